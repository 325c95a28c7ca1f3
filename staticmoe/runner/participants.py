"""How a layer takes part in a step: the one protocol between the runner and what the model is made of.

The runner discovers participants among the model's modules by the shape of this protocol and knows
nothing else about them. A participant declares integer record fields, adds to them while its forward
runs, hands over auxiliary losses, and updates state of its own only in `commit_step`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from staticmoe.config import CapacityPolicy


@dataclasses.dataclass(frozen=True)
class LossTerm:
    """A loss that a participant adds to the user's.

    Attributes:
        name: key under which the runner reports the sum over participants, before the coefficient.
        value: fp32 scalar, differentiable.
        coefficient: factor under which the runner adds it to the loss.
    """

    name: str
    value: Tensor
    coefficient: float


class StepBinding:
    """What the runner lends a participant while it is wrapped.

    Attributes:
        fields: record field name -> int64 accumulator of the declared shape. Zeroed by the runner at the
            start of each step, added to over its micro-batches, copied into the record at its end.
        reasons: int64 0-dim accumulator of `Reason` bits.
        doomed: fp32 0-dim, not 0 where the running step will not commit and will be run again: nobody looks at what
            it computes, so that its work may be left out.
        dooming: `Reason` bits that doom a step; the runner sets them. 0 in an evaluation.
        capacity: the capacity in force; the runner swaps it between training and evaluation.
        facts: host-side integers that the participant tells about its buffers and its work in its forward, such as
            "capacity_rows", "can_overflow" (0 or 1), "num_experts", "top_k", "tokens" and "expert_weights". They are
            constants of a capture.
        token_mask: bool tensor of the current micro-batch, True for real tokens, or None.
        active: whether an iteration is running. Outside of one, as when the user generates between two steps, a layer
            is a layer without a runner: dropless, and nothing is counted.
        training: whether the current iteration is a training step.
        entered: how many times a forward has reached the participant since the runner last cleared it.
        main_grads: parameter -> buffer of its shape that takes its gradient in the backward, for all of the
            participant's `accumulated_parameters` or for none; fp32, or fp64 for fp64.
        seen: 0-dim zero of those parameters' dtype, whose expansion autograd gets as their gradient.
        adding: add to what the buffers hold; False in the first micro-batch, which stores.
    """

    def __init__(self, fields: Mapping[str, Tensor], reasons: Tensor, doomed: Tensor, capacity: CapacityPolicy) -> None:
        self.fields = dict(fields)
        self.reasons = reasons
        self.doomed = doomed
        self.dooming = 0
        self.capacity = capacity
        self.facts: dict[str, int] = {}
        self.token_mask: Tensor | None = None
        self.active = True
        self.training = True
        self.entered = 0
        self.main_grads: Mapping[nn.Parameter, Tensor] = {}
        self.seen = doomed
        self.adding = False
        self._losses: list[LossTerm] = []

    @staticmethod
    def in_recompute() -> bool:
        """True inside a backward pass, where activation checkpointing runs a forward a second time."""
        return torch._C._current_graph_task_id() != -1

    def add(self, name: str, value: Tensor) -> None:
        """Add integers to the record field `name`; a recomputed forward adds nothing."""
        if not self.in_recompute():
            self.fields[name].add_(value)

    def flag(self, reason: int, condition: Tensor) -> None:
        """Set `reason` for this step where the bool 0-dim tensor `condition` is true."""
        if not self.in_recompute():
            # Each layer does this in each step: as few launches as there can be.
            self.reasons.bitwise_or_(condition * int(reason))
            if self.dooming & reason:
                self.doomed.masked_fill_(condition, 1.0)

    def add_loss(self, name: str, value: Tensor, coefficient: float) -> None:
        """Hand over an auxiliary loss of the current micro-batch; a recomputed forward hands over nothing."""
        if not self.in_recompute():
            self._losses.append(LossTerm(name, value, coefficient))

    def take_losses(self) -> Sequence[LossTerm]:
        """Return the losses handed over since the last call, and forget them."""
        losses, self._losses = self._losses, []
        return losses


@runtime_checkable
class GradientAccumulator(Protocol):
    """A participant whose backward can add weight gradients into buffers that the runner lends it."""

    def accumulated_parameters(self) -> Sequence[nn.Parameter]:
        """Return those parameters, of one dtype."""


@runtime_checkable
class StepParticipant(Protocol):
    """A module that takes part in the step. Structural: no base class to inherit."""

    def step_fields(self) -> Mapping[str, tuple[int, ...]]:
        """Return record field name -> shape; every field is int64."""

    def bind_step(self, binding: StepBinding | None) -> None:
        """Take the runner's binding, or give it up (None). A second binding is refused."""

    def commit_step(self, veto: Tensor) -> None:
        """Update own state from `fields`; `veto` is an fp32 0-dim tensor, 1 to change nothing."""


def scratch_fields(participants: Mapping[str, StepParticipant], device: torch.device) -> dict[str, dict[str, Tensor]]:
    """Tensors for the participants' fields while no record exists."""
    return {
        name: {
            field: torch.zeros(shape, dtype=torch.int64, device=device)
            for field, shape in participant.step_fields().items()
        }
        for name, participant in participants.items()
    }


# Participants beside modules of somebody else's, on which there is no place for the protocol.
_beside: WeakKeyDictionary[nn.Module, StepParticipant] = WeakKeyDictionary()


def stand_beside(module: nn.Module, participant: StepParticipant) -> None:
    """Let `participant` take part for `module`; it must not keep the module alive."""
    _beside[module] = participant


def participant_of(module: nn.Module) -> StepParticipant | None:
    """The module itself if it takes part in the step, or who stands beside it."""
    return module if isinstance(module, StepParticipant) else _beside.get(module)


class _Thread(threading.local):
    """How many `uncompiled` scopes this thread is in."""

    depth = 0


_thread = _Thread()


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Within: dense regions run as they are, because a participant looks at what they do, or changes it."""
    _thread.depth += 1
    try:
        yield
    finally:
        _thread.depth -= 1


def runs_uncompiled() -> bool:
    """Whether this thread is within `uncompiled`."""
    return _thread.depth > 0
