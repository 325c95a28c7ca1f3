"""A profile as a Chrome trace, for ui.perfetto.dev: streams with their phases, threads with ranges and calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from staticmoe.profiling.attribution import Attributed, attribute
from staticmoe.profiling.result import write_file
from staticmoe.profiling.timeline import FOR_EVER, MEMSET, Timeline

# Track groups need numbers of their own: those of devices lie above all pids.
_DEVICES = 1 << 24


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write the trace, whole or not at all.

    Raises:
        ProfileError: the file cannot be written.
    """
    write_file(path, json.dumps({"traceEvents": trace_events(timeline), "displayTimeUnit": "ms"}).encode())


def trace_events(timeline: Timeline) -> list[dict[str, Any]]:
    """Events of the trace; a run of kernels of one phase lies under a slice that is named by it."""
    attributed = attribute(timeline)
    events = [*_names(timeline), *_phases(attributed)]
    for one in attributed:
        kernel = one.kernel
        events.append(
            _slice(
                kernel.name, one.phase, _DEVICES + kernel.device, kernel.stream, kernel, phase=one.phase, rule=one.rule
            )
        )
    for copy in timeline.copies:
        name = copy.kind if copy.kind == MEMSET else f"copy {copy.kind}"
        events.append(_slice(name, "copy", _DEVICES + copy.device, copy.stream, copy, bytes=copy.bytes))
    events += [_slice("replay", "graph", _DEVICES + one.device, one.stream, one) for one in timeline.launches]
    events += [_slice(one.name, "range", one.pid, one.tid, one) for one in timeline.ranges if one.end != FOR_EVER]
    events += [_slice(call.name, "call", call.pid, call.tid, call) for call in timeline.calls]
    return events


def _slice(name: str, category: str, pid: int, tid: int, interval: Any, **arguments: object) -> dict[str, Any]:
    """A complete event; microseconds, to the ns."""
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": interval.start / 1000,
        "dur": (interval.end - interval.start) / 1000,
        "args": arguments,
    }


def _phases(attributed: Sequence[Attributed]) -> Iterator[dict[str, Any]]:
    """A slice over each run of kernels of one phase and one launch on a stream."""
    runs: dict[tuple[int, int], list[Attributed]] = {}
    for one in attributed:
        key = one.kernel.device, one.kernel.stream
        run = runs.get(key)
        if run and (run[-1].phase, run[-1].kernel.correlation) == (one.phase, one.kernel.correlation):
            run.append(one)
        else:
            if run:
                yield _run(run)
            runs[key] = [one]
    yield from (_run(run) for run in runs.values())


def _run(run: Sequence[Attributed]) -> dict[str, Any]:
    first, end = run[0].kernel, max(one.kernel.end for one in run)
    return {
        "ph": "X",
        "name": run[0].phase,
        "cat": "phase",
        "pid": _DEVICES + first.device,
        "tid": first.stream,
        "ts": first.start / 1000,
        "dur": (end - first.start) / 1000,
        "args": {"kernels": len(run)},
    }


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Names of the track groups and tracks."""
    for device, stream in sorted({(one.device, one.stream) for one in timeline.work}):
        yield _meta("process_name", _DEVICES + device, 0, f"GPU {device}")
        yield _meta("thread_name", _DEVICES + device, stream, f"stream {stream}")
    threads = {(call.pid, call.tid) for call in timeline.calls} | {(one.pid, one.tid) for one in timeline.ranges}
    for pid, tid in sorted(threads):
        yield _meta("process_name", pid, 0, f"host, process {pid}")
        yield _meta("thread_name", pid, tid, f"thread {tid}")


def _meta(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
