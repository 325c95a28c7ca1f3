"""The plan kernels against their oracle, bit for bit: dropless, either capacity or both, ties, NaN, doomed layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from staticmoe import reference

pytest.importorskip("triton")

from staticmoe.kernels import plan as plan_kernels  # noqa: E402
from staticmoe.kernels import victims  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GUARD = 123456789
NAN, INF = float("nan"), float("inf")
NAMES = ("tokens_per_expert", "routed_per_expert", "expert_offsets", "row_assignment", "assignment_row")


@dataclasses.dataclass
class Made:
    """The five tensors that the kernels wrote."""

    tokens_per_expert: Tensor
    routed_per_expert: Tensor
    expert_offsets: Tensor
    row_assignment: Tensor
    assignment_row: Tensor


def guarded(*shape: int) -> tuple[Tensor, Tensor]:
    """A tensor full of rubbish, and the buffer around it, which is longer on both sides."""
    size = torch.Size(shape).numel()
    # 64 entries before it: the tensor starts where an allocation could.
    buffer = torch.full((64 + size + 64,), GUARD, dtype=torch.int32, device=DEVICE)
    return buffer[64 : 64 + size].view(shape), buffer


def planned(
    ids: Tensor,
    weights: Tensor,
    *,
    num_experts: int,
    capacity_rows: int,
    expert_capacity: int | None = None,
    block: int = 64,
    **options: Any,
) -> Made:
    """Launch the plan between guard elements, which stay as they are; so do the inputs."""
    tokens, top_k = ids.shape
    ids, weights = ids.to(DEVICE), weights.to(DEVICE)
    sizes = plan_kernels.scratch_sizes(
        tokens=tokens,
        top_k=top_k,
        num_experts=num_experts,
        capacity_rows=capacity_rows,
        expert_capacity=expert_capacity,
        block=block,
    )
    shapes = ((num_experts,), (num_experts,), (num_experts + 1,), (capacity_rows,), (tokens, top_k), (sizes.total,))
    tensors, buffers = zip(*(guarded(*shape) for shape in shapes), strict=True)
    before = ids.clone(), weights.clone()
    plan_kernels.make_plan(
        ids,
        weights,
        *tensors,
        num_experts=num_experts,
        capacity_rows=capacity_rows,
        expert_capacity=expert_capacity,
        block=block,
        **options,
    )
    for buffer in buffers:
        assert (buffer[:64] == GUARD).all() and (buffer[-64:] == GUARD).all()
    assert torch.equal(ids, before[0])
    assert torch.equal(torch.nan_to_num(weights, 77.0), torch.nan_to_num(before[1], 77.0))
    return Made(*tensors[:5])


def check(ids: Tensor, weights: Tensor | None = None, **options: Any) -> Made:
    """Compare every tensor of the plan with the oracle's, and return the kernels'."""
    weights = torch.rand(ids.shape) if weights is None else weights
    made = planned(ids, weights, **options)
    oracle_options = {k: options[k] for k in ("num_experts", "capacity_rows", "expert_capacity") if k in options}
    want = reference.make_plan(ids, weights, **oracle_options)
    for name in NAMES:
        got = getattr(made, name).cpu()
        assert torch.equal(got, getattr(want, name)), (name, got, getattr(want, name))
    return made


def draw_ids(tokens: int, top_k: int, num_experts: int, *, lowest: int = -1) -> Tensor:
    """Random ids, some of which name no expert."""
    return torch.randint(lowest, num_experts, (tokens, top_k), dtype=torch.int32)


def ids_of(counts: list[int]) -> Tensor:
    """One expert a token, [T,1]."""
    return torch.cat([torch.full((n,), e) for e, n in enumerate(counts)]).to(torch.int32)[:, None]


def coarse(*shape: int) -> Tensor:
    """Weights of which many are equal, NaN and infinite ones among them."""
    choices = torch.tensor([-INF, -1.5, -0.0, 0.0, 0.25, 0.5, 0.50001, 1.0, INF, NAN, 1e-42])
    return choices[torch.randint(choices.numel(), shape)]


@pytest.mark.parametrize("tokens", [1, 3, 17, 127, 129])
@pytest.mark.parametrize("experts", [1, 6, 10, 60, 160, 300, 512])
def test_dropless(experts: int, tokens: int) -> None:
    """O33: any number of experts and tokens; the last row is right."""
    ids = (7 * torch.arange(tokens) % experts).to(torch.int32)[:, None]
    made = check(ids, num_experts=experts, capacity_rows=tokens + 5)
    assert int(made.assignment_row.max()) == tokens - 1


@pytest.mark.parametrize("top_k", [2, 8])
@pytest.mark.parametrize("block", [16, 64, 256])
def test_several_blocks(block: int, top_k: int) -> None:
    check(draw_ids(45, top_k, 10), num_experts=10, capacity_rows=45 * top_k, block=block)


def test_more_blocks_than_are_scanned_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_kernels, "BLOCKS_AT_ONCE", 4)
    monkeypatch.setattr(plan_kernels, "EXPERTS_AT_ONCE", 8)
    check(draw_ids(70, 2, 37), num_experts=37, capacity_rows=150, block=16)


SKEWS: dict[str, Callable[[int], Tensor]] = {
    "all to the first": lambda n: torch.zeros(n),
    "all to the last": lambda n: torch.full((n,), 5.0),
    "empty experts": lambda n: torch.where(torch.arange(n) % 3 == 0, 1.0, 4.0),
    "no expert at all": lambda n: torch.full((n,), -1.0),
    "ids out of range": lambda n: torch.tensor([-7.0, 6.0, 5.0, 1e9])[torch.arange(n) % 4],
}


@pytest.mark.parametrize("capacity", [(100, None), (30, None), (100, 9), (30, 9)])
@pytest.mark.parametrize("skew", SKEWS.values(), ids=SKEWS.keys())
def test_skewed(skew: Callable[[int], Tensor], capacity: tuple[int, int | None]) -> None:
    ids = skew(100).to(torch.int32).view(50, 2)
    check(ids, num_experts=6, capacity_rows=capacity[0], expert_capacity=capacity[1])


@pytest.mark.parametrize("capacity", [(64, 16), (63, None), (64, 15), (32, None), (0, None), (64, 0), (1, 1)])
def test_capacity_at_and_beside_the_count(capacity: tuple[int, int | None]) -> None:
    ids = (torch.arange(64) % 4).to(torch.int32)[:, None]
    made = check(ids, num_experts=4, capacity_rows=capacity[0], expert_capacity=capacity[1])
    per_expert = 64 if capacity[1] is None else capacity[1]
    assert int(made.tokens_per_expert.sum()) == min(capacity[0], 4 * min(16, per_expert))


@pytest.mark.parametrize(
    ("weights", "capacity"),
    [
        *(
            (weights, capacity)
            for weights in ("coarse", "tiny steps")
            for capacity in [(50, None), (120, 17), (44, 17)]
        ),
        *((weights, (44, 17)) for weights in ("random", "equal", "nan")),
    ],
)
def test_victims(capacity: tuple[int, int | None], weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lowest weights lose, then the highest assignment; several parts, so that ties straddle them."""
    monkeypatch.setattr(victims, "MEMBERS", 32)
    monkeypatch.setattr(victims, "PARTS_AT_ONCE", 2)
    monkeypatch.setattr(victims, "EXPERTS_AT_ONCE", 4)
    shape = (30, 4)
    values = {
        "random": torch.randn(shape),
        "coarse": coarse(*shape),
        "equal": torch.full(shape, 0.125),
        "nan": torch.full(shape, NAN),
        "tiny steps": 1.0 + torch.randint(0, 9, shape) * 2.0**-23,
    }[weights]
    check(draw_ids(30, 4, 5), values, num_experts=5, capacity_rows=capacity[0], expert_capacity=capacity[1])


