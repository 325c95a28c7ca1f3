"""The plan against Python sorting: maps inverse, offsets, counts, order, and who loses at a capacity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from staticmoe import functional, ops
from staticmoe.errors import ConfigError
from staticmoe.functional import RoutingPlan

NAN = float("nan")
# Few values, so that ties and NaN are common.
WEIGHTS = st.sampled_from([0.0, 0.125, 0.25, 0.25, 0.5, 1.0, NAN])


@st.composite
def routings(draw: st.DrawFn) -> dict[str, Any]:
    """Ids (some -1 or out of range, duplicates within a token allowed), weights, and capacities."""
    tokens, top_k, experts = draw(st.integers(1, 9)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    count = tokens * top_k
    flat_ids = draw(st.lists(st.integers(-1, experts), min_size=count, max_size=count))
    flat_weights = draw(st.lists(WEIGHTS, min_size=count, max_size=count))
    return {
        "ids": [flat_ids[t * top_k : (t + 1) * top_k] for t in range(tokens)],
        "weights": [flat_weights[t * top_k : (t + 1) * top_k] for t in range(tokens)],
        "num_experts": experts,
        "rows": draw(st.integers(1, count + 3)),
        "expert_capacity": draw(st.none() | st.integers(1, count + 1)),
    }


def build(case: dict[str, Any], device: torch.device | str = "cpu") -> RoutingPlan:
    return functional.make_plan(
        torch.tensor(case["ids"], dtype=torch.int32, device=device),
        torch.tensor(case["weights"], device=device),
        num_experts=case["num_experts"],
        capacity_rows=case["rows"],
        expert_capacity=case["expert_capacity"],
    )


@settings(max_examples=150)
@given(case=routings())
def test_properties(case: dict[str, Any]) -> None:
    plan = build(case)
    flat_ids: list[int] = sum(case["ids"], [])
    flat_weights = [w if w == w else float("-inf") for w in sum(case["weights"], [])]
    rows, experts = plan.row_assignment.tolist(), case["num_experts"]
    places = plan.assignment_row.flatten().tolist()
    routed, kept = plan.routed_per_expert.tolist(), plan.tokens_per_expert.tolist()
    offsets = plan.expert_offsets.tolist()
    used = offsets[-1]

    # The maps are inverse to each other and every row lies in its expert's range.
    assert all(a >= 0 and places[a] == r for r, a in enumerate(rows[:used]))
    assert all(a == -1 for a in rows[used:])
    assert all(r == -1 or rows[r] == a for a, r in enumerate(places))
    assert all(flat_ids[rows[r]] == e for e in range(experts) for r in range(offsets[e], offsets[e + 1]))
    # Counts, offsets, order.
    assert offsets == [sum(kept[:e]) for e in range(experts + 1)]
    assert routed == [flat_ids.count(e) for e in range(experts)]
    assert rows[:used] == sorted(rows[:used], key=lambda a: (flat_ids[a], a))
    dropped = [a for a, e in enumerate(flat_ids) if 0 <= e < experts and places[a] < 0]
    assert used + len(dropped) == sum(routed)
    # Capacity is used up before anything is dropped, and the dropped are the smallest.
    limit = case["expert_capacity"]
    assert used <= case["rows"] and (limit is None or max(kept) <= limit)
    for a in dropped:
        expert_is_full = limit is not None and kept[flat_ids[a]] == limit
        assert expert_is_full or used == case["rows"]
        rivals = [r for r in rows[:used] if flat_ids[r] == flat_ids[a] or not expert_is_full]
        assert all((-flat_weights[r], r) < (-flat_weights[a], a) for r in rivals)


@settings(max_examples=150)
@given(case=routings())
def test_against_python_sorting(case: dict[str, Any]) -> None:
    plan = build(case)
    capacity = case["expert_capacity"]
    order: list[int] = sum(case["ids"], [])
    weights = [w if w == w else float("-inf") for w in sum(case["weights"], [])]
    alive = [a for a, e in enumerate(order) if 0 <= e < case["num_experts"]]
    if capacity is not None:
        groups = [[a for a in alive if order[a] == e] for e in range(case["num_experts"])]
        alive = sum((sorted(g, key=lambda a: (-weights[a], a))[:capacity] for g in groups), [])
    alive = sorted(alive, key=lambda a: (-weights[a], a))[: case["rows"]]
    want = sorted(alive, key=lambda a: (order[a], a))
    assert plan.row_assignment.tolist() == want + [-1] * (case["rows"] - len(want))


@pytest.mark.parametrize("rows", [60, 37, 1, 80])
@pytest.mark.parametrize("expert_capacity", [None, 7, 60])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_on_every_device(
    rows: int,
    expert_capacity: int | None,
    dtype: torch.dtype,
    device: torch.device,
    plain: Callable[..., Any],
    plain_plan: Callable[..., Any],
) -> None:
    ids = torch.randint(-1, 7, (20, 3))
    weights = torch.randint(0, 5, (20, 3)) / 8
    plan = functional.make_plan(
        ids.to(device, dtype),
        weights.to(device),
        num_experts=7,
        capacity_rows=rows,
        expert_capacity=expert_capacity,
    )
    assert all(
        tensor.dtype == torch.int32 and tensor.device.type == device.type
        for tensor in (plan.tokens_per_expert, plan.routed_per_expert, plan.row_assignment, plan.assignment_row)
    )
    assert plain(plan) == plain_plan(ids.tolist(), weights.tolist(), 7, rows, expert_capacity)


@pytest.mark.parametrize(
    ("counts", "kept", "dropped"),
    [
        ([16, 16, 16, 16], [16, 16, 16, 16], 0),
        ([17, 15, 16, 16], [16, 15, 16, 16], 1),
        ([64, 0, 0, 0], [16, 0, 0, 0], 48),
        ([0, 32, 0, 32], [0, 16, 0, 16], 32),
        ([1, 62, 1, 0], [1, 16, 1, 0], 46),
    ],
)
def test_drop_counts(counts: list[int], kept: list[int], dropped: int, device: torch.device) -> None:
    """O23: a drop count off by one, or an overflow reported where the capacity is hit exactly."""
    ids = torch.tensor([[e] for e, n in enumerate(counts) for _ in range(n)], dtype=torch.int32, device=device)
    plan = functional.make_plan(ids, torch.ones(64, 1, device=device), num_experts=4, expert_capacity=16)
    assert plan.routed_per_expert.tolist() == counts
    assert plan.tokens_per_expert.tolist() == kept
    assert int((plan.routed_per_expert - plan.tokens_per_expert).sum()) == dropped
    assert bool((plan.tokens_per_expert < plan.routed_per_expert).any()) == (dropped > 0)


def test_second_choice_counts(device: torch.device) -> None:
    """O23: two choices a token, all to experts 0 and 1: 16 assignments, 8 of them dropped."""
    ids = torch.tensor([[0, 1]] * 8, dtype=torch.int32, device=device)
    plan = functional.make_plan(ids, torch.full((8, 2), 0.5, device=device), num_experts=4, expert_capacity=4)
    assert plan.routed_per_expert.tolist() == [8, 8, 0, 0]
    assert plan.tokens_per_expert.tolist() == [4, 4, 0, 0]
    assert plan.assignment_row.tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]] + [[-1, -1]] * 4


def test_ties_keep_the_lowest_assignments(device: torch.device) -> None:
    """O27: with equal weights the kept set is the same every time, and it is the first tokens'."""
    ids = torch.tensor([[0, 1]] * 32, dtype=torch.int32, device=device)
    weights = torch.full((32, 2), 0.5, device=device)
    for _ in range(20):
        plan = functional.make_plan(ids, weights, num_experts=8, expert_capacity=8)
        assert plan.routed_per_expert.tolist() == [32, 32, 0, 0, 0, 0, 0, 0]
        assert plan.assignment_row.tolist() == [[t, t + 8] for t in range(8)] + [[-1, -1]] * 24


