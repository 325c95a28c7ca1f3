"""A profile in numbers: idle share, gaps, host waits, time per phase, copies, launches, kernels.

Devices are measured by the clock, over the window; phases and kernels by the iteration that launched them, for a device
works on a step after the host has left it.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from staticmoe.profiling.attribution import UNATTRIBUTED, Attributed, attribute
from staticmoe.profiling.errors import ProfileError
from staticmoe.profiling.host import find_gaps, host_waits, launch_times
from staticmoe.profiling.intervals import Span, clip, length, overlap, union
from staticmoe.profiling.result import Analysis, CopyTime, DeviceTime, KernelTime, PhaseTime
from staticmoe.profiling.timeline import MEMSET, Timeline
from staticmoe.profiling.window import Window, find_window, iteration_times, quartile_distance

NODE, GRAPH = "node", "graph"
NO_NODES = "the tool traces no graph nodes: of replayed kernels only names tell the phase"


@dataclasses.dataclass(frozen=True)
class Shapes:
    """What is known beforehand: work of a launch by kernel name, and the measured ceilings of the device.

    Args:
        flops: kernel name -> floating-point operations of a launch.
        bytes: kernel name -> bytes that a launch moves.
        ceilings: "tflops", "gb_per_s" -> what the device was measured to reach.
    """

    flops: Mapping[str, float] = dataclasses.field(default_factory=dict)
    bytes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    ceilings: Mapping[str, float] = dataclasses.field(default_factory=dict)


def read_shapes(path: Path) -> Shapes:
    """Shapes from JSON: {"kernels": {name: {"flops": F, "bytes": B}}, "ceilings": {"tflops": C, "gb_per_s": D}}.

    Raises:
        ProfileError: the file is missing or says something else.
    """
    try:
        found = json.loads(path.read_text())
        kernels = {str(name): dict(work) for name, work in found["kernels"].items()}
        rates = {kind: {name: float(work[kind]) for name, work in kernels.items() if kind in work} for kind in _WORK}
        ceilings = {str(name): float(value) for name, value in found.get("ceilings", {}).items()}
        return Shapes(rates["flops"], rates["bytes"], ceilings)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProfileError(
            f'{path}: expected {{"kernels": {{name: {{"flops": F, "bytes": B}}}}, "ceilings": {{...}}}}; got {error!r}'
        ) from error


_WORK = ("flops", "bytes")


def analyse_processes(timeline: Timeline, shapes: Shapes | None = None) -> list[Analysis]:
    """One analysis for each process that gave a device work, by pid.

    Raises:
        ProfileError: no process did.
    """
    return [analyse(timeline.of_process(pid), shapes) for pid in timeline.processes()] or [analyse(timeline, shapes)]


def analyse(timeline: Timeline, shapes: Shapes | None = None) -> Analysis:
    """Measure the timeline of one process.

    Raises:
        ProfileError: no device did anything.
    """
    shapes = shapes or Shapes()
    window = find_window(timeline)
    attributed = attribute(timeline)
    kernels = [(number, one) for one in attributed if (number := window.of_work(one.kernel, one.call)) is not None]
    whole = sum(one.kernel.end - one.kernel.start for _, one in kernels)
    phases = _phase_times(kernels, window)
    gaps, kinds = find_gaps(timeline, window)
    times = iteration_times(timeline, attributed, window)
    rules: Counter[str] = Counter()
    for _, one in kernels:
        rules[one.rule] += one.kernel.end - one.kernel.start
    return Analysis(
        source=timeline.source,
        tool=timeline.tool,
        pid=next(iter(timeline.processes()), 0),
        level=GRAPH if timeline.launches else NODE,
        window=window.origin,
        window_ns=window.ns,
        iterations=window.count,
        iteration_ns=median(times),
        iteration_spread_ns=quartile_distance(times),
        unattributed_share=sum(one.share for one in phases if one.phase == UNATTRIBUTED),
        rules={rule: ns / max(whole, 1) for rule, ns in sorted(rules.items())},
        devices=_device_times(timeline, window),
        phases=phases,
        gaps=gaps,
        gap_kinds=kinds,
        waits=host_waits(timeline, window),
        copies=_copy_times(timeline, window),
        launches=launch_times(timeline, window),
        kernels=_kernel_times([one for _, one in kernels], whole, shapes),
        ceilings=dict(shapes.ceilings),
        notes=_notes(timeline, window),
    )


def median(values: Sequence[float]) -> float:
    """The middle value, of an even number the mean of both."""
    found = sorted(values)
    return (found[(len(found) - 1) // 2] + found[len(found) // 2]) / 2


def _notes(timeline: Timeline, window: Window) -> tuple[str, ...]:
    """What limits the numbers."""
    notes = []
    if timeline.launches:
        notes.append("replays were traced as a whole: the idle share is a lower bound, and no phase is seen inside")
    if timeline.tool == "kineto":
        notes.append(NO_NODES)
    if not window.iterations:
        notes.append("no iteration range: everything is over the whole capture")
    elif window.count == 1:
        notes.append("one iteration: its window ends when the host leaves the step, whatever the device still does")
    return tuple(notes)


def _device_times(timeline: Timeline, window: Window) -> tuple[DeviceTime, ...]:
    """Busy time and idle share of each device."""
    spans: dict[int, list[Span]] = defaultdict(list)
    for one in timeline.work:
        spans[one.device].append((one.start, one.end))
    busy = {device: length(union(clip(found, window.span))) for device, found in sorted(spans.items())}
    return tuple(DeviceTime(device, ns, 1 - ns / max(window.ns, 1)) for device, ns in busy.items())


def _phase_times(kernels: Sequence[tuple[int, Attributed]], window: Window) -> tuple[PhaseTime, ...]:
    """Kernel time of each phase, the longest first."""
    spans: dict[str, list[Span]] = defaultdict(list)
    sums: dict[str, Counter[int]] = defaultdict(Counter)
    for number, one in kernels:
        spans[one.phase].append((one.kernel.start, one.kernel.end))
        sums[one.phase][number] += one.kernel.end - one.kernel.start
    whole = sum(sum(found.values()) for found in sums.values())
    times = [
        PhaseTime(
            phase,
            len(spans[phase]) / window.count,
            sum(found.values()) / window.count,
            length(union(spans[phase])) / window.count,
            sum(found.values()) / max(whole, 1),
            quartile_distance([found[number] for number in range(window.count)]),
        )
        for phase, found in sums.items()
    ]
    return tuple(sorted(times, key=lambda one: (-one.ns, one.phase)))


def _copy_times(timeline: Timeline, window: Window) -> tuple[CopyTime, ...]:
    """Copies in the window, those of graphs apart from those that the host launched, and how much kernels hide."""
    replays = {call.correlation for call in timeline.calls if call.launches_graph}
    running: dict[int, list[Span]] = defaultdict(list)
    for kernel in timeline.kernels:
        running[kernel.device].append((kernel.start, kernel.end))
    merged = {device: union(spans) for device, spans in running.items()}
    found = []
    for origin in ("graph", "host"):
        spans: dict[int, list[Span]] = defaultdict(list)
        size = 0
        for copy in timeline.copies:
            from_graph = copy.node is not None or copy.correlation in replays
            if (
                copy.kind != MEMSET
                and from_graph == (origin == "graph")
                and clip([(copy.start, copy.end)], window.span)
            ):
                spans[copy.device].append((copy.start, copy.end))
                size += copy.bytes
        ns = sum(length(union(one)) for one in spans.values())
        hidden = sum(overlap(union(one), merged.get(device, [])) for device, one in spans.items())
        if spans:
            count = sum(len(one) for one in spans.values())
            found.append(CopyTime(origin, count, size, ns, hidden / max(ns, 1)))
    return tuple(found)


def _kernel_times(kernels: Sequence[Attributed], whole: int, shapes: Shapes) -> tuple[KernelTime, ...]:
    """Each kernel by name and phase, the longest in sum first."""
    counts: Counter[tuple[str, str]] = Counter()
    times: Counter[tuple[str, str]] = Counter()
    for one in kernels:
        key = one.kernel.name, one.phase
        counts[key] += 1
        times[key] += one.kernel.end - one.kernel.start
    found = []
    for (name, phase), ns in times.items():
        mean = ns / counts[name, phase]
        # Operations in a ns are 1e9 of them in a second: 1e-3 of them make a TFLOP/s, and a byte in a ns is a GB/s.
        tflops = shapes.flops[name] / mean / 1e3 if name in shapes.flops and mean else None
        rate = shapes.bytes[name] / mean if name in shapes.bytes and mean else None
        found.append(KernelTime(name, phase, counts[name, phase], ns, mean, ns / max(whole, 1), tflops, rate))
    return tuple(sorted(found, key=lambda one: (-one.ns, one.name, one.phase)))
