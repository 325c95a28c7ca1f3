"""AdamW whose hyper-parameters are device values: any of them may change at every step of a captured run.

Letters: G parameter groups, W = 5 hyper-parameters of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from staticmoe.errors import OptimizerError
from staticmoe.ops.adamw import adamw_
from staticmoe.reference.adamw import adamw_state_dtype

# What torch.optim.AdamW keeps in a group besides; here, so that each loads the other's state dict.
_TORCH_OPTIONS: dict[str, Any] = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
_MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW(Optimizer):
    """torch's AdamW with fp32 moments, every hyper-parameter on the device, and a veto inside the update.

    State dicts go both ways between this class and `torch.optim.AdamW`. By itself it is an ordinary optimizer; under
    a runner a change of lr, betas, eps or weight_decay takes effect at the next step and captures nothing anew.

    Args:
        params: parameters or groups, fp64, fp32, bf16 or fp16.
        lr: learning rate.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decoupled.
        amsgrad, maximize: accepted as False only.

    Raises:
        OptimizerError: a value out of range, or an option or parameter that this class does not have.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        own = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**own, **_TORCH_OPTIONS, "amsgrad": amsgrad, "maximize": maximize})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, checked.

        Raises:
            OptimizerError: as at construction; the group is not added.
        """
        super().add_param_group(param_group)
        try:
            _check_group(len(self.param_groups) - 1, self.param_groups[-1])
            for parameter in self.param_groups[-1]["params"]:
                if not parameter.is_floating_point():
                    raise OptimizerError(f"AdamW: expected floating parameters, got one of {parameter.dtype}")
        except OptimizerError:
            self.param_groups.pop()
            raise

    def hyper_parameters(self) -> list[list[float | Tensor]]:
        """[G][W] as the groups say now, in the order of `staticmoe.reference.adamw.ADAMW_COLUMNS`.

        Raises:
            OptimizerError: a group has got an option that this class does not have.
        """
        rows: list[list[float | Tensor]] = []
        for number, group in enumerate(self.param_groups):
            _check_options(number, group)
            beta1, beta2 = group["betas"]
            # From the Python float, before anything is rounded to fp32.
            rows.append([group["lr"], 1 - beta1, 1 - beta2, group["eps"], group["weight_decay"]])
        return rows

    def create_state(self, parameter: Tensor) -> None:
        """Create the state of a parameter that has none."""
        state = self.state[parameter]
        if state:
            return
        dtype = adamw_state_dtype(parameter.dtype)
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for name in _MOMENTS:
            state[name] = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)

    def update(self, work: Sequence[tuple[int, Tensor, Tensor]], table: Tensor, veto: Tensor) -> None:
        """Apply gradients where `veto` is 0; parameters, moments and step counts are bitwise as before elsewhere.

        Shapes:
            work: (group, parameter with state, gradient); table [G, W] fp32; veto fp32 0-dim, exactly 0 or 1.
        Graph-safe: yes, if every parameter has its state.
        """
        if not work:
            return
        states = [self.state[parameter] for _, parameter, _ in work]
        # Before the updates, which read it; one kernel for all. A list, because the form with one tensor for all asks
        # the host for its value on a CPU.
        torch._foreach_add_([state["step"] for state in states], [1 - veto] * len(states))
        rows = table.unbind()
        adamw_(
            [parameter for _, parameter, _ in work],
            [gradient for _, _, gradient in work],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["step"] for state in states],
            [rows[group] for group, _, _ in work],
            veto,
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` returned.

        Graph-safe: no, the hyper-parameters come from the host; a runner stages them and calls `update`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rows = torch.tensor(self.hyper_parameters(), dtype=torch.float32)
        work: dict[torch.device, list[tuple[int, Tensor, Tensor]]] = {}
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                if gradient.layout != torch.strided:
                    raise OptimizerError(f"AdamW: expected a dense gradient, got {gradient.layout}; use sparse=False")
                self.create_state(parameter)
                work.setdefault(parameter.device, []).append((number, parameter, gradient))
        for device, items in work.items():
            self.update(items, rows.to(device), torch.zeros((), device=device))
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of torch.optim.AdamW; moments keep all their bits.

        Raises:
            OptimizerError: it has an option that this class does not have; nothing is loaded then.
        """
        for number, group in enumerate(state_dict["param_groups"]):
            _check_options(number, group)
        given: list[Mapping[str, Any]] = []
        # Last of the pre-hooks: sees the dict as the user's hooks made it.
        handle = self.register_load_state_dict_pre_hook(lambda _, loaded: given.append(loaded))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        self._load_exactly(given[0])

    @torch.no_grad()
    def _load_exactly(self, state_dict: Mapping[str, Any]) -> None:
        """Copy the moments once more: torch rounds them to the dtype of the parameter on the way in."""
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for name in _MOMENTS:
                if name in state_dict["state"].get(number, {}):
                    self.state[parameter][name].copy_(state_dict["state"][number][name])

    @torch.no_grad()
    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a state: torch's step counts may be numbers or on the host, its moments of another dtype."""
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in _TORCH_OPTIONS.items():
                group.setdefault(key, value)
            group["decoupled_weight_decay"] = True
            for parameter in group["params"]:
                held = self.state.get(parameter)
                if not held:
                    continue
                held["step"] = torch.as_tensor(held["step"], dtype=torch.float32).to(parameter.device, copy=True)
                dtype = adamw_state_dtype(parameter.dtype)
                for name in _MOMENTS:
                    target = torch.empty_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
                    held[name] = target.copy_(held[name])


def _check_options(number: int, group: Mapping[str, Any]) -> None:
    for key in ("amsgrad", "maximize", "differentiable"):
        if group.get(key):
            raise OptimizerError(
                f"AdamW group {number}: expected {key}=False, got {key}=True, which staticmoe.optim.AdamW does not "
                "have; use torch.optim.AdamW"
            )


def _check_group(number: int, group: Mapping[str, Any]) -> None:
    _check_options(number, group)
    values = dict(zip(("beta1", "beta2"), group["betas"], strict=True))
    for name, value in values.items():
        if not 0 <= value < 1:
            raise OptimizerError(f"AdamW group {number}: expected {name} in [0, 1), got {value}")
    for name in ("lr", "eps", "weight_decay"):
        if not group[name] >= 0:
            raise OptimizerError(f"AdamW group {number}: expected {name} >= 0, got {group[name]}")
