"""From routing to rows: a counting sort of the assignments by expert, stable, in integers.

Four launches: counts and ranks within blocks of assignments; for each expert an exclusive scan over the blocks; an
exclusive scan over the experts; the placement. Where the capacity may not suffice, `victims.py` finds for each expert
the assignment that is kept last, and count and scan run again with what is left. Where an overflow dooms the layer,
nobody asks who would have been dropped: of limits by expert the counts tell how many.

Dimensions: T tokens, K top_k, N = T·K assignments, E experts, R capacity rows, C rows of one expert, NB blocks of
assignments.
"""

from __future__ import annotations

import dataclasses

import triton
import triton.language as tl
from torch import Tensor

from staticmoe.kernels import victims
from staticmoe.kernels.victims import Assignments, expert_of, is_kept, overflows

_BLOCK = 256
_COMPARED = 32
_COLUMNS = 16
BLOCKS_AT_ONCE = 256
EXPERTS_AT_ONCE = victims.EXPERTS_AT_ONCE


@triton.jit
def _expert_if_kept(a, ids, ids_token, ids_slot, weights, weights_token, weights_slot, last_key, last_kept, N, K, E):
    """The expert of assignment `a`, or -1 where it names none or is a victim of the capacity."""
    expert = expert_of(a, ids, ids_token, ids_slot, N, K, E)
    if last_key is not None:
        kept = is_kept(a, expert, weights, weights_token, weights_slot, last_key, last_kept, K)
        expert = tl.where(kept, expert, -1)
    return expert


