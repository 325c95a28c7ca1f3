"""Custom op `staticmoe::combine`: rows to tokens, weighted; shape contract and autograd rule.

Dimensions: T tokens, K top_k, E experts, H hidden, R capacity rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from staticmoe import reference
from staticmoe.ops.precision import as_given

_PLAN = "Tensor expert_offsets, Tensor row_assignment, Tensor assignment_row"


@torch.library.custom_op(
    "staticmoe::combine",
    mutates_args=(),
    schema=f"(Tensor rows, Tensor topk_weights, {_PLAN}) -> Tensor",
)
@as_given
def combine(
    rows: Tensor, topk_weights: Tensor, expert_offsets: Tensor, row_assignment: Tensor, assignment_row: Tensor
) -> Tensor:
    """Return each token's weighted sum of its rows; see `staticmoe.reference.combine`.

    Shapes:
        rows [R,H]; topk_weights [T,K]; expert_offsets [E+1]; row_assignment [R]; assignment_row [T,K]. Returns [T,H].
    Graph-safe: yes.
    """
    return reference.combine(rows, topk_weights, assignment_row)


@combine.register_kernel("cuda")
@as_given
def _(
    rows: Tensor, topk_weights: Tensor, expert_offsets: Tensor, row_assignment: Tensor, assignment_row: Tensor
) -> Tensor:
    # Here, because a machine without a GPU need not have triton.
    from staticmoe.ops.launch import combine as launch
    from staticmoe.ops.launch.operands import serves

    run = launch.combine_forward if serves(rows.dtype, 1, rows.shape[1]) else reference.combine
    return run(rows, topk_weights, assignment_row)


@combine.register_fake
def _(
    rows: Tensor, topk_weights: Tensor, expert_offsets: Tensor, row_assignment: Tensor, assignment_row: Tensor
) -> Tensor:
    return rows.new_empty(assignment_row.shape[0], rows.shape[1])


@torch.library.custom_op(
    "staticmoe::combine_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor rows, Tensor topk_weights, {_PLAN}) -> (Tensor, Tensor)",
)
@as_given
def combine_backward(
    grad: Tensor,
    rows: Tensor,
    topk_weights: Tensor,
    expert_offsets: Tensor,
    row_assignment: Tensor,
    assignment_row: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows [R,H] and topk_weights [T,K]; see `staticmoe.reference.combine_backward`.

    Shapes:
        grad [T,H]; rows [R,H]; topk_weights [T,K]; expert_offsets [E+1]; row_assignment [R]; assignment_row [T,K].
    Graph-safe: yes.
    """
    return reference.combine_backward(grad, rows, topk_weights, row_assignment, assignment_row)


@combine_backward.register_kernel("cuda")
@as_given
def _(
    grad: Tensor,
    rows: Tensor,
    topk_weights: Tensor,
    expert_offsets: Tensor,
    row_assignment: Tensor,
    assignment_row: Tensor,
) -> tuple[Tensor, Tensor]:
    from staticmoe.ops.launch import combine as launch
    from staticmoe.ops.launch.operands import serves

    if not serves(rows.dtype, 1, rows.shape[1]):
        return reference.combine_backward(grad, rows, topk_weights, row_assignment, assignment_row)
    return launch.combine_backward(grad, rows, topk_weights, expert_offsets, row_assignment, assignment_row)


@combine_backward.register_fake
def _(
    grad: Tensor,
    rows: Tensor,
    topk_weights: Tensor,
    expert_offsets: Tensor,
    row_assignment: Tensor,
    assignment_row: Tensor,
) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), topk_weights.new_empty(topk_weights.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    d_rows, d_weights = combine_backward(grad, *ctx.saved_tensors)
    return d_rows, d_weights, None, None, None


combine.register_autograd(_backward, setup_context=_setup_context)
