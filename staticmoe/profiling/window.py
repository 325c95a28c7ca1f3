"""The part of a profile that is measured: its iterations, and which of them any piece of work belongs to.

A profile opens before the graph is captured, so that its nodes are seen; an iteration that captures is no step as
others are. The window is the longest row of iterations without one.
"""

from __future__ import annotations

import bisect
import dataclasses
import statistics
from collections import Counter
from collections.abc import Sequence

from staticmoe.phases import HostPhase
from staticmoe.profiling.attribution import Attributed
from staticmoe.profiling.errors import ProfileError
from staticmoe.profiling.intervals import Span
from staticmoe.profiling.timeline import FOR_EVER, GRAPH_LAUNCHES, GraphLaunch, HostCall, Kernel, Range, Timeline

LAUNCHES = (*GRAPH_LAUNCHES, "cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchCooperativeKernel")


@dataclasses.dataclass(frozen=True)
class Window:
    """Start and end in ns; `iterations` empty: no range names them, and the whole capture is one.

    Args:
        span: the window.
        iterations: their ranges, by start.
        thread: tid of the training thread.
        origin: what the window is, in words.
    """

    span: Span
    iterations: tuple[Range, ...]
    thread: int | None
    origin: str

    @property
    def count(self) -> int:
        """Iterations, at least 1."""
        return max(1, len(self.iterations))

    @property
    def ns(self) -> int:
        """Length."""
        return self.span[1] - self.span[0]

    def number(self, time: int) -> int | None:
        """Number of the iteration that the host was in, or had just left; None outside of the window."""
        if not self.span[0] <= time < self.span[1]:
            return None
        if not self.iterations:
            return 0
        return bisect.bisect_right([one.start for one in self.iterations], time) - 1

    def within_step(self, time: int) -> bool:
        """Whether the host was in a step then; without ranges everything counts as one."""
        number = self.number(time)
        return number is not None and (not self.iterations or time < self.iterations[number].end)

    def of_work(self, work: Kernel | GraphLaunch, call: HostCall | None) -> int | None:
        """Number of the iteration that launched it: a device works on a step after the host has left it."""
        return self.number(call.start if call is not None else work.start)


def find_window(timeline: Timeline) -> Window:
    """The window of one process.

    Raises:
        ProfileError: no device did anything.
    """
    work = timeline.work
    if not work:
        raise ProfileError(
            f"{timeline.source}: expected work of a GPU (kernels, copies or replays); got none: "
            "record a range in which the training runs on a GPU"
        )
    ranges = [one for one in timeline.ranges if one.ours and one.name == HostPhase.ITERATION]
    thread = ranges[0].tid if ranges else _launching_thread(timeline)
    ranges = [one for one in ranges if one.tid == thread]
    captures = [one for one in timeline.ranges if one.ours and one.name == HostPhase.CAPTURE]
    rows: list[list[Range]] = [[]]
    for one in ranges:
        if any(one.start <= capture.start < one.end for capture in captures):
            rows.append([])
        else:
            rows[-1].append(one)
    longest = max(rows, key=len)
    steps = tuple(one for one in longest if one.end != FOR_EVER)
    if steps:
        left = len(ranges) - len(steps)
        origin = f"{len(steps)} iterations" + (f", {left} with a capture or cut off left out" if left else "")
        return Window((steps[0].start, steps[-1].end), steps, thread, origin)
    start = min([work[0].start, *(call.start for call in timeline.calls[:1])])
    end = max(one.end for one in (*work, *timeline.calls))
    return Window((start, end), (), thread, "the whole capture: no range names an iteration")


def _launching_thread(timeline: Timeline) -> int | None:
    """The thread with the most launches; of all calls where none launches."""
    launching = Counter(call.tid for call in timeline.calls if call.name.startswith(LAUNCHES))
    calling = launching or Counter(call.tid for call in timeline.calls)
    return calling.most_common(1)[0][0] if calling else None


def quartile_distance(values: Sequence[float]) -> float:
    """Distance between the quartiles; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def iteration_times(timeline: Timeline, kernels: Sequence[Attributed], window: Window) -> list[int]:
    """Ns of each iteration, from start to start on the device, or on the host where the device shows too little.

    The host runs ahead by the steps in flight and then waits, so its first steps look short; the device's do not.
    """
    if not window.iterations:
        return [window.ns]
    calls = {call.correlation: call for call in timeline.calls}
    launched: list[tuple[Kernel | GraphLaunch, HostCall | None]] = [(one.kernel, one.call) for one in kernels]
    launched += [(one, calls.get(one.correlation)) for one in timeline.launches]
    found = [(number, *one) for one in launched if (number := window.of_work(*one)) is not None]
    # What is launched beside the replays need not come in every step.
    replayed = [one for one in found if isinstance(one[1], GraphLaunch) or (one[2] and one[2].launches_graph)]
    work = [(number, one) for number, one, _ in replayed or found]
    if window.count == 1:
        step = window.iterations[0]
        return [max([step.end, *(one.end for _, one in work)]) - step.start]
    busy: Counter[tuple[int, int]] = Counter()
    for _, one in work:
        busy[one.device, one.stream] += one.end - one.start
    main = max(busy, key=busy.__getitem__, default=None)
    first: dict[int, int] = {}
    for number, one in work:
        if (one.device, one.stream) == main:
            first[number] = min(first.get(number, one.start), one.start)
    starts = [first[number] for number in range(window.count) if number in first]
    if len(starts) < window.count:
        starts = [one.start for one in window.iterations]
    return [after - before for before, after in zip(starts, starts[1:], strict=False)]
