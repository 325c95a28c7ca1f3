"""The allocator's books: what a series of allocations takes from a device, by the rules of torch's allocator."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staticmoe.runner.memory import Checks, held_over_construction
from staticmoe.runner.segments import Block, Events, Segments, allocated

KIB, MIB = 1 << 10, 1 << 20


def held(*sizes: int) -> int:
    segments = Segments()
    for nbytes in sizes:
        segments.allocate(nbytes)
    return segments.held


@pytest.mark.parametrize(
    ("sizes", "takes"),
    [
        ([1], 2 * MIB),
        ([MIB, MIB], 2 * MIB),
        ([MIB, MIB, 1], 4 * MIB),
        # Above 1 MiB a segment of 20, which several share.
        ([MIB + 1], 20 * MIB),
        ([9 * MIB, 9 * MIB, 2 * MIB], 20 * MIB),
        ([9 * MIB, 9 * MIB, 3 * MIB], 40 * MIB),
        # From 10 MiB on a segment of its own, in steps of 2; what is left of one, up to 1 MiB, is nobody's.
        ([10 * MIB], 10 * MIB),
        ([11 * MIB + 1], 12 * MIB),
        ([11 * MIB, 1 * MIB + 512], 12 * MIB + 20 * MIB),
        # Small requests take nothing of a large segment.
        ([9 * MIB, KIB], 22 * MIB),
    ],
)
def test_what_requests_take(sizes: list[int], takes: int) -> None:
    assert held(*sizes) == takes


def test_the_smallest_piece_that_fits_is_cut_and_neighbours_become_one() -> None:
    """Of two free pieces the smaller; what lies between pieces in use joins nobody."""
    segments = Segments()
    big, bar, small, end = (segments.allocate(size * MIB) for size in (7, 2, 5, 6))
    assert segments.held == 20 * MIB
    segments.release(big)
    segments.release(small)
    again = segments.allocate(4 * MIB)
    assert again.address == small.address and segments.held == 20 * MIB
    # 7 and 1 MiB are free, apart from each other: 8 do not fit.
    wide = segments.allocate(8 * MIB)
    assert segments.held == 40 * MIB
    for block in (bar, again, wide, end):
        segments.release(block)
    # Whole again, both: what is left of the first 20 MiB is what the last request finds.
    assert [segments.allocate(size * MIB).size for size in (19, 20)] == [20 * MIB, 20 * MIB]
    assert segments.held == 40 * MIB


@given(st.lists(st.tuples(st.integers(1, 24 * MIB), st.integers(0, 1 << 30)), max_size=60))
def test_blocks_never_overlap_and_nothing_is_lost(requests: list[tuple[int, int]]) -> None:
    """Whatever comes and goes: blocks lie apart within what is held, and in the end whole segments are free."""
    segments, alive = Segments(), list[Block]()
    for nbytes, choice in requests:
        if choice % 3 == 0 and alive:
            segments.release(alive.pop(choice % len(alive)))
        else:
            block = segments.allocate(nbytes)
            assert block.size >= allocated(nbytes) and not block.free
            alive.append(block)
        spans = sorted((block.address, block.address + block.size) for block in alive)
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
        free = sum(size for pool in segments._free.values() for size, _ in pool)
        assert sum(block.size for block in alive) + free == segments.held
    segments.release_all(alive)
    whole = [size for pool in segments._free.values() for size, _ in pool]
    assert len(whole) == segments._count and sum(whole) == segments.held


# Three tensors, of which the last one, as a gradient, stays: in segments of 16 and 20 MiB.
RUN: Events = [(1, 16 * MIB), (2, 4 * MIB), (3, 12 * MIB), (1, -1), (2, -1)]


@pytest.mark.parametrize(
    ("checks", "takes"),
    [
        (Checks(self_check=False, replayed=False), 50 + 36),
        (Checks(self_check=False), 50 + 36 + 36),
        # Beside the gradients of one run the next has no room for its own.
        (Checks(), 50 + 36 + 12 + 36),
    ],
)
def test_a_construction_runs_beside_its_pool(checks: Checks, takes: int) -> None:
    """What exists, a warm-up, the pool, and for a self-check two runs of which the first keeps its gradients."""
    assert held_over_construction([30 * MIB, 20 * MIB], [RUN], checks) == takes * MIB


def test_graphs_share_a_pool_unless_one_is_checked_again() -> None:
    """The second graph has the memory of the first one's gradients, but for a recheck, which compares them."""
    two = [RUN, RUN]
    apart, shared = (held_over_construction([], two, Checks(self_check=False, rechecked=r)) for r in (True, False))
    assert shared == held_over_construction([], [RUN], Checks(self_check=False)) < apart
