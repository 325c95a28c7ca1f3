"""What a runner takes in: checks of what it is given before anything is touched, each with its mend; and defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from staticmoe.capture.dynamo import is_compiled
from staticmoe.capture.holders import plain
from staticmoe.config import RunnerConfig
from staticmoe.errors import ConfigError, ModelError, OptimizerError
from staticmoe.runner.iteration import TokenMask
from staticmoe.runner.participants import StepParticipant, participant_of

# Names, not types: importing the distributed wrappers to look for them costs a second.
_WRAPPERS = {
    "DistributedDataParallel": "a DistributedDataParallel model; pass model.module, and process_group= to the runner",
    "DataParallel": "a DataParallel model; pass model.module",
    "FullyShardedDataParallel": "an FSDP model; pass the model unsharded (sharding is not supported yet)",
    "FSDPModule": "an FSDP2 model; pass the model unsharded (sharding is not supported yet)",
}


def admit_model(model: object) -> torch.device:
    """Return the one device of `model`.

    Raises:
        ModelError: not a module, wrapped or compiled, on the meta device, or on several devices.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        if is_compiled(module) and (not name or any(participant_of(part) is not None for part in module.modules())):
            what = f"'{name}', compiled with layers in it that take part in the step" if name else "a compiled model"
            raise ModelError(
                f"model: expected compiled code only where nothing takes part in the step, got {what}; pass it as it "
                "was, and RunnerConfig(compile='blocks') compiles what can be, or compile parts without such layers"
            )
        for kind in type(module).__mro__:
            if kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch."):
                raise ModelError(f"model: expected a plain module, got {_WRAPPERS[kind.__name__]}")
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    devices = {tensor.device for tensor in tensors.values()}
    empty = [name for name, tensor in tensors.items() if tensor.is_meta]
    if empty:
        raise ModelError(
            f"model: expected parameters with data, got {len(empty)} on the meta device ({', '.join(empty[:5])}); "
            "load or initialise them first"
        )
    if len(devices) != 1:
        raise ModelError(f"model: expected all parameters and buffers on one device, got {sorted(map(str, devices))}")
    return devices.pop()


def discover(model: nn.Module) -> dict[str, StepParticipant]:
    """Return the participants of `model` by module name.

    Raises:
        ModelError: there is none.
    """
    asked = ((name, participant_of(module)) for name, module in model.named_modules())
    found = {name: participant for name, participant in asked if participant is not None}
    if not found:
        raise ModelError(
            f"model: expected at least one layer that takes part in the step (a staticmoe layer), got none in "
            f"{type(model).__name__}; build the model with staticmoe layers, call "
            "staticmoe.integrations.huggingface.prepare(model) on a transformers model, or train it without this runner"
        )
    return found


def admit_optimizer(optimizer: object, model: nn.Module) -> None:
    """Check that `optimizer` trains parameters of `model` and nothing else.

    Raises:
        OptimizerError: not an optimizer, without trained parameters, or with parameters of another model.
    """
    if not isinstance(optimizer, Optimizer):
        raise OptimizerError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    known = {id(parameter) for parameter in model.parameters()}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = sum(1 for parameter in given if id(parameter) not in known)
    if foreign:
        raise OptimizerError(
            f"optimizer: expected parameters of the model, got {foreign} of {len(given)} that are not; build it from "
            "model.parameters() after the model has its final parameters"
        )
    if not any(parameter.requires_grad for parameter in given):
        raise OptimizerError("optimizer: expected at least one parameter with requires_grad, got none")


def admit_functions(functions: Iterable[Callable[..., object]]) -> None:
    """Check what the loss functions hold on to.

    Raises:
        ConfigError: one is compiled; or a gradient scaler: the runner's own backward would scale the gradients, and
            nobody unscale them.
    """
    for function in functions:
        if hasattr(plain(function), "_torchdynamo_orig_callable"):
            raise ConfigError(
                f"{getattr(function, '__name__', 'loss_fn')}: expected a plain function, got one that torch.compile "
                "made: it calls the model, whose layers take part in the step; pass the function as it was"
            )
        if not inspect.isfunction(function):
            continue
        seen = inspect.getclosurevars(function)
        for name, value in {**seen.globals, **seen.nonlocals}.items():
            if isinstance(value, torch.amp.GradScaler) and value.is_enabled():
                raise ConfigError(
                    f"{function.__name__}: expected a loss without a scaler, got the GradScaler {name!r}; train in "
                    "bfloat16 (RunnerConfig(autocast=torch.bfloat16)), which needs none, or construct it with "
                    "enabled=False"
                )


def untrained(optimizer: Optimizer, model: nn.Module) -> Iterator[str]:
    """Names of parameters that require a gradient and that the optimizer does not have."""
    given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return (name for name, p in model.named_parameters() if p.requires_grad and id(p) not in given)


def admit_options(config: RunnerConfig, device: torch.device) -> str:
    """Return the capture mode that `config.capture` means on `device`.

    Raises:
        ConfigError: an option that this version does not have, or a mode that the device cannot do.
    """
    mode = config.capture
    if mode == "auto":
        mode = "cuda" if device.type == "cuda" else "emulate"
    expected = {"cuda": "cuda", "emulate": "cpu"}.get(mode, device.type)
    if device.type != expected:
        raise ConfigError(
            f"capture: {mode!r} expects a model on {expected}, got one on {device}; move it, or use 'auto'"
        )
    return mode


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """`model(**batch).loss`, as Hugging Face models give it."""
    output = model(**batch)
    loss = getattr(output, "loss", None)
    if loss is None:
        raise ModelError(
            f"loss_fn: expected model(**batch).loss, got {type(output).__name__} without a loss; pass loss_fn or labels"
        )
    return loss


def mask_function(token_mask: str | TokenMask | None) -> TokenMask | None:
    """A batch key as a function of the batch."""
    if token_mask is None or callable(token_mask):
        return token_mask
    key = token_mask

    def mask(batch: Any) -> Tensor:
        if not isinstance(batch, Mapping) or batch.get(key) is None:
            keys = list(batch) if isinstance(batch, Mapping) else type(batch).__name__
            raise ConfigError(
                f"token_mask: expected a key of the batch with a tensor, got {key!r}; the batch has {keys}"
            )
        return batch[key]

    return mask
