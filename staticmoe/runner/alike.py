"""What ranks that train together must have been given alike, hold alike, and do alike; compared before it matters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from staticmoe.capture import Stream
from staticmoe.config import OWN_OPTIONS, RunnerConfig
from staticmoe.errors import ReplicaError
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


def compare_replicas(replicas: Replicas | None, model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
    """Check that what steps commit is still the same on every rank; buffers may be a rank's own, as statistics are.

    Raises:
        ReplicaError: on every rank, with what differs first.
    """
    if replicas is not None:
        buffers = dict(model.named_buffers())
        tensors = _tensors(model, optimizer).items()
        replicas.compare_values({name: t for name, t in tensors if name not in buffers and t.device == device})


def agree(replicas: Replicas | None, purpose: str, **facts: object) -> None:
    """Wait for every rank, to learn that it has come this far with the same `facts`, before one alone exchanges more.

    Raises:
        ReplicaError: they differ, or another rank failed.
    """
    if replicas is not None:
        replicas.agreement.compare(purpose, {name.replace("_", " "): str(fact) for name, fact in facts.items()})


@contextlib.contextmanager
def together(replicas: Replicas | None, purpose: str) -> Iterator[None]:
    """Leave when every rank has done what is within; where one fails, the others hear of it where they agree next.

    Not within another one: an error is told once.

    Raises:
        ReplicaError: another rank failed.
    """
    if replicas is None:
        yield
        return
    with replicas.agreement.sharing_failures(purpose):
        yield
        agree(replicas, purpose)


def wait_for(replicas: Replicas | None, stream: Stream, ticket: int) -> None:
    """Return when the work of `ticket` has finished; with several ranks in the time that a collective of theirs has.

    No watchdog of torch's knows the collectives of a replay: one of which a rank is missing waits for ever.

    Raises:
        ReplicaError: it has not.
    """
    if replicas is None:
        stream.wait(ticket)
        return
    seconds = replicas.patience.total_seconds()
    try:
        stream.wait(ticket, seconds)
    except TimeoutError as error:
        raise ReplicaError(
            f"a step: expected it to end within the {seconds:g} s that the process group gives a collective, got none "
            "of it; a rank that stopped, failed, or captures again while this one does not is missing in its "
            "collectives: every rank must launch the same steps, or init_process_group needs a longer timeout"
        ) from error


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
