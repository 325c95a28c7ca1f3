"""`staticmoe profile`: records a training run and says where the time of a replay goes.

staticmoe profile -- python train.py --size tiny
staticmoe profile --ranks all --plot --trace -- torchrun --nproc-per-node 2 train.py
staticmoe profile -- python train.py --run-dir runs/{run}
staticmoe profile --analyse profile/profile.sqlite --json before.json
staticmoe profile --compare before.json after.json
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from staticmoe.cli.profile_report import ProfileReport
from staticmoe.profiling.collect import Recorded, collect, export_report, import_raw
from staticmoe.profiling.commands import Recording
from staticmoe.profiling.compare import compare as compare_analyses
from staticmoe.profiling.errors import ProfileError
from staticmoe.profiling.metrics import Shapes, analyse_processes, read_shapes
from staticmoe.profiling.plot import need_plot, write_plot
from staticmoe.profiling.read import read_profile
from staticmoe.profiling.result import Analysis, from_json, is_analysis, write_file
from staticmoe.profiling.timeline import Timeline
from staticmoe.profiling.tools import NSYS, find_nsys
from staticmoe.profiling.trace import write_trace

REGRESSION = 3
_RAW = (".nsys-rep", ".qdstrm")


def profile(
    command: Annotated[
        list[str] | None, typer.Argument(help="The program, after `--`.", metavar="-- PROGRAM ...")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for the files.")] = Path("profile"),
    start: Annotated[int, typer.Option(help="Step before which recording begins.")] = 10,
    count: Annotated[int, typer.Option(help="Steps to record.")] = 10,
    ranks: Annotated[str, typer.Option(help="Ranks to record: 0,3 or all.")] = "0",
    timing: Annotated[
        bool,
        typer.Option(
            help="Run it again at graph level, for undisturbed times; {run} in its arguments: node, then graph."
        ),
    ] = True,
    timeout: Annotated[float | None, typer.Option(help="Seconds that a run may take.", show_default=False)] = None,
    plot: Annotated[bool, typer.Option("--plot", help="A PNG of one iteration, by phase and stream.")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="A Chrome trace with phases, for ui.perfetto.dev.")] = False,
    shapes: Annotated[
        Path | None, typer.Option(help="JSON: flops and bytes by kernel, ceilings.", show_default=False)
    ] = None,
    analyse: Annotated[
        Path | None,
        typer.Option(help="Record nothing; say what this .sqlite, .nsys-rep or .json holds.", show_default=False),
    ] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="With --analyse: JSON file to write.", show_default=False)
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Two profiles or analyses, before and after; exit code 3 where it got slower."),
    ] = None,
    tolerance: Annotated[float, typer.Option(help="With --compare: growth that is allowed.")] = 0.05,
) -> None:
    """Record a training run and say where the time of a replay goes; or analyse a file, or compare two."""
    chosen = [bool(command), analyse is not None, compare is not None]
    if sum(chosen) != 1:
        raise ProfileError(
            f"expected one of `-- PROGRAM ...`, --analyse FILE, --compare A B; got {sum(chosen)}: "
            "staticmoe profile -- python train.py"
        )
    if json_out is not None and analyse is None:
        raise ProfileError("--json: expected --analyse FILE with it; a recording writes its analysis beside its files")
    report = ProfileReport(Console())
    known = read_shapes(shapes) if shapes is not None else Shapes()
    if compare is not None:
        _compare(compare, tolerance, known, report)
        return
    if plot:
        need_plot()
    if analyse is not None:
        _analyse(analyse, known, report, json_out, picture=plot, events=trace)
        return
    recording = Recording(
        command=tuple(command or ()),
        folder=output,
        start=start,
        count=count,
        ranks=ranks,
        timing=timing,
        timeout_s=timeout,
    )
    _record(recording, known, report, picture=plot, events=trace)


def _compare(paths: tuple[Path, Path], tolerance: float, shapes: Shapes, report: ProfileReport) -> None:
    """Show what grew; exit code 3 on a regression."""
    before, after = (_one(path, shapes, report) for path in paths)
    comparison = compare_analyses(before, after, tolerance)
    report.comparison(comparison, tolerance)
    if comparison.regressed:
        raise typer.Exit(REGRESSION)


def _one(path: Path, shapes: Shapes, report: ProfileReport) -> Analysis:
    """The analysis in a file, or of it.

    Raises:
        ProfileError: the file holds several processes.
    """
    if is_analysis(path):
        return from_json(path.read_text(), str(path))
    found = analyse_processes(_read(path, report), shapes)
    if len(found) != 1:
        pids = ", ".join(str(one.pid) for one in found)
        raise ProfileError(f"{path}: expected a profile of one process to compare; got {pids}: record ranks apart")
    return found[0]


def _read(path: Path, report: ProfileReport) -> Timeline:
    """The timeline in a file; a report is exported into a temporary folder first.

    Raises:
        ProfileError: the file cannot be read, or there is no nsys to export it.
    """
    if path.suffix not in _RAW:
        return read_profile(path)
    if not path.is_file():
        raise ProfileError(f"{path}: expected a report of nsys; there is none: check the path")
    nsys = find_nsys()
    if nsys is None:
        raise ProfileError(
            f"{path}: expected nsys to export it; it was not found: name it by {NSYS}, or give an .sqlite"
        )
    with tempfile.TemporaryDirectory() as folder:
        report_file = path
        if path.suffix == ".qdstrm":
            report_file = import_raw(nsys, path, Path(folder) / f"{path.stem}.nsys-rep", report.say)
        return read_profile(export_report(nsys, report_file, report.say, Path(folder)))


def _analyse(
    path: Path, shapes: Shapes, report: ProfileReport, json_out: Path | None, *, picture: bool, events: bool
) -> None:
    """Show what a file says, and write what was asked for beside it."""
    if is_analysis(path):
        report.show(from_json(path.read_text(), str(path)))
        return
    timeline = _read(path, report)
    found = analyse_processes(timeline, shapes)
    if json_out is not None and len(found) != 1:
        raise ProfileError(f"--json: expected a profile of one process; {path} holds {len(found)}: record ranks apart")
    for analysis in found:
        report.show(analysis)
    if len(found) > 1:
        report.ranks([(f"process {one.pid}", one, None) for one in found])
    if json_out is not None:
        write_file(json_out, found[0].as_json().encode())
        report.say(f"analysis: {json_out}")
    _draw(timeline, path.with_suffix(""), report, picture=picture, events=events)


def _draw(timeline: Timeline, base: Path, report: ProfileReport, *, picture: bool, events: bool) -> None:
    """Write the picture and the trace."""
    if picture:
        for pid in timeline.processes():
            several = len(timeline.processes()) > 1
            target = base.with_name(f"{base.name}-{pid}.png" if several else f"{base.name}.png")
            write_plot(timeline.of_process(pid), target)
            report.say(f"plot: {target}")
    if events:
        target = base.with_name(f"{base.name}.trace.json")
        write_trace(timeline, target)
        report.say(f"trace: {target} (open it in ui.perfetto.dev)")


def _record(recording: Recording, shapes: Shapes, report: ProfileReport, *, picture: bool, events: bool) -> None:
    """Record, then show and write what each rank says."""
    nsys = find_nsys()
    if nsys is not None:
        report.say(f"nsys: {nsys}")
    collected = collect(recording, nsys, report.say, report.echo)
    shown: list[tuple[str, Analysis, Analysis | None]] = []
    for one in collected.recorded:
        shown += _show(one, shapes, report, picture=picture, events=events)
    if len(shown) > 1:
        report.ranks(shown)
    for note in collected.notes:
        report.say(f"note: {note}")


def _show(
    one: Recorded, shapes: Shapes, report: ProfileReport, *, picture: bool, events: bool
) -> list[tuple[str, Analysis, Analysis | None]]:
    """Show the processes of a recording, each with its timing where there is one, and write the analyses."""
    timeline = read_profile(one.profile)
    found = analyse_processes(timeline, shapes)
    times = analyse_processes(read_profile(one.timing), shapes) if one.timing is not None else []
    shown = []
    for number, analysis in enumerate(found):
        # The processes of a second run have other pids, and the same order.
        clock = times[number] if len(times) == len(found) else None
        report.show(analysis, clock)
        name = one.name if len(found) == 1 else f"{one.name}-{number}"
        target = one.profile.with_name(f"{name}.analysis.json")
        write_file(target, analysis.as_json().encode())
        report.say(f"profile: {one.profile}; analysis: {target}")
        if clock is not None:
            write_file(target.with_name(f"{name}-timing.analysis.json"), clock.as_json().encode())
        shown.append((name, analysis, clock))
    _draw(timeline, one.profile.with_suffix(""), report, picture=picture, events=events)
    return shown
