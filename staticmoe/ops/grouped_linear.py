"""Custom op `staticmoe::grouped_linear`: one product with per-expert weights; shape contract and autograd rule.

Dimensions: T tokens, K top_k, E experts, R capacity rows, A and B widths in and out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from staticmoe import reference
from staticmoe.ops.precision import as_given

_PLAN = "Tensor expert_offsets, Tensor row_assignment, Tensor assignment_row"


@torch.library.custom_op(
    "staticmoe::grouped_linear",
    mutates_args=(),
    schema=f"(Tensor inputs, Tensor weight, {_PLAN}, bool gather) -> Tensor",
)
@as_given
def grouped_linear(
    inputs: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    row_assignment: Tensor,
    assignment_row: Tensor,
    gather: bool,
) -> Tensor:
    """Multiply rows (or, with `gather`, tokens dispatched to rows) with the weight of their expert.

    Shapes:
        inputs [T,A] with `gather`, else [R,A]; weight [E,B,A]; plan tensors. Returns [R,B], zeros in empty rows.
    Graph-safe: yes.
    """
    rows = reference.gather_rows(inputs, row_assignment, assignment_row.shape[1]) if gather else inputs
    return reference.grouped_mm(rows, weight, expert_offsets)


@grouped_linear.register_kernel("cuda")
@as_given
def _(
    inputs: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    row_assignment: Tensor,
    assignment_row: Tensor,
    gather: bool,
) -> Tensor:
    # Here, because a machine without a GPU need not have triton.
    from staticmoe.ops.launch import grouped_linear as launch
    from staticmoe.ops.launch.operands import serves

    operands = (inputs, weight, expert_offsets, row_assignment, assignment_row, gather)
    served = serves(inputs.dtype, *weight.shape)
    return launch.grouped_linear_forward(*operands) if served else grouped_linear._init_fn(*operands)


@grouped_linear.register_fake
def _(
    inputs: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    row_assignment: Tensor,
    assignment_row: Tensor,
    gather: bool,
) -> Tensor:
    return inputs.new_empty(row_assignment.shape[0], weight.shape[1])


@torch.library.custom_op(
    "staticmoe::grouped_linear_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor inputs, Tensor weight, {_PLAN}, bool gather, bool[] needs) -> (Tensor, Tensor)",
)
@as_given
def grouped_linear_backward(
    grad: Tensor,
    inputs: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    row_assignment: Tensor,
    assignment_row: Tensor,
    gather: bool,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """Return the gradients of inputs and weight; an empty tensor for one that is not needed.

    Shapes:
        grad [R,B]; the rest as in the forward; needs [2].
    Graph-safe: yes.
    """
    need_inputs, need_weight = needs
    d_inputs, d_weight = inputs.new_zeros(0), weight.new_zeros(0)
    if need_inputs:
        d_inputs = reference.grouped_mm(grad, weight.transpose(1, 2), expert_offsets)
        if gather:
            d_inputs = reference.gather_to_tokens(d_inputs, assignment_row)
    if need_weight:
        rows = reference.gather_rows(inputs, row_assignment, assignment_row.shape[1]) if gather else inputs
        d_weight = reference.grouped_weight_grad(grad, rows, expert_offsets)
    return d_inputs, d_weight


@grouped_linear_backward.register_kernel("cuda")
@as_given
def _(
    grad: Tensor,
    inputs: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    row_assignment: Tensor,
    assignment_row: Tensor,
    gather: bool,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    from staticmoe.ops.launch import grouped_linear as launch
    from staticmoe.ops.launch.operands import serves

    operands = (grad, inputs, weight, expert_offsets, row_assignment, assignment_row, gather, needs)
    if not serves(inputs.dtype, *weight.shape):
        return grouped_linear_backward._init_fn(*operands)
    d_inputs, d_weight = launch.grouped_linear_backward(*operands)
    return (
        inputs.new_zeros(0) if d_inputs is None else d_inputs,
        weight.new_zeros(0) if d_weight is None else d_weight,
    )


@grouped_linear_backward.register_fake
def _(
    grad: Tensor,
    inputs: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    row_assignment: Tensor,
    assignment_row: Tensor,
    gather: bool,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    return (
        inputs.new_empty(inputs.shape if needs[0] else (0,)),
        weight.new_empty(weight.shape if needs[1] else (0,)),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.gather = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:2])
    grads = grouped_linear_backward(grad, *ctx.saved_tensors, ctx.gather, needs)
    return (*(g if need else None for g, need in zip(grads, needs, strict=True)), None, None, None, None)


grouped_linear.register_autograd(_backward, setup_context=_setup_context)