@triton.jit
def staticmoe_plan_count(
    ids_ptr,
    ids_token,
    ids_slot,
    weights_ptr,
    weights_token,
    weights_slot,
    last_key_ptr,
    last_kept_ptr,
    overflow_ptr,
    counts_ptr,
    rank_ptr,
    count,
    num_experts,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    COMPARED: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Count the assignments of each expert in a block, and number those of one expert in order.

    Grid: NB = ceil(N / BLOCK) programs. Program b owns counts [NB,E] row b and rank [N] entries
    [b * BLOCK, (b + 1) * BLOCK): the number of earlier assignments of the block to the same expert, -1 where there is
    no expert. With last_key and last_kept [E], victims have no expert either, and everything stays unwritten where
    neither overflow [2] is set: nobody was a victim, so that the first count holds.
    Deterministic: integers; each entry has one owner, which writes zero, waits, and writes the count.
    """
    if last_key_ptr is not None and not overflows(overflow_ptr):
        return
    pid = tl.program_id(0).to(tl.int64)
    counts_ptr += pid * num_experts
    for start in range(0, num_experts, EXPERTS):
        e = start + tl.arange(0, EXPERTS)
        tl.store(counts_ptr + e, tl.zeros([EXPERTS], tl.int32), mask=e < num_experts)
    first = tl.program_id(0) * BLOCK
    own = tl.arange(0, BLOCK)
    expert = _expert_if_kept(
        first + own,
        ids_ptr,
        ids_token,
        ids_slot,
        weights_ptr,
        weights_token,
        weights_slot,
        last_key_ptr,
        last_kept_ptr,
        count,
        K,
        num_experts,
    )
    # Every pair of the block is compared: BLOCK operations for an assignment, whatever E is. Those before count 1;
    # itself and those behind count BLOCK, so that the last of its expert has BLOCK to spare exactly once.
    seen = tl.zeros([BLOCK], tl.int32)
    for start in range(0, BLOCK, COMPARED):
        other = start + tl.arange(0, COMPARED)
        other_expert = _expert_if_kept(
            first + other,
            ids_ptr,
            ids_token,
            ids_slot,
            weights_ptr,
            weights_token,
            weights_slot,
            last_key_ptr,
            last_kept_ptr,
            count,
            K,
            num_experts,
        )
        one = tl.where(other[:, None] < own[None, :], 1, BLOCK)
        seen += tl.sum(tl.where(other_expert[:, None] == expert[None, :], one, 0), axis=0)
    rank = seen % BLOCK
    named = expert >= 0
    tl.store(rank_ptr + first + own, tl.where(named, rank, -1), mask=first + own < count)
    # The zeros above were written by other threads.
    tl.debug_barrier()
    tl.store(counts_ptr + expert, rank + 1, mask=named & (seen // BLOCK == 1))


@triton.jit
def staticmoe_plan_scan_blocks(
    counts_ptr,
    total_ptr,
    routed_ptr,
    overflow_ptr,
    blocks,
    num_experts,
    BLOCKS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Replace the counts [NB,E] of each expert by the exclusive prefix sum over the blocks; write total [E].

    Grid: ceil(E / EXPERTS) programs. Program i owns columns [i * EXPERTS, (i + 1) * EXPERTS) of the counts, and these
    totals. With routed [E] and neither overflow [2] set the counts hold already and total becomes a copy of routed.
    Deterministic: integers; each entry has one owner.
    """
    e = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    inside = e < num_experts
    if routed_ptr is not None and not overflows(overflow_ptr):
        tl.store(total_ptr + e, tl.load(routed_ptr + e, mask=inside, other=0), mask=inside)
        return
    total = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        at = counts_ptr + block.to(tl.int64)[:, None] * num_experts + e[None, :]
        mask = (block < blocks)[:, None] & inside[None, :]
        counts = tl.load(at, mask=mask, other=0)
        tl.store(at, total[None, :] + tl.cumsum(counts, axis=0) - counts, mask=mask)
        total += tl.sum(counts, axis=0)
    tl.store(total_ptr + e, total, mask=inside)


@triton.jit
def staticmoe_plan_scan_experts(
    kept_ptr,
    routed_ptr,
    kept_out_ptr,
    offsets_ptr,
    doomed_ptr,
    num_experts,
    expert_capacity,
    OVERFLOW_DOOMS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Write offsets [E+1], the exclusive prefix sum of kept [E], or zeros where the layer is doomed; copy kept.

    Grid: one program. kept_out [E] may be kept itself. Of each expert at most expert_capacity are kept. The layer is
    doomed where doomed, a scalar, is given and not 0, and with OVERFLOW_DOOMS where fewer assignments are kept than
    routed.
    Deterministic: integers.
    """
    e = tl.arange(0, EXPERTS)
    inside = e < num_experts
    kept = tl.minimum(tl.load(kept_ptr + e, mask=inside, other=0), expert_capacity)
    end = tl.cumsum(kept, axis=0)
    is_doomed = False
    if doomed_ptr is not None:
        is_doomed = tl.load(doomed_ptr) != 0
    if OVERFLOW_DOOMS:
        routed = tl.load(routed_ptr + e, mask=inside, other=0)
        is_doomed = is_doomed | (tl.sum(kept, axis=0) < tl.sum(routed, axis=0))
    tl.store(offsets_ptr + 1 + e, tl.where(is_doomed, 0, end), mask=inside)
    tl.store(offsets_ptr, 0)
    tl.store(kept_out_ptr + e, kept, mask=inside)


@triton.jit
def staticmoe_plan_place(
    ids_ptr,
    ids_token,
    ids_slot,
    counts_ptr,
    offsets_ptr,
    row_assignment_ptr,
    assignment_row_ptr,
    overflow_ptr,
    count,
    num_experts,
    capacity_rows,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Give each kept assignment its row: offset of the expert + those of earlier blocks + rank within the block.

    Grid: NB programs. Program b owns assignment_row [N] entries [b * BLOCK, (b + 1) * BLOCK), which come in as ranks
    (-1: no row), the rows of these assignments in row_assignment [R], and every NB-th block of BLOCK rows past the last
    offset, which become -1. A last offset of 0 (no assignment is kept, or the layer is doomed) leaves all -1. All stays
    unwritten where overflow [2] is given and its first entry is 0: the order within experts is not needed then.
    Deterministic: integers; rows are distinct, so each entry is written once.
    """
    if overflow_ptr is not None and tl.load(overflow_ptr) == 0:
        return
    pid = tl.program_id(0)
    used = tl.load(offsets_ptr + num_experts)
    a = pid * BLOCK + tl.arange(0, BLOCK)
    expert = expert_of(a, ids_ptr, ids_token, ids_slot, count, K, num_experts)
    rank = tl.load(assignment_row_ptr + a, mask=a < count, other=-1)
    kept = tl.where(used > 0, rank, -1) >= 0
    before = tl.load(counts_ptr + pid.to(tl.int64) * num_experts + expert, mask=kept, other=0)
    row = tl.load(offsets_ptr + expert, mask=kept, other=0) + before + rank
    tl.store(row_assignment_ptr + row, a, mask=kept & (row < capacity_rows))
    tl.store(assignment_row_ptr + a, tl.where(kept, row, -1), mask=a < count)
    for start in range(used + pid * BLOCK, capacity_rows, tl.num_programs(0) * BLOCK):
        row = start + tl.arange(0, BLOCK)
        tl.store(row_assignment_ptr + row, tl.full([BLOCK], -1, tl.int32), mask=row < capacity_rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScratchSizes:
    """How the int32 scratch of `make_plan` is cut, in entries.

    Attributes:
        counts: [NB,E], those of blocks of assignments.
        expert_offsets: [E+1], before capacity.
        limits: [2,E], key and number of the assignment that is kept last.
        order: [N], assignments by expert, before capacity.
        histogram: of the radix select over a rank.
        ties: of each part of the assignments.
        state: the two overflow flags, and what one pass leaves for the next.
    """

    counts: int
    expert_offsets: int = 0
    limits: int = 0
    order: int = 0
    histogram: int = 0
    ties: int = 0
    state: int = 0

    @property
    def total(self) -> int:
        """Entries of the scratch."""
        return sum(dataclasses.astuple(self))

    def cut(self, scratch: Tensor) -> list[Tensor]:
        """The pieces, in the order of the attributes."""
        return list(scratch[: self.total].split(dataclasses.astuple(self)))


def _limits(count: int, num_experts: int, capacity_rows: int, expert_capacity: int | None) -> tuple[bool, bool]:
    """Whether an expert's rows, and a rank's, can exceed their capacity."""
    most = count if expert_capacity is None else min(count, num_experts * expert_capacity)
    return expert_capacity is not None and expert_capacity < count, capacity_rows < most


def scratch_sizes(
    *,
    tokens: int,
    top_k: int,
    num_experts: int,
    capacity_rows: int,
    expert_capacity: int | None = None,
    block: int = _BLOCK,
) -> ScratchSizes:
    """Return what `make_plan` needs for the same arguments: `.total` int32 entries, whatever they hold."""
    count = tokens * top_k
    counts = max(triton.cdiv(count, block), 1) * num_experts
    by_expert, by_rank = _limits(count, num_experts, capacity_rows, expert_capacity)
    if not by_expert and not by_rank:
        return ScratchSizes(counts=counts)
    return ScratchSizes(
        counts=counts,
        expert_offsets=num_experts + 1,
        limits=2 * num_experts,
        order=count if by_expert else 0,
        histogram=victims.HISTOGRAM_SIZE if by_rank else 0,
        ties=triton.cdiv(count, victims.MEMBERS) if by_rank else 0,
        state=victims.STATE_SIZE,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sort:
    """What the launches of one plan share.

    Attributes:
        given: the assignments.
        counts: [NB,E] scratch.
        assignment_row: [T,K], which holds ranks until the placement.
        block: assignments of a program.
    """

    given: Assignments
    counts: Tensor
    assignment_row: Tensor
    block: int

    @property
    def blocks(self) -> int:
        """NB; one block of nothing where there are no assignments, so that all outputs are written."""
        return max(triton.cdiv(self.given.count, self.block), 1)

    @property
    def at_once(self) -> int:
        """Experts that a program goes through at once."""
        return min(triton.next_power_of_2(self.given.num_experts), EXPERTS_AT_ONCE)

    def count_and_scan(self, total: Tensor, limits: Tensor | None, flags: Tensor | None, routed: Tensor | None) -> None:
        """Count those who are within the limits, into `total` [E]."""
        last_key, last_kept = (None, None) if limits is None else limits.chunk(2)
        staticmoe_plan_count[(self.blocks,)](
            *self.given.ids,
            *((None, 0, 0) if limits is None else self.given.weights),
            last_key,
            last_kept,
            flags,
            self.counts,
            self.assignment_row,
            self.given.count,
            self.given.num_experts,
            K=self.given.slots,
            BLOCK=self.block,
            COMPARED=min(_COMPARED, self.block),
            EXPERTS=self.at_once,
            num_warps=max(1, min(8, self.block // 32)),
        )
        experts = min(triton.next_power_of_2(self.given.num_experts), _COLUMNS)
        staticmoe_plan_scan_blocks[(triton.cdiv(self.given.num_experts, experts),)](
            self.counts,
            total,
            routed,
            flags,
            self.blocks,
            self.given.num_experts,
            BLOCKS=min(triton.next_power_of_2(self.blocks), BLOCKS_AT_ONCE),
            EXPERTS=experts,
        )

    def place(self, offsets: Tensor, rows: Tensor, flags: Tensor | None = None) -> None:
        """Write rows [R], and assignment_row over the ranks."""
        staticmoe_plan_place[(self.blocks,)](
            *self.given.ids,
            self.counts,
            offsets,
            rows,
            self.assignment_row,
            flags,
            self.given.count,
            self.given.num_experts,
            rows.shape[0],
            K=self.given.slots,
            BLOCK=self.block,
        )


def _assignments(ids: Tensor, weights: Tensor, num_experts: int) -> Assignments:
    """Where the kernels find ids and weights [T,K], whatever their strides."""
    # Contiguous tensors are addressed as N tokens of one slot, which needs no division.
    plain = ids.is_contiguous() and weights.is_contiguous()
    id_strides, weight_strides = ((1, 1), (1, 1)) if plain else (ids.stride(), weights.stride())
    return Assignments(
        ids=(ids, id_strides[0], id_strides[1]),
        weights=(weights, weight_strides[0], weight_strides[1]),
        slots=1 if plain else ids.shape[1],
        count=ids.numel(),
        num_experts=num_experts,
    )


def make_plan(
    topk_ids: Tensor,
    topk_weights: Tensor,
    tokens_per_expert: Tensor,
    routed_per_expert: Tensor,
    expert_offsets: Tensor,
    row_assignment: Tensor,
    assignment_row: Tensor,
    scratch: Tensor,
    *,
    num_experts: int,
    capacity_rows: int,
    expert_capacity: int | None = None,
    doomed: Tensor | None = None,
    overflow_dooms: bool = False,
    block: int = _BLOCK,
) -> None:
    """Launch the plan; see `staticmoe.reference.make_plan`. Four launches, or 9 to 14 where rows may be dropped.

    A layer is doomed where `doomed` is not 0, or with `overflow_dooms` where anything is dropped: then expert_offsets
    is all 0, row_assignment and assignment_row are all -1, and the counts are the true ones.

    Shapes:
        topk_ids [T,K] int32 or int64 and topk_weights [T,K] fp32, fp16 or bf16 (NaN counts as the lowest), any strides.
        Written, int32, contiguous: tokens_per_expert [E], routed_per_expert [E], expert_offsets [E+1],
        row_assignment [R], assignment_row [T,K]. scratch int32 [`scratch_sizes(...).total` or more]. doomed 0-dim.
    Graph-safe: yes; what is launched follows from shapes and capacities.
    """
    tokens, slots = topk_ids.shape
    count = tokens * slots
    by_expert, by_rank = _limits(count, num_experts, capacity_rows, expert_capacity)
    sizes = scratch_sizes(
        tokens=tokens,
        top_k=slots,
        num_experts=num_experts,
        capacity_rows=capacity_rows,
        expert_capacity=expert_capacity,
        block=block,
    )
    pieces = sizes.cut(scratch)
    given = _assignments(topk_ids, topk_weights, num_experts)
    sort = _Sort(given=given, counts=pieces[0], assignment_row=assignment_row, block=block)
    sort.count_and_scan(routed_per_expert, None, None, None)
    kept = routed_per_expert
    limit = count if expert_capacity is None else expert_capacity
    if by_rank or (by_expert and not overflow_dooms):
        _, offsets, limits, order, histogram, ties, state = pieces
        victims.start(given, routed_per_expert, offsets, limits, histogram, state, limit, capacity_rows)
        if by_expert:
            sort.place(offsets, order, state)
            victims.of_experts(given, order, offsets, limits, limit)
        if by_rank:
            victims.of_rank(given, limits, histogram, ties, state, capacity_rows)
        sort.count_and_scan(tokens_per_expert, limits, state, routed_per_expert)
        kept = tokens_per_expert
    staticmoe_plan_scan_experts[(1,)](
        kept,
        routed_per_expert,
        tokens_per_expert,
        expert_offsets,
        doomed,
        num_experts,
        limit,
        OVERFLOW_DOOMS=overflow_dooms and (by_expert or by_rank),
        EXPERTS=triton.next_power_of_2(num_experts),
        num_warps=8 if num_experts > EXPERTS_AT_ONCE else 4,
    )
    sort.place(expert_offsets, row_assignment)
