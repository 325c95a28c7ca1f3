"""Capture without a GPU: a tape of operations, replayed late, as unforgiving as a CUDA graph."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterable

import torch

from staticmoe.capture.interface import Graph, Upload
from staticmoe.capture.recorder import Recorder
from staticmoe.capture.seeding import StepSeeds
from staticmoe.capture.tape import Tape


class DeferredStream:
    """Work that runs only when somebody waits for it, so that launched steps really are in flight.

    Work that raises loses all later work of the queue with it, as a faulting GPU stream does; the error
    comes out of the wait.

    Attributes:
        overtakes: see `Stream`; not where work no longer waits to be asked for.
    """

    def __init__(self) -> None:
        self.overtakes = True
        self._failure: Exception | None = None
        self._queue: collections.deque[tuple[int, Callable[[], None], Callable[[], None] | None]] = collections.deque()
        self._launched = 0
        self._done = 0

    def launch(self, work: Callable[[], None], copy_out: Callable[[], None] | None = None) -> int:
        """Append `work` and `copy_out`; nothing runs yet, unless it has to keep up."""
        self._launched += 1
        self._queue.append((self._launched, work, copy_out))
        if not self.overtakes:
            try:
                self._run_until(self._launched)
            except Exception as error:
                self._failure = error
        return self._launched

    def keep_up(self) -> None:
        """From here on run work as it is launched.

        For work that meets other ranks: one whose host stands in a barrier of the user's would never get to its work,
        and keep a rank that asks for a result of the same step from ever coming to that barrier. A GPU works on.
        """
        self.overtakes = False

    def upload(self) -> Upload | None:
        """None: there is no other memory."""
        return None

    def is_done(self, ticket: int) -> bool:
        """Whether `ticket` has run."""
        return ticket <= self._done

    def wait(self, ticket: int, seconds: float | None = None) -> None:
        """Run everything up to `ticket`."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        self._run_until(ticket)

    def _run_until(self, ticket: int) -> None:
        while self._queue and self._queue[0][0] <= ticket:
            number, work, copy_out = self._queue.popleft()
            try:
                work()
                if copy_out is not None:
                    copy_out()
            except BaseException:
                self._queue.clear()
                self._done = self._launched
                raise
            self._done = number


class EmulatedCapture:
    """Records an iteration on the CPU and replays the tape. Costs: every intermediate result is kept."""

    name = "emulate"

    def __init__(self) -> None:
        self.stream = DeferredStream()
        self.seeds = StepSeeds(torch.device("cpu"))

    def pool_bytes(self) -> int:
        """0: there is no pool that could grow."""
        return 0

    def prepare(self, parameters: Iterable[torch.Tensor]) -> None:
        """Nothing to prepare."""

    def warming_up(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to prepare."""
        return contextlib.nullcontext()

    def capture(self, iteration: Callable[[], None], recorder: Callable[..., Recorder]) -> Graph:
        """Run `iteration` once under the recorder and return its tape."""
        tape = Tape()
        with recorder(tape).watch():
            iteration()
        if tape.has_collectives:
            self.stream.keep_up()
        return tape
