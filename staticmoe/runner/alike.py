"""What ranks that train together must have been given alike, hold alike, and do alike; compared before it matters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from staticmoe.config import OWN_OPTIONS, RunnerConfig
from staticmoe.parallel.replicas import Replicas
from staticmoe.runner.batch_shape import BatchShape
from staticmoe.runner.inputs import DeviceScalars


def admit_replicas(
    replicas: Replicas,
    model: nn.Module,
    optimizer: Optimizer,
    shapes: Sequence[BatchShape],
    scalars: DeviceScalars,
    config: RunnerConfig,
    device: torch.device,
) -> None:
    """Check that every rank was given the same as the others, and holds the same values.

    Raises:
        ReplicaError: on every rank, with what differs first.
        ConfigError: the group does not connect the devices.
    """
    tensors = _tensors(model, optimizer)
    facts = {
        "version of torch": torch.__version__,
        "kind of device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        **{name: repr(value) for name, value in vars(config).items() if name not in OWN_OPTIONS},
        **{f"shape {number} in example_batch": str(shape) for number, shape in enumerate(shapes)},
        "names of scalars": ", ".join(scalars),
        **{f"shape and dtype of {name}": f"{tuple(t.shape)} {t.dtype}" for name, t in tensors.items()},
        **_options_of(optimizer, model),
    }
    replicas.agreement.compare("StaticMoERunner", facts)
    replicas.connect(device)
    replicas.compare_values({name: tensor for name, tensor in tensors.items() if tensor.device == device})


@contextlib.contextmanager
def together(replicas: Replicas | None, purpose: str, **facts: object) -> Iterator[None]:
    """Leave when every rank has done what is within, and is about to do the same; `facts` say what.

    Raises:
        ReplicaError: they are not.
    """
    if replicas is None:
        yield
        return
    with replicas.agreement.sharing_failures(purpose):
        yield
        replicas.agreement.compare(purpose, {name: str(fact) for name, fact in facts.items()})


def obstacle_anywhere(replicas: Replicas | None, own: str | None) -> str | None:
    """What stands in the way of this rank, or that another has something in its way."""
    if replicas is None:
        return own
    return own or "another rank cannot" if replicas.agreement.any(own is not None) else None


def _tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Name -> parameter, buffer or tensor of the optimizer's state."""
    state = {
        f"optimizer state {key} of {name}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }
    return {**dict(model.named_parameters()), **dict(model.named_buffers()), **state}


def _options_of(optimizer: Optimizer, model: nn.Module) -> Mapping[str, str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    facts = {"optimizer": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        facts[f"parameters of optimizer group {number}"] = ", ".join(names[id(p)] for p in group["params"])
        trained = [names[id(p)] for p in group["params"] if p.requires_grad]
        facts[f"trained parameters of optimizer group {number}"] = ", ".join(trained)
        for key, value in group.items():
            if key != "params":
                facts[f"{key} of optimizer group {number}"] = repr(_plain(value))
    return facts


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value
