"""What a profile holds, whatever tool wrote it: work of the devices, calls and ranges of the host, graph nodes.

Times are nanoseconds of one clock, intervals are half open. A process is named by its pid, a thread by its tid.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from staticmoe.phases import DevicePhase, HostPhase

DOMAIN = "staticmoe"
FORWARD, BACKWARD, LOSS, CLIP = "forward", "backward", "loss", "clip"
# Ranges that say which pass an operation belongs to, and not what it does.
PASSES = frozenset({FORWARD, BACKWARD})
HOST_NAMES = frozenset(phase.value for phase in HostPhase)
DEVICE_NAMES = frozenset(phase.value for phase in DevicePhase) | {FORWARD, BACKWARD, LOSS, CLIP}

GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
MEMSET = "memset"
# End of a range that was open when recording ended.
FOR_EVER = 2**63 - 1


class Interval(Protocol):
    """Anything with a start and an end, in ns."""

    @property
    def start(self) -> int:
        """Its first nanosecond."""

    @property
    def end(self) -> int:
        """The first nanosecond after it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel on a device; `node`: its node of a replayed graph, where the tool knows it."""

    start: int
    end: int
    device: int
    stream: int
    pid: int
    correlation: int
    name: str
    full_name: str
    node: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """One copy (`kind` is "HtoD", "DtoH", ...) or memset on a device; `pageable`: an end of it is pageable memory."""

    start: int
    end: int
    device: int
    stream: int
    pid: int
    correlation: int
    kind: str
    bytes: int
    pageable: bool = False
    node: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class GraphLaunch:
    """One replay seen as a whole: what tracing at graph level gives instead of kernels."""

    start: int
    end: int
    device: int
    stream: int
    pid: int
    correlation: int


@dataclasses.dataclass(frozen=True, slots=True)
class HostCall:
    """One call of CUDA's API, its name without version suffix."""

    start: int
    end: int
    pid: int
    tid: int
    correlation: int
    name: str

    @property
    def launches_graph(self) -> bool:
        """Whether it replays a graph."""
        return self.name.startswith(GRAPH_LAUNCHES)


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """One named range of the host; domain "" is the default one, None is one whose name the file does not hold."""

    start: int
    end: int
    pid: int
    tid: int
    name: str
    domain: str | None

    @property
    def ours(self) -> bool:
        """Whether this package pushed it: by its domain, or by its name where the domain is unknown."""
        return self.domain == DOMAIN or (self.domain is None and self.name in HOST_NAMES | DEVICE_NAMES)


@dataclasses.dataclass(frozen=True, slots=True)
class NodeOrigin:
    """The creation of a graph node at `time` on a thread; `original`: the node that it is a clone of."""

    time: int
    pid: int
    tid: int
    node: int
    original: int | None


@dataclasses.dataclass(frozen=True)
class Timeline:
    """All that a file holds, each kind by start."""

    source: str
    tool: str
    kernels: Sequence[Kernel] = ()
    copies: Sequence[Copy] = ()
    launches: Sequence[GraphLaunch] = ()
    calls: Sequence[HostCall] = ()
    ranges: Sequence[Range] = ()
    origins: Sequence[NodeOrigin] = ()

    def __post_init__(self) -> None:
        for name in ("kernels", "copies", "launches", "calls", "ranges"):
            object.__setattr__(self, name, tuple(sorted(getattr(self, name), key=lambda one: (one.start, one.end))))
        object.__setattr__(self, "origins", tuple(sorted(self.origins, key=lambda one: one.time)))

    @property
    def work(self) -> list[Kernel | Copy | GraphLaunch]:
        """Everything that keeps a device busy, by start."""
        return sorted([*self.kernels, *self.copies, *self.launches], key=lambda one: (one.start, one.end))

    def processes(self) -> list[int]:
        """Pids that gave a device work, ascending."""
        return sorted({one.pid for one in self.work})

    def of_process(self, pid: int) -> Timeline:
        """What belongs to one process."""
        return Timeline(
            self.source,
            self.tool,
            [one for one in self.kernels if one.pid == pid],
            [one for one in self.copies if one.pid == pid],
            [one for one in self.launches if one.pid == pid],
            [one for one in self.calls if one.pid == pid],
            [one for one in self.ranges if one.pid == pid],
            [one for one in self.origins if one.pid == pid],
        )


T = TypeVar("T", bound=Interval)


class Cover(Generic[T]):
    """Answers which of many intervals is the innermost at a time: of those open then, the one that began last."""

    def __init__(self, intervals: Iterable[T]) -> None:
        self._times: list[int] = []
        self._innermost: list[T | None] = []
        edges: list[tuple[int, bool, int, int]] = []
        found = [one for one in intervals if one.end > one.start]
        for number, one in enumerate(found):
            # At one time ends come before starts, and of two that start together the longer one is outside.
            edges += [(one.start, True, -one.end, number), (one.end, False, 0, number)]
        open_now: list[int] = []
        for time, starts, _, number in sorted(edges):
            if starts:
                open_now.append(number)
            else:
                open_now.remove(number)
            self._times.append(time)
            self._innermost.append(found[open_now[-1]] if open_now else None)

    def at(self, time: int) -> T | None:
        """The innermost interval open at `time`; None where there is none."""
        place = bisect.bisect_right(self._times, time) - 1
        return self._innermost[place] if place >= 0 else None
