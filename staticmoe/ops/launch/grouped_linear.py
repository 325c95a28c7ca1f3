"""Launches of `staticmoe::grouped_linear` and its backward.

Dimensions: T tokens, K top_k, E experts, R capacity rows, A and B widths in and out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from staticmoe.kernels.combine import combine
from staticmoe.ops.launch.operands import aligned, whole_rows
from staticmoe.ops.launch.products import Products


def grouped_linear_forward(
    inputs: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    row_assignment: Tensor,
    assignment_row: Tensor,
    gather: bool,
) -> Tensor:
    """Return [R,B], zeros in empty rows: the caller may read them."""
    on = Products(inputs.dtype, expert_offsets, row_assignment, assignment_row)
    out = inputs.new_zeros(row_assignment.shape[0], weight.shape[1])
    return on.product("grouped_gemm", whole_rows(inputs), aligned(weight), None, out, transposed=False, gather=gather)


def grouped_linear_backward(
    grad: Tensor,
    inputs: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    row_assignment: Tensor,
    assignment_row: Tensor,
    gather: bool,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of inputs and weight; None where not needed."""
    on = Products(inputs.dtype, expert_offsets, row_assignment, assignment_row)
    grad, inputs, weight = whole_rows(grad), whole_rows(inputs), aligned(weight)
    d_inputs = d_weight = None
    if needs[0]:
        d_rows = grad.new_zeros(row_assignment.shape[0], weight.shape[2])
        on.product("grouped_gemm", grad, weight, None, d_rows, transposed=True)
        d_inputs = d_rows
        if gather:
            d_inputs = torch.empty_like(inputs)
            combine(d_rows, None, assignment_row, d_inputs)
    if needs[1]:
        d_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
        on.weight_grad("weight_grad_down", grad, inputs, d_weight, gather="right" if gather else None)
    return d_inputs, d_weight
