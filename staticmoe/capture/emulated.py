"""Capture without a GPU: a tape of operations, replayed late, as unforgiving as a CUDA graph."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator

import torch

from staticmoe.capture.interface import Graph
from staticmoe.capture.recorder import Recorder
from staticmoe.capture.tape import Tape


class DeferredStream:
    """Work that runs only when somebody waits for it, so that launched steps really are in flight.

    Work that raises loses all later work of the queue with it, as a faulting GPU stream does; the error
    comes out of the wait.
    """

    def __init__(self) -> None:
        self._queue: collections.deque[tuple[int, Callable[[], None]]] = collections.deque()
        self._launched = 0
        self._done = 0

    def launch(self, work: Callable[[], None]) -> int:
        """Append `work`; nothing runs yet."""
        self._launched += 1
        self._queue.append((self._launched, work))
        return self._launched

    def is_done(self, ticket: int) -> bool:
        """Whether `ticket` has run."""
        return ticket <= self._done

    def wait(self, ticket: int) -> None:
        """Run everything up to `ticket`."""
        while self._queue and self._queue[0][0] <= ticket:
            number, work = self._queue.popleft()
            try:
                work()
            except BaseException:
                self._queue.clear()
                self._done = self._launched
                raise
            self._done = number


class ImmediateStream:
    """Work that runs as it is launched."""

    def __init__(self) -> None:
        self._done = 0

    def launch(self, work: Callable[[], None]) -> int:
        """Run `work` now."""
        work()
        self._done += 1
        return self._done

    def is_done(self, ticket: int) -> bool:
        """Always true of a ticket that was given out."""
        return ticket <= self._done

    def wait(self, ticket: int) -> None:
        """Nothing is ever outstanding."""


class _HostGenerator:
    """Random numbers of an iteration on the CPU.

    Replays run late, while the user's loop draws from the same generator. So a step takes one number from it
    when it is called and seeds its own sequence: the order of replays and user draws does not matter, a rerun
    repeats its numbers, and seeding the generator reproduces a run.
    """

    def draw_seed(self) -> int:
        """One draw from torch's default generator."""
        return int(torch.randint(2**62, (), dtype=torch.int64))

    @contextlib.contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Default generator seeded with `seed`, and afterwards as it was."""
        generator = torch.default_generator
        before = generator.get_state()
        generator.manual_seed(seed)
        try:
            yield
        finally:
            generator.set_state(before)


class EmulatedCapture(_HostGenerator):
    """Records an iteration on the CPU and replays the tape. Costs: every intermediate result is kept."""

    name = "emulate"

    def __init__(self) -> None:
        self.stream = DeferredStream()

    def capture(self, iteration: Callable[[], None], recorder: Callable[..., Recorder]) -> Graph:
        """Run `iteration` once under the recorder and return its tape."""
        tape = Tape()
        with recorder(tape).watch():
            iteration()
        return tape


class Uncaptured(_HostGenerator):
    """Runs the iteration's Python at every step: what a capture is compared with."""

    name = "off"

    def __init__(self) -> None:
        self.stream = ImmediateStream()

    def capture(self, iteration: Callable[[], None], recorder: Callable[..., Recorder]) -> Graph:
        """Return `iteration` itself as the graph."""
        return _PythonGraph(iteration)


class _PythonGraph:
    owned_bytes = 0

    def __init__(self, iteration: Callable[[], None]) -> None:
        self.replay = iteration
