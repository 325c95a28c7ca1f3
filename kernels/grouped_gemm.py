"""Grouped GEMM over packed rows: each row times the weight of its expert. Down projection, and gradient of rows.

Dimensions: T tokens, K top_k, E experts, R capacity rows, S rows of a saved buffer, A and B widths in and out, G groups
of the inner dimension (2: gate and up, or 1), M the most row tiles; BM, BN, BK a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from staticmoe.kernels.descriptors import load_rows, plain_descriptor, ragged_descriptor, store_rows
from staticmoe.kernels.tiles import Tile


@triton.jit
def tile_position(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Return (row tile, column tile) of number `tile`: GROUP row tiles take one column after the other.

    What runs at one time then shares the rows of a few row tiles and the weights of one or two experts in L2.
    """
    width = GROUP * column_tiles
    first = tile // width * GROUP
    group = tl.minimum(row_tiles - first, GROUP)
    within = tile % width
    return first + within % group, within // group


@triton.jit
def gathered_rows(tokens_ptr, assignment_ptr, first, inside, stride, TOP_K: tl.constexpr, ROWS: tl.constexpr):
    """Return pointers [ROWS] to the tokens of rows first, first + 1, ...; to token 0 where not `inside`.

    `stride` must be a product with a constant 16 bytes long: only then do loads become 16-byte asynchronous copies.
    """
    assignment = tl.load(assignment_ptr + first + tl.arange(0, ROWS), mask=inside, other=0)
    return tokens_ptr + (assignment // TOP_K).to(tl.int64) * stride


@triton.jit
def _grouped_gemm(
    rows,
    assignment_ptr,
    weight,
    bias_ptr,
    out,
    schedule_ptr,
    tile_count_ptr,
    width_units,
    stride_units,
    columns,
    bias_stride,
    ALIGN: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    SAVED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
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
    tl.static_assert(GROUPS == 1 or GROUPS == 2, "one group, or gate and up")
    row_tiles = tl.load(tile_count_ptr)
    column_tiles = tl.cdiv(columns, BN)
    width = width_units * ALIGN
    steps = tl.cdiv(width, BK)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=FLATTEN):
        m, n = tile_position(tile, row_tiles, column_tiles, GROUP)
        expert = tl.load(schedule_ptr + m * 4)
        first = tl.load(schedule_ptr + m * 4 + 1)
        count = tl.load(schedule_ptr + m * 4 + 2)
        source = tl.load(schedule_ptr + m * 4 + 3) if SAVED else first
        if GATHER:
            inside = tl.arange(0, BM) < count
            depth = tl.arange(0, BK)
            at = gathered_rows(rows, assignment_ptr, first, inside, stride_units * ALIGN, TOP_K, BM)
            at = at[:, None] + depth[None, :]
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(0, GROUPS * steps):
            # The groups of the inner dimension are summed one after the other, each with its own tail.
            group = (step >= steps).to(tl.int32) if GROUPS == 2 else 0
            k = (step - group * steps) * BK
            if GATHER:
                mask = inside[:, None] if EVEN else inside[:, None] & (k + depth < width)[None, :]
                a = tl.load(at + group * width + k, mask=mask, other=0.0)
            else:
                a = load_rows(rows, source, count, group, k, BM, BK)
            if TRANSPOSED:
                b = tl.reshape(weight.load([expert, group, k, n * BN]), (BK, BN))
            else:
                b = tl.reshape(weight.load([expert, group, n * BN, k]), (BN, BK)).T
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        if BIAS:
            column = n * BN + tl.arange(0, BN)
            bias = tl.load(bias_ptr + expert.to(tl.int64) * bias_stride + column, mask=column < columns, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        # In halves: a whole tile does not fit into shared memory beside the stages.
        halves = tl.permute(tl.reshape(acc.to(DTYPE), (BM, 2, BN // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        store_rows(out, first, count, 0, n * BN, left)
        store_rows(out, first, count, 0, n * BN + BN // 2, right)


@triton.jit
def staticmoe_down_gemm(
    rows,
    assignment_ptr,
    weight,
    bias_ptr,
    out,
    schedule_ptr,
    tile_count_ptr,
    width_units,
    stride_units,
    columns,
    bias_stride,
    ALIGN: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    SAVED: tl.constexpr,
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
    """out[r] = rows[r] @ W[e].T + bias[e] for the rows r of the schedule's tiles; W is [E,1,B,A].

    Grid: up to as many programs as there are SMs; program i takes tiles i, i + programs, ... of
    `tile_count` x ceil(B / BN), in the order of `tile_position`. A tile owns its rows and BN columns of `out`.
    Unwritten: every row of `out` that is in no tile. Reads no row outside of its segment.
    Deterministic: one program sums an element over A in steps of BK; nothing depends on the grid or on R.
    """
    _grouped_gemm(
        rows, assignment_ptr, weight, bias_ptr, out, schedule_ptr, tile_count_ptr, width_units, stride_units, columns,
        bias_stride, ALIGN, GROUPS, TOP_K, GATHER, SAVED, False, BIAS, EVEN, DTYPE, PRECISION, BM, BN, BK, GROUP,
        FLATTEN,
    )  # fmt: skip


@triton.jit
def staticmoe_token_grad_gemm(
    rows,
    assignment_ptr,
    weight,
    bias_ptr,
    out,
    schedule_ptr,
    tile_count_ptr,
    width_units,
    stride_units,
    columns,
    bias_stride,
    ALIGN: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    SAVED: tl.constexpr,
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
    """out[r] = sum over g of rows[r,g] @ W[e,g] for the rows r of the schedule's tiles; W is [E,G,A/G,B].

    Grid, ownership, what stays unwritten, determinism: as `staticmoe_down_gemm`; the groups are summed in order.
    """
    _grouped_gemm(
        rows, assignment_ptr, weight, bias_ptr, out, schedule_ptr, tile_count_ptr, width_units, stride_units, columns,
        bias_stride, ALIGN, GROUPS, TOP_K, GATHER, SAVED, True, BIAS, EVEN, DTYPE, PRECISION, BM, BN, BK, GROUP,
        FLATTEN,
    )  # fmt: skip


def input_precision(dtype: torch.dtype, allow_tf32: bool) -> str:
    """How a product of `dtype` operands is taken: fp32 in full unless tf32 was asked for. Others have one way."""
    return "ieee" if dtype == torch.float32 and not allow_tf32 else "tf32"


def compile_options(tile: Tile) -> dict[str, int | None]:
    """The options of a launch that `tile` sets."""
    return {"num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": tile.registers}


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    """Triton's name of a dtype that the kernels take."""
    names = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
    if dtype not in names:
        raise ValueError(f"kernels take {', '.join(map(str, names))}, got {dtype}; use staticmoe.reference")
    return names[dtype]


def grouped_gemm(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    schedule: Tensor,
    tile_count: Tensor,
    *,
    transposed: bool,
    row_assignment: Tensor | None = None,
    top_k: int = 1,
    saved_rows: bool = False,
    tile: Tile,
    programs: int,
    allow_tf32: bool = False,
) -> None:
    """Multiply each row in use with the weight of its expert, and add the bias before rounding.

    Shapes:
        rows [R,A]; [S,A] at the rows of schedule column 3 if `saved_rows`; tokens [T,A], gathered by `row_assignment`
        [R] int32 // `top_k`, if that is given. weight [E,B,A]; if `transposed` [E,A,B], or [E,G,A/G,B]. bias [E,B] or
        None. out [R,B]. schedule [M,4] int32 for BM = tile.rows, tile_count [1] int32.
        rows, weight, bias, out of one dtype: bf16, fp16, fp32. Strides 1 along the last dimension, any others multiples
        of 16 bytes, as A/G and B.
    Raises: ValueError for another dtype.
    Graph-safe: yes.
    """
    align = 16 // rows.element_size()
    if weight.dim() == 3:
        weight = weight.unsqueeze(1)
    groups, columns = weight.shape[1], out.shape[1]
    width = rows.shape[1] // groups
    box = [1, 1, tile.depth, tile.columns] if transposed else [1, 1, tile.columns, tile.depth]
    gather = row_assignment is not None
    kernel = staticmoe_token_grad_gemm if transposed else staticmoe_down_gemm
    tiles = schedule.shape[0] * triton.cdiv(columns, tile.columns)
    kernel[(min(tiles, programs),)](
        rows if gather else ragged_descriptor(rows, groups, [tile.rows, tile.depth]),
        row_assignment,
        plain_descriptor(weight, box),
        bias,
        ragged_descriptor(out, 1, [tile.rows, tile.columns // 2]),
        schedule,
        tile_count,
        width // align,
        rows.stride(0) // align,
        columns,
        0 if bias is None else bias.stride(0),
        ALIGN=align,
        GROUPS=groups,
        TOP_K=top_k,
        GATHER=gather,
        SAVED=saved_rows,
        BIAS=bias is not None,
        EVEN=width % tile.depth == 0,
        DTYPE=triton_dtype(out.dtype),
        PRECISION=input_precision(rows.dtype, allow_tf32),
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.depth,
        GROUP=tile.group,
        FLATTEN=tile.flatten,
        **compile_options(tile),
    )
