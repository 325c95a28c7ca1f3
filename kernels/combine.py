"""Rows back to tokens: each token's sum of its rows; and for its backward, tokens to rows and the products of both.

Dimensions: T tokens, K top_k, E experts, R capacity rows, A width.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# Slots whose rows are loaded at one time; more are taken in a loop.
_UNROLLED = tl.constexpr(16)
_BLOCKS = (2048, 1024, 512)
_THREAD_BYTES = 16
_WARP_THREADS = 32


@triton.jit
def _add_row(total, rows_ptr, weights_ptr, row_ptr, slot, column, columns, stride, WEIGHTED: tl.constexpr):
    """Return `total` plus the (weighted) row of a token's slot; a dropped slot reads nothing and adds nothing."""
    row = tl.load(row_ptr + slot)
    end = tl.where(row >= 0, columns, 0)
    part = tl.load(rows_ptr + row.to(tl.int64) * stride + column, mask=column < end, other=0.0).to(tl.float32)
    if WEIGHTED:
        part = part * tl.load(weights_ptr + slot, mask=row >= 0, other=0.0).to(tl.float32)
    return total + part


@triton.jit
def _combine(
    rows_ptr,
    weights_ptr,
    assignment_row_ptr,
    out_ptr,
    stride_units,
    column_units,
    ALIGN: tl.constexpr,
    TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = column_units * ALIGN
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row_ptr = assignment_row_ptr + token * TOP_K
    weight_ptr = weights_ptr + token * TOP_K if WEIGHTED else weights_ptr
    stride = stride_units * ALIGN
    total = tl.zeros((BLOCK,), tl.float32)
    if TOP_K <= _UNROLLED:
        for slot in tl.static_range(TOP_K):
            total = _add_row(total, rows_ptr, weight_ptr, row_ptr, slot, column, columns, stride, WEIGHTED)
    else:
        for slot in range(TOP_K):
            total = _add_row(total, rows_ptr, weight_ptr, row_ptr, slot, column, columns, stride, WEIGHTED)
    tl.store(out_ptr + token * columns + column, total.to(out_ptr.dtype.element_ty), mask=column < columns)


@triton.jit
def staticmoe_combine_sum(
    rows_ptr,
    weights_ptr,
    assignment_row_ptr,
    out_ptr,
    stride_units,
    column_units,
    ALIGN: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[t] = sum over the slots k of weights[t,k] * rows[assignment_row[t,k]], in fp32 and in slot order.

    Grid: (T, ceil(A / BLOCK)); a program owns BLOCK columns of one token. Writes every element of `out`; a token
    without rows gets zeros. Reads only rows that an assignment names. Deterministic: a fixed order, no atomics.
    """
    _combine(rows_ptr, weights_ptr, assignment_row_ptr, out_ptr, stride_units, column_units, ALIGN, TOP_K, True, BLOCK)


@triton.jit
def staticmoe_token_grad_sum(
    rows_ptr,
    weights_ptr,
    assignment_row_ptr,
    out_ptr,
    stride_units,
    column_units,
    ALIGN: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[t] = sum over the slots k of rows[assignment_row[t,k]]; otherwise as `staticmoe_combine_sum`."""
    _combine(rows_ptr, weights_ptr, assignment_row_ptr, out_ptr, stride_units, column_units, ALIGN, TOP_K, False, BLOCK)


@triton.jit
def staticmoe_combine_backward_rows(
    tokens_ptr,
    weights_ptr,
    row_assignment_ptr,
    expert_offsets_ptr,
    out_ptr,
    experts,
    stride_units,
    column_units,
    ALIGN: tl.constexpr,
    TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[r] = weight of row r * tokens[row_assignment[r] // K] for the rows in use.

    Grid: (programs, ceil(A / BLOCK)); program i owns BLOCK columns of rows i, i + programs, ...
    Unwritten: rows past `expert_offsets[E]`. Deterministic: each element is written once, from one product.
    """
    columns = column_units * ALIGN
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    for row in range(tl.program_id(0), tl.load(expert_offsets_ptr + experts), tl.num_programs(0)):
        assignment = tl.load(row_assignment_ptr + row).to(tl.int64)
        value = tl.load(tokens_ptr + assignment // TOP_K * (stride_units * ALIGN) + column, mask=inside, other=0.0)
        if WEIGHTED:
            value = value.to(tl.float32) * tl.load(weights_ptr + assignment).to(tl.float32)
        at = tl.cast(row, tl.int64) * columns + column
        tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def staticmoe_combine_backward_weights(
    tokens_ptr,
    rows_ptr,
    assignment_row_ptr,
    out_ptr,
    token_units,
    row_units,
    column_units,
    ALIGN: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[t,k] = <tokens[t], rows[assignment_row[t,k]]> in fp32, exactly zero where the assignment was dropped.

    Grid: (T * K,); a program owns one assignment. Writes all of `out`. Deterministic: blocks of columns in order, each
    lane by itself, then one tree; nothing depends on R.
    """
    assignment = tl.program_id(0).to(tl.int64)
    row = tl.load(assignment_row_ptr + assignment).to(tl.int64)
    columns = column_units * ALIGN
    total = tl.zeros((BLOCK,), tl.float32)
    if row >= 0:
        token = assignment // TOP_K
        for first in range(0, columns, BLOCK):
            column = first + tl.arange(0, BLOCK)
            inside = column < columns
            left = tl.load(tokens_ptr + token * (token_units * ALIGN) + column, mask=inside, other=0.0)
            right = tl.load(rows_ptr + row * (row_units * ALIGN) + column, mask=inside, other=0.0)
            total += left.to(tl.float32) * right.to(tl.float32)
    tl.store(out_ptr + assignment, tl.sum(total).to(out_ptr.dtype.element_ty))


def _block(columns: int, element_size: int) -> tuple[int, int]:
    """The columns of a program, and its warps: least waste, then the widest, 16 bytes for each thread."""
    scale = 2 if element_size == 4 else 1
    block = min((b // scale for b in _BLOCKS), key=lambda b: (triton.cdiv(columns, b) * b, -b))
    block = min(block, triton.next_power_of_2(columns))
    return block, max(1, block * element_size // (_THREAD_BYTES * _WARP_THREADS))


def combine(rows: Tensor, weights: Tensor | None, assignment_row: Tensor, out: Tensor) -> None:
    """Sum each token's rows, weighted if there are weights; see `staticmoe.reference.combine`.

    Shapes:
        rows [R,A], A and the row stride multiples of 16 bytes; weights [T,K] contiguous or None; assignment_row [T,K]
        int32 contiguous; out [T,A] contiguous, every element written. rows and out bf16, fp16 or fp32.
    Graph-safe: yes.
    """
    tokens, top_k = assignment_row.shape
    columns, align = out.shape[1], 16 // rows.element_size()
    block, warps = _block(columns, rows.element_size())
    kernel = staticmoe_token_grad_sum if weights is None else staticmoe_combine_sum
    kernel[(tokens, triton.cdiv(columns, block))](
        rows,
        weights,
        assignment_row,
        out,
        rows.stride(0) // align,
        columns // align,
        ALIGN=align,
        TOP_K=top_k,
        BLOCK=block,
        num_warps=warps,
    )


def gather_weighted(
    tokens: Tensor,
    weights: Tensor | None,
    row_assignment: Tensor,
    expert_offsets: Tensor,
    out: Tensor,
    *,
    top_k: int,
    programs: int,
) -> None:
    """Write each row in use: its token, times its routing weight if there are weights. For the backward of `combine`.

    Shapes:
        tokens [T,A], A and the row stride multiples of 16 bytes; weights [T,K] contiguous or None; row_assignment [R]
        int32; expert_offsets [E+1] int32; out [R,A] contiguous: rows not in use stay unwritten.
    Graph-safe: yes.
    """
    columns, align = out.shape[1], 16 // tokens.element_size()
    block, warps = _block(columns, tokens.element_size())
    staticmoe_combine_backward_rows[(min(programs, out.shape[0]), triton.cdiv(columns, block))](
        tokens,
        weights,
        row_assignment,
        expert_offsets,
        out,
        expert_offsets.shape[0] - 1,
        tokens.stride(0) // align,
        columns // align,
        ALIGN=align,
        TOP_K=top_k,
        WEIGHTED=weights is not None,
        BLOCK=block,
        num_warps=warps,
    )


def combine_weight_grad(tokens: Tensor, rows: Tensor, assignment_row: Tensor, out: Tensor) -> None:
    """Write the inner product of each assignment's token and row, zero where it was dropped: `combine`'s weights.

    Shapes:
        tokens [T,A] (the gradient), rows [R,A], A and row strides multiples of 16 bytes; assignment_row [T,K] int32
        and out [T,K], contiguous.
    Graph-safe: yes.
    """
    columns, align = rows.shape[1], 16 // rows.element_size()
    block, warps = _block(columns, rows.element_size())
    staticmoe_combine_backward_weights[(assignment_row.numel(),)](
        tokens,
        rows,
        assignment_row,
        out,
        tokens.stride(0) // align,
        rows.stride(0) // align,
        columns // align,
        ALIGN=align,
        TOP_K=assignment_row.shape[1],
        BLOCK=block,
        num_warps=warps,
    )
