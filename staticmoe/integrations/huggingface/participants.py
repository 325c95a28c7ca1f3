"""Experts modules of transformers models as participants of a runner's step: counts, capacity, token mask.

The modules are the user's and stay as they are: a participant stands beside each one.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from staticmoe.errors import ModelError
from staticmoe.integrations.huggingface.activation import activation_of
from staticmoe.moe.step import active, step_fields
from staticmoe.runner.participants import StepBinding, participant_of, stand_beside


class ExpertsStep:
    """Takes part in the step for one experts module.

    Attributes:
        binding: what a runner lends, or None.
    """

    def __init__(self, module: nn.Module) -> None:
        # Weakly, because this object lives as long as its module.
        self._module = weakref.ref(module)
        self.binding: StepBinding | None = None

    def step_fields(self) -> Mapping[str, tuple[int, ...]]:
        """Return the record fields: assignments before capacity and rows kept, per expert."""
        return step_fields(self._need_module().down_proj.shape[0])

    def bind_step(self, binding: StepBinding | None) -> None:
        """Take a runner's binding, or give it up (None).

        Raises:
            ModelError: another binding is held.
        """
        if binding is not None and self.binding is not None:
            raise ModelError(
                f"{type(self._need_module()).__name__}: expected experts without a runner; got some that a runner "
                "holds: close that runner"
            )
        self.binding = binding

    def commit_step(self, veto: Tensor) -> None:
        """The experts have no state of their own."""

    def accumulated_parameters(self) -> Sequence[nn.Parameter]:
        """Return the weights, where the whole block is one op that takes them as they lie; else none."""
        module = self._need_module()
        return (module.gate_up_proj, module.down_proj) if as_they_lie(module) else ()

    def _need_module(self) -> Any:
        module = self._module()
        assert module is not None, "the participant of a module is found through the module"
        return module


def as_they_lie(module: Any) -> bool:
    """Whether `functional.experts` takes the module's weights themselves, gate rows first, not views of them."""
    plain = module.has_gate and module.is_concatenated and not module.is_transposed
    return plain and not getattr(module, "has_post_expert_norm", False) and activation_of(module) is not None


def step_of(module: nn.Module) -> StepBinding | None:
    """What a runner lends the module at the moment; None outside of its iterations."""
    participant = participant_of(module)
    return active(participant.binding) if isinstance(participant, ExpertsStep) else None


def attach(modules: Mapping[str, nn.Module]) -> None:
    """Put a participant beside each module that has none."""
    for module in modules.values():
        if participant_of(module) is None:
            stand_beside(module, ExpertsStep(module))


def masked(binding: StepBinding | None, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Take the expert, and the weight, from every token that the runner's mask says is none.

    Shapes:
        ids [T,K] int; weights [T,K] float.
    Raises:
        ModelError: the mask has another number of tokens.
    Graph-safe: yes.
    """
    if binding is None or binding.token_mask is None:
        return ids, weights
    mask = binding.token_mask.reshape(-1)
    if mask.shape[0] != ids.shape[0]:
        raise ModelError(
            f"token_mask: expected one value for each of the {ids.shape[0]} tokens that reach the experts; got "
            f"{tuple(binding.token_mask.shape)}"
        )
    real = mask[:, None]
    return torch.where(real, ids, -1), torch.where(real, weights, 0.0)
