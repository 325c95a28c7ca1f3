"""The phases of a run by name, and the ranges that make them visible in a profiler's timeline.

One list for code and profiles: host ranges around what the runner does, and the prefixes of kernel names.
Ranges come from the `nvtx` package; without it they do nothing, and one log line says so.
"""

from __future__ import annotations

import contextlib
import enum
import logging
from collections.abc import Callable, Iterator
from typing import Any

log = logging.getLogger(__name__)

# How a program that is profiled learns which steps of which ranks, and where to write what no nsys records.
WINDOW_VARIABLE, KINETO_VARIABLE = "STATICMOE_PROFILE", "STATICMOE_PROFILE_KINETO"


class HostPhase(enum.StrEnum):
    """What the host does for a step."""

    # Enum's own runs Python, at each look into a dictionary.
    __hash__ = str.__hash__

    ITERATION = "iteration"
    STAGE_INPUTS = "stage inputs"
    REPLAY = "replay"
    POLL = "poll"
    CAPTURE = "capture"


class DevicePhase(enum.StrEnum):
    """What the device does in an iteration; our kernels carry the name as `staticmoe_<phase>_`.

    `forward` and `backward` say which pass over the model is running, the others what is computed.
    """

    __hash__ = str.__hash__

    FORWARD = "forward"
    BACKWARD = "backward"
    LAYOUT = "layout"
    ROUTER = "router"
    PLAN = "plan"
    UP = "up"
    DOWN = "down"
    COMBINE = "combine"
    DACT = "dact"
    WEIGHT_GRAD = "weight_grad"
    TOKEN_GRAD = "token_grad"
    EXCHANGE = "exchange"
    CLIP = "clip"
    OPTIMIZER = "optimizer"
    RECORD = "record"


class _Range:
    """One push and pop, with the event's attributes made once: making them costs more than the range."""

    def __init__(self, domain: Any, name: str) -> None:
        self._domain = domain
        self._attributes = domain.get_event_attributes(message=name)

    def __enter__(self) -> None:
        self._domain.push_range(self._attributes)

    def __exit__(self, *_: object) -> None:
        self._domain.pop_range()


class _Nothing:
    """A range that nobody sees; half as dear as contextlib's."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        pass


_Phase = HostPhase | DevicePhase
_Shown = Callable[[str], contextlib.AbstractContextManager[Any]]


def _ranges() -> dict[_Phase, Any]:
    """A reusable range for each phase."""
    phases: list[_Phase] = [*HostPhase, *DevicePhase]
    nothing = dict.fromkeys(phases, _Nothing())
    try:
        import nvtx
    except ImportError:
        log.info("nvtx is not installed: profiles will show no ranges (pip install nvtx)")
        return nothing
    domain = nvtx.get_domain("staticmoe")
    if domain.get_event_attributes() is None:
        # What nvtx gives where no tool is attached, which none can be later: it knows nothing and does nothing.
        return nothing
    return {phase: _Range(domain, phase.value) for phase in phases}


_RANGES: dict[_Phase, Any] = {}
_shown_by: list[_Shown] = []


def host_range(phase: _Phase) -> contextlib.AbstractContextManager[Any]:
    """Context manager that shows `phase` on the host's timeline.

    Graph-safe: yes, it launches nothing; pushed inside a capture it shows at the capture and not at replays.
    """
    if _shown_by:
        return _shown_by[-1](phase.value)
    if not _RANGES:
        _RANGES.update(_ranges())
    return _RANGES[phase]


def device_range(phase: DevicePhase) -> contextlib.AbstractContextManager[Any]:
    """Context manager around the launches of `phase`; a profile finds the nodes of a graph by what was open at capture.

    Graph-safe: as `host_range`.
    """
    return host_range(phase)


@contextlib.contextmanager
def shown_by(show: _Shown) -> Iterator[None]:
    """Within, `show(name)` makes the ranges: for a tool that does not see those of nvtx."""
    _shown_by.append(show)
    try:
        yield
    finally:
        _shown_by.remove(show)
