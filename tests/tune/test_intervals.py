"""Bounds against tables of the distributions, and against what simulated steps really do."""

from __future__ import annotations

import math

import numpy as np
import pytest

from staticmoe.tune import intervals
from staticmoe.tune.intervals import Interval


@pytest.mark.parametrize(("freedom", "t"), [(1, 12.7062), (4, 2.77645), (10, 2.22814), (30, 2.04227), (1000, 1.96234)])
def test_student_against_the_table(freedom: int, t: float) -> None:
    assert intervals.student_quantile(freedom) == pytest.approx(t, abs=2e-5)


@pytest.mark.parametrize(
    ("count", "trials", "low", "high"),
    [(0, 10, 0.0, 0.30850), (5, 10, 0.18709, 0.81291), (10, 10, 0.69150, 1.0), (1, 100, 0.000253, 0.054459)],
)
def test_clopper_pearson_against_the_table(count: int, trials: int, low: float, high: float) -> None:
    assert intervals.clopper_pearson(count, trials) == pytest.approx((low, high), abs=1e-5)


def test_a_prediction_is_wider_than_what_it_predicts_from() -> None:
    """Half a uniform prior: with nothing seen and one to come it may be either."""
    assert intervals.predicted_share(0, 0, 1) == (0.0, 1.0)
    low, high = intervals.predicted_share(50, 100, 50)
    bounds = intervals.clopper_pearson(50, 100)
    assert low < bounds[0] < 0.5 < bounds[1] < high
    # The variance of the difference is p(1-p)(1/100 + 1/50).
    assert high - 0.5 == pytest.approx(1.96 * math.sqrt(0.25 * 0.03), abs=0.025)
    assert intervals.predicted_share(0, 1000, 20) == (0.0, 0.0)


def test_correlation_time() -> None:
    """Of an AR(1) process (1 + r) / (1 - r); of independent values, constants and what alternates, 1."""
    random = np.random.default_rng(0)
    noise = random.normal(size=40000)
    assert intervals.correlation_time(noise) == pytest.approx(1.0, abs=0.1)
    walk = np.zeros(40000)
    for step in range(1, len(walk)):
        walk[step] = 0.8 * walk[step - 1] + noise[step]
    assert intervals.correlation_time(walk) == pytest.approx(9.0, rel=0.15)
    assert intervals.correlation_time(np.full(50, 0.1)) == 1.0
    assert intervals.correlation_time(np.tile([0.0, 1.0], 50)) == 1.0
    # Drift looks like a correlation as long as the recording allows.
    assert intervals.correlation_time(np.arange(100.0)) > 20


def test_correlation_widens_and_few_steps_widen() -> None:
    events = np.arange(200) % 10 == 0
    narrow, wide = (intervals.event_interval(events, time) for time in (1.0, 10.0))
    assert narrow.rate == wide.rate == 0.1
    assert narrow.low == pytest.approx(intervals.clopper_pearson(20, 200)[0])
    assert (wide.low, wide.high) == pytest.approx(intervals.clopper_pearson(2, 20))
    assert wide.low < narrow.low and narrow.high < wide.high


def test_losses_that_were_not_seen_are_bounded_by_what_they_could_be() -> None:
    whole = np.full(100, 10.0)
    none = intervals.share_interval(np.zeros(100), whole, 1.0, severity=0.4)
    assert none == Interval(0.0, 0.0, pytest.approx(0.4 * intervals.clopper_pearson(0, 100)[1]))
    once = np.zeros(100)
    once[3] = 5.0
    one = intervals.share_interval(once, whole, 1.0, severity=0.4)
    assert one.rate == 0.005 and one.high == pytest.approx(0.5 * intervals.clopper_pearson(1, 100)[1])
    always = intervals.share_interval(np.tile([1.0, 3.0], 50), whole, 1.0, severity=0.4)
    half = intervals.student_quantile(99.0) * math.sqrt(100 / 99) * 0.1 / 10
    assert always.rate == 0.2 and always.high - 0.2 == pytest.approx(half)
    assert intervals.share_interval(np.zeros(3), np.zeros(3), 1.0, 0.4) == Interval(0.0, 0.0, 1.0)


def test_bounds_for_steps_to_come() -> None:
    """As many to come as were seen: twice the variance; and few may well lose nothing where a few of many did."""
    lost, whole = np.tile([1.0, 3.0], 50), np.full(100, 10.0)
    now, later = (intervals.share_interval(lost, whole, 1.0, 0.4, ahead) for ahead in (None, 100))
    assert later.high - 0.2 == pytest.approx(math.sqrt(2) * (now.high - 0.2)) and later.low < now.low
    rare = np.zeros(100)
    rare[::20] = 1.0
    assert intervals.share_interval(rare, whole, 1.0, 0.4).low > 0
    few = intervals.share_interval(rare, whole, 1.0, 0.4, ahead=10)
    assert few.low == 0 and few.holds(0.0) and few.high >= 0.1 * intervals.predicted_share(5, 100, 10)[1]


@pytest.mark.parametrize("share", [0.02, 0.3])
def test_bounds_hold_the_truth_as_often_as_they_say(share: float) -> None:
    random = np.random.default_rng(1)
    hits = {"events": 0, "losses": 0}
    for _ in range(400):
        events = random.random(200) < share
        hits["events"] += intervals.event_interval(events, 1.0).holds(share)
        lost = events * random.uniform(0, 2, size=200)
        # Expected: a share of `share` steps, each losing 1 of 10 in the mean.
        hits["losses"] += intervals.share_interval(lost, np.full(200, 10.0), 1.0, 0.2).holds(share / 10)
    assert 0.95 <= hits["events"] / 400 <= 0.995 and 0.92 <= hits["losses"] / 400 <= 0.998, hits
