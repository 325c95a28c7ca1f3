"""The phases of a run by name, and the ranges that make them visible in a profiler's timeline.

One list for code and profiles: host ranges around what the runner does, and the prefixes of kernel names.
Ranges come from the `nvtx` package; without it they do nothing, and one log line says so.
"""

from __future__ import annotations

import contextlib
import enum
import logging
from typing import Any

log = logging.getLogger(__name__)


class HostPhase(enum.StrEnum):
    """What the host does for a step."""

    ITERATION = "iteration"
    STAGE_INPUTS = "stage inputs"
    REPLAY = "replay"
    POLL = "poll"
    CAPTURE = "capture"


class DevicePhase(enum.StrEnum):
    """What the device does in an iteration; kernels carry the name as `staticmoe_<phase>_`."""

    ROUTER = "router"
    PLAN = "plan"
    UP = "up"
    DOWN = "down"
    COMBINE = "combine"
    DACT = "dact"
    WEIGHT_GRAD = "weight_grad"
    TOKEN_GRAD = "token_grad"
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


def _ranges() -> dict[HostPhase, Any]:
    """A reusable range for each host phase."""
    try:
        import nvtx
    except ImportError:
        log.info("nvtx is not installed: profiles will show no ranges (pip install nvtx)")
        return {phase: contextlib.nullcontext() for phase in HostPhase}
    domain = nvtx.get_domain("staticmoe")
    return {phase: _Range(domain, phase.value) for phase in HostPhase}


_RANGES: dict[HostPhase, Any] = {}


def host_range(phase: HostPhase) -> contextlib.AbstractContextManager[Any]:
    """Context manager that shows `phase` on the host's timeline.

    Graph-safe: yes, it launches nothing; pushed inside a capture it shows at the capture and not at replays.
    """
    if not _RANGES:
        _RANGES.update(_ranges())
    return _RANGES[phase]
