"""The command: one frame that fits, live frames that follow, a page, and plain words where there is nothing to show."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner, Result

from staticmoe.cli import monitor as command
from staticmoe.cli.monitor_view import ASCII, BLOCKS, Room, distinct_parts, frame, sparkline
from staticmoe.errors import ConfigError, StaticMoEError
from staticmoe.observe.follow import RunFilesError, RunFollower
from staticmoe.observe.overview import Overview

app = typer.Typer(rich_markup_mode=None)
app.command("monitor")(command.monitor)


@app.callback()
def _root() -> None:
    """As in the command line: a command among others."""


def monitor(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["monitor", *map(str, arguments)])


def append(path: Path, *records: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    first = [] if path.exists() else [{"kind": "meta", "schema": 2}]
    with path.open("a") as stream:
        stream.write("".join(json.dumps(record) + "\n" for record in [*first, *records]))


def train(step: int, **more: Any) -> dict[str, Any]:
    record = {"kind": "train", "step": step, "attempt": 0, "void": False, "skipped": False, "reasons": []}
    values = {
        "train/loss": 8.0 - step / 100, "moe/drop_rate": 0.0123, "graph/variant": 1.25, "graph/skips": 2,
        "graph/reruns": 7, "graph/recaptures": 1, "time/step_p50": 0.0123, "time/step_p99": 0.02,
        "throughput/tokens_per_s": 12345.0,
    }  # fmt: skip
    return {**record, "time": time.time() - 5, **values, **more}


def window(layers: int, experts: int, name: str = "model.layers.{}.mlp") -> dict[str, Any]:
    """Layer i drops i tenths of a percent, needs a factor of 1 + i / 100, and gives expert 3 no token."""
    found = {}
    for layer in range(layers):
        load = [100] * experts
        load[3], load[0] = 0, 200
        found[name.format(layer)] = {
            "routed": sum(load), "dropped": layer, "drop_rate": layer / 1000, "max_vio": 1.0, "dead_experts": 1,
            "required_factor": 1 + layer / 100, "capacity_rows": 20480, "load": load,
        }  # fmt: skip
    return {"kind": "train", "first_step": 51, "step": 100, "steps": 50, "time": 1.0, "layers": found}


ALERT = {
    "kind": "alert", "time": 1.0, "step": 90, "rule": "drops", "severity": "warning", "metric": "moe/drop_rate",
    "value": 0.02, "threshold": 0.01, "message": "more than 1 % of the assignments", "runbook": "raise the factor",
}  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    meta = {"schema": 2, "backend": "emulate", "device": "cpu", "torch": "2.13.0", "gpus": [], "config": {"lr": 0.1}}
    (folder / "meta.json").write_text(json.dumps(meta))
    append(folder / "metrics.jsonl", *(train(step) for step in range(1, 101)))
    append(folder / "layers" / "layers.jsonl", window(3, 8))
    append(folder / "alerts.jsonl", ALERT)
    return folder


def lines_of(run_dir: Path, room: Room) -> list[str]:
    overview = Overview()
    follower = RunFollower(run_dir, overview)
    follower.poll()
    follower.close()
    return [line.plain for line in frame(overview, "run", time.time(), room)]


def test_one_frame_shows_the_run_and_fits_80_columns(run_dir: Path) -> None:
    result = monitor(run_dir, "--once")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert max(map(cell_len, lines)) <= 80
    assert lines[0].endswith("emulate, cpu, torch 2.13.0")
    assert re.match(r"step 100   record [5-9](\.\d+)? s ago   12,345 tokens/s   p50 12\.3 ms p99 20 ms$", lines[1])
    assert lines[2].startswith("loss 7 ") and lines[2].endswith("  7 to 7.99")
    assert lines[3].startswith("drop 1.23% ") and lines[3].endswith("  up to 1.23%")
    assert lines[4] == "skips 2 reruns 7 recaptures 1 factor 1.25"
    assert lines[5].split() == ["layers,", "steps", "51-100", "drop", "max_vio", "required", "capacity", "rows", "dead"]
    assert [line.split() for line in lines[6:9]] == [
        [f"model.layers.{layer}.mlp", f"0.{layer}0%", "1.00", f"1.0{layer}", "20,480", "1"] for layer in range(3)
    ]
    assert lines[9] == "load/even ·0 ▁<0.25 ▂<0.5 ▃<0.8 ▄<1.25 ▅<2 ▆<4 █>=4"
    assert lines[10:13] == [f"{layer} ▆▄▄·▄▄▄▄" for layer in range(3)]
    clock = time.strftime("%H:%M:%S", time.localtime(1.0))
    assert lines[13:] == ["alerts  open: drops", f"{clock} warning step 90 drops: more than 1 % of the assignments"]
    # Without a terminal it is one frame too, and no colour.
    assert monitor(run_dir).output.splitlines()[2:] == lines[2:] and "\x1b" not in result.output


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("height", [8, 16, 24, 60])
def test_a_frame_fits_its_screen(run_dir: Path, width: int, height: int) -> None:
    long = "模型.blocks.{}.a_module_with_quite_a_long_name.experts"
    append(run_dir / "layers" / "layers.jsonl", window(40, 300, long))
    append(run_dir / "alerts.jsonl", *[{**ALERT, "message": "long " * 50}] * 20)
    append(run_dir / "metrics.jsonl", train(101, attempt=1, reasons=["capacity_overflow", "nonfinite"] * 5))
    for glyphs in (BLOCKS, ASCII):
        lines = lines_of(run_dir, Room(width, height, glyphs))
        assert len(lines) <= height and max(map(cell_len, lines)) <= width
        assert lines[1].startswith("step 101") and lines[2].startswith("loss 6.99")
        assert glyphs is BLOCKS or "".join(lines).isascii()


def test_where_layers_do_not_fit_the_worst_come_first(run_dir: Path) -> None:
    append(run_dir / "layers" / "layers.jsonl", window(20, 8))
    lines = lines_of(run_dir, Room(80, 24))
    names = [line.split()[0] for line in lines if line.startswith("model.layers.")]
    # 24 lines, 8 of them always there and 1 for the alert: 8 for the table, 7 for the map, the last for the rest.
    assert names == [f"model.layers.{layer}.mlp" for layer in (19, 18, 17, 16, 15, 14, 13)]
    assert [line.split()[0] for line in lines if "▆" in line[2:6]] == ["19", "18", "17", "16", "15", "14"]
    assert "and 13 more" in lines and "and 14 more" in lines and len(lines) == 24
    tall = lines_of(run_dir, Room(80, None))
    assert [line.split()[0] for line in tall if line.startswith("model.")] == [
        f"model.layers.{i}.mlp" for i in range(20)
    ]
    assert not [line for line in tall if line.startswith("and ")]


def test_experts_share_columns_where_there_are_more_than_columns(run_dir: Path) -> None:
    append(run_dir / "layers" / "layers.jsonl", window(2, 64))
    (legend, first, second) = [line for line in lines_of(run_dir, Room(40)) if line[:2] in ("lo", "0 ", "1 ")][1:]
    assert legend.startswith("load/even, 2 experts a column")
    # Of an even load: (200 + 100) / 2, then (100 + 0) / 2, then 100, each over 100.
    assert first == "0 ▅▃" + "▄" * 30 and second == "1" + first[1:]
    assert lines_of(run_dir, Room(80))[-4] == "0 ▆▄▄·" + "▄" * 60


def test_a_sparkline_is_as_high_as_its_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8, BLOCKS.spark) == BLOCKS.spark
    assert sparkline([0, 5, 0, 0, 0, 7], 3, BLOCKS.spark) == "▆▁█"
    assert sparkline([5.0, 5.0], 8, BLOCKS.spark) == "▁▁" and sparkline([], 8, BLOCKS.spark) == ""
    assert sparkline([5.0, 5.0], 8, BLOCKS.spark, floor=0.0) == "██"
    assert sparkline([1, 3], 8, ASCII.spark, floor=0.0) == "-#"


def test_layers_are_told_apart_by_what_differs_in_their_names() -> None:
    assert distinct_parts(["model.layers.0.mlp", "model.layers.12.mlp"]) == {
        "model.layers.0.mlp": "0", "model.layers.12.mlp": "12"
    }  # fmt: skip
    assert distinct_parts(["a.0.moe", "a.1.ffn"]) == {"a.0.moe": "0.moe", "a.1.ffn": "1.ffn"}
    assert distinct_parts(["a.b"]) == {"a.b": "a.b"} and distinct_parts(["a", "a.b"]) == {"a": "a", "a.b": "a.b"}


def test_what_comes_from_files_moves_no_cursor(run_dir: Path) -> None:
    evil = "\x1b[2J\x07\n\u202e[red]x"
    append(run_dir / "layers" / "layers.jsonl", window(1, 4, evil))
    append(run_dir / "alerts.jsonl", {**ALERT, "message": evil, "rule": evil, "severity": evil})
    append(run_dir / "metrics.jsonl", train(101, skipped=True, reasons=[evil]))
    (run_dir / "meta.json").write_text(json.dumps({"schema": 2, "backend": evil}))
    result = monitor(run_dir, "--once")
    assert result.exit_code == 0, result.output
    assert re.search(r"[\x00-\x09\x0b-\x1f\u202e]", result.output) is None
    assert result.output.count("?[2J???[red]x") >= 5


def test_several_ranks_are_shown_as_one_run_and_each_by_itself(run_dir: Path, tmp_path: Path) -> None:
    """Two ranks of 12345 tokens a second, whose losses at step 100 are 7 and 5; rank 1 is ten steps behind."""
    ranks = {"schema": 2, "backend": "cuda", "torch": "2.11", "ranks": 2}
    (run_dir / "meta.json").write_text(json.dumps({**ranks, "rank": 0}))
    assert monitor(run_dir, "--once").output.splitlines()[-1] == "of rank 1 nothing is here"
    other = run_dir / "rank1"
    append(other / "metrics.jsonl", *(train(step, **{"train/loss": 6.0 - step / 100}) for step in range(1, 91)))
    append(other / "layers" / "layers.jsonl", window(3, 8))
    append(other / "alerts.jsonl", ALERT)
    (other / "meta.json").write_text(json.dumps({**ranks, "rank": 1}))
    lines = monitor(run_dir, "--once").output.splitlines()
    assert lines[0].endswith("2 ranks, cuda, torch 2.11") and lines[1].startswith("step 90 ")
    assert "24,690 tokens/s" in lines[1] and lines[2].startswith("loss 6.1 ")
    # Rows and loads of both: 1 of 800 assignments was dropped on each.
    assert lines[7].split() == ["model.layers.1.mlp", "0.12%", "1.00", "1.01", "40,960", "1"]
    assert "alerts  open: drops, drops (rank 1)" in lines and lines[-1] == "rank 1 is 10 records behind"
    lines = monitor(run_dir, "--once", "--rank", 1).output.splitlines()
    assert lines[0].endswith("rank 1 of 2, cuda, torch 2.11") and "12,345 tokens/s" in lines[1]
    assert lines[2].startswith("loss 5.1 ")
    assert monitor(run_dir, "--once", "--rank", 0).output.splitlines()[2].startswith("loss 7 ")
    page = tmp_path / "page.html"
    assert monitor(run_dir, "--html", page, "--rank", 1).exit_code == 0 and str(other) in page.read_text()
    for wrong in (2, -1):
        result = monitor(run_dir, "--rank", wrong)
        assert f"expected a rank whose files are in {run_dir}; got {wrong}" in str(result.exception)


def test_what_is_not_there_yet_is_waited_for(tmp_path: Path, run_dir: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    result = monitor(empty, "--once")
    assert result.exit_code == 0 and result.output.splitlines()[-1] == "waiting for the first record"
    (run_dir / "layers" / "layers.jsonl").unlink()
    assert "load: waiting for the first window of steps" in monitor(run_dir, "--once").output


def test_lines_that_cannot_be_read_are_told(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as stream:
        stream.write('{"kind": "train", "step": 10\n{"kind": "train", "step": 999, "torn')
    result = monitor(run_dir, "--once")
    assert result.output.splitlines()[-1] == "1 lines could not be read and are left out"
    assert "step 100 " in result.output


def test_what_cannot_work_is_said(run_dir: Path, tmp_path: Path) -> None:
    def error(*arguments: object) -> str:
        result = monitor(*arguments)
        assert isinstance(result.exception, StaticMoEError), result.output
        return str(result.exception)

    absent = tmp_path / "absent"
    assert f"expected the directory of a run; {absent} does not exist: give the --run-dir" in error(absent)
    assert "meta.json is a file" in error(run_dir / "meta.json")
    for wrong in (0, -1, "nan", "inf"):
        assert "--refresh: expected seconds above 0; got" in error(run_dir, "--refresh", wrong)
    assert "--html: expected a file that can be written" in error(run_dir, "--html", tmp_path)
    (run_dir / "metrics.jsonl").write_text('{"kind": "meta", "schema": 1}\n')
    assert "metrics.jsonl: expected a first line with kind 'meta' and schema 2" in error(run_dir, "--once")


def test_the_page_is_written_and_the_frame_only_if_asked_for(run_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "page.html"
    result = monitor(run_dir, "--html", path)
    assert result.exit_code == 0 and result.output == f"page: {path}\n"
    page = path.read_text()
    assert page.count('<path class="line') == 6 and "model.layers.2.mlp" in page and str(run_dir) in page
    path.unlink()
    result = monitor(run_dir, "--html", path, "--once")
    assert result.output.startswith("staticmoe monitor") and path.is_file()


def test_a_page_that_cannot_be_written_is_said(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(command, "write_html", full)
    with pytest.raises(ConfigError, match=r"--html: expected .*page\.html: No space left on device"):
        CliRunner().invoke(
            app, ["monitor", str(run_dir), "--html", str(tmp_path / "page.html")], catch_exceptions=False
        )


def live(monkeypatch: pytest.MonkeyPatch, run_dir: Path, sleep: Callable[[float], None], *arguments: object) -> str:
    """Run on a made-up terminal of 80 x 24 until `sleep` raises; return what was written to it."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, height=24, legacy_windows=False, _environ={})
    monkeypatch.setattr(command, "Console", lambda: console)
    monkeypatch.setattr(command.time, "sleep", sleep)
    result = monitor(run_dir, *arguments)
    assert result.exit_code == 0, result.output
    return screen.getvalue()


