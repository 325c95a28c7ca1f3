"""How half a tile of a weight gradient gets from registers to memory: cut into slices, through staging buffers, by TMA.

Dimensions: BM token columns of a tile; a warpgroup owns BM/2 of them, and all packed columns.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from staticmoe.kernels.hopper.pipeline import tma_add


@gluon.jit
def _emit(
    values, out, out_ptr, staging, place,
    WHICH: gl.constexpr, INDEX: gl.constexpr, BUFFERS: gl.constexpr, TRANSPOSED: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Store or add slice `INDEX` of a half tile [BM/2 token columns, packed columns] through a staging buffer."""
    WM: gl.constexpr = values.shape[0]
    WIDTH: gl.constexpr = values.shape[1]
    expert, target, group, token_column, packed_column = place
    buffer = staging.index(WHICH * BUFFERS + INDEX % BUFFERS)
    if TRANSPOSED:
        at_row = packed_column + INDEX * WIDTH
        at_column = token_column
    else:
        at_row = token_column
        at_column = packed_column + INDEX * WIDTH
    if ADD == "load":
        layout: gl.constexpr = values.type.layout
        i = gl.arange(0, WM, layout=gl.SliceLayout(1, layout))
        j = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
        base = out_ptr + expert.to(gl.int64) * out.strides[0] + group.to(gl.int64) * out.strides[1]
        # One group's elements can be counted in 32 bits (`serves`): 64 cost registers that are not there.
        pitch = out.strides[2].to(gl.int32)
        if TRANSPOSED:
            at = gl.expand_dims((at_row + j) * pitch, 0) + gl.expand_dims(at_column + i, 1)
            mask = gl.expand_dims(at_row + j < out.shape[2], 0) & gl.expand_dims(at_column + i < out.shape[3], 1)
        else:
            at = gl.expand_dims((at_row + i) * pitch, 1) + gl.expand_dims(at_column + j, 0)
            mask = gl.expand_dims(at_row + i < out.shape[2], 1) & gl.expand_dims(at_column + j < out.shape[3], 0)
        values += gl.load(base + at, mask=mask, other=0.0).to(gl.float32)
    # The store that last read this buffer is BUFFERS stores ago: younger ones may still be on their way.
    tma.store_wait(BUFFERS - 1)
    gl.thread_barrier()
    if TRANSPOSED:
        buffer.reshape([WIDTH, WM]).permute((1, 0)).store(values.to(out.dtype))
    else:
        buffer.reshape([WM, WIDTH]).store(values.to(out.dtype))
    fence_async_shared()
    gl.thread_barrier()
    if ADD == "reduce":
        tma_add(out, [target, group, at_row, at_column], buffer)
    else:
        tma.async_copy_shared_to_global(out, [target, group, at_row, at_column], buffer)


@gluon.jit
def store_half(
    values, out, out_ptr, staging, place, WHICH: gl.constexpr, INDEX: gl.constexpr, SLICES: gl.constexpr,
    BUFFERS: gl.constexpr, TRANSPOSED: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """`_emit` of every slice of packed columns, from left to right; cutting moves no data."""
    if SLICES == 1:
        _emit(values, out, out_ptr, staging, place, WHICH, INDEX, BUFFERS, TRANSPOSED, ADD)
    else:
        ROWS: gl.constexpr = values.shape[0]
        HALF: gl.constexpr = values.shape[1] // 2
        HALVES: gl.constexpr = SLICES // 2
        low, high = gl.split(gl.permute(gl.reshape(values, (ROWS, 2, HALF)), (0, 2, 1)))
        store_half(low, out, out_ptr, staging, place, WHICH, INDEX, HALVES, BUFFERS, TRANSPOSED, ADD)
        store_half(high, out, out_ptr, staging, place, WHICH, INDEX + HALVES, HALVES, BUFFERS, TRANSPOSED, ADD)