def test_the_stricter_of_both_limits_holds() -> None:
    """The rank drops the lowest of expert 1 alone; expert 0 keeps to its own, higher limit."""
    ids = ids_of([10, 4])
    weights = torch.cat([0.5 + torch.arange(10) / 100, 0.1 + torch.arange(4) / 100])[:, None]
    made = check(ids, weights, num_experts=2, capacity_rows=7, expert_capacity=4)
    assert made.tokens_per_expert.tolist() == [4, 3]
    assert made.row_assignment.tolist() == [6, 7, 8, 9, 11, 12, 13]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_two_bytes(dtype: torch.dtype) -> None:
    weights = torch.randn(40, 2).to(dtype)
    check(draw_ids(40, 2, 5), weights, num_experts=5, capacity_rows=60, expert_capacity=13)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("capacity", [(80, None), (50, 9)])
def test_strided_inputs(dtype: torch.dtype, capacity: tuple[int, int | None]) -> None:
    ids = torch.randint(-2, 8, (20, 3, 4), dtype=dtype)[:, 1, :]
    weights = torch.rand(4, 41)[:, 1::2].T
    assert not ids.is_contiguous() and not weights.is_contiguous()
    check(ids, weights, num_experts=7, capacity_rows=capacity[0], expert_capacity=capacity[1])


