"""What was forecast against what came: stationary loads, loads with a memory, and loads that move."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from staticmoe.errors import ConfigError
from staticmoe.tune import Loads, compare, halves, holdout

Recording = Callable[..., Loads]
SEEDS = 200


@pytest.mark.parametrize(("memory", "factor", "least"), [(0.0, 1.75, 0.9), (0.0, 1.25, 0.9), (0.9, 1.5, 0.85)])
def test_held_out_rates_are_where_they_were_forecast(
    draw: Recording, memory: float, factor: float, least: float
) -> None:
    found = [holdout(draw(seed, memory=memory), factor) for seed in range(SEEDS)]
    drops, reruns = (
        float(np.mean(hits)) for hits in zip(*((one.drop_hit, one.rerun_hit) for one in found), strict=True)
    )
    assert drops >= least and reruns >= least, (drops, reruns)
    # The bounds are of use: they are not everything, and both ways of missing would show.
    widths = [one.rerun.high - one.rerun.low for one in found]
    assert 0.05 < np.mean([one.observed_rerun for one in found]) < 0.99 and np.mean(widths) < 0.6
    assert {one.steps for one in found} == {(140, 60)}


def test_a_held_out_part_that_differs_is_missed(recording: Recording) -> None:
    rows = [[4, 4, 4, 4]] * 70 + [[7, 3, 3, 3]] * 30
    found = holdout(recording({"a": rows}, 16), 1.5)
    assert found.observed_rerun == 1.0 and found.observed_drop == 1 / 16
    assert not found.rerun_hit and not found.drop_hit and found.rerun.rate == 0
    same = holdout(recording({"a": [[7, 3, 3, 3]] * 100}, 16), 1.5)
    assert same.rerun_hit and same.drop_hit and same.drop.rate == 1 / 16


def drifting(recording: Recording, way: float, steps: int = 400) -> Loads:
    """Popularity goes a part of the way from one draw of a Dirichlet distribution to another."""
    random = np.random.default_rng(5)
    start, end = random.dirichlet(np.full(8, 40.0)), random.dirichlet(np.full(8, 3.0))
    along = way * np.linspace(0, 1, steps)[:, None]
    return recording({"a": random.multinomial(256, (1 - along) * start + along * end)}, 256)


def test_natural_drift_is_seen_with_numbers(recording: Recording) -> None:
    still, moved = (halves(drifting(recording, way), 1.6) for way in (0.0, 1.0))
    assert not still.drifted and still.words.startswith("no drift is seen: at factor 1.6")
    assert moved.drifted and moved.words.startswith("the load has drifted: at factor 1.6")
    assert moved.drop_rate > moved.predicted.high and f"{moved.drop_rate:.3%}" in moved.words
    assert moved.required[1] > moved.required[0] + 0.2 and abs(still.required[1] - still.required[0]) < 0.1
    assert moved.distance > 0.1 > 0.03 > still.distance


def test_the_numbers_of_a_comparison_by_hand(recording: Recording) -> None:
    before = recording({"a": [[6, 2]] * 40, "b": [[4, 4]] * 40}, 8)
    after = recording({"a": [[5, 3]] * 40, "b": [[8, 0]] * 40}, 8)
    found = compare(before, after, 1.25)
    # C = 5: a loses 1 of 8 before; b loses 3 of 8 afterwards.
    assert found.predicted.rate == 1 / 16 and found.drop_rate == 3 / 16 and found.drifted
    assert found.required == (1.5, 2.0) and found.required_high == (1.5, 2.0)
    assert found.distance == 0.5 and found.layer == "b"
    with pytest.raises(ConfigError, match="recordings of the same layers and sizes"):
        compare(before, recording({"a": [[6, 2]] * 40}, 8), 1.25)


def test_a_cut_never_goes_through_a_step(recording: Recording) -> None:
    """11 steps of two ranks with two micro-batches, and a row left over: 8 to fit, 3 to hold out."""
    found = holdout(recording({"a": [[6, 2]] * 45}, 8, accumulate=2), 1.0, "expert", 2)
    assert found.steps == (8, 3) and found.observed_drop == found.drop.rate == 0.25
