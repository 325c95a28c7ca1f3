"""Which layers of a model really use staticmoe's experts: transformers accepts the setting for any model.

Some families have experts that never look into the registry (Llama4, DBRX, JetMoE and others). For them the setting
is stored and has no effect, without a word.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from staticmoe.errors import ModelError
from staticmoe.integrations.huggingface.adapters import add_in_rows, as_peft_does
from staticmoe.integrations.huggingface.devices import make_on_device
from staticmoe.integrations.huggingface.experts import entries
from staticmoe.integrations.huggingface.participants import attach
from staticmoe.integrations.huggingface.registry import NAME

# Largest difference from the module's own loop, over the largest value: some roundings of the dtype.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


@dataclasses.dataclass(frozen=True)
class LayerCheck:
    """What `check` found in one layer.

    Attributes:
        calls: entries during the check.
        error: largest difference from the module's own loop on the same inputs, over the largest value.
    """

    calls: int
    error: float


def calls(model: nn.Module) -> dict[str, int]:
    """Return how often each experts module of `model` came to staticmoe so far, by its name.

    A layer that is entered again for a recomputed backward counts twice; the replay of a graph counts nothing.
    """
    return {name: entries.get(module, 0) for name, module in _layers(model).items()}


def check(model: nn.Module, batch: Any) -> dict[str, LayerCheck]:
    """Run one forward without gradient and refuse a model that staticmoe does not serve, or not rightly.

    Each layer's output is compared with that of the module's own loop; a router that cannot learn, because every weight
    is 1, is warned of. Modules are in eval mode meanwhile; modes and random state are afterwards as before.

    Args:
        batch: a mapping, passed as keywords, or anything else, passed as the one argument.
    Raises:
        ModelError: the family's experts never look into the registry; a layer uses another implementation, was not
            entered, or differs from its own loop.
    """
    layers = _served(model)
    before, errors = calls(model), dict.fromkeys(layers, 0.0)
    with contextlib.ExitStack() as stack:
        for name, module in layers.items():
            hook = module.register_forward_hook(_comparison(name, errors), with_kwargs=True)
            stack.callback(hook.remove)
        stack.enter_context(_quietly(model))
        model(**batch) if isinstance(batch, Mapping) else model(batch)
    found = {name: LayerCheck(count - before[name], errors[name]) for name, count in calls(model).items()}
    _refuse_unentered_or_wrong(model, layers, found)
    return found


def prepare(model: nn.Module, *, balancing_bias_rate: float = 0.0) -> None:
    """Let every experts layer of `model` take part in the steps of a `StaticMoERunner`; called again, set the rate.

    The layers then count under their module names, keep to the runner's capacity, and give no expert to tokens that
    the runner's `token_mask` takes out. Adapters that PEFT has put on their weights (`target_parameters`) are added in
    the rows, so that they can be captured; call this again after adding one. Constants that PhiMoE and MiniMax make on
    the host in each forward are made on the device.

    Args:
        balancing_bias_rate: by how much each commit moves a layer's `e_score_correction_bias` towards even loads, as
            DeepSeek-V3 was trained and transformers does not do; 0 leaves it as it is.
    Raises:
        ModelError: the family's experts never look into the registry, a layer uses another implementation, or has no
            such bias in fp32 to update.
    """
    layers = _served(model)
    attach(model, layers, balancing_bias_rate)
    add_in_rows(model, layers, NAME)
    make_on_device(model)


def _served(model: nn.Module) -> dict[str, Any]:
    """The experts modules by name, once all of them use staticmoe."""
    layers = _layers(model)
    _refuse_strangers(model, layers)
    others = {name: module.config._experts_implementation for name, module in layers.items()}
    others = {name: value for name, value in others.items() if value != NAME}
    if others:
        raise ModelError(
            f'{type(model).__name__}: expected experts_implementation="{NAME}" in every layer; got '
            f"{_listed(f'{name}: {value!r}' for name, value in others.items())}: "
            f'model.set_experts_implementation("{NAME}")'
        )
    return layers


def _layers(model: nn.Module) -> dict[str, Any]:
    """The modules that look into the registry, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(type(module), "_apply_gate") and all(hasattr(module, flag) for flag in _FLAGS)
    }


def _strangers(model: nn.Module, layers: Mapping[str, nn.Module]) -> list[str]:
    """Outermost modules that are experts by their class's name and do not look into the registry."""
    found: list[str] = []
    for name, module in model.named_modules():
        kind = type(module).__name__
        inside = any(not known or name == known or name.startswith(f"{known}.") for known in [*layers, *found])
        if "Expert" in kind and "Shared" not in kind and not inside:
            found.append(name)
    return found


def _refuse_strangers(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    strangers = _strangers(model, layers)
    if not strangers and layers:
        return
    kinds = sorted({type(model.get_submodule(name)).__name__ for name in strangers})
    got = f"{', '.join(kinds)} at {_listed(strangers)}, which never asks" if strangers else "none"
    raise ModelError(
        f"{type(model).__name__}: expected experts that ask transformers for their implementation; got {got}: this "
        f'family accepts experts_implementation="{NAME}" and ignores it. Use "eager", or a family with such experts '
        "(Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V2 and V3, GPT-OSS, GLM4-MoE, Granite-MoE, ...)"
    )


def _refuse_unentered_or_wrong(
    model: nn.Module, layers: Mapping[str, nn.Module], found: Mapping[str, LayerCheck]
) -> None:
    idle = [name for name, layer in found.items() if not layer.calls]
    if idle:
        raise ModelError(
            f"{type(model).__name__}: expected every experts layer to be entered in a forward; got none in "
            f"{_listed(idle)}: a replaced forward or kernel goes past them, or the batch does not reach them"
        )
    wrong = []
    for name, layer in found.items():
        dtype = next(p.dtype for p in layers[name].parameters())
        if not layer.error <= _TOLERANCE[dtype]:
            wrong.append(f"{name}: {layer.error:.1e} over {_TOLERANCE[dtype]:.0e} for {dtype}")
    if wrong:
        raise ModelError(
            f"{type(model).__name__}: expected the output of the experts' own loop; got a relative difference of "
            f'{_listed(wrong)}: use experts_implementation="eager" and report the family'
        )


def _comparison(name: str, errors: dict[str, float]) -> Any:
    """A forward hook that runs the module's own loop on the same inputs and keeps the largest relative difference."""

    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        _warn_of_constant_weights(name, kwargs.get("top_k_weights", args[-1]))
        with as_peft_does(module):
            want = inspect.unwrap(type(module).forward)(module, *args, **kwargs).double()
        difference = (output.double() - want).abs().max() / want.abs().max().clamp(min=1e-30)
        errors[name] = max(errors[name], float(torch.nan_to_num(difference, nan=float("inf"))))

    return compare


def _warn_of_constant_weights(name: str, weights: Tensor) -> None:
    """One expert a token, whose weight is divided by itself (Mixtral, GPT-OSS; others by `norm_topk_prob`)."""
    if weights.shape[1] == 1 and bool((weights == 1).all()):
        warnings.warn(
            f"{name}: with one expert a token and renormalised weights every weight is 1, and the router gets no "
            "gradient but from an auxiliary loss: use norm_topk_prob=False where the family has it, or "
            "output_router_logits=True",
            stacklevel=2,
        )


@contextlib.contextmanager
def _quietly(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradient; modes and random state are put back."""
    modes = [(module, module.training) for module in model.modules()]
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _listed(names: Any, most: int = 4) -> str:
    """The first few names, and how many more there are."""
    names = list(names)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
