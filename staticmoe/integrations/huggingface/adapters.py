"""PEFT's adapters of the experts themselves (`target_parameters`), added in the rows.

In every forward PEFT puts the sum W + s·B·A in the place of a parameter. Each layer then keeps a weight's memory until
its backward, which makes a gradient of that size, and no graph can hold a parameter that is exchanged. Once a model is
prepared, x·Wᵀ + (x·Aᵀ)·(s·B)ᵀ is computed instead: W is read as it lies, and what is added has the rank's width.

PEFT's modules, parameters and names stay; under any other experts implementation its own way is taken.

Dimensions: E experts, r rank (of all active adapters together), A and B widths in and out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
# Rows of the two narrow products start at 16 bytes, which the kernels need.
_ALIGN_BYTES = 16

# Experts module -> parameter -> the wrapper that is in the middle of a forward and its active adapters.
_running: WeakKeyDictionary[nn.Module, dict[str, tuple[Any, list[str]]]] = WeakKeyDictionary()
_adapted: WeakSet[nn.Module] = WeakSet()


@dataclasses.dataclass(frozen=True)
class LowRank:
    """What is added to one weight, as two factors.

    Attributes:
        inner: [E,r,A].
        outer: [E,B,r], scaled.
    """

    inner: Tensor
    outer: Tensor


def add_in_rows(model: nn.Module, modules: Mapping[str, nn.Module], implementation: str) -> None:
    """Let PEFT's adapters of the weights of `modules` be added in the rows, while these use `implementation`."""
    served = {id(module) for module in modules.values()}
    wrappers: list[Any] = [module for module in model.modules() if is_wrapper(module)]
    for wrapper in wrappers:
        base = wrapper.get_base_layer()
        # A bias under an adapter is left to PEFT, which no capture can hold.
        if id(base) in served and wrapper.parameter_name in _WEIGHTS:
            # On the wrapper alone: PEFT's class is also that of models that are not ours.
            wrapper._activate_lora = functools.partial(_beside, wrapper, implementation)
            _adapted.add(base)


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is PEFT's wrapper around a parameter; told by name, because PEFT need not be there."""
    kind = type(module)
    return kind.__name__ == "ParamWrapper" and kind.__module__.startswith("peft.")


def is_adapted(module: nn.Module) -> bool:
    """Whether `add_in_rows` found adapters of the weights of `module`."""
    return module in _adapted


@contextlib.contextmanager
def _beside(wrapper: Any, implementation: str, active_adapters: list[str]) -> Iterator[None]:
    """In the place of `ParamWrapper._activate_lora`: say what is active, and leave the parameter where it is."""
    module = wrapper.get_base_layer()
    if module.config._experts_implementation != implementation:
        with type(wrapper)._activate_lora(wrapper, active_adapters):
            yield
        return
    held = _running.setdefault(module, {})
    held[wrapper.parameter_name] = (wrapper, [name for name in active_adapters if name in wrapper.lora_A])
    try:
        yield
    finally:
        del held[wrapper.parameter_name]


def has_running_adapters(module: nn.Module) -> bool:
    """Whether the forward that is running adds to a weight of `module`."""
    return any(names for _, names in _running.get(module, {}).values())


def adapters_of(module: Any, dtype: torch.dtype) -> dict[str, LowRank]:
    """What PEFT adds to the weights of `module` in the forward that is running, by parameter.

    Shapes: both factors in the layout [E,out,in] of the products, whatever that of the parameter.
    Graph-safe: yes; scalings are Python numbers, which a runner watches.
    """
    running = _running.get(module, {})
    return {name: _factors(*held, module, dtype) for name, held in running.items() if held[1]}


@contextlib.contextmanager
def as_peft_does(module: nn.Module) -> Iterator[None]:
    """Within: the sums in the parameters' places, for the module's own loop."""
    with contextlib.ExitStack() as stack:
        for wrapper, names in _running.get(module, {}).values():
            stack.enter_context(type(wrapper)._activate_lora(wrapper, names))
        yield


def _factors(wrapper: Any, names: list[str], module: Any, dtype: torch.dtype) -> LowRank:
    """The factors of the active adapters, side by side along the rank."""
    num_experts = wrapper.num_experts
    # PEFT before 0.19 takes any parameter for [E,in,out]: where that is wrong its A is of the outputs.
    straight = getattr(wrapper, "_did_swap_in_out_features", False) != module.is_transposed
    inner, outer = [], []
    for name in names:
        a, b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
        a = a.reshape(num_experts, -1, a.shape[1])
        b = b.reshape(b.shape[0], -1, num_experts).permute(2, 0, 1) * wrapper.scaling[name]
        inner.append((a if straight else b.transpose(1, 2)).to(dtype))
        outer.append((b if straight else a.transpose(1, 2)).to(dtype))
    rank = sum(factor.shape[1] for factor in inner)
    padding = -rank % (_ALIGN_BYTES // dtype.itemsize)
    return LowRank(F.pad(torch.cat(inner, 1), (0, 0, 0, padding)), F.pad(torch.cat(outer, 2), (0, padding)))