def test_ids_of_eight_bytes_do_not_wrap() -> None:
    ids = torch.tensor([[2**32 + 1], [1], [-(2**32) + 1], [0]])
    made = check(ids, num_experts=3, capacity_rows=4)
    assert made.routed_per_expert.tolist() == [1, 1, 0]


@pytest.mark.parametrize("capacity", [(16, None), (40, 4)])
def test_no_tokens(capacity: tuple[int, int | None]) -> None:
    check(draw_ids(0, 2, 4), num_experts=4, capacity_rows=capacity[0], expert_capacity=capacity[1])


@pytest.mark.parametrize("capacity", [(100, None), (60, None), (100, 9), (100, 40), (30, 9)])
@pytest.mark.parametrize("reason", ["flag", "overflow", "flag is 0"])
def test_doomed(reason: str, capacity: tuple[int, int | None]) -> None:
    """A doomed layer has no rows and true counts; without a reason it is an ordinary one."""
    ids, weights = draw_ids(50, 2, 6), torch.rand(50, 2)
    options = {"num_experts": 6, "capacity_rows": capacity[0], "expert_capacity": capacity[1]}
    flag = None if reason == "overflow" else torch.tensor(1.0 if reason == "flag" else 0.0, device=DEVICE)
    made = planned(ids, weights, **options, doomed=flag, overflow_dooms=reason == "overflow")
    want = reference.make_plan(ids, weights, **options)
    overflowed = int(want.tokens_per_expert.sum()) < int(want.routed_per_expert.sum())
    assert overflowed == (capacity not in ((100, None), (100, 40)))
    doomed = reason == "flag" or (reason == "overflow" and overflowed)
    for name in NAMES:
        value = getattr(want, name)
        if doomed and name == "expert_offsets":
            value = torch.zeros_like(value)
        elif doomed and name in ("row_assignment", "assignment_row"):
            value = torch.full_like(value, -1)
        assert torch.equal(getattr(made, name).cpu(), value), name


def test_no_pass_for_victims_where_the_capacity_cannot_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("launched")

    for name in ("start", "of_experts", "of_rank"):
        monkeypatch.setattr(victims, name, refuse)
    check(draw_ids(20, 2, 4), num_experts=4, capacity_rows=40)
    check(draw_ids(20, 2, 4), num_experts=4, capacity_rows=40, expert_capacity=40)
    with pytest.raises(AssertionError, match="launched"):
        check(draw_ids(20, 2, 4), num_experts=4, capacity_rows=39)
    with pytest.raises(AssertionError, match="launched"):
        check(draw_ids(20, 2, 4), num_experts=4, capacity_rows=40, expert_capacity=39)
    # Who is dropped matters to nobody where it dooms the layer; of a rank the counts of all experts follow from it.
    ids, weights = draw_ids(20, 2, 4), torch.rand(20, 2)
    planned(ids, weights, num_experts=4, capacity_rows=40, expert_capacity=5, overflow_dooms=True)
    with pytest.raises(AssertionError, match="launched"):
        planned(ids, weights, num_experts=4, capacity_rows=39, expert_capacity=39, overflow_dooms=True)


