"""Running the user's optimizer inside a captured iteration, with a veto, and leaving it as it was.

Letters: G parameter groups, W hyper-parameters of a group that are device values.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from staticmoe.errors import OptimizerError
from staticmoe.optim import adamw
from staticmoe.reference.adamw import ADAMW_COLUMNS

_VETOABLE = (Adam, AdamW, SGD, Adagrad)


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
            gradients: one for each of `parameters`; table [G, W] fp32; veto: fp32 0-dim, exactly 0 or 1.
        Graph-safe: yes; parameters, state and step counts change on the device only.
        """


def adapter_for(optimizer: Optimizer) -> OptimizerAdapter:
    """Return the adapter that runs `optimizer`.

    Raises:
        OptimizerError: there is none, or the optimizer has an option that its adapter lacks.
    """
    # Exactly these types: a subclass may do anything in its step.
    if type(optimizer) is adamw.AdamW:
        return TableAdapter(optimizer)
    if type(optimizer) in _VETOABLE:
        return FusedAdapter(optimizer)
    names = ", ".join(kind.__name__ for kind in _VETOABLE)
    raise OptimizerError(
        f"optimizer {type(optimizer).__name__}: expected staticmoe.optim.AdamW or one of torch's {names}, whose fused "
        f"steps a device veto can skip; got {type(optimizer).__module__}.{type(optimizer).__qualname__}; with "
        "capture_scope='forward_backward' any optimizer steps outside the graph"
    )


class TableAdapter(OptimizerAdapter):
    """`staticmoe.optim.AdamW`, which reads all its hyper-parameters and the veto from the device by itself."""

    width = len(ADAMW_COLUMNS)
    staged = frozenset({"lr", "betas", "eps", "weight_decay"})

    def __init__(self, optimizer: adamw.AdamW) -> None:
        super().__init__(optimizer)
        self._adamw = optimizer

    def _create(self, parameter: Tensor, group: dict[str, Any]) -> None:
        self._adamw.create_state(parameter)

    def hyper_parameters(self) -> list[list[float | Tensor]]:
        """[G][5]; see `staticmoe.reference.adamw.ADAMW_COLUMNS`."""
        return self._adamw.hyper_parameters()

    def step(self, gradients: list[Tensor], table: Tensor, veto: Tensor) -> None:
        """Apply `gradients` where `veto` is 0; see `OptimizerAdapter.step`."""
        groups = [n for n, group in enumerate(self.optimizer.param_groups) for p in group["params"] if p.requires_grad]
        self._adamw.update(list(zip(groups, self.parameters, gradients, strict=True)), table, veto)


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
        parameters = self.parameters
        options: list[dict[str, Any]] = [
            {key: group[key] for key in ("lr", "fused", "foreach", "capturable") if key in group}
            for group in optimizer.param_groups
        ]
        held = [parameter.grad for parameter in parameters]
        try:
            for group, rate in zip(optimizer.param_groups, learning_rates, strict=True):
                group.update({"lr": rate, "fused": True, "foreach": False})
                if "capturable" in group:
                    group["capturable"] = veto.is_cuda
            optimizer.found_inf = veto  # type: ignore[attr-defined]
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            yield
        finally:
            for parameter, gradient_before in zip(parameters, held, strict=True):
                parameter.grad = gradient_before
            for group, option in zip(optimizer.param_groups, options, strict=True):
                group.update(option)
            if hasattr(optimizer, "found_inf"):
                del optimizer.found_inf
