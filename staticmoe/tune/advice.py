"""Which capacity factor to take, and why."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from staticmoe.config import RunnerConfig
from staticmoe.errors import ConfigError
from staticmoe.tune.intervals import Interval
from staticmoe.tune.table import Judge, Row, Table

# Factors beyond the candidates are looked for in steps of one hundredth.
_GRID = 100


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """What to set.

    Attributes:
        factor: capacity factor; None is dropless.
        scope: capacity scope.
        overflow: policy that the factor was chosen for.
        candidate: whether the factor was among the candidates, or is dropless because there is nothing to tune.
        reason: why, in words.
    """

    factor: float | None
    scope: str
    overflow: str
    candidate: bool
    reason: str

    @property
    def config(self) -> dict[str, Any]:
        """Arguments of `RunnerConfig`."""
        return {"capacity_factor": self.factor, "capacity_scope": self.scope, "overflow": self.overflow}

    @property
    def arguments(self) -> str:
        """The same as it is written in Python."""
        return ", ".join(f"{name}={value!r}" for name, value in self.config.items())

    @property
    def flags(self) -> str:
        """Flags of `staticmoe train`; without a capacity factor it is dropless."""
        bound = "" if self.factor is None else f"--capacity-factor {self.factor:g} "
        return f"{bound}--capacity-scope {self.scope} --overflow {self.overflow}"


def recommend(
    table: Table, *, max_drop_rate: float | None = None, max_rerun_rate: float | None = None
) -> Recommendation:
    """Return the smallest factor whose upper bounds are within the limits, or without limits the fastest.

    A drop rate limits what overflow="drop" loses; a rerun rate, and time, are about overflow="rerun". With both limits
    both must hold, and the policy is "drop". Where no candidate will do, the smallest factor that would is searched.

    Raises:
        ConfigError: a limit that is no share between 0 and 1.
    """
    for name, limit in (("max_drop_rate", max_drop_rate), ("max_rerun_rate", max_rerun_rate)):
        if limit is not None and not 0 <= limit <= 1:
            raise ConfigError(f"{name}: expected a share between 0 and 1; got {limit}")
    judge = table.judge
    overflow = "rerun" if max_drop_rate is None else "drop"
    if not judge.can_overflow(1.0):
        return _nothing_to_tune(judge, overflow)
    if max_drop_rate is None and max_rerun_rate is None:
        best = min(table.rows, key=lambda row: (row.time, row.factor))
        reason = f"the smallest of the fastest: a step takes {best.time:.2f} of one without an overflow"
        if best.rerun.rate > RunnerConfig.max_rerun_fraction:
            reason += (
                f". A runner stops at so many reruns, max_rerun_fraction={RunnerConfig.max_rerun_fraction:g}: give it "
                "larger candidates"
            )
        return Recommendation(best.factor, judge.scope, "rerun", True, reason)

    def excess(row: Row, bound: Callable[[Interval], float]) -> float:
        """How many times the limits the row is."""
        pairs = ((row.drop, max_drop_rate), (row.rerun, max_rerun_rate))
        return max(_times(bound(rate), limit) for rate, limit in pairs if limit is not None)

    wanted = " and ".join(
        f"a {name} rate of at most {limit:.4g}"
        for name, limit in (("drop", max_drop_rate), ("rerun", max_rerun_rate))
        if limit is not None
    )
    for row in table.rows:
        if excess(row, _high) <= 1:
            bounds = f"drops up to {row.drop.high:.3g}, reruns up to {row.rerun.high:.3g}"
            reason = f"the smallest candidate with {wanted} at the upper bound ({bounds})"
            return Recommendation(row.factor, judge.scope, overflow, True, reason)
    return _beyond(table, excess, wanted, overflow)


def _high(interval: Interval) -> float:
    return interval.high


def _rate(interval: Interval) -> float:
    return interval.rate


def _times(rate: float, limit: float) -> float:
    if limit == 0:
        return 0.0 if rate == 0 else math.inf
    return rate / limit


def _nothing_to_tune(judge: Judge, overflow: str) -> Recommendation:
    reason = (
        "nothing to tune: every row of a rank is its own, and T tokens have T*K assignments wherever they go, so that "
        "from factor 1 on nothing can overflow. capacity_factor=None is exactly that"
    )
    return Recommendation(None, judge.scope, overflow, True, reason)


def _beyond(
    table: Table, excess: Callable[[Row, Callable[[Interval], float]], float], wanted: str, overflow: str
) -> Recommendation:
    """The smallest factor on the grid that will do, no candidate being enough."""
    judge = table.judge
    # Nothing overflows at `high`: each expert, or each rank, may be sent everything.
    experts = max(layer.num_experts for layer in judge.loads.layers.values())
    low, high = 0, _GRID * (experts if judge.scope == "expert" else judge.ranks)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if excess(judge.row(middle / _GRID), _high) <= 1 else (middle, high)
    factor, reason = high / _GRID, f"none of the candidates has {wanted} at the upper bound; the smallest that would do"
    if judge.can_overflow(factor):
        return Recommendation(factor, judge.scope, overflow, False, f"{reason} is {factor:g}")
    reason += " is dropless"
    observed = next((row for row in table.rows if excess(row, _rate) <= 1), None)
    if observed is not None and observed.factor is not None:
        reason += f". As recorded, without bounds, factor {observed.factor:g} has it"
        more = excess(observed, _high) * judge.steps
        if math.isfinite(more):
            reason += (
                f"; to show that takes about {float(f'{more:.2g}'):.0f} steps of recording instead of {judge.steps}"
            )
    return Recommendation(None, judge.scope, overflow, False, reason)
