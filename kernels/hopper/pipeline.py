"""What the Gluon kernels for sm_90a share: their descriptors, the numbering of stages, and division without a division.

A producer fills stages of shared memory and consumers read them. All of them number the uses of stages alike: use u is
in stage u % STAGES, in phase u // STAGES of its barriers.
"""

from __future__ import annotations

from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from staticmoe.kernels import descriptors

_MOST_SWIZZLE_BYTES = 128
_FAR = gl.constexpr(1 << 30)
_MAGIC_BITS = gl.constexpr(30)


def plain_descriptor(tensor: Tensor, box: list[int]) -> TensorDescriptor:
    """As `staticmoe.kernels.descriptors.plain_descriptor`, for boxes in shared memory as wgmma reads them."""
    return _laid_out(descriptors.plain_descriptor(tensor, box), tensor)


def ragged_descriptor(rows: Tensor, groups: int, box: list[int]) -> TensorDescriptor:
    """As `staticmoe.kernels.descriptors.ragged_descriptor`, for boxes in shared memory as wgmma reads them."""
    return _laid_out(descriptors.ragged_descriptor(rows, groups, box), rows)


def _laid_out(made: descriptors.TensorDescriptor, tensor: Tensor) -> TensorDescriptor:
    size, box = tensor.element_size(), made.block_shape
    # As wide as a row of the box, which is a power of two.
    layout = gl.NVMMASharedLayout(min(_MOST_SWIZZLE_BYTES, box[-1] * size), 8 * size, len(box))
    return TensorDescriptor(tensor, made.shape, made.strides, made.block_shape, layout)


@gluon.jit
def load_rows(descriptor, end, count, group, column, barrier, buffer):
    """Start the copy of rows from `end - count` and columns from `column` of `group` on; zeros from `end` on."""
    tma.async_copy_global_to_shared(descriptor, [_FAR, end, group, -count + _FAR, column], barrier, buffer)


@gluon.jit
def store_rows(descriptor, end, count, group, column, buffer):
    """Start the copy of a buffer to rows from `end - count` and columns from `column` of `group` on, up to `end`."""
    tma.async_copy_shared_to_global(descriptor, [_FAR, end, group, -count + _FAR, column], buffer)


@builtin
def tma_add(descriptor, coordinates, source, _semantic=None):
    """Add a box of shared memory to global memory; else a TMA store. Gluon of Triton 3.6 has no name for it."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, coordinates, source.handle)


@gluon.jit
def magic(divisor):
    """Return ceil(2^30 / divisor), for `divide`."""
    return (divisor + (1 << _MAGIC_BITS) - 1) // divisor


@gluon.jit
def divide(x, divisor_magic):
    """Return x // divisor; exact while x times the divisor is below 2^30. A division costs a consumer 200 cycles."""
    return ((x.to(gl.int64) * divisor_magic) >> _MAGIC_BITS).to(gl.int32)


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """Return the stage after `stage` and the parity of its phase."""
    stage += 1
    wrapped = (stage == STAGES).to(gl.int32)
    return stage - wrapped * STAGES, phase ^ wrapped


@gluon.jit
def stage_before(stage, STAGES: gl.constexpr):
    """Return the stage before `stage`.

    Worked out, never carried through a loop as `previous = stage`: Triton 3.6 finds what a loop carries by one dry
    visit of its body with the first values. A name that begins as another carried name, and is set to it, looks
    unchanged, becomes a constant of the loop and names the wrong barrier: a deadlock.
    """
    return stage - 1 + (stage == 0).to(gl.int32) * STAGES
