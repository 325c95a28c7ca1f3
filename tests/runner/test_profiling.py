"""Windows of a live job: the right steps are recorded, training goes on as without, nothing half-written is left."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from staticmoe import RunnerConfig, StaticMoE, StaticMoERunner, phases
from staticmoe.errors import ConfigError
from staticmoe.phases import KINETO_VARIABLE, WINDOW_VARIABLE
from staticmoe.runner.profiling import REQUEST

BATCHES = [{"x": torch.randn(8, 16, generator=torch.Generator().manual_seed(number))} for number in range(40)]


def build(run_dir: Path | None = None, **options: Any) -> tuple[nn.Module, StaticMoERunner]:
    torch.manual_seed(0)
    model = StaticMoE(16, 16, 4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = RunnerConfig(run_dir=run_dir, **options)
    return model, StaticMoERunner(
        model, optimizer, example_batch=BATCHES[0], loss_fn=lambda model, batch: model(batch["x"]).square().mean(),
        config=config,
    )  # fmt: skip


def ranges(path: Path, name: str) -> int:
    """How often a range of that name was recorded."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return sum(event.get("name") == name for event in json.loads(data)["traceEvents"] if event.get("ph") == "X")


def test_a_window_holds_its_steps_and_changes_nothing(tmp_path: Path) -> None:
    """Five steps are in the file, the graph captured again inside it, and the parameters are those without."""
    plain_model, plain = build()
    with plain:
        losses = [float(plain.step(batch).loss) for batch in BATCHES[:12]]
    model, runner = build(tmp_path)
    with runner:
        for number, batch in enumerate(BATCHES[:12]):
            if number == 3:
                runner.profile(5)
            assert float(runner.step(batch).loss) == losses[number]
        assert runner.telemetry()["recaptures"] == 1
    found = list((tmp_path / "profile").iterdir())
    assert [path.name for path in found] == ["steps_4_8.json.gz"]
    assert {name: ranges(found[0], name) for name in ("iteration", "capture", "replay")} == {
        "iteration": 5, "capture": 1, "replay": 5,
    }  # fmt: skip
    # What the iteration is made of shows where it was captured.
    assert ranges(found[0], "optimizer") >= 1 and ranges(found[0], "router") >= 1
    for one, other in zip(model.parameters(), plain_model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_file_asks_for_a_window(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is taken once; one that makes no sense is said and removed."""
    _, runner = build(tmp_path)
    with runner:
        (tmp_path / REQUEST).write_text("2\n")
        for batch in BATCHES[:20]:
            runner.step(batch)
        assert not (tmp_path / REQUEST).exists()
        assert [path.name for path in (tmp_path / "profile").iterdir()] == ["steps_16_17.json.gz"]
        (tmp_path / REQUEST).write_text("many")
        for batch in BATCHES[:20]:
            runner.step(batch)
    assert not (tmp_path / REQUEST).exists() and "got 'many'" in caplog.text
    assert len(list((tmp_path / "profile").iterdir())) == 1


@pytest.mark.parametrize(("ranks", "recorded"), [("0", 0), ("1,3", 3), ("all", 3)])
def test_the_environment_asks_for_a_window_of_some_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: str, recorded: int
) -> None:
    """start:count:ranks, and a file for each rank."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv(WINDOW_VARIABLE, f"2:3:{ranks}")
    monkeypatch.setenv(KINETO_VARIABLE, str(tmp_path / "rank{rank}.json"))
    _, runner = build()
    with runner:
        for batch in BATCHES[:8]:
            runner.step(batch)
    files = [path.name for path in tmp_path.iterdir()]
    assert files == (["rank3.json"] if recorded else [])
    if recorded:
        assert ranges(tmp_path / "rank3.json", "iteration") == 3


def test_a_window_that_the_run_ends_is_written(tmp_path: Path) -> None:
    """As far as it came."""
    _, runner = build(tmp_path)
    with runner:
        runner.profile(5)
        for batch in BATCHES[:2]:
            runner.step(batch)
    (found,) = (tmp_path / "profile").iterdir()
    assert found.name == "steps_1_2.json.gz" and ranges(found, "iteration") == 2


def test_what_cannot_be_recorded_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what was expected; the run goes on."""
    _, runner = build()
    with runner:
        with pytest.raises(ConfigError, match=r"run_dir"):
            runner.profile(3)
        runner.step(BATCHES[0])
    _, runner = build(tmp_path)
    with runner:
        for wrong in (0, -1, 2.5, True):
            with pytest.raises(ConfigError, match="at least 1"):
                runner.profile(wrong)  # type: ignore[arg-type]
        runner.profile(2)
        with pytest.raises(ConfigError, match="one of 2 steps is"):
            runner.profile(2)
    monkeypatch.setenv(WINDOW_VARIABLE, "1:2:0")
    with pytest.raises(ConfigError, match=r"run_dir"):
        build()
    monkeypatch.setenv(WINDOW_VARIABLE, "10-5")
    with pytest.raises(ConfigError, match="start:count:ranks, as 10:5:0 or 10:5:all; got '10-5'"):
        build()


def test_a_trace_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither under its name nor under another; it is said, and training goes on."""
    _, runner = build(tmp_path)

    def broken(self: Any, path: str) -> None:
        Path(path).write_text("{")
        raise OSError("disk full")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", broken)
    with runner:
        runner.profile(1)
        assert runner.step(BATCHES[0]).step == 1
        assert "the profile of steps 1 to 1 is lost" in caplog.text and "disk full" in caplog.text
        assert list((tmp_path / "profile").iterdir()) == []
        assert runner.step(BATCHES[1]).step == 2


def test_a_profiler_that_does_not_start_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said, once; the next one is taken."""
    _, runner = build(tmp_path)
    start = torch.profiler.profile.start

    def busy(self: Any) -> None:
        raise RuntimeError("another profiler is at work")

    monkeypatch.setattr(torch.profiler.profile, "start", busy)
    with runner:
        runner.profile(2)
        for batch in BATCHES[:3]:
            runner.step(batch)
        assert caplog.text.count("no profile of step 1") == 1 and not (tmp_path / "profile").exists()
        assert runner.telemetry()["recaptures"] == 0 and phases._shown_by == []
        monkeypatch.setattr(torch.profiler.profile, "start", start)
        runner.profile(1)
        runner.step(BATCHES[3])
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["steps_4_4.json.gz"]