def test_nan_weights_lose_and_corrupt_nothing(device: torch.device) -> None:
    weights = torch.tensor([[NAN], [0.0], [NAN], [0.5]], device=device)
    ids = torch.zeros(4, 1, dtype=torch.int32, device=device)
    plan = functional.make_plan(ids, weights, num_experts=2, capacity_rows=3)
    assert plan.row_assignment.tolist() == [0, 1, 3]
    plan = functional.make_plan(ids, weights, num_experts=2, expert_capacity=2)
    assert plan.row_assignment.tolist() == [1, 3, -1, -1]


def test_rows_do_not_depend_on_capacity(device: torch.device) -> None:
    """As long as nothing is dropped, a wider buffer only has more empty rows."""
    ids = torch.randint(-1, 5, (12, 2), device=device)
    weights = torch.rand(12, 2, device=device)
    total = int((ids >= 0).sum())
    plans = [
        functional.make_plan(ids, weights, num_experts=5, capacity_rows=rows) for rows in (total, total + 1, 24, 40)
    ]
    for plan in plans[1:]:
        assert torch.equal(plan.row_assignment[:total], plans[0].row_assignment)
        assert (plan.row_assignment[total:] == -1).all()
        assert torch.equal(plan.assignment_row, plans[0].assignment_row)


