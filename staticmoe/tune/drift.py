"""Whether what was tuned still holds: halves of a recording, a later one, and forecasts held against what came."""

from __future__ import annotations

import dataclasses

import numpy as np

from staticmoe.errors import ConfigError
from staticmoe.tune.intervals import Interval
from staticmoe.tune.loads import Loads
from staticmoe.tune.table import Judge

_FIT = 0.7


@dataclasses.dataclass(frozen=True)
class Drift:
    """An earlier and a later recording at one capacity.

    Attributes:
        factor: capacity factor.
        predicted: drop rate of the earlier, with bounds for as many steps as the later has.
        drop_rate: of the later.
        required: (earlier, later) medians of the factor that a step requires.
        required_high: (earlier, later) 99th percentiles of it.
        distance: total-variation distance of the loads, of the layer where it is largest: the share of the assignments
            that would have to move to another expert. Some of it is chance.
        layer: that layer.
    """

    factor: float | None
    predicted: Interval
    drop_rate: float
    required: tuple[float, float]
    required_high: tuple[float, float]
    distance: float
    layer: str

    @property
    def drifted(self) -> bool:
        """Whether the later drop rate is outside of the bounds that the earlier recording predicts."""
        return not self.predicted.holds(self.drop_rate)

    @property
    def words(self) -> str:
        """What was found, with numbers."""
        verdict = "the load has drifted" if self.drifted else "no drift is seen"
        outside = "outside of" if self.drifted else "within"
        named = "dropless" if self.factor is None else f"factor {self.factor:g}"
        return (
            f"{verdict}: at {named} the later part drops {self.drop_rate:.3%}, {outside} the "
            f"{self.predicted.low:.3%} to {self.predicted.high:.3%} that the earlier one predicts; required factor "
            f"p50 {self.required[0]:.2f} -> {self.required[1]:.2f}, p99 {self.required_high[0]:.2f} -> "
            f"{self.required_high[1]:.2f}; loads moved by {self.distance:.1%} at most (layer '{self.layer}')"
        )


@dataclasses.dataclass(frozen=True)
class Holdout:
    """A forecast from the first part of a recording beside what the rest did.

    Attributes:
        factor: capacity factor.
        steps: (fitted, held out).
        drop, rerun: forecast rates, with bounds for the held-out steps.
        observed_drop, observed_rerun: held-out rates.
    """

    factor: float | None
    steps: tuple[int, int]
    drop: Interval
    rerun: Interval
    observed_drop: float
    observed_rerun: float

    @property
    def drop_hit(self) -> bool:
        """Whether the held-out drop rate was within the bounds."""
        return self.drop.holds(self.observed_drop)

    @property
    def rerun_hit(self) -> bool:
        """Whether the held-out rerun rate was within the bounds."""
        return self.rerun.holds(self.observed_rerun)


def halves(loads: Loads, factor: float | None, scope: str = "expert", ranks: int = 1) -> Drift:
    """Compare the second half of a recording with the first.

    Raises:
        ConfigError: a half has fewer than two steps.
    """
    first, second = _split(loads, 0.5, ranks)
    return compare(first, second, factor, scope, ranks)


def compare(tuned: Loads, later: Loads, factor: float | None, scope: str = "expert", ranks: int = 1) -> Drift:
    """Compare a later recording with the one that `factor` was tuned on.

    Raises:
        ConfigError: they are not of the same layers.
    """
    if tuned.layers != later.layers:
        raise ConfigError(
            f"loads: expected recordings of the same layers and sizes; got {dict(tuned.layers)} and "
            f"{dict(later.layers)}: compare runs of one model and batch shape"
        )
    before, after = Judge(tuned, scope, ranks), Judge(later, scope, ranks)
    _, predicted = before.rates(factor, ahead=after.steps)
    _, found = after.observed(factor)
    required = before.arrivals.required(), after.arrivals.required()
    shares = tuned.shares(), later.shares()
    distances = {name: float(np.abs(shares[0][name] - shares[1][name]).sum()) / 2 for name in tuned.layers}
    layer = max(distances, key=lambda name: distances[name])
    return Drift(
        factor=factor,
        predicted=predicted,
        drop_rate=found,
        required=(float(np.median(required[0])), float(np.median(required[1]))),
        required_high=(float(np.quantile(required[0], 0.99)), float(np.quantile(required[1], 0.99))),
        distance=distances[layer],
        layer=layer,
    )


def holdout(loads: Loads, factor: float | None, scope: str = "expert", ranks: int = 1) -> Holdout:
    """Fit on the first 70 % of a recording, and hold the rates of the rest against the bounds.

    Raises:
        ConfigError: a part has fewer than two steps.
    """
    fitted, rest = (Judge(part, scope, ranks) for part in _split(loads, _FIT, ranks))
    rerun, drop = fitted.rates(factor, ahead=rest.steps)
    observed_rerun, observed_drop = rest.observed(factor)
    return Holdout(factor, (fitted.steps, rest.steps), drop, rerun, observed_drop, observed_rerun)


def _split(loads: Loads, share: float, ranks: int) -> tuple[Loads, Loads]:
    """Cut behind `share` of the steps, never within one."""
    rows = loads.rows_per_step(ranks)
    cut = round(share * (len(loads) // rows)) * rows
    return loads.part(0, cut), loads.part(cut, len(loads))
