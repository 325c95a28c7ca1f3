"""The graphs of one kind, training or evaluation: a ladder a batch shape, built anew when what they froze changes."""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from staticmoe.capture.change import Change
from staticmoe.errors import BatchError, ReplayError
from staticmoe.runner.batch_shape import BatchShape, describe, wrong_device
from staticmoe.runner.beside import Beside
from staticmoe.runner.ladder import Ladder
from staticmoe.runner.options import OptimizerState
from staticmoe.runner.program import Program
from staticmoe.runner.watch import HostState

log = logging.getLogger(__name__)

_RECAPTURES_PER_CAUSE = 3
_SHOWN = 5


class Family:
    """Ladders of programs by batch shape.

    Args:
        kind: "training" or "evaluation", for messages.
        device: of the model.
        shapes: of the micro-batches that the user declared; each is built at its first use.
        make: makes the ladder of a shape and builds what it must hold.
        state: takes the Python state that the programs freeze.
        options: takes the optimizer's options, or None for an evaluation.
        beside: what has changed beside the Python state.
        on_change: "recapture" or "raise".
    """

    def __init__(
        self,
        kind: str,
        device: torch.device,
        shapes: Sequence[BatchShape],
        make: Callable[[BatchShape], Ladder],
        state: Callable[[], HostState],
        options: Callable[[], OptimizerState] | None,
        beside: Beside,
        on_change: str,
    ) -> None:
        self._kind = kind
        self._device = device
        self._make = make
        self._take_state = state
        self._take_options = options
        self._beside = beside
        self._on_change = on_change
        self._ladders: list[tuple[BatchShape, Ladder | None]] = [(shape, None) for shape in shapes]
        self._state: HostState | None = None
        self._options: OptimizerState | None = None
        self._causes: collections.Counter[str] = collections.Counter()

    @property
    def programs(self) -> list[Program]:
        """Those that are built."""
        return [program for _, ladder in self._ladders if ladder is not None for program in ladder.programs]

    def accept(self, batches: Sequence[Any]) -> tuple[int, list[list[Any]]]:
        """Number of the declared shape that all of `batches` have, and their values in leaf order.

        Raises:
            BatchError: they have none, and compares with each; or a tensor lies on another device than the model.
        """
        described = [describe(batch) for batch in batches]
        elsewhere = next(filter(None, (wrong_device(leaves, self._device) for leaves, _, _ in described)), None)
        if elsewhere is not None:
            raise BatchError(f"{elsewhere}; move it")
        problems = []
        for number, (shape, _) in enumerate(self._ladders):
            found = (shape.mismatch(b, leaves, spec) for b, (leaves, _, spec) in zip(batches, described, strict=True))
            problem = next(filter(None, found), None)
            if problem is None:
                return number, [values for _, values, _ in described]
            problems.append(problem)
        raise BatchError(
            f"{'; or '.join(problems)}; pad the batch to a captured shape, or declare its shape in example_batch"
        )

    def ladder(self, number: int) -> Ladder:
        """The ladder of shape `number`, built now if it is not there or a change has dropped it."""
        shape, ladder = self._ladders[number]
        if ladder is None:
            ladder = self._make(shape)
            self._ladders[number] = (shape, ladder)
            if self._state is None:
                self._remember()
        return ladder

    def drop(self) -> None:
        """Forget all graphs; the next use of a shape builds it again."""
        for program in self.programs:
            program.retire()
        self._ladders = [(shape, None) for shape, _ in self._ladders]
        self._state = self._options = None

    def changes(self) -> list[Change]:
        """What the graphs froze and is different now."""
        found = self._state.changes() + self._beside.changes() if self._state is not None else []
        if self._options is None:
            return found
        self._options.check_groups()
        if found:
            self._options.check_members()
        return found + self._options.changes()

    def follow(self, changes: Sequence[Change]) -> None:
        """Drop the graphs because of `changes`.

        Raises:
            ReplayError: the same thing has changed too often: capturing each time costs more than it saves; or changes
                are to be raised, and the graphs stay.
        """
        if self._on_change == "raise":
            raise ReplayError(
                f"the {self._kind} graph holds {len(changes)} things that have changed: {_words(changes)}; put them "
                "back, or call runner.recapture() to train on with them (RunnerConfig(on_change='raise'))"
            )
        for cause, change in {change.cause: change for change in changes}.items():
            self._causes[cause] += 1
            if self._causes[cause] >= _RECAPTURES_PER_CAUSE:
                self._causes[cause] = 0
                raise ReplayError(
                    f"{cause} has changed {_RECAPTURES_PER_CAUSE} times, and each change captures the {self._kind} "
                    f"graph again (last: {change}); put the value into a buffer or runner.scalars, or use capture='off'"
                )
        log.warning("recapturing the %s graph: %s", self._kind, _words(changes))
        self.drop()

    def _remember(self) -> None:
        self._state = self._take_state()
        self._options = self._take_options() if self._take_options is not None else None


def _words(changes: Sequence[Change]) -> str:
    more = f"; and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
    return "; ".join(map(str, changes[:_SHOWN])) + more
