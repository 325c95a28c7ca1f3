"""Rows to tokens against a loop: values, gradients, slot order, and slots that nobody filled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from staticmoe import functional, ops
from staticmoe.errors import ConfigError
from staticmoe.functional import RoutingPlan

NAN = float("nan")


def some_plan(device: torch.device) -> RoutingPlan:
    """Six tokens, three slots, four experts; drops, slots without expert, rows to spare."""
    ids = torch.tensor([[0, 1, 2], [1, 0, -1], [1, 2, 0], [-1, -1, -1], [0, 2, 1], [2, 1, 0]], device=device)
    return functional.make_plan(
        ids, torch.rand(6, 3, device=device), num_experts=4, capacity_rows=15, expert_capacity=4
    )


def combine_by_loop(rows: Tensor, weights: Tensor, plan: RoutingPlan) -> Tensor:
    out = []
    for t, slots in enumerate(plan.assignment_row.tolist()):
        y = rows.new_zeros(rows.shape[1])
        for k, r in enumerate(slots):
            if r >= 0:
                y = y + weights[t, k] * rows[r]
        out.append(y)
    return torch.stack(out)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [8, 13, 1])
def test_against_a_loop(
    dtype: torch.dtype, width: int, device: torch.device, error: Callable[[Tensor, Tensor], float]
) -> None:
    plan = some_plan(device)
    rows = torch.randn(15, width).to(device, dtype).requires_grad_()
    weights = torch.rand(6, 3).to(device, torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in (rows, weights)]
    got, want = functional.combine(rows, weights, plan), combine_by_loop(wide[0], wide[1], plan)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6}.get(dtype, 1e-2)
    assert got.dtype == dtype and error(got.double(), want) < tolerance
    direction = torch.randn_like(got)
    grads = torch.autograd.grad(got, (rows, weights), direction)
    for grad, want_grad in zip(grads, torch.autograd.grad(want, wide, direction.double()), strict=True):
        assert error(grad.double(), want_grad) < tolerance
    assert grads[1].dtype == weights.dtype


def test_gradcheck() -> None:
    plan = some_plan(torch.device("cpu"))
    rows = torch.randn(15, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(6, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r, w: functional.combine(r, w, plan), (rows, weights))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_slots_nobody_filled(dtype: torch.dtype, device: torch.device) -> None:
    """O20: NaN in empty rows and in the weights of dropped slots reaches neither an output nor a gradient."""
    plan = some_plan(device)
    used, dropped = int(plan.expert_offsets[-1]), plan.assignment_row < 0
    rows = torch.randn(15, 8).to(device, dtype)
    weights = torch.rand(6, 3, device=device)
    results = []
    for filling in (1.0, NAN):
        rows[used:], weights[dropped] = filling, filling
        leaves = [rows.clone().requires_grad_(), weights.clone().requires_grad_()]
        out = functional.combine(leaves[0], leaves[1], plan)
        results.append([out, *torch.autograd.grad(out.sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    out, d_rows, d_weights = results[1]
    assert (out[3] == 0).all() and (d_rows[used:] == 0).all() and (d_weights[dropped] == 0).all()


def test_a_nan_row_stays_with_its_token(device: torch.device) -> None:
    """A dropped slot must not read row 0 in place of the row that it has not got."""
    plan = some_plan(device)
    owner = int(plan.row_assignment[0]) // 3
    rows = torch.randn(15, 8, device=device)
    rows[0] = NAN
    y = functional.combine(rows, torch.rand(6, 3, device=device), plan)
    assert y.isnan().any(-1).tolist() == [t == owner for t in range(6)]


def test_adds_in_slot_order(device: torch.device) -> None:
    """1e8 - 1e8 + 1 is 1 in slot order and 0 in the order of experts or rows."""
    ids = torch.tensor([[2, 0, 1]], device=device)
    plan = functional.make_plan(ids, torch.ones(1, 3, device=device), num_experts=3)
    rows = torch.tensor([[-1e8], [1.0], [1e8]], device=device)
    assert functional.combine(rows, torch.ones(1, 3, device=device), plan).tolist() == [[1.0]]


def test_opcheck(device: torch.device) -> None:
    plan = some_plan(device)
    rows = torch.randn(15, 8, device=device, requires_grad=True)
    weights = torch.rand(6, 3, device=device, requires_grad=True)
    tensors = (plan.expert_offsets, plan.row_assignment, plan.assignment_row)
    torch.library.opcheck(ops.combine.combine, (rows, weights, *tensors))
    grad = torch.randn(6, 8, device=device)
    torch.library.opcheck(ops.combine.combine_backward, (grad, rows.detach(), weights.detach(), *tensors))


def test_refusals_name_value_and_fix() -> None:
    plan = some_plan(torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"rows.*\(15, 8\).*\(14, 8\)"):
        functional.combine(torch.zeros(14, 8), torch.zeros(6, 3), plan)
    with pytest.raises(ConfigError, match=r"topk_weights.*\(6, 3\).*\(6, 2\)"):
        functional.combine(torch.zeros(15, 8), torch.zeros(6, 2), plan)
