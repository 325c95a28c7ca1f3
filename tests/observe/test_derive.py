"""Numbers from counts, by hand: two layers of different sizes, a dense one, masked tokens, nothing routed at all.

Letters: E experts, T tokens of a micro-batch, K top_k, N micro-batches.
"""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest

from staticmoe.observe.derive import LayerNumbers, Loads, StepWork, Told, layer_views, moe_metrics, step_work
from staticmoe.observe.record import Reason, Record

# "a": E=4, T=4, K=2, all real. "b": E=2, T=8, K=1, two of the tokens masked. "dense" reports no loads.
FIELDS = {
    "a": {"routed": [6, 2, 0, 0], "kept": [4, 2, 0, 0]},
    "dense": {"norms": [7]},
    "half": {"routed": [1, 1]},
    "b": {"routed": [3, 3], "kept": [3, 3]},
}
FACTS = {
    "a": {"capacity_rows": 6, "can_overflow": 1, "num_experts": 4, "top_k": 2, "tokens": 4, "expert_weights": 400},
    "dense": {},
    "half": {"capacity_rows": 99},
    "b": {"capacity_rows": 8, "can_overflow": 0, "num_experts": 2, "top_k": 1, "tokens": 8, "expert_weights": 60},
}
ENTROPY_A = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)


def record(fields: dict[str, Any]) -> Record:
    return Record(1, 0, False, Reason(0), False, 1, {}, fields)


def derived(fields: Any = FIELDS, facts: Any = FACTS, n: int = 1, scope: str = "rank") -> tuple[Loads, LayerNumbers]:
    loads = Loads.of(record(fields))
    return loads, LayerNumbers.of(loads, Told.of(loads, facts), n, scope)


@pytest.mark.parametrize(("scope", "required"), [("rank", 1.0), ("expert", 3.0)])
def test_the_metrics_of_two_layers_of_different_sizes(scope: str, required: float) -> None:
    loads, layers = derived(scope=scope)
    assert loads.names == ("a", "b") and loads.sizes == (4, 2)
    assert moe_metrics(loads, layers, 1) == {
        "moe/assignments": 14,
        "moe/drop_rate": 2 / 14,
        "moe/drop_rate_max_layer": 2 / 8,
        "moe/max_vio": (2.0 + 0.0) / 2,
        "moe/required_factor": required,
        "moe/buffer_util": (6 / 6 + 6 / 8) / 2,
        "moe/capacity_rows": 14,
        "moe/router_entropy": pytest.approx((ENTROPY_A + 1) / 2),
        "moe/dead_experts": 2,
    }


def test_masked_tokens_lower_what_a_layer_requires() -> None:
    """Layer b alone: 6 of 8 tokens are real, three an expert."""
    for scope in ("rank", "expert"):
        loads, layers = derived({"b": FIELDS["b"]}, scope=scope)
        assert moe_metrics(loads, layers, 1)["moe/required_factor"] == 6 / 8


def test_counts_of_several_micro_batches_are_held_against_as_many_buffers() -> None:
    fields = {"a": {"routed": [6, 6, 2, 2], "kept": [4, 4, 2, 2]}}
    loads, layers = derived(fields, n=2, scope="expert")
    found = moe_metrics(loads, layers, 2)
    assert (found["moe/required_factor"], found["moe/buffer_util"], found["moe/capacity_rows"]) == (6 * 4 / 16, 1.0, 6)


def test_a_step_without_a_real_token_has_no_averages_and_drops_nothing() -> None:
    fields = {name: {"routed": [0] * size, "kept": [0] * size} for name, size in (("a", 4), ("b", 2))}
    loads, layers = derived(fields)
    assert moe_metrics(loads, layers, 1) == {
        "moe/assignments": 0,
        "moe/drop_rate": 0.0,
        "moe/drop_rate_max_layer": 0.0,
        "moe/max_vio": None,
        "moe/required_factor": 0.0,
        "moe/buffer_util": 0.0,
        "moe/capacity_rows": 14,
        "moe/router_entropy": None,
        "moe/dead_experts": 6,
    }


def test_an_idle_layer_leaves_the_averages_of_the_others_alone() -> None:
    loads, layers = derived({"a": FIELDS["a"], "b": {"routed": [0, 0], "kept": [0, 0]}})
    found = moe_metrics(loads, layers, 1)
    assert found["moe/max_vio"] == 2.0 and found["moe/router_entropy"] == pytest.approx(ENTROPY_A)


