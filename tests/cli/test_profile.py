"""The command: it records, analyses and compares, and says what it found in at most 100 columns of plain text."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from staticmoe.cli.profile import profile
from staticmoe.profiling import tools
from staticmoe.profiling.errors import ProfileError
from staticmoe.profiling.metrics import analyse
from staticmoe.profiling.read import read_profile
from staticmoe.profiling.result import from_json

# Stands for nsys: runs the program, leaves a report, and exports what was prepared.
NSYS = """#!/bin/sh
case $1 in
profile)
    while [ "$1" != -o ]; do shift; done
    out=$(echo "$2" | sed "s/%q{RANK}/$RANK/"); shift 2
    "$@" && echo raw > "$out.nsys-rep" ;;
export) cp "$SQLITE" "$6" ;;
esac
"""

app = typer.Typer(rich_markup_mode=None)
app.command("profile")(profile)


@app.callback()
def _root() -> None:
    """Makes the command one of several."""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["profile", *map(str, arguments)])


def refused(*arguments: object) -> str:
    """Message of the error that the entry point turns into exit code 1."""
    result = run(*arguments)
    assert isinstance(result.exception, ProfileError), result.output
    return str(result.exception)


def write_profile(path: Path, optimizer_us: int = 200, pids: tuple[int, ...] = (7,)) -> Path:
    """Three steps of 900 us in 1000: each 300 us of the up projection, an unknown kernel of 100 us, an optimizer."""
    names = [
        "iteration",
        "cudaGraphLaunch_v10000",
        "staticmoe_up_gemm",
        "ünknown" * 9,
        "staticmoe_optimizer_adamw",
        "staticmoe",
    ]
    ids = {name: number for number, name in enumerate(names)}
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE StringIds (id, value)")
        db.executemany("INSERT INTO StringIds VALUES (?, ?)", [(number, name) for name, number in ids.items()])
        db.execute("CREATE TABLE NVTX_EVENTS (start, end, eventType, text, textId, domainId, globalTid)")
        db.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, end, nameId, correlationId, globalTid)")
        db.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL "
            "(start, end, deviceId, streamId, correlationId, globalPid, shortName)"
        )
        for pid in pids:
            db.execute("INSERT INTO NVTX_EVENTS VALUES (0, NULL, 75, 'staticmoe', NULL, 1, ?)", [pid << 24 | 1])
            for start in (0, 1_000_000, 2_000_000):
                db.execute(
                    "INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, 'iteration', NULL, 1, ?)",
                    [start, start + 900_000, pid << 24 | 1],
                )
                call = [start + 10_000, start + 20_000, ids["cudaGraphLaunch_v10000"], start + 1, pid << 24 | 1]
                db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", call)
                time = start + 50_000
                for name, us in ((names[2], 300), (names[3], 100), (names[4], optimizer_us)):
                    row = [time, time + us * 1000, 0, 7, start + 1, pid << 24, ids[name]]
                    db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?, ?)", row)
                    time += us * 1000
    db.close()
    return path


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """A profile."""
    return write_profile(tmp_path / "prepared.sqlite")


@pytest.fixture
def nsys(tmp_path: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tool that stands for nsys, and is found."""
    path = tmp_path / "nsys"
    path.write_text(NSYS)
    path.chmod(0o755)
    monkeypatch.setenv("STATICMOE_NSYS", str(path))
    monkeypatch.setenv("SQLITE", str(prepared))
    return path


def plain(output: str) -> list[str]:
    """Lines of an output that is fit for a log."""
    lines = output.splitlines()
    assert re.search(r"[^\n\x20-\x7e]", output) is None
    # A line that names a file is as long as its path.
    assert all(len(line) <= 100 for line in lines if "/" not in line), max(lines, key=len)
    return lines