def test_no_slot_of_token_0_is_doubled() -> None:
    """O20: empty rows name no assignment, least of all token 0; the dropped ones have no row."""
    ids = torch.cat([torch.zeros(1, 1), torch.full((15, 1), 3.0)]).to(torch.int32)
    for capacity in (16, 4):
        made = check(ids, num_experts=4, capacity_rows=16, expert_capacity=capacity)
        rows = made.row_assignment.tolist()
        assert rows.count(0) == 1 and rows.count(-1) == 15 - min(capacity, 15)
        assert (made.assignment_row[:, 0] == -1).sum() == 15 - min(capacity, 15)


@pytest.mark.parametrize(
    ("counts", "dropped"), [([16, 16, 16, 16], 0), ([17, 15, 16, 16], 1), ([64, 0, 0, 0], 48)], ids=str
)
def test_drops_are_counted_to_the_one(counts: list[int], dropped: int) -> None:
    """O23."""
    made = check(ids_of(counts), num_experts=4, capacity_rows=64, expert_capacity=16)
    assert int((made.routed_per_expert - made.tokens_per_expert).sum()) == dropped
    assert int((made.assignment_row < 0).sum()) == dropped


def test_the_second_choice_is_dropped_and_counted_too() -> None:
    """O23, K = 2."""
    ids = torch.tensor([[0, 1]] * 8, dtype=torch.int32)
    made = check(ids, num_experts=4, capacity_rows=16, expert_capacity=4)
    assert made.routed_per_expert.tolist() == [8, 8, 0, 0] and made.tokens_per_expert.tolist() == [4, 4, 0, 0]


def test_ties_drop_the_highest_assignments() -> None:
    """O27: a zero router, E = 8, K = 2, T = 32, C = 8."""
    ids = torch.tensor([[0, 1]] * 32, dtype=torch.int32)
    weights = torch.full((32, 2), 0.5)
    first = check(ids, weights, num_experts=8, capacity_rows=64, expert_capacity=8)
    assert first.routed_per_expert.tolist() == [32, 32, 0, 0, 0, 0, 0, 0]
    assert int((first.assignment_row < 0).sum()) == 48 and (first.assignment_row[:8] >= 0).all()
    again = planned(ids, weights, num_experts=8, capacity_rows=64, expert_capacity=8)
    assert all(torch.equal(getattr(first, name), getattr(again, name)) for name in NAMES)


@pytest.mark.parametrize("counts", [[21, 0, 0, 16], [37, 0, 0, 0]], ids=str)
def test_overload_stays_within_its_buffers(counts: list[int]) -> None:
    """O31: the guards behind every output are checked by `planned`."""
    made = check(ids_of(counts), num_experts=4, capacity_rows=64, expert_capacity=16)
    assert int(made.tokens_per_expert[3]) == counts[3]
    check(ids_of(counts), num_experts=4, capacity_rows=16)


@settings(max_examples=10, derandomize=True)
@given(
    tokens=st.integers(1, 30),
    top_k=st.integers(1, 5),
    experts=st.integers(1, 9),
    capacity_rows=st.integers(0, 160),
    expert_capacity=st.one_of(st.none(), st.integers(0, 25)),
    ties=st.booleans(),
    block=st.sampled_from([32, 256]),
    seed=st.integers(0, 10_000),
)
def test_any_plan(
    tokens: int,
    top_k: int,
    experts: int,
    capacity_rows: int,
    expert_capacity: int | None,
    ties: bool,
    block: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    weights = coarse(tokens, top_k) if ties else torch.randn(tokens, top_k)
    check(
        draw_ids(tokens, top_k, experts, lowest=-2),
        weights,
        num_experts=experts,
        capacity_rows=capacity_rows,
        expert_capacity=expert_capacity,
        block=block,
    )
