"""The programs of one kind, training or evaluation: one for each batch shape, built anew when what they froze changes."""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable
from typing import Any

from staticmoe.errors import BatchError, ReplayError
from staticmoe.runner.inputs import BatchShape
from staticmoe.runner.program import Program
from staticmoe.runner.watch import HostState, OptimizerState, cause_of

log = logging.getLogger(__name__)

_RECAPTURES_PER_CAUSE = 3


class Family:
    """Programs by batch shape.

    Args:
        kind: "training" or "evaluation", for messages.
        make: makes and builds the program of a shape.
        state: takes the Python state that the programs freeze.
        options: takes the optimizer's options, or None for an evaluation.
    """

    def __init__(
        self,
        kind: str,
        make: Callable[[BatchShape], Program],
        state: Callable[[], HostState],
        options: Callable[[], OptimizerState] | None,
    ) -> None:
        self._kind = kind
        self._make = make
        self._take_state = state
        self._take_options = options
        self._programs: list[tuple[BatchShape, Program | None]] = []
        self._state: HostState | None = None
        self._options: OptimizerState | None = None
        self._causes: collections.Counter[str] = collections.Counter()

    @property
    def programs(self) -> list[Program]:
        """Those that are built."""
        return [program for _, program in self._programs if program is not None]

    def declare(self, shape: BatchShape) -> Program:
        """Add a batch shape and build its program."""
        program = self._make(shape)
        self._programs.append((shape, program))
        if self._state is None:
            self._remember()
        return program

    def find(self, batch: Any) -> tuple[BatchShape, int] | None:
        """The declared shape that `batch` has and its number, or None."""
        for number, (shape, _) in enumerate(self._programs):
            if shape.mismatch(batch) is None:
                return shape, number
        return None

    def shape_of(self, batch: Any) -> tuple[BatchShape, int]:
        """The declared shape that `batch` has and its number.

        Raises:
            BatchError: none; compares with the first.
        """
        found = self.find(batch)
        if found is None:
            self._programs[0][0].check(batch)
            raise BatchError("batch: fits no declared shape")
        return found

    def program(self, number: int) -> Program:
        """The program of shape `number`, built if a change has dropped it."""
        shape, program = self._programs[number]
        if program is None:
            program = self._make(shape)
            self._programs[number] = (shape, program)
            if self._state is None:
                self._remember()
        return program

    def drop(self) -> None:
        """Forget all graphs; the next use of a shape builds it again."""
        self._programs = [(shape, None) for shape, _ in self._programs]
        self._state = self._options = None

    def changes(self) -> list[str]:
        """What the graphs froze and is different now."""
        if self._options is not None:
            self._options.check()
        found = self._state.changes() if self._state is not None else []
        return found + (self._options.changes() if self._options is not None else [])

    def follow(self, changes: list[str]) -> None:
        """Drop the graphs because of `changes`.

        Raises:
            ReplayError: the same thing has changed too often: capturing each time costs more than it saves.
        """
        for change in changes:
            cause = cause_of(change)
            self._causes[cause] += 1
            if self._causes[cause] >= _RECAPTURES_PER_CAUSE:
                self._causes[cause] = 0
                raise ReplayError(
                    f"{cause} has changed {_RECAPTURES_PER_CAUSE} times, and each change captures the {self._kind} graph "
                    f"again (last: {change}); put the value into a buffer or runner.scalars, or use capture='off'"
                )
        log.warning("recapturing the %s graph: %s", self._kind, "; ".join(changes[:5]))
        self.drop()

    def _remember(self) -> None:
        self._state = self._take_state()
        self._options = self._take_options() if self._take_options is not None else None


def timed(build: Callable[[], None], what: str) -> None:
    """Run `build` and log how long it took."""
    start = time.perf_counter()
    build()
    log.info("%s in %.2f s", what, time.perf_counter() - start)
