"""Grouped products against a loop over rows, both inputs, every path, and rows that were never written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from staticmoe import functional, ops, reference
from staticmoe.errors import ConfigError
from staticmoe.functional import RoutingPlan

NAN = float("nan")


def product_by_loop(inputs: Tensor, weight: Tensor, plan: RoutingPlan, gather: bool) -> Tensor:
    """Row by row; empty rows are zeros."""
    offsets, rows = plan.expert_offsets.tolist(), plan.row_assignment.tolist()
    out = []
    for r, assignment in enumerate(rows):
        if assignment < 0:
            out.append(weight.new_zeros(weight.shape[1]))
            continue
        expert = next(e for e in range(plan.num_experts) if r < offsets[e + 1])
        out.append(weight[expert] @ inputs[assignment // plan.top_k if gather else r])
    return torch.stack(out)


def some_plan(device: torch.device, rows: int | None = 16) -> RoutingPlan:
    """Seven tokens, two slots, five experts; expert 2 idle, two assignments without expert, rows to spare."""
    ids = torch.tensor([[0, 1], [4, 0], [1, -1], [0, 3], [-1, 4], [1, 0], [3, 1]], device=device)
    return functional.make_plan(ids, torch.rand(7, 2, device=device), num_experts=5, capacity_rows=rows)


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("widths", [(8, 16), (9, 11), (8, 11), (9, 16), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [16, 14, 5])
def test_against_a_loop(
    gather: bool,
    widths: tuple[int, int],
    dtype: torch.dtype,
    rows: int,
    device: torch.device,
    error: Callable[[Tensor, Tensor], float],
) -> None:
    plan = some_plan(device, rows)
    inputs = torch.randn(7 if gather else rows, widths[0]).to(device, dtype).requires_grad_()
    weight = torch.randn(5, widths[1], widths[0]).to(device, dtype).requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in (inputs, weight)]
    got = functional.grouped_linear(inputs, weight, plan, gather=gather)
    want = product_by_loop(wide[0], wide[1], plan, gather)
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5}.get(dtype, 2e-2)
    assert got.dtype == dtype and got.is_contiguous()
    assert error(got.double(), want) < tolerance
    direction = torch.randn_like(got)
    grads = torch.autograd.grad(got, (inputs, weight), direction)
    for grad, want_grad in zip(grads, torch.autograd.grad(want, wide, direction.double()), strict=True):
        assert grad.dtype == dtype and error(grad.double(), want_grad) < tolerance
    assert (grads[1][2] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("widths", [(8, 16), (9, 11)])
def test_rows_nobody_wrote_are_not_read(dtype: torch.dtype, widths: tuple[int, int], device: torch.device) -> None:
    """O19: NaN in empty rows of the input and of the gradient reaches no result; zeros come out."""
    plan = some_plan(device)
    used = int(plan.expert_offsets[-1])
    weight = torch.randn(5, widths[1], widths[0]).to(device, dtype).requires_grad_()
    rows = torch.randn(16, widths[0]).to(device, dtype)
    direction = torch.randn(16, widths[1]).to(device, dtype)
    results = []
    for filling in (0.0, NAN):
        rows[used:], direction[used:] = filling, filling
        leaf = rows.clone().requires_grad_()
        out = functional.grouped_linear(leaf, weight, plan, gather=False)
        results.append([out, *torch.autograd.grad(out, (leaf, weight), direction)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert (results[1][0][used:] == 0).all() and (results[1][1][used:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("widths", [(16, 24), (100, 36), (9, 11)])
def test_strides_and_offsets(dtype: torch.dtype, widths: tuple[int, int], device: torch.device) -> None:
    """O34: odd storage offsets and transposed weights give what their contiguous copies give."""
    plan = some_plan(device)
    width_in, width_out = widths
    wide = torch.randn(7, width_in + 3).to(device, dtype)
    flat = torch.randn(5 * width_in * width_out + 1).to(device, dtype)
    inputs = wide[:, 1 : 1 + width_in]
    for weight in (
        flat[1:].view(5, width_out, width_in),
        flat[:-1].view(5, width_in, width_out).transpose(1, 2),
        flat[1:].view(5, width_in, width_out).transpose(1, 2),
    ):
        got = functional.grouped_linear(inputs, weight, plan, gather=True)
        want = functional.grouped_linear(inputs.contiguous(), weight.contiguous(), plan, gather=True)
        assert torch.allclose(got, want, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)


def test_full_early_expert_does_not_hurt_a_later_one(device: torch.device, error: Callable[..., float]) -> None:
    """O31: with experts 0 and 3 sent 21 and 16 tokens and 16 rows each, expert 3's rows are all right."""
    ids = torch.tensor([[0]] * 21 + [[3]] * 16, device=device)
    inputs, weight = torch.randn(37, 8, device=device), torch.randn(4, 8, 8, device=device)
    for case in (ids, torch.zeros_like(ids)):
        plan = functional.make_plan(case, torch.ones(37, 1, device=device), num_experts=4, expert_capacity=16)
        rows = functional.grouped_linear(inputs, weight, plan, gather=True)
        y = functional.combine(rows, torch.ones(37, 1, device=device), plan)
        want = torch.stack([weight[e] @ x for e, x in zip(case[:, 0].tolist(), inputs, strict=True)])
        want[16 : 21 if case is ids else 37] = 0
        assert error(y, want) < 1e-5 and (y[16:21] == 0).all()