def test_what_a_file_says(prepared: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "found.json"
    result = run("--analyse", prepared, "--json", out)
    assert result.exit_code == 0, result.output
    lines = plain(result.output)
    assert "window: 3 iterations, 2.900 ms" in lines
    # 1800 of 2900 us.
    assert "iteration 1.000 ms (spread 0.000 ms); GPU 0 idle 37.93%" in lines
    assert "host waits in a step: 0.00" in lines
    assert "unattributed: 16.67% of kernel time (told by prefix 83.3%)" in lines
    assert "launch: cudaGraphLaunch 1.0 an iteration, 10.0 us" in lines
    cells = [line.split() for line in lines]
    assert ["up", "1.0", "0.300", "0.300", "50.0%"] in cells
    assert ["staticmoe_optimizer_adamw", "optimizer", "3", "0.600", "200.0", "33.3%"] in cells
    # Two pauses of 400 us between the replays, of which the middle lies in the step, 50 before them and 250 after.
    assert ["host", "in", "the", "step", "4", "1.100", "400.0"] in cells
    assert from_json(out.read_text(), "x") == analyse(read_profile(prepared).of_process(7))
    assert run("--analyse", out).output.splitlines()[1:] == lines[1:-1]


def test_rates_beside_the_ceilings(prepared: Path, tmp_path: Path) -> None:
    shapes = tmp_path / "shapes.json"
    shapes.write_text(json.dumps({"kernels": {"staticmoe_up_gemm": {"flops": 120e9}}, "ceilings": {"tflops": 800}}))
    cells = [line.split() for line in plain(run("--analyse", prepared, "--shapes", shapes).output)]
    assert ["staticmoe_up_gemm", "up", "3", "0.900", "300.0", "50.0%", "400", "(50%)", "-"] in cells


def test_pictures_beside_the_file(prepared: Path) -> None:
    pytest.importorskip("matplotlib", reason="comes with the extra `report`")
    result = run("--analyse", prepared, "--plot", "--trace")
    assert result.exit_code == 0, result.output
    assert prepared.with_name("prepared.png").read_bytes()[:4] == b"\x89PNG"
    events = json.loads(prepared.with_name("prepared.trace.json").read_text())["traceEvents"]
    assert sum(event.get("cat") == "phase" for event in events) == 9


def test_two_profiles(prepared: Path, tmp_path: Path) -> None:
    slower = write_profile(tmp_path / "slower.sqlite", optimizer_us=230)
    result = run("--compare", prepared, slower)
    assert result.exit_code == 3, result.output
    lines = plain(result.output)
    assert ["optimizer", "0.200", "0.230", "+15.0%", "0.000", "slower"] in [line.split() for line in lines]
    assert lines[-1] == "slower by more than 5.0% and more than the spread: optimizer"
    for arguments in (("--compare", slower, prepared), ("--compare", prepared, slower, "--tolerance", 0.2)):
        result = run(*arguments)
        assert result.exit_code == 0 and result.output.splitlines()[-1].startswith("nothing grew by more than")


def test_an_analysis_beside_a_profile(prepared: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    assert run("--analyse", prepared, "--json", out).exit_code == 0
    assert run("--compare", out, write_profile(tmp_path / "slower.sqlite", optimizer_us=230)).exit_code == 3
    assert run("--compare", out, prepared).exit_code == 0


def test_a_recording(nsys: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    result = run("--output", folder, "--trace", "--", "echo", "training", "--count", "3")
    assert result.exit_code == 0, result.output
    lines = plain(result.output)
    # The program runs twice, and keeps its own options.
    assert lines.count("training --count 3") == 2 and any(
        "recording steps 10 to 19, node level" in line for line in lines
    )
    assert sum(line.startswith("iteration 1.000 ms") for line in lines) == 1
    assert "undisturbed, at node level: iteration 1.000 ms (spread 0.000 ms); GPU 0 idle 37.93%" in lines
    assert sorted(path.name for path in folder.iterdir()) == [
        "profile-timing.analysis.json", "profile-timing.nsys-rep", "profile-timing.sqlite", "profile.analysis.json",
        "profile.nsys-rep", "profile.sqlite", "profile.trace.json",
    ]  # fmt: skip
    found = from_json((folder / "profile.analysis.json").read_text(), "x")
    assert found.iterations == 3 and found.source == str(folder / "profile.sqlite")


def test_ranks_beside_each_other(nsys: Path, tmp_path: Path) -> None:
    launcher = tmp_path / "torchrun"
    launcher.write_text(
        '#!/bin/sh\n[ "$1" = --no-python ] && shift\nfor RANK in 0 1; do export RANK; "$@" || exit; done\n'
    )
    launcher.chmod(0o755)
    folder = tmp_path / "out"
    result = run("--no-timing", "--output", folder, "--ranks", "all", "--", launcher, "--no-python", "true")
    assert result.exit_code == 0, result.output
    cells = [line.split() for line in plain(result.output)]
    for rank in ("rank0", "rank1"):
        assert [rank, "1.000", "0.600", "0.000", "37.93%", "0.00", "16.67%"] in cells
        assert (folder / f"{rank}.analysis.json").exists()


def test_processes_of_one_file(tmp_path: Path) -> None:
    path = write_profile(tmp_path / "two.sqlite", pids=(7, 8))
    result = run("--analyse", path)
    assert result.exit_code == 0, result.output
    assert sum(line.startswith(("process 7 ", "process 8 ")) for line in plain(result.output)) == 2
    assert "expected a profile of one process to compare; got 7, 8" in refused("--compare", path, path)
    assert "holds 2" in refused("--analyse", path, "--json", tmp_path / "x.json")


def test_a_report_is_exported_first(nsys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "x.nsys-rep"
    report.write_text("raw")
    result = run("--analyse", report)
    assert result.exit_code == 0 and "window: 3 iterations, 2.900 ms" in plain(result.output)
    assert not (tmp_path / "x.sqlite").exists()
    assert "there is none: check the path" in refused("--analyse", tmp_path / "none.nsys-rep")
    monkeypatch.delenv("STATICMOE_NSYS")
    monkeypatch.setenv("PATH", "/bin/none")
    monkeypatch.setattr(tools, "PLACES", ())
    assert "expected nsys to export it; it was not found: name it by STATICMOE_NSYS" in refused("--analyse", report)


def test_without_nsys_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "PLACES", ())
    monkeypatch.delenv("STATICMOE_NSYS", raising=False)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    program, trace = tmp_path / "program", tmp_path / "t.json"
    program.write_text(f'#!/bin/sh\n/bin/cp {trace} "$STATICMOE_PROFILE_KINETO"\n')
    program.chmod(0o755)
    common = {"ph": "X", "pid": 5, "tid": 5, "ts": 10.0}
    events = [
        {**common, "cat": "cuda_runtime", "name": "cudaGraphLaunch", "dur": 1.0, "args": {"correlation": 3}},
        {
            **common,
            "cat": "kernel",
            "name": "staticmoe_up_gemm",
            "dur": 5.0,
            "args": {"device": 0, "stream": 7, "correlation": 3},
        },
    ]
    trace.write_text(json.dumps({"traceEvents": events}))
    result = run("--output", tmp_path / "out", "--", program)
    assert result.exit_code == 0, result.output
    lines = plain(result.output)
    assert any("nsys was not found" in line and "torch.profiler instead" in line for line in lines)
    assert ["up", "1.0", "0.005", "0.005", "100.0%"] in [line.split() for line in lines]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["profile.analysis.json", "profile.json"]


def test_what_cannot_work_is_refused(prepared: Path, tmp_path: Path) -> None:
    assert "expected one of `-- PROGRAM ...`, --analyse FILE, --compare A B; got 0" in refused()
    assert "; got 2" in refused("--analyse", prepared, "--", "true")
    assert "--json: expected --analyse FILE with it" in refused("--json", tmp_path / "x", "--", "true")
    assert "--ranks: expected `all` or numbers" in refused("--ranks", "first", "--", "true")
    assert "there is none: check the path" in refused("--analyse", tmp_path / "none.sqlite")
    (tmp_path / "text").write_text("text")
    assert "it begins with b'text'" in refused("--analyse", tmp_path / "text")
    blocked = tmp_path / "text" / "a.json"
    assert f"{blocked}: expected a file that can be written" in refused("--analyse", prepared, "--json", blocked)
