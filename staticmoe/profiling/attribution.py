"""The phase of every kernel: what of the iteration it did.

A replayed graph is one launch, so a range around the launch says nothing. What tells the phase, best first:

    prefix    the kernel's name, `staticmoe_<phase>_`
    lineage   graph node -> the node it was cloned from -> when and on which thread that was created -> range open then
    range     for a kernel launched by itself: the range open around its launch
    pattern   what is neither ours nor in a range of its own, by name: attention, loss, else dense
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Sequence

from staticmoe.phases import DevicePhase, HostPhase
from staticmoe.profiling.timeline import (
    BACKWARD,
    DEVICE_NAMES,
    LOSS,
    PASSES,
    Cover,
    HostCall,
    Kernel,
    NodeOrigin,
    Range,
    Timeline,
)

UNATTRIBUTED = "unattributed"
ATTENTION, DENSE, EXCHANGE = "attention", "dense", "exchange"
# Their names say that they belong to a backward pass, or lie behind it.
_ONE_PASS = {DevicePhase.DACT, DevicePhase.WEIGHT_GRAD, DevicePhase.TOKEN_GRAD, DevicePhase.OPTIMIZER}
_PREFIXES = sorted({phase.value for phase in DevicePhase} - PASSES, key=len, reverse=True)
# Work of these is launched outside a graph, and the range alone says what it is for.
_TELLING_HOST = {HostPhase.STAGE_INPUTS.value, HostPhase.POLL.value}

_LOSS = re.compile(r"nll|cross_?entropy|log_?softmax", re.IGNORECASE)
_ATTENTION = re.compile(r"flash|fmha|sdpa|attention", re.IGNORECASE)
_SOFTMAX = re.compile(r"softmax", re.IGNORECASE)
_EXCHANGE = re.compile(r"^nccl", re.IGNORECASE)
# A softmax belongs to attention where one of so many kernels before or after it on the stream does.
_NEAR = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Attributed:
    """A kernel, its phase, the rule that told it, and the call that launched it."""

    kernel: Kernel
    phase: str
    rule: str
    call: HostCall | None


class _Ranges:
    """Ranges of a timeline that tell a phase, by thread and by process."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        threads: dict[tuple[int, int], list[Range]] = defaultdict(list)
        processes: dict[int, list[Range]] = defaultdict(list)
        backward: dict[int, list[Range]] = defaultdict(list)
        for one in ranges:
            if one.ours and one.name in DEVICE_NAMES | _TELLING_HOST:
                threads[one.pid, one.tid].append(one)
                processes[one.pid].append(one)
                if one.name == BACKWARD:
                    backward[one.pid].append(one)
        self._threads = {key: Cover(found) for key, found in threads.items()}
        self._processes = {key: Cover(found) for key, found in processes.items()}
        self._backward = {key: Cover(found) for key, found in backward.items()}

    def find(self, pid: int, tid: int, time: int) -> tuple[str | None, bool]:
        """Name of the innermost range there, and whether the backward pass ran then.

        The engine launches the backward pass on a thread of its own, while the range is open on the caller's.
        """
        own = self._threads.get((pid, tid))
        found = own.at(time) if own else None
        if found is None and pid in self._processes:
            found = self._processes[pid].at(time)
        backward = pid in self._backward and self._backward[pid].at(time) is not None
        return (found.name if found else None), backward


class _Lineage:
    """Graph nodes and where they come from."""

    def __init__(self, origins: Sequence[NodeOrigin]) -> None:
        self._nodes: dict[tuple[int, int], NodeOrigin] = {}
        for one in origins:
            # The first event of a node is its creation; one of a graph made from another has a second, which names the
            # node that it was cloned from.
            known = self._nodes.setdefault((one.pid, one.node), one)
            if known.original is None and one.original is not None:
                self._nodes[one.pid, one.node] = one

    def root(self, pid: int, node: int) -> NodeOrigin | None:
        """Creation of the node that this one descends from; in a circle, of the last one not seen before."""
        found = self._nodes.get((pid, node))
        seen = {node}
        while found is not None and found.original is not None and found.original not in seen:
            seen.add(found.original)
            parent = self._nodes.get((pid, found.original))
            if parent is None:
                break
            found = parent
        return found


def attribute(timeline: Timeline) -> tuple[Attributed, ...]:
    """Every kernel of the timeline with its phase, in its order."""
    calls = {(call.pid, call.correlation): call for call in timeline.calls}
    ranges, lineage = _Ranges(timeline.ranges), _Lineage(timeline.origins)
    near = _near_attention(timeline.kernels)
    found = []
    for number, kernel in enumerate(timeline.kernels):
        call = calls.get((kernel.pid, kernel.correlation))
        phase, rule = _phase_of(kernel, call, ranges, lineage, number in near)
        found.append(Attributed(kernel, phase, rule, call))
    return tuple(found)


def _phase_of(
    kernel: Kernel, call: HostCall | None, ranges: _Ranges, lineage: _Lineage, near_attention: bool
) -> tuple[str, str]:
    """Phase of a kernel, and the rule that told it."""
    own = prefix_phase(kernel.name)
    if own is not None:
        return own, "prefix"
    place = None
    rule = "range"
    if kernel.node is not None:
        root, rule = lineage.root(kernel.pid, kernel.node), "lineage"
        place = (root.tid, root.time) if root else None
    elif call is not None and not call.launches_graph:
        place = (call.tid, call.start)
    if place is None:
        return UNATTRIBUTED, "none"
    name, backward = ranges.find(kernel.pid, *place)
    if name is None:
        return UNATTRIBUTED, "none"
    if name in PASSES:
        backward = name == BACKWARD
        name, rule = foreign_phase(kernel, near_attention), "pattern"
    return (f"{name} {BACKWARD}" if backward and name not in _ONE_PASS else name), rule


def prefix_phase(name: str) -> str | None:
    """Phase that the name of one of our kernels carries; None for all others."""
    for phase in _PREFIXES:
        if name.startswith(f"staticmoe_{phase}_"):
            return f"{phase} {BACKWARD}" if "_backward" in name and phase not in _ONE_PASS else phase
    return None


def foreign_phase(kernel: Kernel, near_attention: bool) -> str:
    """What a kernel that is not ours does in a pass over the model."""
    if _EXCHANGE.search(kernel.name):
        return EXCHANGE
    if _LOSS.search(kernel.full_name):
        return LOSS
    if _ATTENTION.search(kernel.full_name) or (near_attention and _SOFTMAX.search(kernel.full_name)):
        return ATTENTION
    return DENSE


def _near_attention(kernels: Sequence[Kernel]) -> set[int]:
    """Numbers of the kernels that lie near one of attention on their stream."""
    streams: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for number, kernel in enumerate(kernels):
        streams[kernel.pid, kernel.device, kernel.stream].append(number)
    near: set[int] = set()
    for numbers in streams.values():
        for place, number in enumerate(numbers):
            if _ATTENTION.search(kernels[number].full_name):
                near.update(numbers[max(0, place - _NEAR) : place + _NEAR + 1])
    return near
