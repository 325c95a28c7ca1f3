"""Two profiles beside each other: what grew, and whether that is a regression."""

from __future__ import annotations

import dataclasses

from staticmoe.profiling.errors import ProfileError
from staticmoe.profiling.result import Analysis

ITERATION = "iteration"


@dataclasses.dataclass(frozen=True)
class Difference:
    """Time of an iteration or of a phase of it, ns, before and after; `regressed`: it grew by too much."""

    what: str
    before_ns: float
    after_ns: float
    spread_ns: float
    regressed: bool

    @property
    def growth(self) -> float | None:
        """Growth as a fraction; None where there was nothing before."""
        return self.after_ns / self.before_ns - 1 if self.before_ns else None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All differences, the iteration first, then phases by time; `notes`: what was not compared."""

    differences: tuple[Difference, ...]
    notes: tuple[str, ...]

    @property
    def regressed(self) -> tuple[Difference, ...]:
        """Those that grew by too much."""
        return tuple(one for one in self.differences if one.regressed)


def compare(before: Analysis, after: Analysis, tolerance: float = 0.05) -> Comparison:
    """A time regressed where it grew by more than `tolerance` of it and by more than it spreads in either profile.

    Raises:
        ProfileError: the tolerance is no fraction from 0 on.
    """
    if not tolerance >= 0:
        raise ProfileError(f"--tolerance: expected a fraction of at least 0; got {tolerance}: 0.05 allows 5 %")

    def difference(what: str, old: tuple[float, float], new: tuple[float, float]) -> Difference:
        spread, growth = max(old[1], new[1]), new[0] - old[0]
        return Difference(what, old[0], new[0], spread, growth > tolerance * old[0] and growth > spread)

    found = [
        difference(
            ITERATION,
            (before.iteration_ns, before.iteration_spread_ns),
            (after.iteration_ns, after.iteration_spread_ns),
        )
    ]
    if (before.level, before.tool) != (after.level, after.tool):
        kinds = [f"{one.tool} at {one.level} level" for one in (before, after)]
        return Comparison(tuple(found), (f"phases are not compared: one profile is {kinds[0]}, one {kinds[1]}",))
    old = {one.phase: (one.ns, one.spread_ns) for one in before.phases}
    new = {one.phase: (one.ns, one.spread_ns) for one in after.phases}
    names = sorted(
        old.keys() | new.keys(), key=lambda name: (-max(old.get(name, _NONE)[0], new.get(name, _NONE)[0]), name)
    )
    found += [difference(name, old.get(name, _NONE), new.get(name, _NONE)) for name in names]
    return Comparison(tuple(found), ())


_NONE = (0.0, 0.0)
