"""Records a program with nsys, or without it by the runner's own means, and leaves files that are whole.

Everything is written into a hidden folder beside its place and moved at the end. What was recorded and could not be
imported or exported stays there, and the error names it: a run may have taken hours.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from staticmoe.phases import KINETO_VARIABLE, WINDOW_VARIABLE
from staticmoe.profiling.commands import (
    GRAPH,
    NODE,
    RUN,
    Recording,
    export_command,
    import_command,
    kineto_path,
    record_command,
)
from staticmoe.profiling.errors import ProfileError
from staticmoe.profiling.tools import LIBRARIES, NSYS, Done, find_importer, library_environment, run_tool

Say = Callable[[str], None]
# Import and export of a few steps take seconds; of everything minutes.
TOOL_TIMEOUT_S = 900.0
FALLBACK = f"nsys was not found (PATH, /opt/nvidia, {NSYS}): the runner records with torch.profiler instead"

TWICE = (
    f"\nthe analysis of the first run is kept; a program that will not write to the same place twice takes {RUN} in "
    f"that argument, as --run-dir=runs/{RUN}, which becomes {NODE} and {GRAPH}; or give --no-timing"
)


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Files of one process or rank: what phases are read from, and what times are read from, where there is one."""

    name: str
    profile: Path
    timing: Path | None = None


@dataclasses.dataclass(frozen=True)
class Collected:
    """All that was recorded; `notes` say what went another way than asked."""

    recorded: tuple[Recorded, ...]
    notes: tuple[str, ...]


def collect(recording: Recording, nsys: Path | None, say: Say, echo: Say) -> Collected:
    """Run the program once, and once more for timing; without nsys once.

    Args:
        recording: what to record.
        nsys: the tool; None where there is none.
        say: is told what goes on.
        echo: is given every line that the program writes.

    Raises:
        ProfileError: nothing was recorded, or a tool failed.
    """
    try:
        recording.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ProfileError(f"--output: expected a folder; got {recording.folder}: {error.strerror}") from error
    if nsys is None:
        say(FALLBACK)
        files, notes = _record_kineto(recording.at(NODE), say, echo)
        return Collected(tuple(Recorded(name, path) for name, path in files.items()), (FALLBACK, *notes))
    named = any(RUN in word for word in recording.command)
    if recording.timing and not named and any(word.startswith("--run-dir") for word in recording.command):
        say(f"the program runs twice with this --run-dir; where it refuses that, write --run-dir=...{RUN}")
    files, notes = _record(recording.at(NODE), nsys, NODE, say, echo)
    times: dict[str, Path] = {}
    if recording.timing:
        try:
            times, more = _record(recording.at(GRAPH), nsys, GRAPH, say, echo)
            notes += more
        except ProfileError as error:
            # The first run is whole and was the dearer one.
            notes.append(f"no run for timing: {error}{'' if named else TWICE}")
    recorded = (Recorded(name, path, times.get(f"{name}-timing")) for name, path in files.items())
    return Collected(tuple(recorded), tuple(notes))


def _record(recording: Recording, nsys: Path, level: str, say: Say, echo: Say) -> tuple[dict[str, Path], list[str]]:
    """SQLite files by name, at one level of tracing."""
    partial = _partial_folder(recording.folder)
    keep = False
    try:
        command = record_command(recording, nsys, partial, level)
        say(f"recording steps {recording.start} to {recording.start + recording.count - 1}, {level} level")
        done = run_tool(command, timeout_s=recording.timeout_s, say=echo, environment=_environment(recording))
        names = sorted({path.stem for path in partial.iterdir() if path.suffix in (".nsys-rep", ".qdstrm")})
        if not names:
            raise _nothing(done, recording)
        keep = True
        for name in names:
            export_report(nsys, _report(nsys, partial, name, say), say)
        keep = False
        files = {name: partial / f"{name}.sqlite" for name in names}
        found = {name: _publish(path, recording.folder) for name, path in files.items()}
        for name in names:
            _publish(partial / f"{name}.nsys-rep", recording.folder)
        return found, _code_note(done)
    except ProfileError as error:
        if keep:
            raise ProfileError(f"{error}\nwhat was recorded is kept in {partial}") from error
        raise
    finally:
        if not keep:
            shutil.rmtree(partial, ignore_errors=True)


