"""What the host did: calls that made it wait, what launching cost, what it did while a device had nothing to do."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from staticmoe.phases import HostPhase
from staticmoe.profiling.intervals import Span
from staticmoe.profiling.result import Gap, GapKind, HostWait, LaunchTime
from staticmoe.profiling.timeline import HOST_NAMES, MEMSET, Copy, Cover, HostCall, Timeline
from staticmoe.profiling.window import LAUNCHES, Window

# A gap up to this long is the usual distance between two kernels.
GAP_NS = 5_000
TOP_GAPS = 10
ITEM = "copy to the host, then a wait (.item())"

_STREAM_WAIT = re.compile(r"(cuda|cu)StreamSynchronize")
_WAIT = re.compile(r"cuda(Stream|Device|Event)Synchronize|cu(Stream|Ctx|Event)Synchronize")
_COPY_CALL = re.compile(r"(cuda|cu)Memcpy")
# Questions that take no time and stand between a copy and the wait for it.
_QUESTION = re.compile(
    r"cuda(Get|Peek|StreamIsCapturing|StreamGetCaptureInfo|EventQuery)|cu(Get|CtxGet|StreamGetCaptureInfo)"
)


@dataclasses.dataclass(frozen=True)
class _Wait:
    call: HostCall
    name: str
    ns: int


def host_waits(timeline: Timeline, window: Window) -> tuple[HostWait, ...]:
    """Calls of the window that make a thread wait, an iteration, by where and by call; the most frequent first.

    Waits are synchronising calls, copies that are not asynchronous, and asynchronous ones with pageable memory.
    A copy to the host followed by a wait for its stream is one.
    """
    copies: dict[int, Copy] = {one.correlation: one for one in timeline.copies if one.kind != MEMSET}
    threads: dict[int, list[HostCall]] = defaultdict(list)
    for call in timeline.calls:
        threads[call.tid].append(call)
    counts: Counter[tuple[str, str]] = Counter()
    times: Counter[tuple[str, str]] = Counter()
    for tid, calls in threads.items():
        for wait in _waits_of_thread(_outermost(calls), copies):
            number = window.number(wait.call.start)
            if number is None:
                continue
            inside = window.within_step(wait.call.start)
            where = "side thread" if tid != window.thread else "in step" if inside else "between steps"
            counts[where, wait.name] += 1
            times[where, wait.name] += wait.ns
    return tuple(
        HostWait(where, name, count / window.count, times[where, name] / window.count)
        for (where, name), count in sorted(counts.items(), key=lambda one: (one[0][0] != "in step", -one[1], one[0]))
    )


def _outermost(calls: Sequence[HostCall]) -> list[HostCall]:
    """Calls of a thread that lie in no other: a runtime call may show the driver call that it makes."""
    kept: list[HostCall] = []
    for call in sorted(calls, key=lambda one: (one.start, -one.end)):
        if not kept or call.start >= kept[-1].end:
            kept.append(call)
    return kept


def _waits_of_thread(calls: Sequence[HostCall], copies: dict[int, Copy]) -> list[_Wait]:
    """Waits among the calls of one thread, in order."""
    found: list[_Wait] = []
    # The copy to the host that a wait of its stream, if it comes next, belongs to.
    last: HostCall | None = None
    for call in calls:
        if _QUESTION.match(call.name):
            continue
        if last is not None and _STREAM_WAIT.match(call.name):
            if found and found[-1].call is last:
                found.pop()
            found.append(_Wait(last, ITEM, call.end - last.start))
            last = None
            continue
        last = None
        if _WAIT.match(call.name):
            found.append(_Wait(call, call.name, call.end - call.start))
        elif _COPY_CALL.match(call.name):
            copy = copies.get(call.correlation)
            if "Async" not in call.name:
                found.append(_Wait(call, call.name, call.end - call.start))
            elif copy is not None and copy.pageable:
                found.append(_Wait(call, f"{call.name}, pageable memory", call.end - call.start))
            if copy is not None and copy.kind == "DtoH":
                last = call
    return found


def launch_times(timeline: Timeline, window: Window) -> tuple[LaunchTime, ...]:
    """Time of the training thread in launching calls, an iteration; the dearest first."""
    counts: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for call in timeline.calls:
        if call.tid == window.thread and call.name.startswith(LAUNCHES) and window.number(call.start) is not None:
            counts[call.name] += 1
            times[call.name] += call.end - call.start
    return tuple(
        LaunchTime(name, counts[name] / window.count, ns / window.count)
        for name, ns in sorted(times.items(), key=lambda one: (-one[1], one[0]))
    )


def find_gaps(timeline: Timeline, window: Window) -> tuple[tuple[Gap, ...], tuple[GapKind, ...]]:
    """The longest pauses of the devices, and all of them by name, the longest in sum first."""
    doing = _HostDoing(timeline, window)
    replays = {call.correlation for call in timeline.calls if call.launches_graph}
    gaps: list[Gap] = []
    for device in sorted({one.device for one in timeline.work}):
        for start, end, replay in _pauses(timeline, device, window.span):
            if end - start <= GAP_NS:
                continue
            # Both sides are one launch: whatever the host did then, it did not hold up this.
            inside = replay is not None and replay in replays
            during = "inside a replay" if inside else doing.at((start + end) // 2)
            gaps.append(Gap(device, start - window.span[0], end - start, during))
    named: dict[str, list[int]] = defaultdict(list)
    for gap in gaps:
        named[gap.during].append(gap.ns)
    kinds = [GapKind(during, len(ns), sum(ns), max(ns)) for during, ns in named.items()]
    return (
        tuple(sorted(gaps, key=lambda one: (-one.ns, one.start_ns))[:TOP_GAPS]),
        tuple(sorted(kinds, key=lambda one: (-one.ns, one.during))),
    )


def _pauses(timeline: Timeline, device: int, span: Span) -> list[tuple[int, int, int | None]]:
    """Start and end of each pause in the window, and the launch that both its sides belong to, where it is one."""
    found: list[tuple[int, int, int | None]] = []
    reached, before = span[0], None
    for one in timeline.work:
        if one.device != device or one.end <= one.start:
            continue
        start = min(one.start, span[1])
        if start > reached:
            found.append((reached, start, before if before == one.correlation else None))
        if one.end > reached:
            reached, before = one.end, one.correlation
        if reached >= span[1]:
            return found
    return [*found, (reached, span[1], None)]


class _HostDoing:
    """What the training thread did at a time, in words."""

    def __init__(self, timeline: Timeline, window: Window) -> None:
        self._calls = Cover(call for call in timeline.calls if call.tid == window.thread)
        ranges = [one for one in timeline.ranges if one.ours and one.name in HOST_NAMES and one.tid == window.thread]
        self._ranges = Cover(ranges)
        self._named = bool(window.iterations)

    def at(self, time: int) -> str:
        """The call then, else the range, else that the host was between two steps."""
        call, inside = self._calls.at(time), self._ranges.at(time)
        if call is not None:
            return f"waiting in {call.name}" if _WAIT.match(call.name) else f"in {call.name}"
        if inside is not None:
            return "host in the step" if inside.name == HostPhase.ITERATION else f"host: {inside.name}"
        return "host between steps" if self._named else "host"
