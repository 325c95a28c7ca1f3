"""What a captured iteration needs of an optimizer, whichever it is.

Letters: G parameter groups, W hyper-parameters of a group that are device values.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from staticmoe.errors import OptimizerError


class OptimizerAdapter(abc.ABC):
    """What an iteration needs of an optimizer: state before the first step, values to stage, a step with a veto.

    Args:
        optimizer: the user's, built from the model's parameters.

    Attributes:
        width: W, values of a group that are staged at every step; the first is the learning rate.
        staged: group keys of those values, whose change needs no new capture; None: no option is part of the graph.

    Raises:
        OptimizerError: it has hooks, which a replay would not call.
    """

    width: int
    staged: frozenset[str] | None

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        hooks: dict[str, Any] = {
            "step pre-hooks": optimizer._optimizer_step_pre_hooks,
            "step post-hooks": optimizer._optimizer_step_post_hooks,
        }
        for name, registered in hooks.items():
            if registered:
                raise OptimizerError(
                    f"optimizer: expected no {name}, got {len(registered)}; a replay would not call them"
                )

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Parameters that are trained, in group order."""
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]

    @property
    def state_tensors(self) -> dict[str, Tensor]:
        """Name -> tensor of the optimizer's state."""
        return {
            f"optimizer.state[{number}].{key}": value
            for number, state in enumerate(self.optimizer.state.values())
            for key, value in state.items()
            if isinstance(value, Tensor)
        }

    def create_state(self) -> None:
        """Create the state that the first step would create, so that the first step is like all others."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self._create(parameter, group)

    @contextlib.contextmanager
    def lending(self, gradients: list[Tensor]) -> Iterator[None]:
        """Let each of `parameters` hold its gradient, and a frozen one none; afterwards `grad` is as the user left it.

        A gradient of another dtype, summed in fp32 for a 16-bit parameter, is rounded to the parameter's.
        A frozen parameter may still hold a gradient of before it was frozen, which the optimizer would apply.
        """
        every = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        held = [parameter.grad for parameter in every]
        try:
            for parameter in every:
                parameter.grad = None
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient.to(parameter.dtype)
            yield
        finally:
            for parameter, before in zip(every, held, strict=True):
                parameter.grad = before

    @abc.abstractmethod
    def _create(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Create the state of one parameter where it is missing."""

    @abc.abstractmethod
    def hyper_parameters(self) -> list[list[float | Tensor]]:
        """[G][W] as the user set them; numbers that are not rounded yet."""

    @abc.abstractmethod
    def step(self, gradients: list[Tensor], table: Tensor, veto: Tensor) -> None:
        """Apply `gradients` where `veto` is 0.

        Shapes:
            gradients: one for each of `parameters`, of its dtype or fp32; table [G, W] fp32; veto: fp32 0-dim, exactly
            0 or 1.
        Graph-safe: yes; parameters, state and step counts change on the device only.
        """
