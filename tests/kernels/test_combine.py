"""Combine, and the gradients of its rows and weights, against fp64: dropped assignments, any K, what is left alone.

Letters: T tokens, K top_k, R capacity rows, A width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from staticmoe import reference
from staticmoe.kernels.combine import combine, combine_weight_grad, gather_weighted

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
WIDTH = 40


def filled(problem: Any, dtype: torch.dtype, width: int = WIDTH) -> Tensor:
    """Rows [R,A]: random numbers in use, NaN past them."""
    rows = problem.unwritten(problem.plan.capacity_rows, width, dtype=dtype)
    rows[: problem.used] = problem.draw(problem.used, width, dtype=dtype)
    return rows


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


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_sum_of_rows(dtype: torch.dtype, weighted: bool, problem: Callable[..., Any], error: Any) -> None:
    """With assignments dropped, tokens without any row, and rows never written."""
    case = problem([9, 0, 14, 3], top_k=3, tokens=13)
    plan = case.plan
    assert (plan.assignment_row < 0).any() and (plan.assignment_row < 0).all(1).any()
    weights = case.weights if weighted else None
    if weighted:
        # What nobody uses may hold anything.
        case.weights[plan.assignment_row < 0] = float("nan")
    rows, out = filled(case, dtype), case.unwritten(13, WIDTH, dtype=dtype)
    combine(rows, weights, plan.assignment_row, out)
    want = reference.gather_to_tokens(rows.double(), plan.assignment_row, weights)
    assert error(out, want) < TOLERANCE[dtype]
    assert torch.equal(out[(plan.assignment_row < 0).all(1)], torch.zeros_like(out[(plan.assignment_row < 0).all(1)]))


@pytest.mark.parametrize("top_k", [*range(1, 9), 17])
def test_any_number_of_slots(top_k: int, problem: Any, error: Any) -> None:
    case = problem([2 * top_k, 1, top_k], top_k=top_k, tokens=4)
    rows, out = filled(case, torch.float32), case.unwritten(4, WIDTH, dtype=torch.float32)
    combine(rows, case.weights, case.plan.assignment_row, out)
    want = reference.combine(rows.double(), case.weights.double(), case.plan.assignment_row)
    assert error(out, want) < 2e-6


def test_slots_are_summed_in_order(problem: Any) -> None:
    """1e8 + 1 - 1e8 in fp32 is 0 in this order and 1 in another."""
    case = problem([3], top_k=3, tokens=1)
    rows = torch.empty(case.plan.capacity_rows, 8, device=case.device)
    for slot, value in enumerate((1e8, 1.0, -1e8)):
        rows[case.plan.assignment_row[0, slot]] = value
    out = case.unwritten(1, 8, dtype=torch.float32)
    combine(rows, None, case.plan.assignment_row, out)
    assert torch.equal(out, torch.zeros_like(out))
    combine(rows, torch.ones(1, 3, device=case.device), case.plan.assignment_row.flip(1), out)
    assert torch.equal(out, torch.zeros_like(out))
    combine(rows, None, case.plan.assignment_row[:, [0, 2, 1]].contiguous(), out)
    assert torch.equal(out, torch.ones_like(out))


@pytest.mark.parametrize("width", [8, 24, 512, 1100])
def test_widths(width: int, problem: Any, error: Any) -> None:
    """Of less than a block, of whole blocks, and of several with a tail; what lies behind stays NaN."""
    case = problem([3, 2], top_k=2, tokens=3)
    rows = filled(case, torch.float32, width)
    buffer = case.unwritten(4, width, dtype=torch.float32)
    combine(rows, case.weights, case.plan.assignment_row, buffer[:3])
    assert error(buffer[:3], reference.combine(rows.double(), case.weights, case.plan.assignment_row)) < 2e-6
    assert torch.isnan(buffer[3]).all()


def test_offsets_past_32_bits(problem: Any, error: Any) -> None:
    """The last row, and for the gradients the last token, lie at element 2^31."""
    case = problem([3], tokens=3, spare=0)
    plan, rows = case.plan, spread(case.draw(3, WIDTH, dtype=torch.float16))
    out, d_weights = case.unwritten(3, WIDTH, dtype=torch.float16), case.unwritten(3, 1, dtype=torch.float32)
    combine(rows, None, plan.assignment_row, out)
    assert torch.equal(out, reference.gather_to_tokens(rows, plan.assignment_row))
    gather_weighted(rows, None, plan.row_assignment, plan.expert_offsets, out, top_k=1, programs=2)
    assert torch.equal(out, reference.gather_rows(rows, plan.row_assignment, 1))
    combine_weight_grad(rows, rows.contiguous(), plan.assignment_row, d_weights)
    want = (rows.double() * reference.gather_to_tokens(rows, plan.assignment_row).double()).sum(1, keepdim=True)
    assert error(d_weights, want) < 2e-6


def test_nothing_kept_gives_zeros(problem: Any) -> None:
    case = problem([0, 0], top_k=2, tokens=5)
    out = case.unwritten(5, WIDTH, dtype=torch.float32)
    combine(filled(case, torch.float32), case.weights, case.plan.assignment_row, out)
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("programs", [1, 3, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_gradients(dtype: torch.dtype, programs: int, problem: Any, error: Any) -> None:
    """Of rows and weights; rows past the count are neither read nor written."""
    case = problem([9, 0, 14, 3], top_k=3, tokens=13)
    plan, rows, grad = case.plan, filled(case, dtype), case.draw(13, WIDTH, dtype=dtype)
    grad[(plan.assignment_row < 0).all(1)] = float("nan")
    want_rows, want_weights = reference.combine_backward(
        torch.nan_to_num(grad.double()), rows.double(), case.weights, plan.row_assignment, plan.assignment_row
    )
    d_rows, d_weights = case.unwritten(*rows.shape, dtype=dtype), case.unwritten(13, 3, dtype=torch.float32)
    gather_weighted(grad, case.weights, plan.row_assignment, plan.expert_offsets, d_rows, top_k=3, programs=programs)
    combine_weight_grad(grad, rows, plan.assignment_row, d_weights)
    assert error(d_rows[: case.used], want_rows[: case.used]) < TOLERANCE[dtype]
    assert torch.isnan(d_rows[case.used :]).all()
    assert error(d_weights, want_weights) < 2e-6
    assert torch.equal(d_weights[plan.assignment_row < 0], torch.zeros_like(d_weights[plan.assignment_row < 0]))


def test_tokens_to_rows_without_weights(problem: Any) -> None:
    """A copy: bitwise."""
    case = problem([4, 0, 3], top_k=2, tokens=6)
    plan, tokens = case.plan, case.draw(6, WIDTH, dtype=torch.float16)
    out = case.unwritten(plan.capacity_rows, WIDTH, dtype=torch.float16)
    gather_weighted(tokens, None, plan.row_assignment, plan.expert_offsets, out, top_k=2, programs=2)
    used = slice(0, case.used)
    assert torch.equal(out[used], reference.gather_rows(tokens, plan.row_assignment, 2)[used])
    assert torch.isnan(out[case.used :]).all()
