"""Launches of `staticmoe::combine` and its backward.

Dimensions: T tokens, K top_k, E experts, H hidden, R capacity rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from staticmoe.kernels import combine as kernels
from staticmoe.ops.launch.operands import gpu, whole_rows


def combine_forward(rows: Tensor, topk_weights: Tensor, assignment_row: Tensor) -> Tensor:
    """Return [T,H]; see `staticmoe.reference.combine`."""
    out = rows.new_empty(assignment_row.shape[0], rows.shape[1])
    kernels.combine(whole_rows(rows), topk_weights.float().contiguous(), assignment_row, out)
    return out


def combine_backward(
    grad: Tensor,
    rows: Tensor,
    topk_weights: Tensor,
    expert_offsets: Tensor,
    row_assignment: Tensor,
    assignment_row: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows [R,H], zeros in empty rows, and of topk_weights [T,K]."""
    grad, rows = whole_rows(grad), whole_rows(rows)
    weights = topk_weights.float().contiguous()
    d_rows, d_weights = torch.zeros_like(rows), torch.empty_like(weights)
    programs, _ = gpu(rows.device)
    kernels.gather_weighted(
        grad, weights, row_assignment, expert_offsets, d_rows, top_k=assignment_row.shape[1], programs=programs
    )
    kernels.combine_weight_grad(grad, rows, assignment_row, d_weights)
    return d_rows, d_weights.to(topk_weights.dtype)