def test_extremes_of_entropy_are_exact() -> None:
    """One expert with everything: 0, not a rounding error below it. A layer of one expert is even."""
    fields = {"one": {"routed": [0, 12345, 0], "kept": [0, 12345, 0]}, "single": {"routed": [3], "kept": [3]}}
    assert derived(fields)[1].entropy.tolist() == [0.0, 1.0]
    assert derived({"even": {"routed": [7] * 64, "kept": [7] * 64}})[1].entropy == pytest.approx([1.0])


def test_without_layers_there_are_no_metrics() -> None:
    loads, layers = derived({"dense": {"norms": [1]}})
    assert moe_metrics(loads, layers, 1) == {} and layer_views(loads, layers) == {}
    assert step_work(layers, Told.of(loads, FACTS), 1, 10) == StepWork(None, None, None)


def test_a_layer_that_tells_no_sizes_has_no_required_factor() -> None:
    loads, layers = derived({"a": FIELDS["a"], "b": FIELDS["b"]}, {**FACTS, "a": {"capacity_rows": 6}})
    assert math.isnan(layers.required[0]) and layers.required[1] == 0.75
    assert layer_views(loads, layers)["a"]["required_factor"] is None
    assert moe_metrics(loads, layers, 1)["moe/required_factor"] == 0.75


def test_subscribers_get_plain_lists_by_module() -> None:
    loads, layers = derived(scope="expert")
    views = layer_views(loads, layers)
    assert views == {
        "a": {"routed": [6, 2, 0, 0], "dropped": [2, 0, 0, 0], "capacity_rows": 6, "required_factor": 3.0},
        "b": {"routed": [3, 3], "dropped": [0, 0], "capacity_rows": 8, "required_factor": 0.75},
    }
    assert {type(n) for view in views.values() for n in (*view["routed"], *view["dropped"], view["capacity_rows"])} == {
        int
    }


def test_work_counts_real_tokens_and_kept_rows() -> None:
    """1000 weights: 540 dense. A token uses 400·2/4 + 60·1/2 of the experts'; rows cost 100 in a and 30 in b."""
    loads, layers = derived()
    told = Told.of(loads, FACTS)
    work = step_work(layers, told, 1, 1000)
    assert work == StepWork(4, 6.0 * (540 + 200 + 30) * 4, 6.0 * (540 * 4 + 6 * 100 + 6 * 30))
    assert step_work(layers, told, 3, 1000).executed_flops == 6.0 * (540 * 4 * 3 + 6 * 100 + 6 * 30)


@pytest.mark.parametrize("missing", ["expert_weights", "top_k"])
def test_flops_are_not_guessed(missing: str) -> None:
    loads, layers = derived()
    facts = {**FACTS, "a": {key: value for key, value in FACTS["a"].items() if key != missing}}
    # Without the K of a, tokens are those of b, all of which were routed once.
    assert step_work(layers, Told.of(loads, facts), 1, 1000) == StepWork(6 if missing == "top_k" else 4, None, None)
    assert step_work(layers, Told.of(loads, FACTS), 1, None) == StepWork(4, None, None)


def test_counts_beyond_32_bits_and_beyond_doubles_stay_exact() -> None:
    big = 2**53 + 1
    loads, layers = derived({"a": {"routed": [big, 0, 0, 0], "kept": [big - 1, 0, 0, 0]}})
    assert layers.routed.tolist() == [big] and layers.dropped.tolist() == [1]
    assert loads.by_layer(loads.kept) == {"a": [big - 1, 0, 0, 0]}


def test_many_layers_are_as_each_alone() -> None:
    """Random counts of eleven layers of different sizes, against a loop."""
    draw = numpy.random.default_rng(0)
    fields, facts = {}, {}
    for layer in range(11):
        routed = draw.integers(0, 50, size=int(draw.integers(1, 30)))
        kept = numpy.minimum(routed, 30)
        fields[f"l{layer}"] = {"routed": routed.tolist(), "kept": kept.tolist()}
        facts[f"l{layer}"] = {"capacity_rows": int(draw.integers(1, 900)), "top_k": 2, "tokens": 40}
    loads, layers = derived(fields, facts, scope="expert")
    for number, (name, counts) in enumerate(fields.items()):
        routed = numpy.array(counts["routed"])
        total = int(routed.sum())
        share = routed[routed > 0] / max(total, 1)
        assert layers.routed[number] == total
        assert layers.dropped[number] == total - sum(counts["kept"])
        assert layers.dead[number] == counts["routed"].count(0)
        assert layers.required[number] == routed.max() * len(routed) / 80
        if total:
            assert layers.max_vio[number] == pytest.approx(routed.max() * len(routed) / total - 1)
        if len(routed) > 1 and total:
            assert layers.entropy[number] == pytest.approx(-(share * numpy.log(share)).sum() / math.log(len(routed)))
        assert loads.by_layer(loads.kept)[name] == counts["kept"]
