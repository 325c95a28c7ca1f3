"""Reads the Chrome trace that torch.profiler writes, plain or gzipped.

It shows the kernels of a replay under one launch and knows no graph nodes: there only names tell a phase.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from staticmoe.profiling.errors import ProfileError
from staticmoe.profiling.timeline import MEMSET, Copy, HostCall, Kernel, Range, Timeline

_COPY = re.compile(r"Memcpy (\w+)(?: \((\w+) -> (\w+)\))?")
_CALLS = {"cuda_runtime", "cuda_driver"}
_FIX = "write it by torch.profiler's export_chrome_trace with ProfilerActivity.CUDA"


def read_kineto(path: Path) -> Timeline:
    """Everything of interest in a trace of one process.

    Raises:
        ProfileError: the file is missing, empty, damaged, or no trace of torch.profiler.
    """
    events = _events(path)
    host = Counter(event["pid"] for event in events if event.get("cat") in _CALLS | {"user_annotation", "cpu_op"})
    numbers = [pid for pid, _ in host.most_common() if isinstance(pid, int)]
    # On a device's events the pid is the device: the trace is of one process, the one with the calls.
    pid = numbers[0] if numbers else 0
    kernels, copies, calls, ranges = [], [], [], []
    try:
        for event in events:
            kind, name, args = event.get("cat"), event["name"], event.get("args", {})
            start = round(event["ts"] * 1000)
            end = start + round(event["dur"] * 1000)
            correlation = int(args.get("correlation", 0))
            if kind == "kernel":
                place = args["device"], args["stream"], pid, correlation
                kernels.append(Kernel(start, end, *place, short_name(name), name))
            elif kind in ("gpu_memcpy", "gpu_memset"):
                what, pageable = (MEMSET, False) if kind == "gpu_memset" else _copy(name)
                place = args["device"], args["stream"], pid, correlation
                copies.append(Copy(start, end, *place, what, args.get("bytes", 0), pageable))
            elif kind in _CALLS:
                calls.append(HostCall(start, end, pid, event["tid"], correlation, name))
            elif kind == "user_annotation":
                ranges.append(Range(start, end, pid, event["tid"], name, None))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProfileError(
            f"{path}: expected events as torch.profiler writes them; got one with a bad field ({error!r}): {_FIX}"
        ) from error
    return Timeline(str(path), "kineto", kernels, copies, [], calls, ranges)


def _copy(name: str) -> tuple[str, bool]:
    """Kind of a copy, and whether an end of it is pageable memory."""
    found = _COPY.match(name)
    return (found[1], "Pageable" in (found[2], found[3])) if found else ("copy", False)


def short_name(name: str) -> str:
    """Name of a function without return type, namespaces, template arguments and parameters."""
    depth, kept = 0, []
    for letter in name.replace("(anonymous namespace)", ""):
        if letter == "(" and not depth:
            break
        depth += (letter == "<") - (letter == ">")
        if not depth and letter != ">":
            kept.append(letter)
    return "".join(kept).split("::")[-1].split(" ")[-1] or name


def _events(path: Path) -> list[dict[str, Any]]:
    """Events with a duration."""
    if not path.is_file():
        raise ProfileError(f"{path}: expected a Chrome trace of torch.profiler; there is none: check the path")
    try:
        raw = path.read_bytes()
        trace = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise ProfileError(f"{path}: expected a Chrome trace of torch.profiler; got {error}: {_FIX}") from error
    events = trace.get("traceEvents") if isinstance(trace, dict) else trace
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ProfileError(f"{path}: expected a list traceEvents; got {_kind(trace)}: {_FIX}")
    complete = [event for event in events if event.get("ph") == "X"]
    if not {event.get("cat") for event in complete} & (_CALLS | {"kernel", "gpu_memcpy", "user_annotation", "cpu_op"}):
        kinds = ", ".join(_names(event.get("cat") for event in complete)) or "no event with a duration"
        raise ProfileError(f"{path}: expected events of torch.profiler (kernel, cuda_runtime); got {kinds}: {_FIX}")
    return complete


def _kind(trace: object) -> str:
    return (
        f"an object with {', '.join(_names(trace)) or 'nothing'}" if isinstance(trace, dict) else type(trace).__name__
    )


def _names(found: Iterable[object]) -> list[str]:
    return sorted({str(one) for one in found})[:5]