@pytest.mark.parametrize(
    ("flag", "dooms", "rows", "doomed"),
    [(1.0, False, 24, True), (0.0, True, 20, True), (0.0, True, 24, False), (0.0, False, 20, False)],
)
def test_a_doomed_plan_has_its_counts_and_no_row(
    flag: float, dooms: bool, rows: int, doomed: bool, device: torch.device
) -> None:
    """By the flag, or by an overflow where that dooms; else it is the plan without these arguments."""
    ids, weights = torch.randint(0, 4, (12, 2), device=device), torch.rand(12, 2, device=device)
    plain = functional.make_plan(ids, weights, num_experts=4, capacity_rows=rows)
    one = torch.tensor(flag, device=device)
    plan = functional.make_plan(ids, weights, num_experts=4, capacity_rows=rows, doomed=one, overflow_dooms=dooms)
    assert torch.equal(plan.tokens_per_expert, plain.tokens_per_expert)
    assert torch.equal(plan.routed_per_expert, plain.routed_per_expert)
    if doomed:
        assert not plan.expert_offsets.any()
        assert (plan.row_assignment == -1).all() and (plan.assignment_row == -1).all()
    else:
        for name in ("expert_offsets", "row_assignment", "assignment_row"):
            assert torch.equal(getattr(plan, name), getattr(plain, name)), name


class Sorts(TorchDispatchMode):
    """Counts the sorts that run."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket is torch.ops.aten.sort
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("rows", "expert_capacity", "sorts"), [(24, None, 1), (24, 24, 1), (23, None, 3), (24, 8, 3)])
def test_no_sort_for_victims_that_cannot_be(rows: int, expert_capacity: int | None, sorts: int) -> None:
    ids, weights = torch.randint(0, 4, (12, 2)), torch.rand(12, 2)
    with Sorts() as mode:
        ops.plan.make_plan._init_fn(ids, weights, 4, rows, expert_capacity)
    assert mode.count == sorts


@pytest.mark.parametrize(("rows", "expert_capacity"), [(10, None), (6, None), (10, 2)])
def test_opcheck(rows: int, expert_capacity: int | None, device: torch.device) -> None:
    ids = torch.randint(-1, 4, (5, 2), dtype=torch.int32, device=device)
    torch.library.opcheck(ops.plan.make_plan, (ids, torch.rand(5, 2, device=device), 4, rows, expert_capacity))


@pytest.mark.parametrize(
    ("ids", "options", "words"),
    [
        (torch.zeros(4, dtype=torch.int32), {}, r"topk_ids.*2 dimensions.*\(4,\)"),
        (torch.zeros(4, 3, dtype=torch.int32), {}, r"topk_weights.*\(4, 3\).*\(4, 2\)"),
        (torch.zeros(4, 2), {}, "topk_ids.*int32 or int64.*float32"),
        (torch.zeros(4, 2, dtype=torch.int64), {"capacity_rows": 0}, "capacity_rows.*at least 1.*0"),
        (torch.zeros(4, 2, dtype=torch.int64), {"expert_capacity": 0}, "expert_capacity.*at least 1.*0"),
    ],
)
def test_refusals_name_value_and_fix(ids: torch.Tensor, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        functional.make_plan(ids, torch.zeros(4, 2), num_experts=4, **options)
