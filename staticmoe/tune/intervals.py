"""Bounds for a rate that was observed on steps which are not independent of each other.

The one idea: b steps in a row, b being the integrated autocorrelation time, tell as much as one independent step. A
recording of n steps is n/b independent ones, on which exact methods for independent observations are used. Drift looks
like a very long correlation, so it widens the bounds. A bootstrap was not taken: where no step of a recording
overflowed, every resample says that none ever will.

Dimensions: n recorded steps, b correlation time in steps.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray
from scipy import special

Floats = NDArray[np.float64]

LEVEL = 0.95
_TAIL = (1 - LEVEL) / 2


@dataclasses.dataclass(frozen=True)
class Interval:
    """A rate between 0 and 1, with the bounds of its confidence or prediction interval."""

    rate: float
    low: float
    high: float

    def holds(self, rate: float) -> bool:
        """Whether `rate` lies between the bounds, up to rounding."""
        return self.low - 1e-12 <= rate <= self.high + 1e-12


def correlation_time(series: Floats) -> float:
    """Return b in steps, at least 1: the variance of the mean is b times that of n independent steps.

    Autocorrelations are added up in pairs for as long as a pair is above 0 (Geyer 1992, initial positive sequence).
    What alternates counts as independent, never as better.
    """
    n = len(series)
    centred = np.asarray(series, dtype=np.float64) - np.mean(series)
    if n < 4 or not np.any(np.abs(centred) > 1e-12):
        return 1.0
    padded = np.fft.rfft(centred, 2 * n)
    covariance = np.fft.irfft(padded * padded.conj(), 2 * n)[:n]
    rho = covariance / covariance[0]
    pairs = rho[: n // 2 * 2].reshape(-1, 2).sum(1)
    negative = np.flatnonzero(pairs <= 0)
    kept = pairs[: negative[0]] if negative.size else pairs
    return float(min(max(2 * kept.sum() - 1, 1.0), n / 2))


def student_quantile(freedom: float) -> float:
    """The t that a Student distribution with so many degrees of freedom exceeds in absolute value with 1 - LEVEL."""
    return float(special.stdtrit(freedom, 1 - _TAIL))


def clopper_pearson(count: float, trials: float) -> tuple[float, float]:
    """Bounds of a probability after `count` of `trials` independent trials; both may be fractions of blocks.

    Exact, and never too narrow: at 0 of n the upper bound is still 3.7/n, which is what n steps can tell.
    """
    low = 0.0 if count <= 0 else special.betaincinv(count, trials - count + 1, _TAIL)
    high = 1.0 if count >= trials else special.betaincinv(count + 1, trials - count, 1 - _TAIL)
    return float(low), float(high)


def predicted_share(count: float, trials: float, ahead: int) -> tuple[float, float]:
    """Bounds of the share among `ahead` further trials after `count` of `trials`: a beta-binomial prediction."""
    a, b, y = count + 0.5, max(trials - count, 0.0) + 0.5, np.arange(ahead + 1)
    # Probability of y among `ahead`: C(ahead, y) B(a + y, b + ahead - y) / B(a, b).
    ways = -special.betaln(y + 1, ahead - y + 1) - math.log(ahead + 1)
    below = np.cumsum(np.exp(ways + special.betaln(a + y, b + ahead - y) - special.betaln(a, b)))
    return int(np.searchsorted(below, _TAIL)) / ahead, min(int(np.searchsorted(below, 1 - _TAIL)), ahead) / ahead


def event_interval(events: NDArray[np.bool_], time: float, ahead: int | None = None) -> Interval:
    """The probability that a step is an event, by Clopper-Pearson on n/b blocks.

    Args:
        events: [n].
        time: b in steps.
        ahead: bounds for the share among so many steps to come, instead of for the probability.
    """
    n, count = len(events), int(events.sum())
    if ahead is None:
        low, high = clopper_pearson(count / time, n / time)
    else:
        low, high = predicted_share(count / time, n / time, max(round(ahead / time), 1))
    return Interval(count / n, low, high)


def share_interval(lost: Floats, whole: Floats, time: float, severity: float, ahead: int | None = None) -> Interval:
    """The share of `whole` that is lost, over steps: Student's t on n/b blocks, about the ratio of the sums.

    Losses are rare and large: where few steps lost anything, or none, their scatter says nothing about those to come.
    So the upper bound is at least the upper bound of the probability of a loss times what a step then loses.

    Args:
        lost, whole: [n], of each step.
        time: b in steps.
        severity: share that a step loses if none of these did.
        ahead: bounds for the share over so many steps to come, instead of for the long run.
    """
    n, total = len(lost), float(whole.sum())
    if total == 0:
        return Interval(0.0, 0.0, 1.0)
    rate, hit = float(lost.sum()) / total, lost > 0
    events = event_interval(hit, time, ahead)
    if hit.any():
        severity = float(lost.sum() / whole[hit].sum())
    spread = float(np.sqrt(((lost - rate * whole) ** 2).sum() / max(n - 1, 1))) / (total / n)
    blocks = n / time
    further = 0.0 if ahead is None else time / ahead
    half = student_quantile(max(blocks - 1, 1.0)) * spread * math.sqrt(1 / blocks + further)
    return Interval(rate, max(rate - half, 0.0), min(max(rate + half, events.high * severity), 1.0))
