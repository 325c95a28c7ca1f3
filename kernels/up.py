"""The up projection: tokens gathered by row, times the gate and up weights, and the activation in the epilogue.

Dimensions: T tokens, K top_k, E experts, H hidden, I intermediate, R capacity rows, S rows of a saved buffer, G halves
of the weight (2: gate and up; 1 where the activation has no gate), M the most row tiles; BM, BN, BK a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from staticmoe.kernels.activation import activate, activate_ungated, rounded
from staticmoe.kernels.descriptors import load_rows, plain_descriptor, ragged_descriptor, store_rows
from staticmoe.kernels.grouped_gemm import (
    compile_options,
    gathered_rows,
    input_precision,
    tile_position,
    triton_dtype,
)
from staticmoe.kernels.tiles import Tile


@triton.jit
def _split_columns(acc):
    """Return the left and the right half of the columns."""
    halves = tl.reshape(acc, (acc.shape[0], 2, acc.shape[1] // 2))
    return tl.split(tl.permute(halves, (0, 2, 1)))


@triton.jit
def _add_bias(left, right, bias_ptr, column, columns, stride_half, stride, HALVES: tl.constexpr, BN: tl.constexpr):
    """Add the bias of an expert to both halves of a tile that starts at `column`."""
    # One load of both halves: half of it alone would be less than a value for each thread, and Triton would then load
    # it in the layout of the accumulator, 64 values in every thread.
    operand = tl.arange(0, HALVES * BN)
    at = column + operand % BN
    bias = tl.load(bias_ptr + operand // BN * stride_half + at * stride, mask=at < columns, other=0.0)
    bias_left, bias_right = tl.split(tl.permute(tl.reshape(bias, (2, HALVES * BN // 2)), (1, 0)))
    return left + bias_left.to(tl.float32)[None, :], right + bias_right.to(tl.float32)[None, :]


@triton.jit
def staticmoe_up_gemm(
    x,
    assignment_ptr,
    weight,
    bias_ptr,
    pre,
    act,
    schedule_ptr,
    tile_count_ptr,
    width_units,
    stride_units,
    columns,
    bias_stride_expert,
    bias_stride_half,
    bias_stride_column,
    ALIGN: tl.constexpr,
    HALVES: tl.constexpr,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    ACT: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """pre[r] = x[assignment[r] // K] @ W[e].T + bias[e], rounded, and act[r] its activation, for the schedule's rows r.

    Grid: up to as many programs as there are SMs; program i takes tiles i, i + programs, ... of
    `tile_count` x ceil(I / BN), in the order of `tile_position`. A tile owns its rows and BN columns of act, and the
    same columns of every half of pre. Gate and up are one operand of 2 * BN columns, whatever their order in memory.
    `x`: with GATHER a pointer to the tokens, else a ragged descriptor of rows.
    Unwritten: every row that is in no tile. Reads no row outside of its segment.
    Deterministic: one program sums an element over H in steps of BK; nothing depends on the grid or on R.
    """
    row_tiles = tl.load(tile_count_ptr)
    column_tiles = tl.cdiv(columns, BN)
    width = width_units * ALIGN
    steps = tl.cdiv(width, BK)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=FLATTEN):
        m, n = tile_position(tile, row_tiles, column_tiles, GROUP)
        expert = tl.load(schedule_ptr + m * 4)
        first = tl.load(schedule_ptr + m * 4 + 1)
        count = tl.load(schedule_ptr + m * 4 + 2)
        saved = tl.load(schedule_ptr + m * 4 + 3)
        if GATHER:
            inside = tl.arange(0, BM) < count
            depth = tl.arange(0, BK)
            at = gathered_rows(x, assignment_ptr, first, inside, stride_units * ALIGN, TOP_K, BM)
            at = at[:, None] + depth[None, :]
        acc = tl.zeros((BM, HALVES * BN), tl.float32)
        for step in range(0, steps):
            k = step * BK
            if GATHER:
                mask = inside[:, None] if EVEN else inside[:, None] & (k + depth < width)[None, :]
                a = tl.load(at + k, mask=mask, other=0.0)
            else:
                a = load_rows(x, first, count, 0, k, BM, BK)
            b = tl.reshape(weight.load([expert, 0, n * BN, k]), (HALVES * BN, BK))
            acc = tl.dot(a, b.T, acc, input_precision=PRECISION)
        left, right = _split_columns(acc)
        if BIAS:
            bias_at = bias_ptr + expert.to(tl.int64) * bias_stride_expert
            left, right = _add_bias(
                left, right, bias_at, n * BN, columns, bias_stride_half, bias_stride_column, HALVES, BN
            )
        left, wide_left = rounded(left, DTYPE)
        right, wide_right = rounded(right, DTYPE)
        store_rows(pre, saved, count, 0, n * BN, left)
        # A store waits until the one before has left shared memory; an activation is computed in that time.
        if HALVES == 2:
            value = activate(wide_left, wide_right, ACT)
            store_rows(act, first, count, 0, n * BN, value.to(DTYPE))
            store_rows(pre, saved, count, 1, n * BN, right)
        else:
            column = n * BN + BN // 2
            store_rows(act, first, count, 0, n * BN, activate_ungated(wide_left, ACT).to(DTYPE))
            store_rows(pre, saved, count, 0, column, right)
            store_rows(act, first, count, 0, column, activate_ungated(wide_right, ACT).to(DTYPE))


def up(
    x: Tensor,
    row_assignment: Tensor,
    gate_up: Tensor,
    bias: Tensor | None,
    pre: Tensor,
    act: Tensor,
    schedule: Tensor,
    tile_count: Tensor,
    *,
    top_k: int | None,
    activation: str,
    tile: Tile,
    programs: int,
    allow_tf32: bool = False,
) -> None:
    """Write the pre-activation and the activation of every row in use; see `staticmoe.reference.up`.

    Shapes:
        x [T,H], its rows taken by row_assignment // top_k, or [R,H] with a top_k of None; row_assignment [R] int32;
        gate_up [E,G,I,H] and bias [E,G,I] or None, views with any strides, so in either order of the gate; pre [S,G*I]
        with the gate in front, at the rows of schedule column 3; act [R,I].
        schedule [M,4] int32 for BM = tile.rows, tile_count [1] int32.
        All but the index tensors of one dtype: bf16, fp16, fp32. Strides 1 along the last dimension (not of the bias),
        others multiples of 16 bytes, as H and I.
    Raises: ValueError for another dtype.
    Graph-safe: yes.
    """
    align = 16 // x.element_size()
    gather = top_k is not None
    halves, columns, width = gate_up.shape[1:]
    # Without a gate the two stored halves are those of the tile, with one they are gate and up: the same box.
    box = [tile.rows, tile.columns if halves == 2 else tile.columns // 2]
    strides = (0, 0, 0) if bias is None else bias.stride()
    tiles = schedule.shape[0] * triton.cdiv(columns, tile.columns)
    staticmoe_up_gemm[(min(tiles, programs),)](
        x if gather else ragged_descriptor(x, 1, [tile.rows, tile.depth]),
        row_assignment,
        plain_descriptor(gate_up, [1, halves, tile.columns, tile.depth]),
        bias,
        ragged_descriptor(pre, halves, box),
        ragged_descriptor(act, 1, box),
        schedule,
        tile_count,
        width // align,
        x.stride(0) // align,
        columns,
        *strides,
        ALIGN=align,
        HALVES=halves,
        TOP_K=top_k,
        GATHER=gather,
        ACT=activation,
        BIAS=bias is not None,
        EVEN=width % tile.depth == 0,
        DTYPE=triton_dtype(x.dtype),
        PRECISION=input_precision(x.dtype, allow_tf32),
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.depth,
        GROUP=tile.group,
        FLATTEN=tile.flatten,
        **compile_options(tile),
    )
