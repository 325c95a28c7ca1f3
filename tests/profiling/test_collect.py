"""Recording with an nsys made of shell: what is called, what comes out, and what is left where something fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from staticmoe.profiling.collect import FALLBACK, Collected, collect, export_report, import_raw
from staticmoe.profiling.commands import Recording
from staticmoe.profiling.errors import ProfileError
from staticmoe.profiling.read import read_profile

# What nsys does: it runs the program and leaves a report, or exports one.
NSYS = """
echo "nsys $*" >> "$LOG"
case $1 in
profile)
    while [ "$1" != -o ]; do level="$level$(echo $1 | sed -n 's/--cuda-graph-trace=//p')"; shift; done
    out=$(echo "$2" | sed "s/%q{RANK}/$RANK/"); shift 2
    "$@" || code=$?
    [ "$level" = "$FAIL_LEVEL" ] && { echo no luck; exit 9; }
    [ "$NO_REPORT" ] || echo raw > "$out.${SUFFIX:-nsys-rep}"
    exit ${code:-0} ;;
export)
    [ "$FAIL_EXPORT" ] && { echo half > "$6"; echo cannot export >&2; exit 4; }
    cp "$SQLITE" "$6" ;;
esac
"""
IMPORTER = """
echo "importer $* [$LD_LIBRARY_PATH]" >> "$LOG"
[ "$FAIL_IMPORT" ] && { echo half > "$4"; echo libdw.so.1 is missing >&2; exit 5; }
cp "$2" "$4"
"""
PROGRAM = """
echo "program $* $STATICMOE_PROFILE" >> "$LOG"
echo training
[ "$STATICMOE_PROFILE_KINETO" ] && echo half > "$(dirname "$STATICMOE_PROFILE_KINETO")/.profile.json.partial.json"
[ "$STATICMOE_PROFILE_KINETO" ] && [ -z "$NO_TRACE" ] && cp "$TRACE" "$STATICMOE_PROFILE_KINETO"
exit ${CODE:-0}
"""


class Bench:
    """A folder with the tools, and what they were told."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, sqlite: Path) -> None:
        self.folder, self.out, self.log = folder, folder / "out", folder / "log"
        self.lines: list[str] = []
        self.said: list[str] = []
        self.nsys = self.script("host/target-linux-x64/nsys", NSYS)
        self.program = self.script("program", PROGRAM)
        trace = folder / "trace.json"
        trace.write_text(
            '[{"ph": "X", "cat": "user_annotation", "name": "iteration", "pid": 1, "tid": 1, "ts": 0, "dur": 1}]'
        )
        for name, value in {"LOG": self.log, "SQLITE": sqlite, "TRACE": trace}.items():
            monkeypatch.setenv(name, str(value))

    def script(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}")
        path.chmod(0o755)
        return path

    def collect(self, *command: str, nsys: bool = True, **options: Any) -> Collected:
        recording = Recording(command=command or (str(self.program), "go"), folder=self.out, timeout_s=20, **options)
        return collect(recording, self.nsys if nsys else None, self.said.append, self.lines.append)

    def files(self) -> list[str]:
        return sorted(path.name for path in self.out.iterdir())

    def calls(self) -> list[str]:
        """What was run, without the names of hidden folders."""
        lines = self.log.read_text().splitlines()
        return [" ".join(Path(word).name if "/" in word else word for word in line.split()) for line in lines]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Callable[..., Any]) -> Bench:
    """Tools that work."""
    return Bench(tmp_path, monkeypatch, golden("2025.3").write(tmp_path / "prepared.sqlite"))