def _record_kineto(recording: Recording, say: Say, echo: Say) -> tuple[dict[str, Path], list[str]]:
    """Chrome traces by name, written by the runner."""
    partial = _partial_folder(recording.folder)
    try:
        environment = {**_environment(recording), KINETO_VARIABLE: str(kineto_path(recording, partial))}
        say(f"recording steps {recording.start} to {recording.start + recording.count - 1} with torch.profiler")
        done = run_tool(recording.command, timeout_s=recording.timeout_s, say=echo, environment=environment)
        # What the runner could not finish has a hidden name.
        paths = sorted(path for path in partial.glob("[!.]*.json") if path.stat().st_size)
        if not paths:
            raise _nothing(done, recording)
        return {path.stem: _publish(path, recording.folder) for path in paths}, _code_note(done)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _partial_folder(folder: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix=".partial-", dir=folder)).resolve()


def _environment(recording: Recording) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in (WINDOW_VARIABLE, KINETO_VARIABLE)}
    return {**kept, WINDOW_VARIABLE: recording.window}


def _nothing(done: Done, recording: Recording) -> ProfileError:
    """The error of a run that left no file."""
    if done.code:
        return done.failed("recording", "let the program run without `staticmoe profile` first")
    last = recording.start + recording.count - 1
    return done.failed(
        "recording",
        f"it ended without a profile: it needs a StaticMoERunner on a GPU that reaches step {last} on the ranks "
        f"{recording.ranks}: see --start, --count, --ranks",
    )


def _code_note(done: Done) -> list[str]:
    return [f"the program ended with exit code {done.code}; what it recorded before is whole"] if done.code else []


def _report(nsys: Path, folder: Path, name: str, say: Say) -> Path:
    """The report of that name, imported first where nsys left only raw data.

    Raises:
        ProfileError: the importer is missing or failed.
    """
    report, raw = folder / f"{name}.nsys-rep", folder / f"{name}.qdstrm"
    return report if report.is_file() else import_raw(nsys, raw, report, say)


def import_raw(nsys: Path, raw: Path, report: Path, say: Say) -> Path:
    """Make a report of a left-over .qdstrm; it is there whole or not at all.

    Raises:
        ProfileError: the importer is missing or failed.
    """
    importer = find_importer(nsys)
    if importer is None:
        raise ProfileError(
            f"{raw}: expected QdstrmImporter in a folder beside {nsys.resolve().parent}; there is none: "
            f"import it where Nsight Systems is installed, or name another nsys by {NSYS}"
        )
    say(f"importing {raw.name}")
    partial = report.with_name(f"partial-{os.getpid()}-{report.name}")
    try:
        done = run_tool(
            import_command(importer, raw, partial),
            timeout_s=TOOL_TIMEOUT_S,
            environment=library_environment(importer.parent),
        )
        if done.code or not partial.is_file():
            raise done.failed(
                f"import of {raw}", f"where it lacks a library such as libdw.so.1, name its folder by {LIBRARIES}"
            )
        os.replace(partial, report)
    finally:
        partial.unlink(missing_ok=True)
    return report


def export_report(nsys: Path, report: Path, say: Say, folder: Path | None = None) -> Path:
    """Export a report to SQLite beside it or into `folder`; the file is there whole or not at all.

    Raises:
        ProfileError: nsys failed.
    """
    say(f"exporting {report.name}")
    target = (folder or report.parent) / f"{report.stem}.sqlite"
    partial = target.with_name(f"partial-{os.getpid()}-{target.name}")
    try:
        done = run_tool(export_command(nsys, report, partial), timeout_s=TOOL_TIMEOUT_S)
        if done.code or not partial.is_file():
            raise done.failed(f"export of {report}", f"export it with the nsys that wrote it: name that by {NSYS}")
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def _publish(path: Path, folder: Path) -> Path:
    """Move a file that is whole to its place."""
    target = folder / path.name
    os.replace(path, target)
    return target
