"""Exact counts: by hand, by brute force, and at the edges of a capacity."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from staticmoe.errors import ConfigError
from staticmoe.shapes import StaticShape
from staticmoe.tune import Arrivals, Layer, Loads

Recording = Callable[..., Loads]
# T·K = 16 over 4 experts: 4 each where balanced.
ROWS = [[4, 4, 4, 4], [5, 3, 4, 4], [10, 6, 0, 0], [16, 0, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("factor", "dropped"),
    [
        (1.0, [0, 1, 8, 12, 0]),
        (1.25, [0, 0, 6, 11, 0]),  # C = 5: the 5 of the second step is a hit, not a drop
        (1.26, [0, 0, 4, 10, 0]),  # C = ceil(5.04) = 6
        (2.5, [0, 0, 0, 6, 0]),  # C = 10, hit exactly
        (3.99, [0, 0, 0, 0, 0]),  # C = 16: nothing can overflow
        (None, [0, 0, 0, 0, 0]),
    ],
)
def test_drops_of_an_expert_capacity_by_hand(recording: Recording, factor: float | None, dropped: list[int]) -> None:
    outcome = Arrivals(recording({"a": ROWS}, 16), "expert").at(factor)
    assert outcome.dropped["a"].tolist() == dropped
    assert outcome.overflowed.tolist() == [count > 0 for count in dropped]


@pytest.mark.parametrize(
    ("factor", "dropped"), [(0.5, [8, 8, 8, 8, 0]), (0.99, [0] * 5), (0.9, [1, 1, 1, 1, 0]), (1.0, [0] * 5)]
)
def test_a_rank_capacity_on_one_gpu(recording: Recording, factor: float, dropped: list[int]) -> None:
    """R = ceil(0.9 * 16) = 15; ceil(0.99 * 16) is all 16."""
    assert Arrivals(recording({"a": ROWS}, 16), "rank").at(factor).dropped["a"].tolist() == dropped


def test_a_factor_is_rounded_as_the_layer_rounds_it(recording: Recording) -> None:
    """1.1 * 10 is 11 rows, though it is more in binary."""
    outcome = Arrivals(recording({"a": [[11, 9], [12, 8]]}, 20), "expert").at(1.1)
    assert outcome.dropped["a"].tolist() == [0, 1] and outcome.shapes["a"].expert_capacity == 11


def test_a_step_overflows_where_any_layer_does(recording: Recording) -> None:
    outcome = Arrivals(recording({"a": [[2, 2], [4, 0]], "b": [[3, 1], [2, 2]]}, 4), "expert").at(1.0)
    assert outcome.lost.tolist() == [1, 2] and outcome.overflowed.tolist() == [True, True]
    assert {name: counts.tolist() for name, counts in outcome.dropped.items()} == {"a": [0, 2], "b": [1, 0]}


@pytest.mark.parametrize("scope", ["rank", "expert"])
@pytest.mark.parametrize(("ranks", "accumulate"), [(1, 1), (2, 1), (4, 1), (4, 3), (8, 2)])
def test_ranks_against_a_loop(scope: str, ranks: int, accumulate: int) -> None:
    """Each row is a source rank, each rank holds consecutive experts, each micro-batch has its own capacity."""
    experts, total, factor = 8, 24, 1.2
    random = np.random.default_rng(ranks)
    rows = random.multinomial(total, random.dirichlet(np.ones(experts)), size=101)
    loads = Loads({"a": Layer(experts, total)}, {"a": rows}, accumulate=accumulate)
    want, required = [], []
    for step in range(101 // (ranks * accumulate)):
        lost, highest = 0, 0.0
        for micro in range(accumulate):
            first = (step * accumulate + micro) * ranks
            arrived = [sum(int(rows[first + source, e]) for source in range(ranks)) for e in range(experts)]
            sizes = {"tokens": 8, "top_k": 3, "num_experts": experts, "hidden": 4, "intermediate": 4}
            shape = StaticShape(**sizes, capacity_factor=factor, capacity_scope=scope, expert_parallel=ranks)
            if scope == "expert":
                assert shape.expert_capacity is not None
                lost += sum(max(count - shape.expert_capacity, 0) for count in arrived)
                highest = max(highest, max(arrived) * experts / (ranks * total))
                continue
            for rank in range(ranks):
                own = sum(arrived[rank * experts // ranks : (rank + 1) * experts // ranks])
                lost += max(own - shape.capacity_rows, 0)
                highest = max(highest, own / total)
        want.append(lost)
        required.append(highest)
    arrivals = Arrivals(loads, scope, ranks)
    outcome = arrivals.at(factor)
    assert outcome.lost.tolist() == want and arrivals.required() == pytest.approx(required)
    assert outcome.overflowed.tolist() == [lost > 0 for lost in want]
    assert sum(want) > 0 or (scope, ranks) == ("rank", 1)
    assert int(arrivals.routed["a"].sum()) == total * len(want) * ranks * accumulate
    # With the required factor nothing of the worst step is lost; with a little less, something is.
    worst = int(np.argmax(required))
    assert arrivals.at(required[worst]).lost[worst] == 0
    assert arrivals.at(required[worst] - 1.01 * experts / total).lost[worst] > 0


def test_sums_of_micro_batches_are_refused_where_they_hide_something(recording: Recording) -> None:
    """[4, 0] and [0, 4] drop at factor 1, and their sum looks balanced."""
    loads = recording({"a": [[4, 4]] * 4}, 4, summed=2)
    for scope, ranks in (("expert", 1), ("expert", 2), ("rank", 2)):
        with pytest.raises(ConfigError, match=r"sum of 2: record with gradient_accumulation_steps=1 or use calibrate"):
            Arrivals(loads, scope, ranks)
    whole = Arrivals(loads, "rank")
    assert whole.at(1.0).lost.tolist() == [0] * 4 and whole.required().tolist() == [1.0] * 4
    with pytest.raises(ConfigError, match="expected at least 1, where nothing can overflow; got 0.7"):
        whole.at(0.7)


def test_what_cannot_be_grouped_is_refused(recording: Recording) -> None:
    loads = recording({"a": [[2, 1, 1]] * 20}, 4)
    with pytest.raises(ConfigError, match="expected a multiple of expert_parallel = 2; got 3"):
        Arrivals(loads, "expert", 2)
    with pytest.raises(ConfigError, match="at least two steps of 3 ranks with 1 micro-batches each, 6 recorded rows"):
        Arrivals(loads.part(0, 5), "expert", 3)


@pytest.mark.parametrize(
    ("rows", "assignments", "message"),
    [
        ([[1, 2], [3, -1]], 4, "expected counts from 0 on"),
        ([[3, 3]], 4, "at most T·K = 4 together in each of 1 micro-batches; got a row with 6"),
        (np.zeros((0, 2)), 4, "at least one recorded step"),
        ([[1, 2]], 0, "assignments: expected at least 1; got 0"),
    ],
)
def test_loads_that_cannot_be_are_refused(recording: Recording, rows: object, assignments: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recording({"a": rows}, assignments)


def test_layers_must_agree(recording: Recording) -> None:
    with pytest.raises(ConfigError, match=r"expected integers \[1, 2\].*got int64 \[2, 2\]"):
        recording({"a": [[1, 1]], "b": [[1, 1], [1, 1]]}, 4)
    with pytest.raises(ConfigError, match="the same layers"):
        Loads({}, {})