def test_a_recording_and_one_for_timing(bench: Bench) -> None:
    """O42: the recording traces the nodes of graphs, the run for timing whole graphs."""
    found = bench.collect(start=5, count=3)
    (one,) = found.recorded
    assert (one.name, one.profile, one.timing) == (
        "profile", bench.out / "profile.sqlite", bench.out / "profile-timing.sqlite",
    )  # fmt: skip
    assert found.notes == () and bench.lines == ["training", "training"]
    assert len(read_profile(one.profile).kernels) == 49
    assert bench.files() == [
        "profile-timing.nsys-rep", "profile-timing.sqlite", "profile.nsys-rep", "profile.sqlite",
    ]  # fmt: skip
    options = "--sample=none --cpuctxsw=none -c cudaProfilerApi --capture-range-end=stop -o"
    calls = bench.calls()
    assert calls[0] == f"nsys profile -t cuda,nvtx --cuda-graph-trace=node {options} profile program go"
    assert calls[1] == calls[4] == "program go 5:3:0"
    assert calls[2].startswith("nsys export --type sqlite --lazy=false --output partial-")
    assert calls[3] == f"nsys profile -t cuda,nvtx --cuda-graph-trace=graph {options} profile-timing program go"
    assert "recording steps 5 to 7, node level" in bench.said and "exporting profile.nsys-rep" in bench.said


def test_without_timing_it_runs_once(bench: Bench) -> None:
    (one,) = bench.collect(timing=False).recorded
    assert one.timing is None and bench.files() == ["profile.nsys-rep", "profile.sqlite"]
    assert [line.split()[0] for line in bench.calls()] == ["nsys", "program", "nsys"]


def test_a_file_for_each_rank(bench: Bench) -> None:
    """Each rank runs under its own nsys, which the launcher starts."""
    launcher = bench.script(
        "torchrun", 'shift 2; [ "$1" = --no-python ] && shift\nfor RANK in 0 1; do RANK=$RANK "$@" || exit; done'
    )
    found = bench.collect(str(launcher), "--nproc-per-node", "2", "--no-python", str(bench.program), ranks="all")
    assert [(one.name, one.profile.name, one.timing and one.timing.name) for one in found.recorded] == [
        ("rank0", "rank0.sqlite", "rank0-timing.sqlite"),
        ("rank1", "rank1.sqlite", "rank1-timing.sqlite"),
    ]
    assert len(bench.files()) == 8 and "program 10:10:all" in bench.calls()


