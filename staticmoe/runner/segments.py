"""What torch's allocator takes from a GPU for a series of allocations: segments, which it cuts and seldom gives back.

With the allocator's default settings, on one stream. A request takes the smallest free piece that it fits in, of a pool
for small requests or one for large ones, and leaves the rest of it for others; where none fits, a segment is taken.
What fits in none of the pieces that are free is what fragments cost. Sizes: c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Sequence
from typing import TypeAlias

# What an allocation is rounded up to.
_QUANTUM = 512
# Requests of up to this lie in segments of 2 MiB.
_SMALL, _SMALL_SEGMENT = 1 << 20, 2 << 20
# Those below this lie in segments of 20 MiB, larger ones in segments of their own size.
_LARGE, _LARGE_SEGMENT, _LARGE_QUANTUM = 10 << 20, 20 << 20, 2 << 20
# (key, bytes) where something is allocated, (key, -1) where it is let go of.
Events: TypeAlias = Sequence[tuple[int, int]]
# Further apart than a segment is large.
_APART = 1 << 50


def allocated(nbytes: int) -> int:
    """Bytes that are handed out for `nbytes`."""
    return -(-nbytes // _QUANTUM) * _QUANTUM


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Block:
    """A piece of a segment, with its neighbours there."""

    address: int
    size: int
    small: bool
    before: Block | None = None
    after: Block | None = None
    free: bool = False


class Segments:
    """An allocator's books, of one pool.

    Attributes:
        held: bytes taken from the device so far; what is free stays held.
    """

    def __init__(self) -> None:
        self.held = 0
        self._count = 0
        # (size, address): the smallest that fits, and of those the first.
        self._free: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
        self._at: dict[int, Block] = {}

    def allocate(self, nbytes: int) -> Block:
        """Hand out a block."""
        size = allocated(nbytes)
        small = size <= _SMALL
        free = self._free[small]
        at = bisect.bisect_left(free, (size, 0))
        block = self._at.pop(free.pop(at)[1]) if at < len(free) else self._take(size, small)
        block.free = False
        rest = block.size - size
        if rest >= _QUANTUM if small else rest > _SMALL:
            behind = Block(block.address + size, rest, small, block, block.after)
            if block.after is not None:
                block.after.before = behind
            block.size, block.after = size, behind
            self._put(behind)
        return block

    def release(self, block: Block) -> None:
        """Take a block back; with free neighbours it becomes one."""
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._drop(other)
                first, second = (other, block) if other is block.before else (block, other)
                first.size += second.size
                first.after = second.after
                if second.after is not None:
                    second.after.before = first
                block = first
        self._put(block)

    def release_all(self, blocks: Iterable[Block]) -> None:
        """Take them back."""
        for block in blocks:
            self.release(block)

    def play(self, events: Events) -> list[Block]:
        """Allocate and release as in `events`; returns what is not released in the end."""
        # Of nothing at all there is no block.
        alive: dict[int, tuple[Block, ...]] = {}
        for key, nbytes in events:
            if nbytes < 0:
                self.release_all(alive.pop(key))
            else:
                alive[key] = (self.allocate(nbytes),) if nbytes else ()
        return [block for blocks in alive.values() for block in blocks]

    def _take(self, size: int, small: bool) -> Block:
        if small:
            segment = _SMALL_SEGMENT
        else:
            segment = _LARGE_SEGMENT if size < _LARGE else -(-size // _LARGE_QUANTUM) * _LARGE_QUANTUM
        self.held += segment
        self._count += 1
        return Block(self._count * _APART, segment, small)

    def _put(self, block: Block) -> None:
        block.free = True
        self._at[block.address] = block
        bisect.insort(self._free[block.small], (block.size, block.address))

    def _drop(self, block: Block) -> None:
        free = self._free[block.small]
        del free[bisect.bisect_left(free, (block.size, block.address))]
        del self._at[block.address]
