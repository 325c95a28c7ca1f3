"""Any optimizer, stepped outside the graph: `capture_scope="forward_backward"`.

The graph ends with clipped gradients in memory that stays where it is. The host waits for the step's record, and
where the device did not veto it calls the user's own `optimizer.step()`: one wait a step is the price.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from staticmoe.errors import OptimizerError
from staticmoe.optim.adapter import OptimizerAdapter


class OutsideAdapter(OptimizerAdapter):
    """Leaves the gradients for `apply`. Step hooks, foreach forms and changing options work as ever.

    Args:
        optimizer: the user's; its `step` is called without a closure.

    Raises:
        OptimizerError: its `step` needs a closure, which would run the model outside the graph.
    """

    width = 1
    staged = None

    def __init__(self, optimizer: Optimizer) -> None:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise OptimizerError(
                f"optimizer {type(optimizer).__name__}: expected a step() without a closure, got one that needs it; it "
                "would run the model again outside the graph: use another optimizer"
            )
        self.optimizer = optimizer
        self._gradients: dict[torch.nn.Parameter, Tensor] = {}

    @property
    def state_tensors(self) -> dict[str, Tensor]:
        """Name -> gradient memory; the optimizer's state is not part of the graph."""
        return {f"gradient {number}": tensor for number, tensor in enumerate(self._gradients.values())}

    def create_state(self) -> None:
        """Allocate the gradients' memory."""
        for parameter in self.parameters:
            if parameter not in self._gradients:
                self._gradients[parameter] = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def _create(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """The optimizer creates its state in its own first step."""

    def hyper_parameters(self) -> list[list[float | Tensor]]:
        """[G][1]: the learning rate of each group for the record, 0 for an optimizer without one."""
        return [[group.get("lr", 0.0)] for group in self.optimizer.param_groups]

    def step(self, gradients: list[Tensor], table: Tensor, veto: Tensor) -> None:
        """Keep `gradients`; see `OptimizerAdapter.step`."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            self._gradients[parameter].copy_(gradient)

    def apply(self) -> None:
        """Step the optimizer on the kept gradients, on the user's stream."""
        with self.lending([self._gradients[parameter] for parameter in self.parameters]):
            self.optimizer.step()
