"""Which assignments the capacity drops: for each expert the one that is kept last, found without a sort.

The lowest weights lose, and among equal ones the highest assignment. So whoever is kept is named by two numbers for
each expert: the key of the last weight, and the last assignment that is kept with it. A radix select over the bits of
the weights finds the key, a count in the order of the assignments the last of those tied. One expert's rows are
worked on by one program, all rows of a rank by all; a limit on both takes the stricter of the two for each expert.

Where nothing overflows, every pass but the first exits at once.

Dimensions: T tokens, K top_k, N = T·K assignments, E experts, R capacity rows, C rows of one expert.
"""

from __future__ import annotations

import dataclasses

import triton
import triton.language as tl
from torch import Tensor

# Eleven, eleven and ten bits of a key.
_BINS = tl.constexpr(2048)
_LOWEST = tl.constexpr(-(1 << 31))
_LAST = tl.constexpr((1 << 31) - 1)

RADIX_PASSES = 3
# Two flags, and two numbers for each pass.
STATE_SIZE = 2 + 2 * RADIX_PASSES
HISTOGRAM_SIZE = RADIX_PASSES * 2048
MEMBERS = 1024
PARTS_AT_ONCE = 1024
EXPERTS_AT_ONCE = 1024


@triton.jit
def expert_of(a, ids_ptr, ids_token, ids_slot, count, K: tl.constexpr, num_experts):
    """The expert that assignment `a` names, or -1 where there is none; an id outside 0..E-1 is no expert."""
    at = (a // K).to(tl.int64) * ids_token + (a % K).to(tl.int64) * ids_slot
    expert = tl.load(ids_ptr + at, mask=a < count, other=-1)
    return tl.where((expert >= 0) & (expert < num_experts), expert, -1).to(tl.int32)


@triton.jit
def key_of(a, named, weights_ptr, weights_token, weights_slot, K: tl.constexpr):
    """An int32 that rises with the weight of assignment `a`; both zeros are equal, NaN is the lowest weight."""
    at = (a // K).to(tl.int64) * weights_token + (a % K).to(tl.int64) * weights_slot
    weight = tl.load(weights_ptr + at, mask=named, other=0.0)
    bits = weight.to(tl.float32).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # In integers, so that no compiler flag for zeros or NaN matters: NaN becomes -inf, -0 becomes 0.
    bits = tl.where(magnitude > 0x7F800000, -0x00800000, tl.where(magnitude == 0, 0, bits))
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def is_kept(a, expert, weights_ptr, weights_token, weights_slot, last_key_ptr, last_kept_ptr, K: tl.constexpr):
    """Whether assignment `a` of `expert` is no victim of the limits found so far; false without an expert."""
    named = expert >= 0
    key = key_of(a, named, weights_ptr, weights_token, weights_slot, K)
    last_key = tl.load(last_key_ptr + expert, mask=named, other=0)
    last_kept = tl.load(last_kept_ptr + expert, mask=named, other=0)
    return named & ((key > last_key) | ((key == last_key) & (a <= last_kept)))


@triton.jit
def overflows(overflow_ptr):
    """Whether anything overflows: overflow [2] holds the experts' limits and the rank's."""
    return (tl.load(overflow_ptr) | tl.load(overflow_ptr + 1)) != 0


@triton.jit
def _pick(histogram, wanted, BINS: tl.constexpr):
    """The highest digit such that `wanted` members or more have it or a higher one, and how many of it are wanted."""
    from_here = tl.sum(histogram, axis=0) - tl.cumsum(histogram, axis=0) + histogram
    digit = tl.sum((from_here >= wanted).to(tl.int32), axis=0) - 1
    above = tl.sum(tl.where(tl.arange(0, BINS) == digit, from_here - histogram, 0), axis=0)
    return digit, wanted - above


@triton.jit
def staticmoe_plan_overflow(
    routed_ptr,
    offsets_ptr,
    last_key_ptr,
    last_kept_ptr,
    overflow_ptr,
    histogram_ptr,
    num_experts,
    expert_capacity,
    capacity_rows,
    EXPERTS: tl.constexpr,
    HISTOGRAM: tl.constexpr,
):
    """Say what overflows, and start the passes: nobody is a victim, histograms are zero.

    Grid: one program. Writes offsets [E+1], the exclusive prefix sum of routed [E]; last_key and last_kept [E];
    overflow [2]; and HISTOGRAM entries of the histogram.
    Deterministic: integers.
    """
    e = tl.arange(0, EXPERTS)
    inside = e < num_experts
    routed = tl.load(routed_ptr + e, mask=inside, other=0)
    tl.store(offsets_ptr, 0)
    tl.store(offsets_ptr + 1 + e, tl.cumsum(routed, axis=0), mask=inside)
    tl.store(last_key_ptr + e, tl.full([EXPERTS], _LOWEST, tl.int32), mask=inside)
    tl.store(last_kept_ptr + e, tl.full([EXPERTS], _LAST, tl.int32), mask=inside)
    tl.store(overflow_ptr, tl.max((routed > expert_capacity).to(tl.int32), axis=0))
    left = tl.sum(tl.minimum(routed, expert_capacity), axis=0)
    tl.store(overflow_ptr + 1, (left > capacity_rows).to(tl.int32))
    for start in range(0, HISTOGRAM, 1024):
        tl.store(histogram_ptr + start + tl.arange(0, 1024), tl.zeros([1024], tl.int32))


@triton.jit
def staticmoe_plan_expert_victims(
    weights_ptr,
    weights_token,
    weights_slot,
    order_ptr,
    offsets_ptr,
    last_key_ptr,
    last_kept_ptr,
    expert_capacity,
    K: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    """Find who is kept last of an expert that exceeds `expert_capacity`.

    Grid: E programs. Program e owns entry e of last_key and last_kept [E], which stay unwritten where the expert's rows
    fit. order [N] holds the assignments by expert, then by number, the expert's from offsets [e] on; it is not read
    where the rows of every expert fit.
    Deterministic: integers.
    """
    expert = tl.program_id(0)
    first = tl.load(offsets_ptr + expert)
    members = tl.load(offsets_ptr + expert + 1) - first
    if members <= expert_capacity:
        return
    key_so_far = 0
    wanted = expert_capacity
    for step in tl.static_range(4):
        shift = 24 - 8 * step
        histogram = tl.zeros([256], tl.int32)
        for start in range(0, members, MEMBERS):
            member = start + tl.arange(0, MEMBERS)
            matches = member < members
            a = tl.load(order_ptr + first + member, mask=matches, other=0)
            key = key_of(a, matches, weights_ptr, weights_token, weights_slot, K)
            digit = (key >> shift) & 255
            if step == 0:
                # The sign: as digits go up, negative keys come first.
                digit = digit ^ 128
            else:
                matches = matches & ((key >> (shift + 8)) == key_so_far)
            histogram += tl.histogram(digit, 256, mask=matches)
        digit_kept, wanted = _pick(histogram, wanted, 256)
        if step == 0:
            key_so_far = digit_kept - 128
        else:
            key_so_far = key_so_far * 256 + digit_kept
    seen = 0
    last = 0
    for start in range(0, members, MEMBERS):
        member = start + tl.arange(0, MEMBERS)
        inside = member < members
        a = tl.load(order_ptr + first + member, mask=inside, other=0)
        tied = (inside & (key_of(a, inside, weights_ptr, weights_token, weights_slot, K) == key_so_far)).to(tl.int32)
        number = seen + tl.cumsum(tied, axis=0)
        last += tl.sum(tl.where((tied == 1) & (number == wanted), a, 0), axis=0)
        seen += tl.sum(tied, axis=0)
    tl.store(last_key_ptr + expert, key_so_far)
    tl.store(last_kept_ptr + expert, last)


@triton.jit
def staticmoe_plan_rank_victims(
    ids_ptr,
    ids_token,
    ids_slot,
    weights_ptr,
    weights_token,
    weights_slot,
    last_key_ptr,
    last_kept_ptr,
    overflow_ptr,
    histogram_ptr,
    state_ptr,
    ties_ptr,
    count,
    num_experts,
    capacity_rows,
    K: tl.constexpr,
    PASS: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    """One pass of the radix select over all who are left: PASS 0, 1, 2 count the digits of keys, PASS 3 those tied.

    Grid: ceil(N / MEMBERS) programs. Program i counts assignments [i * MEMBERS, (i + 1) * MEMBERS), after it has taken
    the digit of the pass before from the histogram [3,2048]. PASS 3 writes ties [grid]. state [3,2] holds the key so
    far and how many of it are wanted, after each digit; program 0 owns the pass's row. All stays unwritten where the
    rows of the rank fit.
    Deterministic: the atomics add integers, whose sum does not depend on the order, and nobody reads it in this pass.
    """
    if tl.load(overflow_ptr + 1) == 0:
        return
    pid = tl.program_id(0)
    key_so_far = 0
    if PASS > 0:
        wanted = capacity_rows
        if PASS > 1:
            key_so_far = tl.load(state_ptr + 2 * (PASS - 2))
            wanted = tl.load(state_ptr + 2 * (PASS - 2) + 1)
        # The last histogram has half the digits.
        bins: tl.constexpr = _BINS if PASS < 3 else _BINS // 2
        digit, wanted = _pick(tl.load(histogram_ptr + (PASS - 1) * _BINS + tl.arange(0, bins)), wanted, bins)
        if PASS == 1:
            key_so_far = digit - 1024
        elif PASS == 2:
            key_so_far = key_so_far * 2048 + digit
        else:
            key_so_far = key_so_far * 1024 + digit
        if pid == 0:
            tl.store(state_ptr + 2 * (PASS - 1), key_so_far)
            tl.store(state_ptr + 2 * (PASS - 1) + 1, wanted)
    a = pid * MEMBERS + tl.arange(0, MEMBERS)
    expert = expert_of(a, ids_ptr, ids_token, ids_slot, count, K, num_experts)
    matches = is_kept(a, expert, weights_ptr, weights_token, weights_slot, last_key_ptr, last_kept_ptr, K)
    key = key_of(a, matches, weights_ptr, weights_token, weights_slot, K)
    if PASS == 3:
        tl.store(ties_ptr + pid, tl.sum((matches & (key == key_so_far)).to(tl.int32), axis=0))
    else:
        if PASS == 0:
            digit_here = (key >> 21) + 1024
        elif PASS == 1:
            digit_here = (key >> 10) & 2047
            matches = matches & ((key >> 21) == key_so_far)
        else:
            digit_here = key & 1023
            matches = matches & ((key >> 10) == key_so_far)
        one = tl.full([MEMBERS], 1, tl.int32)
        tl.atomic_add(histogram_ptr + PASS * _BINS + digit_here, one, mask=matches, sem="relaxed")


@triton.jit
def staticmoe_plan_rank_cut(
    ids_ptr,
    ids_token,
    ids_slot,
    weights_ptr,
    weights_token,
    weights_slot,
    last_key_ptr,
    last_kept_ptr,
    overflow_ptr,
    state_ptr,
    ties_ptr,
    count,
    num_experts,
    parts,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    """Find the last tied assignment that is kept, and give every expert the stricter of the rank's limit and its own.

    Grid: one program. ties [parts] and state come from `staticmoe_plan_rank_victims`; last_key and last_kept [E] are
    updated in place, and stay as they are where the rows of the rank fit.
    Deterministic: integers.
    """
    if tl.load(overflow_ptr + 1) == 0:
        return
    cut_key = tl.load(state_ptr + 4)
    wanted = tl.load(state_ptr + 5)
    seen = 0
    part = 0
    before = 0
    for start in range(0, parts, PARTS):
        number = start + tl.arange(0, PARTS)
        ties = tl.load(ties_ptr + number, mask=number < parts, other=0)
        end = seen + tl.cumsum(ties, axis=0)
        holds = (end - ties < wanted) & (wanted <= end)
        part += tl.sum(tl.where(holds, number, 0), axis=0)
        before += tl.sum(tl.where(holds, end - ties, 0), axis=0)
        seen += tl.sum(ties, axis=0)
    a = part * MEMBERS + tl.arange(0, MEMBERS)
    expert = expert_of(a, ids_ptr, ids_token, ids_slot, count, K, num_experts)
    left = is_kept(a, expert, weights_ptr, weights_token, weights_slot, last_key_ptr, last_kept_ptr, K)
    tied = (left & (key_of(a, left, weights_ptr, weights_token, weights_slot, K) == cut_key)).to(tl.int32)
    last = tl.sum(tl.where((tied == 1) & (before + tl.cumsum(tied, axis=0) == wanted), a, 0), axis=0)
    for start in range(0, num_experts, EXPERTS):
        e = start + tl.arange(0, EXPERTS)
        key = tl.load(last_key_ptr + e, mask=e < num_experts, other=0)
        kept = tl.load(last_kept_ptr + e, mask=e < num_experts, other=0)
        stricter = (e < num_experts) & ((cut_key > key) | ((cut_key == key) & (last < kept)))
        tl.store(last_key_ptr + e, tl.full([EXPERTS], 0, tl.int32) + cut_key, mask=stricter)
        tl.store(last_kept_ptr + e, tl.full([EXPERTS], 0, tl.int32) + last, mask=stricter)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assignments:
    """What a plan sorts.

    Attributes:
        ids, weights: each a tensor with the distance between tokens and that between slots.
        slots: K, or 1 where both are contiguous and an assignment's number is its address.
        count: N.
        num_experts: E.
    """

    ids: tuple[Tensor, int, int]
    weights: tuple[Tensor, int, int]
    slots: int
    count: int
    num_experts: int


def start(
    given: Assignments,
    routed: Tensor,
    offsets: Tensor,
    limits: Tensor,
    histogram: Tensor,
    state: Tensor,
    expert_capacity: int,
    capacity_rows: int,
) -> None:
    """Launch what the passes start from: `limits` [2E] is last_key, then last_kept; `state` has overflow [2] first."""
    staticmoe_plan_overflow[(1,)](
        routed,
        offsets,
        *limits.chunk(2),
        state,
        histogram,
        given.num_experts,
        expert_capacity,
        capacity_rows,
        EXPERTS=triton.next_power_of_2(given.num_experts),
        HISTOGRAM=histogram.shape[0],
        num_warps=8,
    )


def of_experts(given: Assignments, order: Tensor, offsets: Tensor, limits: Tensor, expert_capacity: int) -> None:
    """Launch the search for the limit of each expert whose rows exceed `expert_capacity`."""
    staticmoe_plan_expert_victims[(given.num_experts,)](
        *given.weights, order, offsets, *limits.chunk(2), expert_capacity, K=given.slots, MEMBERS=MEMBERS, num_warps=8
    )


def of_rank(
    given: Assignments, limits: Tensor, histogram: Tensor, ties: Tensor, state: Tensor, capacity_rows: int
) -> None:
    """Launch the search for the limit of all rows that are left."""
    shared = (*given.ids, *given.weights, *limits.chunk(2), state)
    results, parts = state[2:], ties.shape[0]
    for number in range(RADIX_PASSES + 1):
        staticmoe_plan_rank_victims[(parts,)](
            *shared,
            histogram,
            results,
            ties,
            given.count,
            given.num_experts,
            capacity_rows,
            K=given.slots,
            PASS=number,
            MEMBERS=MEMBERS,
        )
    staticmoe_plan_rank_cut[(1,)](
        *shared,
        results,
        ties,
        given.count,
        given.num_experts,
        parts,
        K=given.slots,
        PARTS=min(triton.next_power_of_2(parts), PARTS_AT_ONCE),
        EXPERTS=min(triton.next_power_of_2(given.num_experts), EXPERTS_AT_ONCE),
        MEMBERS=MEMBERS,
    )
