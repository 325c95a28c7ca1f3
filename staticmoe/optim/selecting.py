"""Optimizers of torch that cannot skip a step on the device: they step, and a vetoed step is undone.

Before the step, parameters and optimizer state are copied; behind it the copies are put back where the veto is set.
The price is that memory, named in the log, and two passes over it.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import ASGD, Adadelta, Adamax, NAdam, Optimizer, RAdam, RMSprop, Rprop

from staticmoe.errors import OptimizerError
from staticmoe.optim.adapter import OptimizerAdapter

log = logging.getLogger(__name__)

SELECTABLE = (RMSprop, NAdam, RAdam, Adamax, Adadelta, Rprop, ASGD)
# Without capturable=True, which torch has on a GPU alone, these read their step count on the host.
_READ_ON_HOST = (NAdam, RAdam, Adamax, ASGD)


class SelectAdapter(OptimizerAdapter):
    """torch's RMSprop, NAdam, RAdam, Adamax, Adadelta, Rprop and ASGD in their capturable form.

    Every hyper-parameter, the learning rate included, is part of the graph: a change recaptures. While an iteration
    runs the groups are `capturable=True` where torch has that (on a GPU); afterwards they are as the user left them.

    Args:
        optimizer: the user's, built from the model's parameters.
        replayed: whether its step will be replayed, not run.

    Raises:
        OptimizerError: an option that cannot be captured, or no capturable form where the parameters are.
    """

    width = 1
    staged = frozenset()

    def __init__(self, optimizer: Optimizer, *, replayed: bool) -> None:
        super().__init__(optimizer)
        if replayed and isinstance(optimizer, _READ_ON_HOST) and not self.parameters[0].is_cuda:
            raise OptimizerError(
                f"optimizer {type(optimizer).__name__}: expected parameters on a GPU, where torch can capture it; got "
                "them on a CPU, where its step reads its count on the host; use staticmoe.optim.AdamW, "
                "capture_scope='forward_backward' or capture='off'"
            )
        for number, group in enumerate(optimizer.param_groups):
            if group.get("differentiable"):
                raise OptimizerError(f"optimizer group {number}: expected differentiable=False, got True; set it so")
            if isinstance(group["lr"], Tensor):
                raise OptimizerError(
                    f"optimizer group {number}: expected lr as a float, got a tensor, which {type(optimizer).__name__} "
                    "reads on the host; pass a float, or use staticmoe.optim.AdamW"
                )

    def create_state(self) -> None:
        """Let torch itself create the state that the first step would create."""
        with self._inside([torch.zeros_like(parameter) for parameter in self.parameters]):
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    self._create(parameter, group)
        size = sum(t.numel() * t.element_size() for t in self._live())
        log.info(
            "%s: a vetoed step is undone from copies of parameters and optimizer state, %.1f MiB in the graph",
            type(self.optimizer).__name__,
            size / 2**20,
        )

    def _create(self, parameter: Tensor, group: dict[str, Any]) -> None:
        if parameter.grad is None:
            return
        initialize = self.optimizer._init_group  # type: ignore[attr-defined]
        lists: list[list[Tensor]] = [[] for _ in list(inspect.signature(initialize).parameters)[1:]]
        initialize({**group, "params": [parameter]}, *lists)
        state = self.optimizer.state[parameter]
        for key, value in state.items():
            # Where earlier eager steps kept a count on the host.
            if isinstance(value, Tensor) and value.device != parameter.device:
                state[key] = value.to(parameter.device)

    def hyper_parameters(self) -> list[list[float | Tensor]]:
        """[G][1]: the learning rate of each group, for the record."""
        return [[group["lr"]] for group in self.optimizer.param_groups]

    def step(self, gradients: list[Tensor], table: Tensor, veto: Tensor) -> None:
        """Apply `gradients` where `veto` is 0; see `OptimizerAdapter.step`."""
        saved = [(tensor, tensor.clone()) for tensor in self._live()]
        with self._inside(gradients):
            self.optimizer.step()
        vetoed = veto > 0
        with torch.no_grad():
            for live, before in saved:
                live.copy_(torch.where(vetoed, before, live))

    def _live(self) -> list[Tensor]:
        """What a step changes. Not a frozen parameter's state, which may hold a step count on the host."""
        states = [self.optimizer.state.get(parameter, {}) for parameter in self.parameters]
        tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return [*(parameter.detach() for parameter in self.parameters), *tensors]

    @contextlib.contextmanager
    def _inside(self, gradients: list[Tensor]) -> Iterator[None]:
        groups, on_gpu = self.optimizer.param_groups, self.parameters[0].is_cuda
        options: list[dict[str, Any]] = [
            {key: group[key] for key in ("capturable", "foreach") if key in group} for group in groups
        ]
        try:
            for group in groups:
                if "capturable" in group:
                    group["capturable"] = on_gpu
                group["foreach"] = on_gpu
            with self.lending(gradients):
                yield
        finally:
            for group, option in zip(groups, options, strict=True):
                group.update(option)
