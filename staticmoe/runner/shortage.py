"""Which allocations of an iteration are the largest at its peak, by the line of the user's that makes them."""

from __future__ import annotations

import dataclasses

from staticmoe.capture.source import Source
from staticmoe.runner.memory import Allocation, in_words

SHOWN = 3


class Ledger:
    """What is allocated and let go of, in order, so that the state at the peak can be told afterwards."""

    def __init__(self) -> None:
        self._events: list[tuple[int, int, Source | None]] = []
        self._peak = 0

    def made(self, key: int, size: int, source: Source) -> None:
        """Enter memory of `size` bytes."""
        self._events.append((key, size, source))

    def gone(self, key: int) -> None:
        """Enter that it was let go of."""
        self._events.append((key, 0, None))

    def at_peak(self) -> None:
        """Say that there has never been more than now."""
        self._peak = len(self._events)

    def largest(self) -> tuple[Allocation, ...]:
        """Those at the peak, the memory of one line taken together."""
        alive: dict[int, tuple[int, Source]] = {}
        for key, size, source in self._events[: self._peak]:
            if source is None:
                alive.pop(key, None)
            else:
                alive[key] = size, source
        lines: dict[Source, list[int]] = {}
        for size, source in alive.values():
            # One line runs in many modules: the first stands for them.
            lines.setdefault(dataclasses.replace(source, module=""), []).append(size)
        first = {dataclasses.replace(source, module=""): source for _, source in reversed(alive.values())}
        found = sorted(lines.items(), key=lambda line: -sum(line[1]))[:SHOWN]
        return tuple(Allocation(sum(sizes), len(sizes), str(first[line])) for line, sizes in found)


def allocation_lines(largest: tuple[Allocation, ...]) -> list[str]:
    """In words, a line each, behind a heading."""
    tensors = [f"{one.tensors} tensor{'s' * (one.tensors != 1)}" for one in largest]
    each = [f"  {in_words(one.bytes)} in {count} at {one.place}" for one, count in zip(largest, tensors, strict=True)]
    return ["largest at the peak of an iteration:", *each]
