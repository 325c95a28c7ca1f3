"""The expert block: up, activation, down, combine, and its backward from x and the pre-activation alone.

Neither the activation nor the rows of the down projection are kept: the activation is computed again, and the
gradient of a routing weight is <dA, a> with dA = W_down^T dy, which needs no down row.

Dimensions: T tokens, K top_k, E experts, H hidden, I intermediate, R capacity rows. Where an activation has no
gate, read I for 2I.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from staticmoe.reference.activation import activate, activation_backward
from staticmoe.reference.grouped import (
    add_expert_bias,
    gather_rows,
    gather_to_tokens,
    gather_weights,
    grouped_mm,
    grouped_sum,
    grouped_weight_grad,
)
from staticmoe.reference.routing import compute_dtype


def up(
    x: Tensor, gate_up: Tensor, bias: Tensor | None, expert_offsets: Tensor, row_assignment: Tensor, top_k: int
) -> Tensor:
    """Gather tokens to rows and return their pre-activation, zeros in empty rows.

    Shapes:
        x [T,H]; gate_up [E,2I,H]; bias [E,2I] or None; row_assignment [R] int32. Returns [R,2I].
    Graph-safe: yes.
    """
    product = grouped_mm(gather_rows(x, row_assignment, top_k), gate_up, expert_offsets)
    return add_expert_bias(product, bias, expert_offsets)


def down(act: Tensor, weight: Tensor, bias: Tensor | None, expert_offsets: Tensor) -> Tensor:
    """Return the down projection of the activation, zeros in empty rows.

    Shapes:
        act [R,I]; weight [E,H,I]; bias [E,H] or None. Returns [R,H].
    Graph-safe: yes.
    """
    return add_expert_bias(grouped_mm(act, weight, expert_offsets), bias, expert_offsets)


def combine(rows: Tensor, topk_weights: Tensor, assignment_row: Tensor) -> Tensor:
    """Return each token's weighted sum of its rows: fp32, slot order, no atomics.

    Shapes:
        rows [R,H]; topk_weights [T,K]; assignment_row [T,K] int32. Returns [T,H].
    Graph-safe: yes.
    """
    return gather_to_tokens(rows, assignment_row, topk_weights)


def combine_backward(
    grad: Tensor, rows: Tensor, topk_weights: Tensor, row_assignment: Tensor, assignment_row: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `combine` with respect to its rows and its weights.

    Shapes:
        grad [T,H]; rows [R,H]; topk_weights [T,K]; row_assignment [R]; assignment_row [T,K].
        Returns [R,H] (zeros in empty rows) and [T,K] (zero for dropped assignments).
    Graph-safe: yes.
    """
    dtype = compute_dtype(rows.dtype)
    grad_rows = gather_rows(grad, row_assignment, assignment_row.shape[1]).to(dtype)
    occupied = (row_assignment >= 0)[:, None]
    d_weights = _to_assignments(torch.where(occupied, rows.to(dtype), 0.0) * grad_rows, assignment_row)
    d_rows = gather_weights(topk_weights, row_assignment).to(dtype) * grad_rows
    return d_rows.to(rows.dtype), d_weights.to(topk_weights.dtype)


def experts_forward(
    x: Tensor,
    topk_weights: Tensor,
    gate_up: Tensor,
    down_weight: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    expert_offsets: Tensor,
    row_assignment: Tensor,
    assignment_row: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """Return the block's output [T,H] and the pre-activation [R,2I] that its backward needs.

    Shapes:
        x [T,H]; topk_weights [T,K]; gate_up [E,2I,H]; down_weight [E,H,I]; biases [E,2I], [E,H] or None.
    Graph-safe: yes.
    """
    pre = up(x, gate_up, gate_up_bias, expert_offsets, row_assignment, assignment_row.shape[1])
    rows = down(activate(pre, activation), down_weight, down_bias, expert_offsets)
    return combine(rows, topk_weights, assignment_row), pre


def experts_backward(
    grad: Tensor,
    x: Tensor,
    pre: Tensor,
    topk_weights: Tensor,
    gate_up: Tensor,
    down_weight: Tensor,
    down_bias: Tensor | None,
    expert_offsets: Tensor,
    row_assignment: Tensor,
    assignment_row: Tensor,
    activation: str,
    needs: Sequence[bool],
    *,
    weight_grad_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, topk_weights, gate_up, down_weight, gate_up_bias, down_bias; None where not needed.

    Shapes:
        grad [T,H]; pre [R,2I]; the rest as in `experts_forward`. Each gradient has the shape and dtype of its input,
        those of the weights `weight_grad_dtype` (default: as their input), summed in it.
    Graph-safe: yes; `needs` is fixed when the iteration is built.
    """
    need_x, need_weights, need_gate_up, need_down, need_gate_up_bias, need_down_bias = needs
    dtype = compute_dtype(pre.dtype)
    wide = pre.dtype if weight_grad_dtype is None else weight_grad_dtype
    grad_rows = gather_rows(grad, row_assignment, assignment_row.shape[1])
    weight_rows = gather_weights(topk_weights, row_assignment).to(dtype)
    act = activate(pre, activation).to(dtype)
    # The gradient of the activation before its routing weight: one product serves dw and dpre.
    d_act = grouped_mm(grad_rows, down_weight.transpose(1, 2), expert_offsets).to(dtype)

    d_x = d_weights = d_gate_up = d_down = d_gate_up_bias = d_down_bias = None
    if need_weights:
        inner = (d_act * act).sum(-1)
        if down_bias is not None:
            bias_rows = add_expert_bias(torch.zeros_like(grad_rows), down_bias, expert_offsets)
            inner = inner + (grad_rows.to(dtype) * bias_rows.to(dtype)).sum(-1)
        d_weights = _to_assignments(inner[:, None], assignment_row).to(topk_weights.dtype)
    if need_down:
        weighted = (weight_rows * act).to(pre.dtype)
        d_down = grouped_weight_grad(grad_rows.to(wide), weighted.to(wide), expert_offsets)
    if need_down_bias:
        d_down_bias = grouped_sum((weight_rows * grad_rows.to(dtype)).to(grad_rows.dtype), expert_offsets)
    if need_x or need_gate_up or need_gate_up_bias:
        d_pre = activation_backward(pre, weight_rows * d_act, activation)
        if need_x:
            d_x = gather_to_tokens(grouped_mm(d_pre, gate_up.transpose(1, 2), expert_offsets), assignment_row)
        if need_gate_up:
            x_rows = gather_rows(x, row_assignment, assignment_row.shape[1])
            d_gate_up = grouped_weight_grad(d_pre.to(wide), x_rows.to(wide), expert_offsets)
        if need_gate_up_bias:
            d_gate_up_bias = grouped_sum(d_pre, expert_offsets)
    return d_x, d_weights, d_gate_up, d_down, d_gate_up_bias, d_down_bias


def _to_assignments(products: Tensor, assignment_row: Tensor) -> Tensor:
    """Sum `products` [R,*] over its columns and return the sums as [T,K], zero for dropped assignments."""
    sums = products.sum(-1).index_select(0, assignment_row.reshape(-1).clamp(min=0).to(torch.int64))
    return torch.where(assignment_row >= 0, sums.reshape(assignment_row.shape), 0.0)
