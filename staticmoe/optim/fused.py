"""torch's optimizers that look at a veto on the device by themselves: their fused forms."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from staticmoe.errors import OptimizerError
from staticmoe.optim.adapter import OptimizerAdapter

FUSED = (Adam, AdamW, SGD, Adagrad)


def _probe_fused_adagrad(parameter: Tensor) -> None:
    """Ask torch itself whether its fused Adagrad runs where `parameter` is."""
    probe = torch.zeros(1, device=parameter.device, requires_grad=True)
    probe.grad = torch.zeros_like(probe)
    try:
        Adagrad([probe], fused=True).step()
    except RuntimeError as error:
        raise OptimizerError(
            "optimizer Adagrad: expected a fused step for the GPU, got none in this torch; use Adam, AdamW or SGD"
        ) from error


class FusedAdapter(OptimizerAdapter):
    """torch's Adam, AdamW, SGD and Adagrad through their fused step, which honours a device veto.

    While an iteration runs, the groups are switched to `fused=True` and a device learning rate and the
    optimizer gets `found_inf`; afterwards all of it is as the user left it.

    Args:
        optimizer: the user's, built from the model's parameters.

    Raises:
        OptimizerError: with an option that the fused step lacks.
    """

    width = 1
    staged = frozenset({"lr"})

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._check_options()
        if type(optimizer) is Adagrad and any(parameter.is_cuda for parameter in self.parameters):
            _probe_fused_adagrad(self.parameters[0])

    def _check_options(self) -> None:
        for number, group in enumerate(self.optimizer.param_groups):
            if group.get("differentiable"):
                raise OptimizerError(
                    f"optimizer group {number}: differentiable=True has no fused step; set it to False"
                )
            if (
                group.get("dampening")
                and group.get("momentum")
                and not all(map(self.optimizer.state.get, group["params"]))
            ):
                raise OptimizerError(
                    f"optimizer group {number}: dampening={group['dampening']} makes the first step differ from the "
                    "others, which one graph cannot hold; use dampening=0"
                )

    def _create(self, parameter: Tensor, group: dict[str, Any]) -> None:
        if isinstance(self.optimizer, SGD) and not group["momentum"]:
            return
        state = self.optimizer.state[parameter]
        if isinstance(self.optimizer, (Adam, AdamW)) and not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            names = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if group["amsgrad"] else [])
            for name in names:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        elif isinstance(self.optimizer, SGD) and state.get("momentum_buffer") is None:
            # momentum * 0 + gradient is the gradient: bitwise what torch's first step stores.
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        if isinstance(state.get("step"), Tensor) and state["step"].device != parameter.device:
            state["step"] = state["step"].to(parameter.device)

    def hyper_parameters(self) -> list[list[float | Tensor]]:
        """[G][1]: the learning rate of each group."""
        return [[group["lr"]] for group in self.optimizer.param_groups]

    def step(self, gradients: list[Tensor], table: Tensor, veto: Tensor) -> None:
        """Apply `gradients` where `veto` is 0; see `OptimizerAdapter.step`."""
        with self._inside(gradients, list(table[:, 0].unbind()), veto):
            self.optimizer.step()

    @contextlib.contextmanager
    def _inside(self, gradients: list[Tensor], learning_rates: list[Tensor], veto: Tensor) -> Iterator[None]:
        optimizer = self.optimizer
        options: list[dict[str, Any]] = [
            {key: group[key] for key in ("lr", "fused", "foreach", "capturable") if key in group}
            for group in optimizer.param_groups
        ]
        try:
            for group, rate in zip(optimizer.param_groups, learning_rates, strict=True):
                group.update({"lr": rate, "fused": True, "foreach": False})
                if "capturable" in group:
                    group["capturable"] = veto.is_cuda
            optimizer.found_inf = veto  # type: ignore[attr-defined]
            with self.lending(gradients):
                yield
        finally:
            for group, option in zip(optimizer.param_groups, options, strict=True):
                group.update(option)
            if hasattr(optimizer, "found_inf"):
                del optimizer.found_inf