def test_live_frames_follow_the_run_until_ctrl_c(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 1:
            (run_dir / "metrics.jsonl").rename(run_dir / "metrics.1.jsonl")
            append(run_dir / "metrics.jsonl", train(101), {**train(102), "train/loss": 3.25})
        if len(slept) == 3:
            raise KeyboardInterrupt

    screen = live(monkeypatch, run_dir, sleep, "--refresh", 0.25)
    assert slept == [0.25] * 3
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen)
    assert re.findall(r"step (\d+)   record", shown) == ["100", "102", "102"]
    assert "loss 7 " in shown and "loss 3.25 " in shown
    # The screen is given back as it was.
    assert screen.index("\x1b[?1049h") < screen.index("step") < screen.rindex("\x1b[?1049l")


def test_a_long_run_is_read_between_frames(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "STREAM_BYTES", 16_000)
    screen = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", live(monkeypatch, run_dir, sleep))
    steps, shares = re.findall(r"step (\d+)   record", screen), re.findall(r"reading: (\d+)%", screen)
    # Two frames at least before the first sleep, and the last of them has everything.
    assert len(steps) >= 2 and steps[-1] == "100" and list(map(int, steps)) == sorted(map(int, steps))
    assert len(shares) >= 1 and int(shares[0]) < 90


def test_reading_that_takes_long_says_how_far_it_is(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "STREAM_BYTES", 16_000)
    command.read_all(RunFollower(run_dir, Overview()))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(command, "PROGRESS_SECONDS", 0.0)
    command.read_all(RunFollower(run_dir, Overview()))
    shares = re.findall(r"reading: (\d+)%\n", capsys.readouterr().err)
    assert len(shares) >= 2 and list(map(int, shares)) == sorted(map(int, shares)) and int(shares[0]) < 90


def test_another_schema_ends_the_live_view_with_an_error(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run_dir / "meta.json").write_text('{"schema": 3}')
    with pytest.raises(RunFilesError, match="got schema 3"):
        command.watch(RunFollower(run_dir, Overview()), Overview(), Console(file=io.StringIO()), 1.0)
