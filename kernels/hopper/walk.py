"""Which tiles of the experts' weight gradients a program works on, and in which order; no division in any loop.

Tiles are numbered expert after expert. Every partition of a program walks alike, each for itself.

Dimensions: M row tiles and N column tiles of an expert's gradient, E experts.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from staticmoe.kernels.hopper.pipeline import divide, magic


@gluon.jit
def position(within, order):
    """Return (m, n) of an expert's tile number `within`: `full` row tiles take one column after the other, for L2.

    The last `tail` row tiles, if they are fewer than `full`, are a block of their own.
    """
    m_tiles, n_tiles, _, full, tail, span_magic, full_magic, tail_magic = order
    block = divide(within, span_magic)
    first = block * full
    inside = within - first * n_tiles
    short = (m_tiles - first < full).to(gl.int32)
    n = divide(inside, short * tail_magic + (1 - short) * full_magic)
    return first + inside - n * (short * tail + (1 - short) * full), n


@gluon.jit
def tile_order(m_tiles, group_tiles, GROUPS: gl.constexpr, GROUP: gl.constexpr):
    """Return what `position` needs, with the divisions done."""
    n_tiles = GROUPS * group_tiles
    full = gl.minimum(m_tiles, GROUP)
    tail = m_tiles - m_tiles // full * full
    tail = tail + (tail == 0).to(gl.int32) * full
    return m_tiles, n_tiles, group_tiles, full, tail, magic(full * n_tiles), magic(full), magic(tail)


@gluon.jit
def first_tile(per_expert):
    """Return (expert, tile within it) of the program's first tile, tiles of an expert, and both of a step of a grid."""
    programs = gl.num_programs(0)
    jump = programs // per_expert
    expert = gl.program_id(0) // per_expert
    return expert, gl.program_id(0) - expert * per_expert, per_expert, jump, programs - jump * per_expert


@gluon.jit
def advance(expert, within, per_expert, jump_experts, jump_within):
    """Return (expert, tile within it) one grid further on; no division."""
    within += jump_within
    carry = (within >= per_expert).to(gl.int32)
    return expert + jump_experts + carry, within - carry * per_expert


@gluon.jit
def segment(offsets_ptr, expert, num_experts):
    """Return (first row, rows) of an expert; past the last one, of the last one."""
    expert = gl.minimum(expert, num_experts - 1)
    first = gl.load(offsets_ptr + expert)
    return first, gl.load(offsets_ptr + expert + 1) - first
