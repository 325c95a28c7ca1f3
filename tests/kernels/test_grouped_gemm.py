"""The grouped GEMM against fp64: both ways through a weight, gate and up as two groups, gathered and saved rows.

Letters: T tokens, K top_k, E experts, R capacity rows, S rows of a saved buffer, A and B widths in and out, G groups.
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
from staticmoe.kernels.grouped_gemm import grouped_gemm
from staticmoe.kernels.tiles import Tile
from staticmoe.reference.grouped import add_expert_bias

TILE = Tile(rows=16, columns=16, depth=16, warps=1, stages=2, group=2)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
# Neither ends on the edge of a tile; a half of WIDE does not either.
NARROW, WIDE = 24, 48


@dataclasses.dataclass
class Inputs:
    """One grouped GEMM: operands, result, and how the rows are found. The result starts as NaN."""

    problem: Any
    rows: Tensor
    weight: Tensor
    bias: Tensor | None
    out: Tensor
    transposed: bool
    gather: bool
    base: int | None

    def run(self, tile: Tile = TILE, programs: int = 3, counts: bool = True) -> Tensor:
        """Launch, and return the rows in use; every other row must still be NaN."""
        schedule, tile_count = self.problem.schedule(tile.rows, self.base or 0)
        if not counts:
            tile_count.zero_()
        grouped_gemm(
            self.rows,
            self.weight,
            self.bias,
            self.out,
            schedule,
            tile_count,
            transposed=self.transposed,
            row_assignment=self.problem.plan.row_assignment if self.gather else None,
            top_k=self.problem.weights.shape[1] if self.gather else 1,
            saved_rows=self.base is not None,
            tile=tile,
            programs=programs,
        )
        assert torch.isnan(self.out[self.problem.used :]).all()
        return self.out[: self.problem.used].clone()

    def want(self) -> Tensor:
        """The rows in use, in fp64."""
        plan, used = self.problem.plan, self.problem.used
        if self.gather:
            rows = reference.gather_rows(torch.nan_to_num(self.rows), plan.row_assignment, plan.top_k)[:used]
        else:
            rows = self.rows[self.base or 0 :][:used]
        weight = self.weight.flatten(1, -2) if self.transposed else self.weight
        weight = weight.transpose(1, 2) if self.transposed else weight
        product = reference.grouped_mm(rows.double(), weight.double(), plan.expert_offsets)
        return add_expert_bias(product, None if self.bias is None else self.bias.double(), plan.expert_offsets)


@pytest.fixture
def inputs(problem: Callable[..., Any]) -> Callable[..., Inputs]:
    """Builds a grouped GEMM: inputs([rows of each expert], ...)."""

    def build(
        counts: list[int],
        *,
        transposed: bool = False,
        groups: int = 0,
        interleaved: bool = False,
        gather: bool = False,
        base: int | None = None,
        bias: bool = False,
        dtype: torch.dtype = torch.float32,
        wide: int = WIDE,
        narrow: int = NARROW,
        **options: Any,
    ) -> Inputs:
        routed = problem(counts, **options)
        experts, scale = len(counts), wide**-0.5
        if interleaved:
            weight = routed.draw(experts, wide // 2, 2, narrow, dtype=dtype, scale=scale).transpose(1, 2)
        elif groups:
            weight = routed.draw(experts, groups, wide // groups, narrow, dtype=dtype, scale=scale)
        elif transposed:
            weight = routed.draw(experts, wide, narrow, dtype=dtype, scale=scale)
        else:
            weight = routed.draw(experts, narrow, wide, dtype=dtype, scale=scale)
        plan, used = routed.plan, routed.used
        if gather:
            rows = routed.draw(routed.weights.shape[0], wide, dtype=dtype)
            rows[(plan.assignment_row < 0).all(1)] = float("nan")
        else:
            # What nobody wrote holds NaN, in front of the base row too.
            first = base or 0
            rows = routed.unwritten(plan.capacity_rows + first, wide, dtype=dtype)
            rows[first : first + used] = routed.draw(used, wide, dtype=dtype)
        return Inputs(
            problem=routed,
            rows=rows,
            weight=weight,
            bias=routed.draw(experts, narrow, dtype=dtype) if bias else None,
            out=routed.unwritten(plan.capacity_rows, narrow, dtype=dtype),
            transposed=transposed,
            gather=gather,
            base=base,
        )

    return build


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


WAYS: dict[str, dict[str, Any]] = {
    "down": {},
    "down with a bias": {"bias": True},
    "gathered": {"gather": True, "top_k": 3, "tokens": 30},
    "transposed": {"transposed": True},
    "transposed and gathered": {"transposed": True, "gather": True, "bias": True},
    "two groups": {"transposed": True, "groups": 2, "base": 5},
    "two groups in turns": {"transposed": True, "interleaved": True, "base": 5},
    "two groups gathered": {"transposed": True, "groups": 2, "gather": True},
    "saved": {"base": 3},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_ways(way: str, dtype: torch.dtype, inputs: Any, error: Any) -> None:
    case = inputs([5, 0, 19, 1], dtype=dtype, **WAYS[way])
    assert error(case.run(), case.want()) < TOLERANCE[dtype]


# Empty experts, tiles hit exactly, one expert with everything, one row.
@pytest.mark.parametrize("counts", [[16, 32, 0], [0, 0, 41], [1], [0, 7, 7, 7]], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_counts(counts: list[int], transposed: bool, inputs: Any, error: Any) -> None:
    case = inputs(counts, transposed=transposed)
    assert error(case.run(), case.want()) < 2e-6


@pytest.mark.parametrize("way", ["down", "gathered", "transposed", "two groups", "two groups gathered"])
@pytest.mark.parametrize(("wide", "narrow"), [(16, 8), (32, 16), (80, 40), (112, 72)])
def test_tails(way: str, wide: int, narrow: int, inputs: Any, error: Any) -> None:
    """Each group has a tail of its own, after which the other group lies in the row."""
    case = inputs([6, 13], wide=wide, narrow=narrow, dtype=torch.float16, **WAYS[way])
    assert error(case.run(), case.want()) < 2e-3
    wider = dataclasses.replace(TILE, columns=32, depth=32)
    assert error(case.run(tile=wider), case.want()) < 2e-3


@pytest.mark.parametrize("way", ["down", "two groups"])
def test_a_neighbour_with_nan_is_harmless(way: str, inputs: Any, error: Any) -> None:
    """The rows of an expert lie in the tile of the one before; here they and their weight are NaN."""
    case = inputs([5, 6, 3], **WAYS[way])
    want = case.want()
    first, last = case.problem.plan.expert_offsets[1:3].tolist()
    base = case.base or 0
    case.rows[base + first : base + last] = float("nan")
    case.weight[1] = float("nan")
    got = case.run()
    assert torch.isnan(got[first:last]).all()
    for rows in (slice(0, first), slice(last, None)):
        assert error(got[rows], want[rows]) < 2e-6


@pytest.mark.parametrize("way", WAYS)
def test_no_tiles_write_nothing(way: str, inputs: Any) -> None:
    case = inputs([5, 0, 19, 1], **WAYS[way])
    case.run(counts=False)
    assert torch.isnan(case.out).all()


@pytest.mark.parametrize("way", ["down", "gathered", "two groups"])
def test_nothing_depends_on_programs_capacity_or_order(way: str, inputs: Any) -> None:
    """Bitwise the same."""
    case = inputs([5, 0, 37, 1], **WAYS[way])
    want = case.run()
    assert torch.equal(case.run(programs=1), want)
    assert torch.equal(case.run(tile=dataclasses.replace(TILE, group=1)), want)
    more = 21
    plan = case.problem.plan
    row_assignment = torch.cat([plan.row_assignment, plan.row_assignment.new_full((more,), -1)])
    wider = dataclasses.replace(plan, capacity_rows=plan.capacity_rows + more, row_assignment=row_assignment)
    case.problem = dataclasses.replace(case.problem, plan=wider)
    case.out = case.problem.unwritten(wider.capacity_rows, NARROW, dtype=case.out.dtype)
    if not case.gather:
        case.rows = torch.cat([case.rows, case.problem.unwritten(more, WIDE, dtype=case.rows.dtype)])
    assert torch.equal(case.run(), want)


@pytest.mark.parametrize("way", ["down", "two groups", "transposed and gathered"])
def test_offsets_past_32_bits(way: str, inputs: Any, error: Any) -> None:
    """The last row of the input and of the result lie at element 2^31."""
    case = inputs([3], spare=0, dtype=torch.float16, **{**WAYS[way], "base": None})
    case.rows, case.out = spread(case.rows), spread(case.out)
    assert error(case.run(), case.want()) < 2e-3


def test_one_expert_of_any_stride(inputs: Any, error: Any) -> None:
    """The stride of a dimension of size 1 says nothing, and torch leaves odd numbers there."""
    case = inputs([9])
    case.weight = case.weight.as_strided(case.weight.shape, (3, WIDE, 1))
    assert error(case.run(), case.want()) < 2e-6


def test_another_dtype_is_refused(inputs: Any) -> None:
    with pytest.raises(ValueError, match="float64"):
        inputs([3], dtype=torch.float64).run()
