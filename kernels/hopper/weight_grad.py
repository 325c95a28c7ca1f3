"""Weight gradients of the experts on Hopper, in Gluon: `staticmoe.kernels.weight_grad` warp-specialised, for 16 bits.

The first operand is the *tokens* side (token gradients or tokens, gathered by cp.async, or rows by TMA), the second the
*packed* side (rows of one or two groups of columns, by TMA); either may be the left one of the product:
    out[e]    = tokens^T @ packed          where the tokens are on the left
    out[e,g] = (tokens^T @ packed[g])^T    where they are on the right: transposed on its way through shared memory
So the gathered operand is the narrow one of a 128 x 256 tile in both, and every product is an m64n256k16.

Dimensions: E experts, T tokens, R rows, A and B widths of the left and right rows, G groups of the left columns,
BM x BN an output tile of BM token columns and BN packed columns, BK the rows taken at once.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from staticmoe.kernels.hopper.epilogue import store_half
from staticmoe.kernels.hopper.pipeline import load_rows, next_stage, plain_descriptor, ragged_descriptor, stage_before
from staticmoe.kernels.hopper.walk import advance, first_tile, position, segment, tile_order
from staticmoe.kernels.weight_grad import Side, check_operands

_TOKENS, _PACKED, _DEPTH = 128, 256, 64
# Row tiles (of the tokens' columns) that take one column after the other, for the L2 cache.
_GROUP = 16
# What `divide` counts without error: the number of a tile times a divisor, both at most this, stay below 2^30.
_MOST_TILES = (1 << 15) - 1
# Elements of one group of `out` that 32 bits count.
_MOST_ELEMENTS = (1 << 31) - 1
# Elements in 16 bytes.
_ALIGN = gl.constexpr(8)
# Of two consumers and the four warps that a producer takes up: 128 * (2 * 224 + 56) of 65536 registers.
_CONSUMER_REGISTERS = gl.constexpr(224)
_PRODUCER_REGISTERS = gl.constexpr(56)


@gluon.jit
def _produce(
    tokens, packed, offsets_ptr, assignment_ptr, num_experts, walk, order, stages, bases, width, stride,
    GATHER: gl.constexpr, TOP_K: gl.constexpr, EVEN: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the stages, one for BK rows of a tile, and run ahead across tiles.

    TMA boxes of the packed rows [BK,BN] and of the two halves of the tokens' columns [BK,BM/2]; gathered tokens come by
    16-byte cp.async instead, whose row numbers are read one step ahead, across tiles too. Past the segment's end both
    operands are zeros: TMA by the ragged descriptor, cp.async by its mask. So NaN of a neighbour does not matter, and
    an expert without rows (one step, everything masked) gives exact zeros.
    """
    WM: gl.constexpr = BM // 2
    SIZE: gl.constexpr = packed.dtype.primitive_bitwidth // 8
    expert, within, per_expert, jump_experts, jump_within = walk
    token_smem, packed_smem, full_bars, empty_bars = stages
    tokens_base, packed_base = bases
    group_tiles = order[2]
    next_first, next_rows = segment(offsets_ptr, expert, num_experts)
    if GATHER:
        VECTOR: gl.constexpr = 16 // SIZE
        ACROSS: gl.constexpr = min(WM // VECTOR, 16)
        layout: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
        row = gl.arange(0, BK, layout=gl.SliceLayout(1, layout))
        lane_column = gl.arange(0, WM, layout=gl.SliceLayout(0, layout))
        ahead = gl.load(assignment_ptr + next_first + row, mask=row < next_rows, other=0)
    stage = 0
    phase = 0
    while expert < num_experts:
        m, n = position(within, order)
        group = (n >= group_tiles).to(gl.int32)
        column = (n - group * group_tiles) * BN
        first = next_first
        rows = next_rows
        expert, within = advance(expert, within, per_expert, jump_experts, jump_within)
        next_first, next_rows = segment(offsets_ptr, expert, num_experts)
        depth = gl.maximum((rows + BK - 1) // BK, 1)
        for step in range(0, depth):
            left = rows - step * BK
            if GATHER:
                now = ahead
                last = (step + 1 == depth).to(gl.int32)
                ahead_first = last * next_first + (1 - last) * (first + (step + 1) * BK)
                ahead_rows = last * next_rows + (1 - last) * (left - BK)
                ahead = gl.load(assignment_ptr + ahead_first + row, mask=row < ahead_rows, other=0)
            mbarrier.wait(empty_bars.index(stage), phase ^ 1)
            full_bar = full_bars.index(stage)
            if GATHER:
                mbarrier.expect(full_bar, BK * BN * SIZE)
            else:
                mbarrier.expect(full_bar, BK * (BN + BM) * SIZE)
            load_rows(packed, first + rows + packed_base, left, group, column, full_bar, packed_smem.index(stage))
            if GATHER:
                source = tokens + gl.expand_dims((now // TOP_K).to(gl.int64) * stride, 1)
                source += gl.expand_dims(m * BM + lane_column, 0)
                inside = gl.expand_dims(row < left, 1)
                for half in gl.static_range(2):
                    if EVEN:
                        mask = inside
                    else:
                        mask = inside & gl.expand_dims(m * BM + half * WM + lane_column < width, 0)
                    async_copy.async_copy_global_to_shared(token_smem.index(2 * stage + half), source + half * WM, mask)
                # Each of the 128 threads arrives once, by the hardware, when its own copies have landed.
                async_copy.mbarrier_arrive(full_bar, increment_count=False)
            else:
                for half in gl.static_range(2):
                    load_rows(
                        tokens, first + rows + tokens_base, left, 0, m * BM + half * WM, full_bar,
                        token_smem.index(2 * stage + half),
                    )  # fmt: skip
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _consume(
    out, out_ptr, offsets_ptr, num_experts, walk, order, stages, staging, lead_bar,
    WHICH: gl.constexpr, GATHER: gl.constexpr, TRANSPOSED: gl.constexpr, ADD: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, LEAD: gl.constexpr,
    SLICES: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """One of two consumer warpgroups: half `WHICH` of the token columns of every tile, all of its packed columns."""
    WM: gl.constexpr = BM // 2
    accumulator: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    expert, within, per_expert, jump_experts, jump_within = walk
    token_smem, packed_smem, full_bars, empty_bars = stages
    group_tiles = order[2]
    _, next_rows = segment(offsets_ptr, expert, num_experts)
    if WHICH == 1:
        mbarrier.wait(lead_bar, 0)
    stage = 0
    phase = 0
    done = 0
    while expert < num_experts:
        m, n = position(within, order)
        group = (n >= group_tiles).to(gl.int32)
        owner = expert
        rows = next_rows
        # Read a tile ahead, so that no main loop waits for its trip count.
        expert, within = advance(expert, within, per_expert, jump_experts, jump_within)
        _, next_rows = segment(offsets_ptr, expert, num_experts)
        depth = gl.maximum((rows + BK - 1) // BK, 1)
        acc = gl.zeros((WM, BN), gl.float32, accumulator)
        for step in range(0, depth):
            mbarrier.wait(full_bars.index(stage), phase)
            if GATHER:
                # cp.async writes through the generic proxy, wgmma reads through the asynchronous one.
                fence_async_shared()
            a = token_smem.index(2 * stage + WHICH).reshape([BK, WM]).permute((1, 0))
            b = packed_smem.index(stage).reshape([BK, BN])
            acc = warpgroup_mma(a, b, acc, is_async=True)
            # One product stays in flight; the one before it has read its stage.
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty_bars.index(stage_before(stage, STAGES)), count=1, pred=step > 0)
            if WHICH == 0:
                mbarrier.arrive(lead_bar, count=1, pred=done == LEAD)
            done += 1
            stage, phase = next_stage(stage, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty_bars.index(stage_before(stage, STAGES)), count=1)
        target = owner
        if ADD is not None:
            # Out of bounds, so that nothing is added to an expert without rows.
            target += (rows == 0).to(gl.int32) * num_experts
        place = (owner, target, group, m * BM + WHICH * WM, (n - group * group_tiles) * BN)
        store_half(acc, out, out_ptr, staging, place, WHICH, 0, SLICES, BUFFERS, TRANSPOSED, ADD)
    if WHICH == 0:
        mbarrier.arrive(lead_bar, count=1, pred=done <= LEAD)
    # Shared memory must outlive the last stores.
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_experts", "width_units", "group_units", "stride_units"])
def staticmoe_weight_grad_hopper(
    tokens,
    packed,
    offsets_ptr,
    assignment_ptr,
    base_row_ptr,
    out,
    out_ptr,
    num_experts,
    width_units,
    group_units,
    stride_units,
    TOP_K: gl.constexpr,
    GROUPS: gl.constexpr,
    GATHER: gl.constexpr,
    SAVED: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    ADD: gl.constexpr,
    EVEN: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    LEAD: gl.constexpr,
    SLICES: gl.constexpr,
    BUFFERS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Store, or add, every expert's tokens^T @ packed, transposed or not: out [E,GROUPS,height,width].

    Grid: any number of programs P, at most one for each tile; program p owns the tiles p, p + P, ... of the output,
    expert after expert. In a program three partitions work on the same tile: a producer, and two consumer warpgroups
    that own half of the tile's token columns each, with accumulators of their own.
    Reads: rows of the segments alone; past the end of one, both operands are zeros.
    Unwritten: nothing of `out`; with ADD the experts without rows.
    Deterministic: an element is one sum in row order, BK rows at a time, in one warpgroup; with ADD "reduce" one addend
    for each element. Nothing depends on P, on the number of empty rows or on who runs first.

    Staggered: consumer 0 starts LEAD steps before consumer 1, once per program. While one is in its epilogue the other
    has the tensor cores to itself and makes up for that lead, then the roles change: so the epilogues hide behind
    products, at the operand traffic of a 128 x 256 tile.

    No deadlock. All partitions walk the same tiles with the same number of steps, so they number uses of stages alike.
    - full_bars[s], count 1 (`expect`) + 128 (cp.async, one a thread) or 1 (TMA): phase k ends when use k * STAGES + s
      has landed. The producer arrives for it only after empty_bars[s] has ended phase k - 1, so after both consumers
      have passed full phase k - 1: no arrival comes a phase too early, no consumer is two phases behind, and a parity
      is never ambiguous.
    - empty_bars[s], count 2, one arrival a consumer: phase k ends when both have read that use. On a fresh barrier the
      wait for phase -1 passes. A consumer arrives once a use: in the step after it, or after the main loop for a tile's
      last one; its four warps have passed their wait for the product by then.
    - Progress: in step u a consumer waits for use u, starts its product, waits for the product of u - 1, which needs
      nothing but time, and releases u - 1. While it waits for u + 1 it holds u alone, and before a tile's first use
      nothing. With two stages or more the producer can always load the oldest missing use.
    - lead_bar gets one arrival in the life of a program: by consumer 0 when it has started use LEAD, or at its end if
      it never gets there. For this it needs uses 0..LEAD, which fit into the stages before consumer 1 has released any,
      as LEAD < STAGES. Consumer 1 waits for phase 0 alone, which stays ended.
    - An epilogue waits for its own earlier stores, which nothing else can hold up.
    """
    gl.static_assert(STAGES >= 2)
    gl.static_assert(LEAD < STAGES)
    gl.static_assert(GROUPS == 1 or GROUPS == 2)
    gl.static_assert(SLICES % BUFFERS == 0)
    WM: gl.constexpr = BM // 2
    PRODUCER_WARPS: gl.constexpr = 4 if GATHER else 1
    if GATHER:
        token_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        token_smem = gl.allocate_shared_memory(packed.dtype, [2 * STAGES, BK, WM], token_layout)
    else:
        token_smem = gl.allocate_shared_memory(packed.dtype, [2 * STAGES, 1, 1, 1, BK, WM], tokens.layout)
    packed_smem = gl.allocate_shared_memory(packed.dtype, [STAGES, 1, 1, 1, BK, BN], packed.layout)
    if TRANSPOSED:
        staging = gl.allocate_shared_memory(out.dtype, [2 * BUFFERS, 1, 1, BN // SLICES, WM], out.layout)
    else:
        staging = gl.allocate_shared_memory(out.dtype, [2 * BUFFERS, 1, 1, WM, BN // SLICES], out.layout)
    full_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    lead_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        if GATHER:
            mbarrier.init(full_bars.index(i), count=1 + 32 * PRODUCER_WARPS)
        else:
            mbarrier.init(full_bars.index(i), count=1)
        mbarrier.init(empty_bars.index(i), count=2)
    mbarrier.init(lead_bar, count=1)
    fence_async_shared()
    stages = (token_smem, packed_smem, full_bars, empty_bars)

    tokens_base = 0
    packed_base = 0
    if SAVED == "tokens":
        tokens_base = gl.load(base_row_ptr).to(gl.int32)
    if SAVED == "packed":
        packed_base = gl.load(base_row_ptr).to(gl.int32)
    width = width_units * _ALIGN
    # A product with a constant 16 bytes long: only then are gathered rows copied in 16 bytes.
    stride = stride_units * _ALIGN
    m_tiles = (width + BM - 1) // BM
    group_tiles = (group_units * _ALIGN + BN - 1) // BN
    order = tile_order(m_tiles, group_tiles, GROUPS, GROUP)
    walk = first_tile(m_tiles * GROUPS * group_tiles)
    gl.warp_specialize([
        (_consume, (out, out_ptr, offsets_ptr, num_experts, walk, order, stages, staging, lead_bar,
                    0, GATHER, TRANSPOSED, ADD, BM, BN, BK, STAGES, LEAD, SLICES, BUFFERS)),
        (_consume, (out, out_ptr, offsets_ptr, num_experts, walk, order, stages, staging, lead_bar,
                    1, GATHER, TRANSPOSED, ADD, BM, BN, BK, STAGES, LEAD, SLICES, BUFFERS)),
        (_produce, (tokens, packed, offsets_ptr, assignment_ptr, num_experts, walk, order, stages,
                    (tokens_base, packed_base), width, stride, GATHER, TOP_K, EVEN, BM, BN, BK, STAGES)),
    ], [4, PRODUCER_WARPS], [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS])  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pipeline:
    """How a program is staged; the numbers change speed alone.

    Attributes:
        stages: of shared memory, 48 KiB each.
        lead: steps that one consumer starts before the other.
        whole: whether half a tile of 16 bits is staged at once; else a quarter, in half of the memory.
    """

    stages: int
    lead: int
    whole: bool

    def slices(self, size: int, add: str | None) -> tuple[int, int]:
        """Slices of half a tile's columns, and how many of them are staged at a time, for elements of `size` bytes.

        What is there is loaded slice by slice into registers, of which half a tile has too few.
        """
        if not self.whole:
            return 2 * size, 2
        return (4, 2) if size > 2 or add == "load" else (1, 1)


# Measured on an H200: with many rows three stages suffice, and an epilogue without waits is worth more.
SHORT = Pipeline(stages=4, lead=2, whole=False)
LONG = Pipeline(stages=3, lead=1, whole=True)
_LONG_FROM = 1024


def pipeline_for(rows_per_expert: float) -> Pipeline:
    """The pipeline for a mean load T·K/E; never by a capacity."""
    return LONG if rows_per_expert >= _LONG_FROM else SHORT


def _tokens_right(groups: int, gather: Side) -> bool:
    """Whether the right operand is the tokens' side: the gathered one, or the one that has no groups."""
    return groups > 1 or gather == "right"


def _tiles(view: Tensor, tokens_right: bool) -> int:
    """Tiles of one expert's out [E,G,A,B]."""
    _, groups, height, width = view.shape
    tokens, packed = (width, height) if tokens_right else (height, width)
    return groups * triton.cdiv(tokens, _TOKENS) * triton.cdiv(packed, _PACKED)


def serves(left: Tensor, right: Tensor, out: Tensor, *, gather: Side) -> bool:
    """Whether `weight_grad` takes these: 16-bit operands, at most two groups, countable tiles and elements."""
    view = out if out.dim() == 4 else out.unsqueeze(1)
    _, groups, height, _ = view.shape
    narrow = left.dtype in (torch.bfloat16, torch.float16) and right.dtype == left.dtype
    countable = _tiles(view, _tokens_right(groups, gather)) <= _MOST_TILES and height * view.stride(2) <= _MOST_ELEMENTS
    return narrow and groups <= 2 and countable


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
    pipeline: Pipeline,
    programs: int,
) -> None:
    """As `staticmoe.kernels.weight_grad.weight_grad`, of what `serves` takes, on compute capability 9.0.

    Raises:
        ValueError: gather and saved name one operand, or shapes that do not belong together.
    Graph-safe: yes.
    """
    check_operands(left, right, expert_offsets, out, gather=gather, saved=saved, base_row=base_row)
    view = out if out.dim() == 4 else out.unsqueeze(1)
    experts, groups, height, width = view.shape
    tokens_right = _tokens_right(groups, gather)
    tokens, packed = (right, left) if tokens_right else (left, right)
    token_columns, packed_columns = (width, height) if tokens_right else (height, width)
    add = None
    if accumulate:
        # fp32 is added by the memory system; 16 bits are loaded, so that the sum is rounded once.
        add = "reduce" if out.dtype == torch.float32 else "load"
    slices, buffers = pipeline.slices(out.element_size(), add)
    box = [_PACKED // slices, _TOKENS // 2] if tokens_right else [_TOKENS // 2, _PACKED // slices]
    saved_side = None
    if saved is not None:
        saved_side = "tokens" if (saved == "right") == tokens_right else "packed"
    staticmoe_weight_grad_hopper[(min(programs, experts * _tiles(view, tokens_right)),)](
        tokens if gather is not None else ragged_descriptor(tokens, 1, [_DEPTH, _TOKENS // 2]),
        ragged_descriptor(packed, groups, [_DEPTH, _PACKED]),
        expert_offsets,
        row_assignment if gather is not None else None,
        base_row,
        plain_descriptor(view, [1, 1, *box]),
        view if add == "load" else None,
        experts,
        token_columns // _ALIGN.value,
        packed_columns // _ALIGN.value,
        tokens.stride(0) // _ALIGN.value,
        TOP_K=top_k,
        GROUPS=groups,
        GATHER=gather is not None,
        SAVED=saved_side,
        TRANSPOSED=tokens_right,
        ADD=add,
        EVEN=token_columns % _TOKENS == 0,
        BM=_TOKENS,
        BN=_PACKED,
        BK=_DEPTH,
        STAGES=pipeline.stages,
        LEAD=pipeline.lead,
        SLICES=slices,
        BUFFERS=buffers,
        GROUP=_GROUP,
        num_warps=4,
    )