def test_segment_sums(device: torch.device, error: Callable[..., float]) -> None:
    plan = some_plan(device)
    rows = torch.randn(16, 6, device=device)
    rows[int(plan.expert_offsets[-1]) :] = NAN
    ends = plan.expert_offsets.tolist()
    want = torch.stack([rows[a:b].sum(0) for a, b in zip(ends, ends[1:], strict=False)])
    got = reference.grouped.grouped_sum(rows, plan.expert_offsets)
    assert error(got, want) < 1e-6 and (got[2] == 0).all()


@pytest.mark.parametrize("gather", [False, True])
def test_opcheck(gather: bool, device: torch.device) -> None:
    plan = some_plan(device)
    inputs = torch.randn(7 if gather else 16, 8, device=device, requires_grad=True)
    weight = torch.randn(5, 12, 8, device=device, requires_grad=True)
    tensors = (plan.expert_offsets, plan.row_assignment, plan.assignment_row)
    torch.library.opcheck(ops.grouped_linear.grouped_linear, (inputs, weight, *tensors, gather))
    grad = torch.randn(16, 12, device=device)
    for needs in ([True, True], [False, True], [True, False]):
        args: tuple[Any, ...] = (grad, inputs.detach(), weight.detach(), *tensors, gather, needs)
        torch.library.opcheck(ops.grouped_linear.grouped_linear_backward, args)


@pytest.mark.parametrize(
    ("inputs", "weight", "gather", "words"),
    [
        ((7, 8), (5, 12, 8), False, r"rows_or_tokens.*\(16, 8\).*gather=True for tokens.*\(7, 8\)"),
        ((16, 8), (5, 12, 8), True, r"rows_or_tokens.*\(7, 8\).*gather=False for rows.*\(16, 8\)"),
        ((7, 9), (5, 12, 8), True, r"rows_or_tokens.*\(7, 8\).*\(7, 9\)"),
        ((7, 8), (4, 12, 8), True, r"weight.*\(5, 12, 8\).*\(4, 12, 8\)"),
        ((7, 8), (12, 8), True, r"weight.*3 dimensions.*\(12, 8\)"),
    ],
)
def test_refusals_name_value_and_fix(inputs: Any, weight: Any, gather: bool, words: str) -> None:
    plan = some_plan(torch.device("cpu"))
    with pytest.raises(ConfigError, match=words):
        functional.grouped_linear(torch.zeros(inputs), torch.zeros(weight), plan, gather=gather)


def test_dtypes_must_match() -> None:
    plan = some_plan(torch.device("cpu"))
    with pytest.raises(ConfigError, match="weight.*float32.*bfloat16.*cast"):
        functional.grouped_linear(torch.zeros(7, 8), torch.zeros(5, 4, 8, dtype=torch.bfloat16), plan, gather=True)
