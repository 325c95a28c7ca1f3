"""Sums of each expert's rows: the gradients of the biases.

Of the up projection's the sum of the gradient of the pre-activation, of the down projection's that of the gathered
token gradients times their routing weights.

Dimensions: E experts, T tokens, K top_k, R rows, S rows of a saved buffer, W width, G groups of columns (gate and up,
or one); BR x BW the rows and columns taken at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_ROWS = 64
_COLUMNS = 64
_WARPS = 4


@triton.jit
def staticmoe_weight_grad_bias(
    rows_ptr,
    expert_offsets_ptr,
    assignment_ptr,
    weight_ptr,
    base_row_ptr,
    out_ptr,
    width,
    width_of_group,
    row_stride,
    stride_expert,
    stride_group,
    stride_column,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SAVED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BR: tl.constexpr,
    BW: tl.constexpr,
):
    """out[e] = the fp32 sum of expert e's rows, or that added to out[e]; rounded once.

    Grid: (E, ceil(W / BW)); program (e, i) owns columns [i * BW, (i + 1) * BW) of expert e.
    Unwritten: nothing of `out`; with ACCUMULATE the experts without rows. Reads no row outside of the segment.
    Deterministic: BR sums over every BR-th row, then their sum in a fixed order, whatever R is.
    """
    expert = tl.program_id(0)
    first = tl.load(expert_offsets_ptr + expert)
    count = tl.load(expert_offsets_ptr + expert + 1) - first
    column = tl.program_id(1) * BW + tl.arange(0, BW)
    real = column < width
    row = tl.arange(0, BR)
    start = first.to(tl.int64)
    if SAVED:
        start += tl.load(base_row_ptr).to(tl.int64)
    total = tl.zeros((BR, BW), tl.float32)
    for at in range(0, count, BR):
        inside = at + row < count
        source = start + at + row
        if GATHER or WEIGHTED:
            assignment = tl.load(assignment_ptr + first + at + row, mask=inside, other=0)
        if GATHER:
            source = (assignment // TOP_K).to(tl.int64)
        mask = inside[:, None] & real[None, :]
        values = tl.load(rows_ptr + source[:, None] * row_stride + column[None, :], mask=mask, other=0.0)
        values = values.to(tl.float32)
        if WEIGHTED:
            values *= tl.load(weight_ptr + assignment, mask=inside, other=0.0).to(tl.float32)[:, None]
        total += values
    result = tl.sum(total, 0)
    group = column // width_of_group
    out_at = out_ptr + expert.to(tl.int64) * stride_expert + group.to(tl.int64) * stride_group
    out_at += (column % width_of_group).to(tl.int64) * stride_column
    if ACCUMULATE:
        real = column < tl.where(count > 0, width, 0)
        result += tl.load(out_at, mask=real, other=0.0).to(tl.float32)
    tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=real)


def grouped_sum(
    rows: Tensor,
    expert_offsets: Tensor,
    out: Tensor,
    *,
    row_assignment: Tensor | None = None,
    topk_weights: Tensor | None = None,
    top_k: int = 1,
    base_row: Tensor | None = None,
    accumulate: bool = False,
) -> None:
    """Store the sum of each expert's rows in `out`, or add it to what is there; see `staticmoe.reference.grouped_sum`.

    An expert without rows: zeros are stored, nothing is added. The sums are fp32; `out` is rounded once, and so is not
    the product of a row and its weight.

    Shapes:
        rows [R,W], any float, last stride 1; with `row_assignment` [R] int32 they are tokens [T,W], and a row's is
        assignment // top_k. topk_weights [T,K], contiguous: what a row counts, for gathered rows alone. out [E,W], or
        [E,G,W/G] with any strides. expert_offsets [E+1] int32 exclusive. base_row, an integer 0-dim or [1] on the
        device: where rows that are not gathered start.
    Raises:
        ValueError: weights without assignments, a base row of gathered tokens, or another width of `out`.
    Graph-safe: yes.
    """
    view = out if out.dim() == 3 else out.unsqueeze(1)
    experts, groups, width_of_group = view.shape
    if topk_weights is not None and row_assignment is None:
        raise ValueError("grouped_sum: topk_weights belong to assignments, but row_assignment is None")
    if base_row is not None and row_assignment is not None:
        raise ValueError(
            "grouped_sum: gathered tokens have no base row, but both base_row and row_assignment are given"
        )
    width = rows.shape[1]
    if groups * width_of_group != width or expert_offsets.shape[0] != experts + 1:
        raise ValueError(
            f"grouped_sum: rows {tuple(rows.shape)} and expert_offsets {tuple(expert_offsets.shape)} do not make an "
            f"out of {tuple(out.shape)}"
        )
    staticmoe_weight_grad_bias[(experts, triton.cdiv(width, _COLUMNS))](
        rows,
        expert_offsets,
        row_assignment,
        topk_weights,
        base_row,
        view,
        width,
        width_of_group,
        rows.stride(0),
        *view.stride(),
        TOP_K=top_k,
        GATHER=row_assignment is not None,
        WEIGHTED=topk_weights is not None,
        SAVED=base_row is not None,
        ACCUMULATE=accumulate,
        BR=_ROWS,
        BW=_COLUMNS,
        num_warps=_WARPS,
    )