def test_raw_data_left_over_are_imported(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUFFIX", "qdstrm")
    monkeypatch.setenv("STATICMOE_NSYS_LIBS", "/libs")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    importer = bench.script("host/linux-desktop-glibc_2_11_3-x64/QdstrmImporter", IMPORTER)
    bench.collect(timing=False)
    assert bench.files() == ["profile.nsys-rep", "profile.sqlite"]
    (line,) = [line for line in bench.log.read_text().splitlines() if line.startswith("importer")]
    assert line.split()[1] == "-i" and line.split()[2].endswith("/profile.qdstrm") and line.split()[3] == "-o"
    assert line.endswith(f"[{importer.parent}:/libs]")


def kept(bench: Bench, message: str) -> list[str]:
    """Names in the hidden folder that the error names; nothing else is there."""
    (partial,) = bench.out.iterdir()
    assert partial.name.startswith(".partial-") and message.endswith(f"what was recorded is kept in {partial}")
    return sorted(path.name for path in partial.iterdir())


def test_a_failing_export_leaves_the_report_and_nothing_half(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIL_EXPORT", "1")
    with pytest.raises(ProfileError) as error:
        bench.collect()
    message = str(error.value)
    assert "got exit code 4" in message and "nsys export --type sqlite" in message and "cannot export" in message
    assert kept(bench, message) == ["profile.nsys-rep"]


def test_a_failing_import_leaves_the_raw_data(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUFFIX", "qdstrm")
    with pytest.raises(
        ProfileError, match="expected QdstrmImporter in a folder beside .*target-linux-x64; there is none"
    ) as error:
        bench.collect()
    assert kept(bench, str(error.value)) == ["profile.qdstrm"]
    bench.script("host/linux-desktop-glibc_2_11_3-x64/QdstrmImporter", IMPORTER)
    monkeypatch.setenv("FAIL_IMPORT", "1")
    raw = next(bench.out.iterdir()) / "profile.qdstrm"
    with pytest.raises(ProfileError, match="libdw.so.1 is missing\n.*STATICMOE_NSYS_LIBS"):
        import_raw(bench.nsys, raw, raw.with_suffix(".nsys-rep"), bench.said.append)
    assert [path.name for path in raw.parent.iterdir()] == ["profile.qdstrm"]


def test_a_program_that_fails_leaves_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_REPORT", "1")
    monkeypatch.setenv("CODE", "7")
    with pytest.raises(ProfileError) as error:
        bench.collect()
    message = str(error.value)
    assert "got exit code 7" in message and "profile -t cuda,nvtx" in message and "\n  training\n" in message
    assert bench.files() == []


def test_a_program_that_opens_no_range_leaves_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_REPORT", "1")
    with pytest.raises(ProfileError, match="a StaticMoERunner on a GPU that reaches step 12 on the ranks 0"):
        bench.collect(start=3, count=10)
    assert bench.files() == []


def test_what_a_failing_program_recorded_is_used(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODE", "7")
    found = bench.collect(timing=False)
    assert bench.files() == ["profile.nsys-rep", "profile.sqlite"] and "exit code 7" in found.notes[0]


def test_a_failing_run_for_timing_costs_only_itself(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIL_LEVEL", "graph")
    found = bench.collect()
    assert found.recorded[0].timing is None and "no run for timing: recording" in found.notes[0]
    assert "no luck" in found.notes[0] and bench.files() == ["profile.nsys-rep", "profile.sqlite"]


def test_a_program_that_writes_to_one_place_can_run_twice(bench: Bench) -> None:
    """One that refuses a folder that is there: told beforehand and in the end, and mended by `{run}`."""
    strict = str(bench.script("strict", 'echo "strict $1" >> "$LOG"; mkdir "${1#*=}" || kill $PPID'))
    found = bench.collect(strict, f"--run-dir={bench.folder}/runs")
    assert found.recorded[0].timing is None and len(read_profile(found.recorded[0].profile).kernels) == 49
    assert any("runs twice with this --run-dir" in line for line in bench.said)
    (note,) = found.notes
    assert note.endswith("as --run-dir=runs/{run}, which becomes node and graph; or give --no-timing")
    bench.said.clear()
    found = bench.collect(strict, f"--run-dir={bench.folder}/runs/{{run}}")
    assert found.recorded[0].timing is not None and found.notes == ()
    assert sorted(path.name for path in (bench.folder / "runs").iterdir()) == ["graph", "node"]
    assert not any("twice" in line for line in bench.said)


def test_without_nsys_the_runner_records(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """And says so; the second run, for timing, would show the same."""
    found = bench.collect(nsys=False)
    (one,) = found.recorded
    assert (one.name, one.profile, one.timing) == ("profile", bench.out / "profile.json", None)
    assert FALLBACK in bench.said and FALLBACK in found.notes and bench.files() == ["profile.json"]
    assert bench.calls() == ["program go 10:10:0"] and read_profile(one.profile).ranges[0].name == "iteration"
    # What the runner did not finish is no profile.
    monkeypatch.setenv("NO_TRACE", "1")
    one.profile.unlink()
    with pytest.raises(ProfileError, match="it ended without a profile"):
        bench.collect(nsys=False)
    assert bench.files() == []


def test_an_old_request_does_not_reach_the_program(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under nsys the runner must not record with torch.profiler as well."""
    monkeypatch.setenv("STATICMOE_PROFILE_KINETO", str(bench.folder / "stray.json"))
    monkeypatch.setenv("STATICMOE_PROFILE", "1:1:9")
    bench.collect(timing=False)
    assert not (bench.folder / "stray.json").exists() and "program go 10:10:0" in bench.calls()


def test_an_export_into_another_folder(bench: Bench) -> None:
    report = bench.folder / "x.nsys-rep"
    report.write_text("raw")
    (bench.folder / "deep").mkdir()
    assert export_report(bench.nsys, report, bench.said.append, bench.folder / "deep") == bench.folder / "deep/x.sqlite"
    assert [path.name for path in (bench.folder / "deep").iterdir()] == ["x.sqlite"]


def test_a_folder_that_cannot_be_made(bench: Bench) -> None:
    bench.out.write_text("a file")
    with pytest.raises(ProfileError, match="--output: expected a folder; got .*out: File exists"):
        bench.collect()
