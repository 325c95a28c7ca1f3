"""The gradient of the pre-activation: gathered token gradients times the down weights, and the derivative on top.

One product dA' = grad @ W_down serves everything that lies between the two projections in the backward: the gradient
of the pre-activation, the weighted activation that the down weights' gradient needs, and the routing weights' gradient.

Dimensions: T tokens, K top_k, E experts, H hidden, I intermediate, R capacity rows, S rows of a saved buffer, G halves
of the pre-activation (2: gate and up; 1 where the activation has no gate), M the most row tiles, N column tiles; BM,
BN, BK a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from staticmoe.kernels.activation import (
    activate,
    activate_backward,
    activate_ungated,
    activate_ungated_backward,
    rounded,
)
from staticmoe.kernels.descriptors import load_rows, plain_descriptor, ragged_descriptor
from staticmoe.kernels.grouped_gemm import (
    compile_options,
    gathered_rows,
    input_precision,
    tile_position,
    triton_dtype,
)
from staticmoe.kernels.tiles import Tile
from staticmoe.kernels.weight_grad import column_slices

# Columns that the epilogue works on at once, where the tile has at most `_MOST_SLICES` times as many: a whole tile of
# the accumulator, gate, up and their gradients does not fit into registers.
_SLICE_COLUMNS = 32
_MOST_SLICES = 8


@triton.jit
def _load_slice(at, column, columns, inside, HALVES: tl.constexpr, WIDTH: tl.constexpr):
    """Return gate and up (ungated: the same twice) of WIDTH columns, and which elements there are."""
    # The mask of columns stays even where I is a multiple of BN: without it Triton 3.6 spills registers.
    mask = inside[:, None] & (column + tl.arange(0, WIDTH) < columns)[None, :]
    gate = tl.load(at, mask=mask, other=0.0)
    up = gate
    if HALVES == 2:
        up = tl.load(at + columns, mask=mask, other=0.0)
    return gate, up, mask


@triton.jit
def derive(gate, up, d_act, weight, HALVES: tl.constexpr, ACT: tl.constexpr, DTYPE: tl.constexpr):
    """Return d_gate, d_up (ungated: the same twice), the weighted activation, and the row sums of d_act times it."""
    gate = gate.to(tl.float32)
    weight = weight[:, None]
    if HALVES == 2:
        up = up.to(tl.float32)
        # Rounded, as the forward used it.
        _, act = rounded(activate(gate, up, ACT), DTYPE)
        d_gate, d_up = activate_backward(gate, up, d_act * weight, ACT)
    else:
        _, act = rounded(activate_ungated(gate, ACT), DTYPE)
        d_gate = activate_ungated_backward(gate, d_act * weight, ACT)
        d_up = d_gate
    return d_gate.to(DTYPE), d_up.to(DTYPE), (act * weight).to(DTYPE), tl.sum(d_act * act, 1)


@triton.jit
def staticmoe_dact_gemm(
    grad,
    assignment_ptr,
    down,
    pre_ptr,
    weight_ptr,
    d_pre_ptr,
    act_ptr,
    part_ptr,
    schedule_ptr,
    tile_count_ptr,
    width_units,
    stride_units,
    columns_units,
    pre_units,
    d_pre_units,
    act_units,
    part_stride,
    ALIGN: tl.constexpr,
    HALVES: tl.constexpr,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    ACT: tl.constexpr,
    EVEN: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    SLICES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """d_pre, weighted activation and parts of the routing weight's gradient, for the rows of the schedule.

    Grid: any number of programs; program i takes tiles i, i + programs, ... of `tile_count` x ceil(I / BN), in the
    order of `tile_position`. A tile owns its rows and BN columns of act, the same columns of every half of d_pre, and
    one column of the parts. d_pre may be pre: a tile reads what it owns, and reads it before it writes it.
    `grad`: with GATHER a pointer to the tokens, else a ragged descriptor of rows.
    Unwritten: every row that is in no tile. Reads no row outside of its segment.
    Deterministic: one program sums an element over H in steps of BK, and a part over BN columns; nothing depends on
    the grid or on R.
    """
    # Without this the flattened loop comes twice, once for no step at all.
    tl.assume(width_units > 0)
    row_tiles = tl.load(tile_count_ptr)
    columns = columns_units * ALIGN
    column_tiles = tl.cdiv(columns, BN)
    width = width_units * ALIGN
    steps = tl.cdiv(width, BK)
    tl.assume(steps > 0)
    rows = tl.arange(0, BM)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=FLATTEN):
        m, n = tile_position(tile, row_tiles, column_tiles, GROUP)
        expert = tl.load(schedule_ptr + m * 4)
        first = tl.load(schedule_ptr + m * 4 + 1)
        count = tl.load(schedule_ptr + m * 4 + 2)
        if GATHER:
            inside = rows < count
            depth = tl.arange(0, BK)
            at = gathered_rows(grad, assignment_ptr, first, inside, stride_units * ALIGN, TOP_K, BM)
            at = at[:, None] + depth[None, :]
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(0, steps):
            k = step * BK
            if GATHER:
                mask = inside[:, None] if EVEN else inside[:, None] & (k + depth < width)[None, :]
                a = tl.load(at + k, mask=mask, other=0.0)
            else:
                a = load_rows(grad, first, count, 0, k, BM, BK)
            b = tl.reshape(down.load([expert, k, n * BN]), (BK, BN))
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        # Read again, not kept: what lives through the flattened loop is registers that the epilogue lacks.
        m, n = tile_position(tile, row_tiles, column_tiles, GROUP)
        first = tl.load(schedule_ptr + m * 4 + 1)
        inside = rows < tl.load(schedule_ptr + m * 4 + 2)
        saved = tl.load(schedule_ptr + m * 4 + 3).to(tl.int64)
        assignment = tl.load(assignment_ptr + first + rows, mask=inside, other=0)
        weight = tl.load(weight_ptr + assignment, mask=inside, other=0.0)
        slices = column_slices(acc, BM, BN, SLICES)
        WIDTH: tl.constexpr = BN // SLICES
        column = n * BN
        offset = tl.arange(0, WIDTH)[None, :]
        pre_at = pre_ptr + saved * (pre_units * ALIGN) + column + (rows[:, None] * (pre_units * ALIGN) + offset)
        d_pre_at = d_pre_ptr + saved * (d_pre_units * ALIGN) + column + (rows[:, None] * (d_pre_units * ALIGN) + offset)
        act_at = act_ptr + first.to(tl.int64) * (act_units * ALIGN) + column
        act_at += rows[:, None] * (act_units * ALIGN) + offset
        part = tl.zeros((BM,), tl.float32)
        gate, up, mask = _load_slice(pre_at, column, columns, inside, HALVES, WIDTH)
        for i in tl.static_range(SLICES):
            now_gate, now_up, now_mask = gate, up, mask
            if i + 1 < SLICES:
                # One slice ahead of the stores, behind which no compiler may move it.
                gate, up, mask = _load_slice(
                    pre_at + (i + 1) * WIDTH, column + (i + 1) * WIDTH, columns, inside, HALVES, WIDTH
                )
            d_gate, d_up, act, products = derive(now_gate, now_up, slices[i], weight, HALVES, ACT, DTYPE)
            part += products
            tl.store(d_pre_at + i * WIDTH, d_gate, mask=now_mask)
            if HALVES == 2:
                tl.store(d_pre_at + i * WIDTH + columns, d_up, mask=now_mask)
            tl.store(act_at + i * WIDTH, act, mask=now_mask)
        tl.store(part_ptr + (first + rows).to(tl.int64) * part_stride + n, part, mask=inside)


@triton.jit
def staticmoe_dact_reduce(
    part_ptr,
    row_ptr,
    out_ptr,
    grad_ptr,
    bias_ptr,
    expert_offsets_ptr,
    assignments,
    column_tiles,
    part_stride,
    grad_stride,
    bias_stride,
    width,
    num_experts,
    TOP_K: tl.constexpr,
    BIAS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """out[a]: the parts of assignment a's row in column order, and with a bias <grad of its token, bias of its expert>.

    Grid: ceil(T*K / BLOCK) programs; program i owns assignments [i * BLOCK, (i + 1) * BLOCK).
    Unwritten: nothing of `out`; a dropped assignment gets 0 and reads nothing.
    Deterministic: each element is one sum in a fixed order.
    """
    assignment = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = assignment < assignments
    row = tl.load(row_ptr + assignment, mask=real, other=-1)
    kept = row >= 0
    total = tl.zeros((BLOCK,), tl.float32)
    at = part_ptr + row.to(tl.int64) * part_stride
    for n in range(0, column_tiles):
        total += tl.load(at + n, mask=kept, other=0.0)
    if BIAS:
        # A row's expert is the number of experts that end at or before it.
        expert = tl.arange(0, EXPERTS)
        end = tl.load(expert_offsets_ptr + expert + 1, mask=expert < num_experts, other=0x7FFFFFFF)
        owner = tl.sum((end[None, :] <= row[:, None]).to(tl.int32), 1)
        grad_at = grad_ptr + (assignment // TOP_K).to(tl.int64)[:, None] * grad_stride
        bias_at = bias_ptr + owner.to(tl.int64)[:, None] * bias_stride
        products = tl.zeros((BLOCK, WIDTH), tl.float32)
        for first in range(0, width, WIDTH):
            column = first + tl.arange(0, WIDTH)
            mask = kept[:, None] & (column < width)[None, :]
            grad = tl.load(grad_at + column[None, :], mask=mask, other=0.0).to(tl.float32)
            products += grad * tl.load(bias_at + column[None, :], mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(products, 1)
    tl.store(out_ptr + assignment, total.to(out_ptr.dtype.element_ty), mask=real)


def weight_parts(intermediate: int, tile: Tile) -> int:
    """The columns of `d_weight_parts` that `dact` writes for I = `intermediate`."""
    return triton.cdiv(intermediate, tile.columns)


def dact(
    grad: Tensor,
    row_assignment: Tensor,
    down: Tensor,
    pre: Tensor,
    topk_weights: Tensor,
    d_pre: Tensor,
    act_weighted: Tensor,
    d_weight_parts: Tensor,
    schedule: Tensor,
    tile_count: Tensor,
    *,
    top_k: int | None,
    activation: str,
    tile: Tile,
    programs: int,
    allow_tf32: bool = False,
) -> None:
    """Write the gradient of the pre-activation, the weighted activation and the routing weights' gradient in parts.

    With dA' = grad of the row's token @ W_down, a the rounded activation and s the routing weight: d_pre is the
    derivative at `pre` times s dA', act_weighted is s a, a part is the sum of dA' a over the columns of a tile.

    Shapes:
        grad [T,H], its rows taken by row_assignment // top_k, or [R,H] with a top_k of None; row_assignment [R] int32;
        down [E,H,I], last stride 1; pre, d_pre [S,G*I] with the gate in front, at
        the rows of schedule column 3; d_pre may be pre. topk_weights [T,K] fp32, contiguous; act_weighted [R,I];
        d_weight_parts [R,N] fp32 with N = `weight_parts`. schedule [M,4] int32 for BM = tile.rows, tile_count [1]
        int32. The rest of one dtype: bf16, fp16, fp32. Strides 1 along the last dimension, others multiples of 16
        bytes, as H and I.
    Raises:
        ValueError: for another dtype, or for parts of another width.
    Graph-safe: yes.
    """
    align = 16 // grad.element_size()
    gather = top_k is not None
    width, columns = down.shape[1:]
    column_tiles = weight_parts(columns, tile)
    if d_weight_parts.shape[1] != column_tiles:
        raise ValueError(f"dact: expected d_weight_parts [R,{column_tiles}], got {tuple(d_weight_parts.shape)}")
    staticmoe_dact_gemm[(min(schedule.shape[0] * column_tiles, programs),)](
        grad if gather else ragged_descriptor(grad, 1, [tile.rows, tile.depth]),
        row_assignment,
        plain_descriptor(down, [1, tile.depth, tile.columns]),
        pre,
        topk_weights,
        d_pre,
        act_weighted,
        d_weight_parts,
        schedule,
        tile_count,
        width // align,
        grad.stride(0) // align,
        columns // align,
        pre.stride(0) // align,
        d_pre.stride(0) // align,
        act_weighted.stride(0) // align,
        d_weight_parts.stride(0),
        ALIGN=align,
        HALVES=pre.shape[1] // columns,
        TOP_K=top_k,
        GATHER=gather,
        ACT=activation,
        EVEN=width % tile.depth == 0,
        DTYPE=triton_dtype(grad.dtype),
        PRECISION=input_precision(grad.dtype, allow_tf32),
        SLICES=min(_MOST_SLICES, max(1, tile.columns // _SLICE_COLUMNS)),
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.depth,
        GROUP=tile.group,
        FLATTEN=tile.flatten,
        **compile_options(tile),
    )


def reduce_weight_grad(
    parts: Tensor,
    assignment_row: Tensor,
    d_weights: Tensor,
    *,
    grad: Tensor | None = None,
    down_bias: Tensor | None = None,
    expert_offsets: Tensor | None = None,
) -> None:
    """Sum the parts of each assignment's row, exactly 0 for a dropped one; add what the bias of `down` contributes.

    Shapes:
        parts [R,N] fp32; assignment_row [T,K] int32, contiguous; d_weights [T,K], any float, contiguous. With a bias
        all three of grad [T,H], down_bias [E,H] (last strides 1) and expert_offsets [E+1] int32 exclusive.
    Raises:
        ValueError: some but not all of what a bias needs.
    Graph-safe: yes.
    """
    given = [tensor is not None for tensor in (grad, down_bias, expert_offsets)]
    if any(given) != all(given):
        raise ValueError(f"reduce_weight_grad: grad, down_bias, expert_offsets go together; given are {given}")
    assignments = assignment_row.numel()
    block = 16 if down_bias is not None else 128
    staticmoe_dact_reduce[(triton.cdiv(assignments, block),)](
        parts,
        assignment_row,
        d_weights,
        grad,
        down_bias,
        expert_offsets,
        assignments,
        parts.shape[1],
        parts.stride(0),
        0 if grad is None else grad.stride(0),
        0 if down_bias is None else down_bias.stride(0),
        0 if grad is None else grad.shape[1],
        0 if down_bias is None else down_bias.shape[0],
        TOP_K=assignment_row.shape[1],
        BIAS=down_bias is not None,
        EXPERTS=1 if down_bias is None else triton.next_power_of_2(down_bias.shape[0]),
        BLOCK=block,
        WIDTH=128,
    )
