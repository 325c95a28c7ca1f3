"""Weight gradients of the experts: each expert's sum over its rows of a left row times a right row.

The down projection's has the gathered token gradient on the left and the weighted activation on the right; the up
projection's has the gradient of the pre-activation on the left and the gathered tokens on the right.

Dimensions: E experts, T tokens, R rows, A and B widths of the left and right rows, G groups of the left columns (gate
and up, or one), BM x BN an output tile, BK the rows taken at once.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from staticmoe.kernels.descriptors import load_rows, plain_descriptor, ragged_descriptor
from staticmoe.kernels.grouped_gemm import compile_options, input_precision, tile_position
from staticmoe.kernels.tiles import Tile

Side = Literal["left", "right"] | None

# Of the output tile, what one store may stage in shared memory beside the operands.
_STAGED_BYTES = 1 << 15
_MOST_SLICES = 8


@triton.jit
def column_halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the left and the right half of a tile's columns; moves no data."""
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def column_slices(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SLICES: tl.constexpr):
    """Return the tile cut into 1, 2, 4 or 8 slices of its columns, from left to right; moves no data."""
    tl.static_assert(SLICES == 1 or SLICES == 2 or SLICES == 4 or SLICES == 8, "1, 2, 4 or 8 slices")
    if SLICES == 1:
        slices = (tile,)
    elif SLICES == 2:
        slices = column_halves(tile, ROWS, COLUMNS)
    elif SLICES == 4:
        left, right = column_halves(tile, ROWS, COLUMNS)
        s0, s1 = column_halves(left, ROWS, COLUMNS // 2)
        s2, s3 = column_halves(right, ROWS, COLUMNS // 2)
        slices = (s0, s1, s2, s3)  # type: ignore[assignment]
    else:
        left, right = column_halves(tile, ROWS, COLUMNS)
        a, b = column_halves(left, ROWS, COLUMNS // 2)
        c, d = column_halves(right, ROWS, COLUMNS // 2)
        s0, s1 = column_halves(a, ROWS, COLUMNS // 4)
        s2, s3 = column_halves(b, ROWS, COLUMNS // 4)
        s4, s5 = column_halves(c, ROWS, COLUMNS // 4)
        s6, s7 = column_halves(d, ROWS, COLUMNS // 4)
        slices = (s0, s1, s2, s3, s4, s5, s6, s7)  # type: ignore[assignment]
    return slices


@triton.jit
def _place(
    tile, expert_offsets_ptr, height_tiles, width_tiles,
    GROUPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Return where a tile lies in `out` (expert, group, row, column), and first row, rows and steps of its expert."""
    tiles = GROUPS * height_tiles * width_tiles
    expert = tile // tiles
    first = tl.load(expert_offsets_ptr + expert)
    rows = tl.load(expert_offsets_ptr + expert + 1) - first
    m, n = tile_position(tile - expert * tiles, GROUPS * height_tiles, width_tiles, GROUP)
    group = m // height_tiles
    return expert, group, (m - group * height_tiles) * BM, n * BN, first, rows, tl.maximum((rows + BK - 1) // BK, 1)


@triton.jit
def _load_tokens(
    tokens_ptr, assignment, stride, column, width, TOP_K: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr
):
    """Return the tokens of the assignments [BK], from `column` on; zeros for an assignment of -1."""
    columns = column + tl.arange(0, WIDTH)
    token = (assignment // TOP_K).to(tl.int64)
    mask = (assignment >= 0)[:, None]
    # What lies behind a token's end could reach no element of `out`; behind the last token's there may be no memory.
    if not EVEN:
        mask = mask & (columns < width)[None, :]
    return tl.load(tokens_ptr + token[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _store_tile(
    acc, out, expert, group, row, column, ADD: tl.constexpr, SLICES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Store the accumulated tile, or add it in fp32 and round once; the descriptor ends at the edges of `out`."""
    WIDTH: tl.constexpr = BN // SLICES
    slices = column_slices(acc, BM, BN, SLICES)
    for i in tl.static_range(SLICES):
        values = tl.reshape(slices[i], (1, 1, BM, WIDTH))
        at = [expert, group, row, column + i * WIDTH]
        if ADD == "reduce":
            # Nothing waits for what `out` holds. One addend for each element: no order that could change.
            out.atomic_add(at, values)
        elif ADD == "load":
            out.store(at, (out.load(at).to(tl.float32) + values).to(out.dtype))
        else:
            out.store(at, values.to(out.dtype))


@triton.jit
def staticmoe_weight_grad_gemm(
    left,
    right,
    expert_offsets_ptr,
    row_assignment_ptr,
    base_row_ptr,
    out,
    num_experts,
    height_units,
    width_units,
    stride_units,
    ALIGN: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    GATHER: tl.constexpr,
    SAVED: tl.constexpr,
    ADD: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    SLICES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Store, or add, every expert's left^T @ right: out [E,GROUPS,height,width].

    Grid: any number of programs P; program p owns the tiles p, p + P, ... of the output, expert after expert. Tiles and
    steps over the rows are two loops: one for both, by hand, was measured to be slower by a tenth.
    Reads: rows of the segments alone; what a step takes past the end of one is zeros in both operands, whatever lies
    there. A gathered operand is a pointer, any other a ragged descriptor.
    Unwritten: nothing of `out`; with ADD the experts without rows.
    Deterministic: each element is one sum in row order, BK rows at a time, whatever P and the number of empty rows.
    """
    height = height_units * ALIGN
    width = width_units * ALIGN
    # A product with a constant 16 bytes long: only then do gathered loads become 16-byte asynchronous copies.
    token_stride = stride_units * ALIGN
    height_tiles = tl.cdiv(height, BM)
    width_tiles = tl.cdiv(width, BN)
    base_row = 0
    if SAVED is not None:
        base_row = tl.load(base_row_ptr).to(tl.int32)
    rows_of_step = tl.arange(0, BK)
    tiles = num_experts * GROUPS * height_tiles * width_tiles
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        expert, group, row, column, first, rows, depth = _place(
            tile, expert_offsets_ptr, height_tiles, width_tiles, GROUPS, BM, BN, BK, GROUP
        )
        # Read one step ahead: the loads of tokens then wait for nothing, and the pipeline keeps its depth.
        assignment = rows_of_step
        if GATHER is not None:
            assignment = tl.load(row_assignment_ptr + first + rows_of_step, mask=rows_of_step < rows, other=-1)
        acc = tl.zeros((BM, BN), tl.float32)
        for step in tl.range(0, depth):
            now_assignment = assignment
            # What is left of the segment, or nothing of an empty one.
            start, remaining = first + step * BK, rows - step * BK
            if GATHER is not None:
                ahead = (step + 1) * BK + rows_of_step
                assignment = tl.load(row_assignment_ptr + first + ahead, mask=ahead < rows, other=-1)
            if GATHER == "left":
                a = _load_tokens(left, now_assignment, token_stride, row, height, TOP_K, BM, EVEN)
            else:
                left_start = start + base_row if SAVED == "left" else start
                a = load_rows(left, left_start, remaining, group, row, BK, BM)
            if GATHER == "right":
                b = _load_tokens(right, now_assignment, token_stride, column, width, TOP_K, BN, EVEN)
            else:
                right_start = start + base_row if SAVED == "right" else start
                b = load_rows(right, right_start, remaining, 0, column, BK, BN)
            acc = tl.dot(a.T, b, acc, input_precision=PRECISION)
        if ADD is not None:
            # Out of bounds, so that nothing is added to an expert without rows: a branch here costs registers.
            expert = tl.where(rows > 0, expert, num_experts)
        _store_tile(acc, out, expert, group, row, column, ADD, SLICES, BM, BN)


def weight_grad(
    left: Tensor,
    right: Tensor,
    expert_offsets: Tensor,
    row_assignment: Tensor,
    out: Tensor,
    *,
    gather: Side,
    saved: Side,
    base_row: Tensor | None,
    top_k: int,
    accumulate: bool,
    tile: Tile,
    programs: int,
    allow_tf32: bool = False,
) -> None:
    """Store each expert's sum over its rows of left_row (x) right_row in `out`, or add it to what is there.

    An expert without rows: zeros are stored, nothing is added. The sums are fp32; `out` is rounded once.

    Shapes:
        left [R,G*A], right [R,B], bf16, fp16 or fp32, contiguous; the one that `gather` names is [T,...] instead, its
        rows taken by row_assignment // top_k. out [E,G*A,B] or [E,G,A,B] of their dtype or fp32, last stride 1.
        expert_offsets [E+1] int32 exclusive; row_assignment [R] int32. The operand that `saved` names (never the
        gathered one) starts at `base_row`, an integer 0-dim or [1] on the device. A, B and all strides are multiples
        of 16 bytes. `tile`: rows and columns of the output tile, depth in rows.
    Raises:
        ValueError: gather and saved name one operand, or shapes that do not belong together.
    Graph-safe: yes.
    """
    check_operands(left, right, expert_offsets, out, gather=gather, saved=saved, base_row=base_row)
    view = out if out.dim() == 4 else out.unsqueeze(1)
    experts, groups, height, width = view.shape
    align = 16 // left.element_size()
    add = _way_of_adding(out) if accumulate else None
    slices = _slices(tile, out.element_size() * (2 if add == "load" else 1))
    tokens, gathered_width, block = (left, height, tile.rows) if gather == "left" else (right, width, tile.columns)
    staticmoe_weight_grad_gemm[
        (min(programs, experts * groups * triton.cdiv(height, tile.rows) * triton.cdiv(width, tile.columns)),)
    ](
        left if gather == "left" else ragged_descriptor(left, groups, [tile.depth, tile.rows]),
        right if gather == "right" else ragged_descriptor(right, 1, [tile.depth, tile.columns]),
        expert_offsets,
        row_assignment if gather is not None else None,
        base_row,
        plain_descriptor(view, [1, 1, tile.rows, tile.columns // slices]),
        experts,
        height // align,
        width // align,
        tokens.stride(0) // align,
        ALIGN=align,
        TOP_K=top_k,
        GROUPS=groups,
        GATHER=gather,
        SAVED=saved,
        ADD=add,
        EVEN=gathered_width % block == 0,
        PRECISION=input_precision(left.dtype, allow_tf32),
        SLICES=slices,
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.depth,
        GROUP=tile.group,
        **compile_options(tile),
    )


def check_operands(
    left: Tensor, right: Tensor, expert_offsets: Tensor, out: Tensor, *,
    gather: Side, saved: Side, base_row: Tensor | None,
) -> None:  # fmt: skip
    """Refuse operands of `weight_grad` that do not belong together, with a ValueError."""
    view = out if out.dim() == 4 else out.unsqueeze(1)
    experts, groups, height, width = view.shape
    if gather is not None and gather == saved:
        raise ValueError(f"weight_grad: gathered tokens have no base row; got gather={gather!r} and saved={saved!r}")
    if (saved is None) != (base_row is None):
        raise ValueError(f"weight_grad: saved and base_row go together; got saved={saved!r}, base_row={base_row!r}")
    if left.shape[1] != groups * height or right.shape[1] != width or expert_offsets.shape[0] != experts + 1:
        raise ValueError(
            f"weight_grad: left {tuple(left.shape)}, right {tuple(right.shape)} and expert_offsets "
            f"{tuple(expert_offsets.shape)} do not make an out of {tuple(out.shape)}"
        )
    if gather == "left" and groups > 1:
        raise ValueError(f"weight_grad: a gathered left operand has one group of columns; got {groups} in out")


def _way_of_adding(out: Tensor) -> str:
    """fp32 is added by the memory system; 16 bits are loaded, so that the sum is rounded once. Alike for fp32."""
    return "reduce" if out.dtype == torch.float32 and not triton.knobs.runtime.interpret else "load"


def _slices(tile: Tile, staged_size: int) -> int:
    """Column slices in which a tile of elements of `staged_size` bytes is stored, so that `_STAGED_BYTES` will do."""
    slices = 1
    while slices < _MOST_SLICES and tile.rows * tile.columns * staged_size > slices * _STAGED_BYTES:
        slices *= 2
    return slices
