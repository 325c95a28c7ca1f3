"""The up projection against fp64: gathered rows, both gate orders, bias, tails, what is read and what is left alone.

Letters: T tokens, K top_k, E experts, H hidden, I intermediate, R capacity rows, S rows of a saved buffer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from staticmoe import reference
from staticmoe.kernels.tiles import Tile
from staticmoe.kernels.up import up

TILE = Tile(rows=16, columns=16, depth=16, warps=1, stages=2, group=2)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
HIDDEN, INTERMEDIATE, SPARE = 40, 24, 5


@dataclasses.dataclass
class Inputs:
    """One up projection: its operands, its results and the schedule. Results start as NaN."""

    problem: Any
    x: Tensor
    gate_up: Tensor
    bias: Tensor | None
    pre: Tensor
    act: Tensor
    base: int

    @property
    def used(self) -> int:
        return self.problem.used

    def run(self, activation: str, tile: Tile = TILE, programs: int = 3, counts: bool = True) -> tuple[Tensor, Tensor]:
        """Launch, and return pre and act of the rows in use; every other row must still be NaN."""
        schedule, tile_count = self.problem.schedule(tile.rows, self.base)
        if not counts:
            tile_count.zero_()
        up(
            self.x,
            self.problem.plan.row_assignment,
            self.gate_up,
            self.bias,
            self.pre,
            self.act,
            schedule,
            tile_count,
            top_k=self.problem.weights.shape[1],
            activation=activation,
            tile=tile,
            programs=programs,
        )
        rows = slice(self.base, self.base + self.used)
        assert torch.isnan(self.pre[: self.base]).all() and torch.isnan(self.pre[rows.stop :]).all()
        assert torch.isnan(self.act[self.used :]).all()
        return self.pre[rows].clone(), self.act[: self.used].clone()

    def want(self, activation: str) -> tuple[Tensor, Tensor]:
        """Pre-activation in fp64, and the activation of what the kernel stored."""
        bias = None if self.bias is None else self.bias.double().flatten(1)
        plan, top_k = self.problem.plan, self.problem.weights.shape[1]
        weight = self.gate_up.double().flatten(1, 2)
        x = torch.nan_to_num(self.x.double(), nan=0.0)
        pre = reference.up(x, weight, bias, plan.expert_offsets, plan.row_assignment, top_k)[: self.used]
        stored = self.pre[self.base : self.base + self.used].double()
        return pre, reference.activate(stored, activation)


@pytest.fixture
def inputs(problem: Callable[..., Any]) -> Callable[..., Inputs]:
    """Builds an up projection: inputs([rows of each expert], ...)."""

    def build(
        counts: list[int],
        *,
        activation: str = "swiglu",
        dtype: torch.dtype = torch.float32,
        hidden: int = HIDDEN,
        intermediate: int = INTERMEDIATE,
        bias: bool = False,
        interleaved: bool = False,
        base: int = 0,
        **options: Any,
    ) -> Inputs:
        routed = problem(counts, **options)
        halves = 2 if reference.is_gated(activation) else 1
        shape = (len(counts), intermediate, halves) if interleaved else (len(counts), halves, intermediate)
        gate_up = routed.draw(*shape, hidden, dtype=dtype, scale=hidden**-0.5)
        offset = routed.draw(*shape, dtype=dtype) if bias else None
        if interleaved:
            gate_up, offset = gate_up.transpose(1, 2), None if offset is None else offset.transpose(1, 2)
        rows = routed.plan.capacity_rows
        return Inputs(
            problem=routed,
            x=routed.draw(routed.weights.shape[0], hidden, dtype=dtype),
            gate_up=gate_up,
            bias=offset,
            pre=routed.unwritten(rows + base + SPARE, halves * intermediate, dtype=dtype),
            act=routed.unwritten(rows, intermediate, dtype=dtype),
            base=base,
        )

    return build


def check(case: Inputs, activation: str, error: Callable[[Tensor, Tensor], float], **options: Any) -> None:
    """Run the kernel and compare both results."""
    pre, act = case.run(activation, **options)
    want_pre, want_act = case.want(activation)
    assert error(pre, want_pre) < TOLERANCE[pre.dtype]
    assert error(act, want_act) < TOLERANCE[pre.dtype]


def spread(rows: Tensor) -> Tensor:
    """A copy of [3,A] whose last row starts at element 2^31, in memory that is not touched in between."""
    step = 1 << 30
    count = 2 * step + rows.shape[1]
    if rows.is_cuda:
        buffer = torch.empty(count, dtype=rows.dtype, device=rows.device)
    else:
        # Unlike torch.empty, which the suite fills, this takes no memory before it is written.
        buffer = torch.from_numpy(numpy.zeros(count * rows.element_size(), dtype=numpy.uint8)).view(rows.dtype)
    return buffer.as_strided(rows.shape, (step, 1)).copy_(rows)


# Odd counts, empty experts, a tile hit exactly, one expert with everything, one row, several tiles of an expert.
@pytest.mark.parametrize("counts", [[5, 0, 17, 1], [16, 32, 0], [0, 0, 41], [1], [7, 7, 7, 7]], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_counts(counts: list[int], dtype: torch.dtype, inputs: Any, error: Any) -> None:
    check(inputs(counts, dtype=dtype), "swiglu", error)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", list(reference.ACTIVATIONS))
def test_activations(activation: str, bias: bool, inputs: Any, error: Any) -> None:
    check(inputs([5, 0, 18], activation=activation, bias=bias, base=3), activation, error)


def test_activation_of_the_rounded_pre_activation(inputs: Any) -> None:
    """Of what is stored, not of the sum before it was rounded: then every second element would differ."""
    case = inputs([37], dtype=torch.float16, intermediate=40)
    pre, act = case.run("swiglu")
    same = act == reference.activate(pre, "swiglu")
    assert float(same.double().mean()) > 0.98


@pytest.mark.parametrize("bias", [False, True])
def test_both_orders_of_the_gate(bias: bool, inputs: Any, error: Any) -> None:
    """A weight with gate and up in turns, as a view, stores the same as one with the gate in front."""
    turns = inputs([9, 3], interleaved=True, bias=bias)
    check(turns, "geglu", error)
    front = dataclasses.replace(turns, gate_up=turns.gate_up.contiguous(), pre=turns.pre * 0 + float("nan"))
    front.bias = None if turns.bias is None else turns.bias.contiguous()
    front.act = front.act * 0 + float("nan")
    for got, want in zip(front.run("geglu"), turns.run("geglu"), strict=True):
        assert torch.equal(got, want)


# Widths that end within a tile, on its edge, and before its first half does.
@pytest.mark.parametrize(("hidden", "intermediate"), [(16, 16), (8, 8), (56, 40), (72, 32)])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_tails(hidden: int, intermediate: int, activation: str, inputs: Any, error: Any) -> None:
    case = inputs([6, 13], activation=activation, hidden=hidden, intermediate=intermediate, dtype=torch.float16)
    check(case, activation, error)
    half = dataclasses.replace(TILE, columns=32, depth=32)
    check(case, activation, error, tile=half)


@pytest.mark.parametrize("top_k", [1, 3])
def test_gathers_the_token_of_a_row(top_k: int, inputs: Any, error: Any) -> None:
    """More tokens than are routed; those in no row hold NaN."""
    case = inputs([4, 0, 11, 3], top_k=top_k, tokens=20)
    routed = (case.problem.plan.assignment_row >= 0).any(1)
    assert not routed.all()
    case.x[~routed] = float("nan")
    check(case, "swiglu", error)


def test_one_token(inputs: Any, error: Any) -> None:
    check(inputs([0, 1, 1], top_k=2, spare=0), "swiglu", error)


def test_base_row(inputs: Any, error: Any) -> None:
    """pre lies at the base row of its buffer, act at row 0; what lies around keeps its values."""
    check(inputs([5, 0, 17, 1], base=7), "swiglu", error)


def test_a_neighbour_with_nan_is_harmless(inputs: Any, error: Any) -> None:
    """The rows of an expert lie in the tile of the one before; here they and their weight are NaN."""
    case = inputs([5, 6, 3])
    first, last = case.problem.plan.expert_offsets[1:3].tolist()
    case.x[case.problem.plan.row_assignment[first:last].long()] = float("nan")
    case.gate_up[1] = float("nan")
    pre, act = case.run("swiglu")
    assert torch.isnan(pre[first:last]).all() and torch.isnan(act[first:last]).all()
    case.gate_up[1] = 0
    want_pre, want_act = case.want("swiglu")
    for rows in (slice(0, first), slice(last, None)):
        assert error(pre[rows], want_pre[rows]) < 2e-6
        assert error(act[rows], want_act[rows]) < 2e-6


def test_offsets_past_32_bits(inputs: Any, error: Any) -> None:
    """The last token and the last results lie at element 2^31."""
    case = inputs([3], tokens=3, spare=0, dtype=torch.float16)
    case.x, case.pre, case.act = spread(case.x), spread(case.pre[:3]), spread(case.act)
    check(case, "swiglu", error)


def test_no_tiles_write_nothing(inputs: Any) -> None:
    case = inputs([5, 0, 17, 1])
    case.run("swiglu", counts=False)
    assert torch.isnan(case.pre).all() and torch.isnan(case.act).all()


@pytest.mark.parametrize("change", ["programs", "capacity", "group"])
def test_nothing_depends_on(change: str, inputs: Any) -> None:
    """Bitwise the same with another number of programs, more capacity, another order of the tiles."""
    case = inputs([5, 0, 37, 1], intermediate=40, base=2)
    want = case.run("swiglu")
    if change == "capacity":
        empty = torch.full((29,), -1, dtype=torch.int32, device=case.x.device)
        plan = case.problem.plan
        wider = dataclasses.replace(plan, row_assignment=torch.cat([plan.row_assignment, empty]))
        case.problem = dataclasses.replace(case.problem, plan=wider)
        case.act = case.problem.unwritten(wider.capacity_rows, 40, dtype=case.act.dtype)
        case.pre = case.problem.unwritten(wider.capacity_rows + 9, 80, dtype=case.pre.dtype)
    options: dict[str, Any] = {
        "programs": {"programs": 1},
        "capacity": {"programs": 5},
        "group": {"tile": dataclasses.replace(TILE, group=1)},
    }[change]
    for got, wanted in zip(case.run("swiglu", **options), want, strict=True):
        assert torch.equal(got, wanted)


def test_another_dtype_is_refused(inputs: Any) -> None:
    with pytest.raises(ValueError, match="float64"):
        inputs([3], dtype=torch.float64).run("swiglu")
