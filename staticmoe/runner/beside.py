"""What can change beside the Python state: compiled forms of the regions, and the memory pool of the graphs.

Both stand still while a graph is replayed. A region that was compiled again found something other than it had compiled
for; a pool that grows is taken from by somebody else.
"""

from __future__ import annotations

import sys

from staticmoe.capture import Capture
from staticmoe.capture.change import Change
from staticmoe.runner.regions import Regions

# Asking a GPU's allocator takes milliseconds.
_POOL_EVERY = 100


class Beside:
    """Compares with what there was when a graph was last built.

    Args:
        regions: that are compiled, or None.
        capture: whose pool it is.
    """

    def __init__(self, regions: Regions | None, capture: Capture) -> None:
        self._regions = regions
        self._capture = capture
        self._asked = 0
        self._compiled: object = None
        self._pool = 0

    def settle(self) -> None:
        """Take everything as it is now."""
        self._pool = self._capture.pool_bytes()
        if self._regions is not None:
            self._regions.settle()
            self._compiled = _compilations()

    def changes(self) -> list[Change]:
        """What is different: compiled forms at each call, the pool at every hundredth."""
        found = []
        if self._regions is not None and (now := _compilations()) != self._compiled:
            found = self._regions.recompiled()
            if not found:
                self._compiled = now
        self._asked += 1
        if self._asked % _POOL_EVERY == 0 and (grown := self._capture.pool_bytes()) > self._pool:
            found.append(Change("memory", "memory pool of the graphs:", "bytes", self._pool, grown))
        return found


def _compilations() -> object:
    """What moves whenever torch compiles anything, None where it never has: one number instead of a look at each."""
    books = sys.modules.get("torch._dynamo.utils")
    return books.counters["stats"]["unique_graphs"] if books is not None else None
