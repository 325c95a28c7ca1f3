"""What the analysis of a profile says; as JSON and back. Times are ns, shares are fractions."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from staticmoe.profiling.errors import ProfileError

FORMAT = "staticmoe profile analysis 1"


@dataclasses.dataclass(frozen=True)
class DeviceTime:
    """A device in the window; `idle_share` is a lower bound where replays were traced as a whole."""

    device: int
    busy_ns: int
    idle_share: float


@dataclasses.dataclass(frozen=True)
class Gap:
    """A pause of a device: `start_ns` after the window's start, and what went on in the middle of it."""

    device: int
    start_ns: int
    ns: int
    during: str


@dataclasses.dataclass(frozen=True)
class GapKind:
    """All gaps of one name, over the window."""

    during: str
    count: int
    ns: int
    longest_ns: int


@dataclasses.dataclass(frozen=True)
class HostWait:
    """A kind of call that makes the host wait, an iteration; `where`: "in step", "between steps", "side thread"."""

    where: str
    call: str
    count: float
    ns: float


@dataclasses.dataclass(frozen=True)
class PhaseTime:
    """Kernels of a phase, an iteration: sum of their times, time with at least one running, and how both vary.

    `share` is of all kernel time, `spread_ns` the distance between the quartiles of the sum over iterations.
    """

    phase: str
    kernels: float
    ns: float
    union_ns: float
    share: float
    spread_ns: float


@dataclasses.dataclass(frozen=True)
class CopyTime:
    """Copies of the graph or of the host's own calls, over the window; memsets are none."""

    origin: str
    count: int
    bytes: int
    ns: int
    overlap: float


@dataclasses.dataclass(frozen=True)
class LaunchTime:
    """What launching costs the training thread, an iteration."""

    call: str
    count: float
    ns: float


@dataclasses.dataclass(frozen=True)
class KernelTime:
    """A kernel over the window; rates only where its work was given."""

    name: str
    phase: str
    count: int
    ns: int
    mean_ns: float
    share: float
    tflops: float | None = None
    gb_per_s: float | None = None


@dataclasses.dataclass(frozen=True)
class Analysis:
    """Everything that a profile says about a process."""

    source: str
    tool: str
    pid: int
    level: str
    window: str
    window_ns: int
    iterations: int
    iteration_ns: float
    iteration_spread_ns: float
    unattributed_share: float
    rules: dict[str, float]
    devices: tuple[DeviceTime, ...]
    phases: tuple[PhaseTime, ...]
    gaps: tuple[Gap, ...]
    gap_kinds: tuple[GapKind, ...]
    waits: tuple[HostWait, ...]
    copies: tuple[CopyTime, ...]
    launches: tuple[LaunchTime, ...]
    kernels: tuple[KernelTime, ...]
    ceilings: dict[str, float]
    notes: tuple[str, ...]

    @property
    def waits_in_step(self) -> float:
        """Host waits of the training thread inside a step, an iteration."""
        return sum(wait.count for wait in self.waits if wait.where == "in step")

    def as_json(self) -> str:
        """The analysis as text."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1)


_PARTS: dict[str, type] = {
    "devices": DeviceTime,
    "phases": PhaseTime,
    "gaps": Gap,
    "gap_kinds": GapKind,
    "waits": HostWait,
    "copies": CopyTime,
    "launches": LaunchTime,
    "kernels": KernelTime,
}


def from_json(text: str, source: str) -> Analysis:
    """The analysis that `as_json` wrote.

    Raises:
        ProfileError: the text is none; `source` names it.
    """
    try:
        found: dict[str, Any] = json.loads(text)
        if found.pop("format") != FORMAT:
            raise ValueError("another format")
        # Where it was recorded, added by hand to a result that is kept.
        found.pop("provenance", None)
        parts = {name: tuple(kind(**one) for one in found.pop(name)) for name, kind in _PARTS.items()}
        return Analysis(**{**found, **parts, "notes": tuple(found["notes"])})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProfileError(
            f"{source}: expected an analysis with format {FORMAT!r}; got {error}: "
            "write it with --analyse FILE --json OUT"
        ) from error


def is_analysis(path: Path) -> bool:
    """Whether a file looks like a written analysis."""
    try:
        with path.open("rb") as file:
            return FORMAT.encode() in file.read(200)
    except OSError:
        return False


def write_file(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all, and make its folder.

    Raises:
        ProfileError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(content)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise ProfileError(f"{path}: expected a file that can be written; got {error.strerror}") from error
