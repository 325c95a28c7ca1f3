"""What the host gives a step: batches and hyper-parameters, checked, copied into a slot, staged by the stream.

Letters: N micro-batches of a step, G parameter groups, W staged hyper-parameters of a group.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from staticmoe.errors import BatchError, ConfigError


class MicroBatches(list):
    """The N micro-batches of one `step` under gradient accumulation, each like the example batch."""


class DeviceScalars(MutableMapping[str, float]):
    """Named numbers that live on the device, so that a captured loss sees each change at the next step.

    Construct it with every name, read it inside the loss function, hand it to the runner:
    `scalars = DeviceScalars(alpha=0.1)`, `loss = main + scalars["alpha"] * other`,
    `StaticMoERunner(..., scalars=scalars)`, `runner.scalars["alpha"] = 0.3`.

    Graph-safe: reading gives a 0-dim fp32 device tensor whose memory never moves.
    """

    def __init__(self, **values: float) -> None:
        self._values = {name: float(value) for name, value in values.items()}
        self._tensor = torch.tensor(list(self._values.values()), dtype=torch.float32)

    def place(self, device: torch.device) -> Tensor:
        """Move to `device` and return the fp32 vector behind the names; the runner calls it once."""
        if self._tensor.device != device:
            self._tensor = self._tensor.to(device)
        return self._tensor

    def host_values(self) -> list[float]:
        """Values to stage, in order."""
        return list(self._values.values())

    def __getitem__(self, name: str) -> Tensor:  # type: ignore[override]
        return self._tensor[self._position(name)]

    def __setitem__(self, name: str, value: float) -> None:
        self._position(name)
        self._values[name] = float(value)

    def __delitem__(self, name: str) -> None:
        raise ConfigError(f"scalars[{name!r}]: the set of names is fixed at construction; nothing can be deleted")

    def _position(self, name: str) -> int:
        if name not in self._values:
            raise ConfigError(
                f"scalars[{name!r}]: expected one of {list(self._values)}; name every scalar in DeviceScalars(...)"
            )
        return list(self._values).index(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One place of a batch.

    Attributes:
        path: where in the batch, as an index expression.
        kind: "tensor", "int", "float", "bool" or "none".
        shape, dtype: of the static tensor; a Python number is a 0-dim tensor, "none" has neither.
        device: where the value lies; no part of the declared shape.
    """

    path: str
    kind: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    device: torch.device = dataclasses.field(default=torch.device("cpu"), compare=False)


_NUMBER_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float32}


def _plain(batch: Any) -> Any:
    """Mappings of any type (a BatchEncoding, say) as dicts with sorted keys, so that fields match by name."""
    if isinstance(batch, Mapping):
        return {key: _plain(batch[key]) for key in sorted(batch, key=str)}
    if type(batch) in (list, tuple):
        return type(batch)(_plain(item) for item in batch)
    return batch


def describe(batch: Any) -> tuple[list[Leaf], list[Any], pytree.TreeSpec]:
    """Leaves, values and structure of one micro-batch.

    Raises:
        BatchError: a value that is no tensor, number or None, or a tensor on the meta device.
    """
    pairs, spec = pytree.tree_flatten_with_path(_plain(batch))
    leaves = [_leaf(pytree.keystr(path), value) for path, value in pairs]
    return leaves, [value for _, value in pairs], spec


def _leaf(path: str, value: Any) -> Leaf:
    if value is None:
        return Leaf(path, "none")
    if isinstance(value, Tensor):
        if value.is_meta or value.layout != torch.strided:
            raise BatchError(f"batch{path}: expected a dense tensor with data, got {value.device} {value.layout}")
        return Leaf(path, "tensor", tuple(value.shape), value.dtype, value.device)
    if type(value) in _NUMBER_DTYPES:
        return Leaf(path, type(value).__name__, (), _NUMBER_DTYPES[type(value)])
    raise BatchError(
        f"batch{path}: expected a tensor, a number or None, got {type(value).__name__} {value!r:.60}; "
        "take it out of the batch or turn it into a tensor"
    )


class BatchShape:
    """The declared structure of a micro-batch: what a graph was captured for."""

    def __init__(self, example: Any) -> None:
        self._kind = type(example).__name__
        self.leaves, self._values, self._spec = describe(example)
        if not any(leaf.kind == "tensor" for leaf in self.leaves):
            raise BatchError(f"example_batch: expected at least one tensor, got {type(example).__name__} without any")

    @property
    def example(self) -> list[Any]:
        """Values of the example, in leaf order."""
        return self._values

    def tensors(self, device: torch.device, *, pinned: bool = False) -> list[Tensor | None]:
        """Fresh tensors for one micro-batch, in leaf order."""
        return [
            None if leaf.kind == "none" else torch.zeros(leaf.shape, dtype=leaf.dtype, device=device, pin_memory=pinned)
            for leaf in self.leaves
        ]

    def assemble(self, tensors: Sequence[Tensor | None]) -> Any:
        """The batch that the loss function sees, from tensors in leaf order."""
        return pytree.tree_unflatten(list(tensors), self._spec)

    def mismatch(self, batch: Any, leaves: list[Leaf], spec: pytree.TreeSpec) -> str | None:
        """Say how `batch` (`leaves`, `spec`) differs from the declared structure, or None where it fits."""
        if spec != self._spec:
            got, expected = [leaf.path for leaf in leaves], [leaf.path for leaf in self.leaves]
            missing, extra = [p for p in expected if p not in got], [p for p in got if p not in expected]
            return (
                f"batch: expected a {self._kind} of {expected}, got a {type(batch).__name__} of {got} "
                f"(missing {missing}, extra {extra})"
            )
        for declared, leaf in zip(self.leaves, leaves, strict=True):
            if not _fits(declared, leaf):
                return f"batch{leaf.path}: expected {_words(declared)}, got {_words(leaf)}"
        return None


def wrong_device(leaves: list[Leaf], device: torch.device) -> str | None:
    """Say which value lies neither on the host nor on `device`, or None."""
    for leaf in leaves:
        if leaf.device.type != "cpu" and leaf.device != device:
            return (
                f"batch{leaf.path}: expected a tensor on the CPU or on {device}, the model's device, got {leaf.device}"
            )
    return None


def _fits(declared: Leaf, leaf: Leaf) -> bool:
    if declared.kind == "float" and leaf.kind == "int":
        return True
    return (declared.kind, declared.shape, declared.dtype) == (leaf.kind, leaf.shape, leaf.dtype)


def _words(leaf: Leaf) -> str:
    if leaf.kind == "tensor":
        return f"a tensor of shape {leaf.shape} and {leaf.dtype}"
    return "None" if leaf.kind == "none" else f"a Python {leaf.kind}"


def split_micro_batches(batch: Any, count: int) -> list[Any]:
    """The micro-batches of one step: `MicroBatches`, or one batch whose tensors have a leading dimension N.

    Raises:
        BatchError: another number of micro-batches than `count`.
    """
    if isinstance(batch, MicroBatches):
        if len(batch) != count:
            raise BatchError(f"MicroBatches: expected {count} (gradient_accumulation_steps), got {len(batch)}")
        return list(batch)
    if count == 1:
        return [batch]
    leaves, values, spec = describe(batch)
    for leaf in leaves:
        if leaf.kind == "tensor" and (not leaf.shape or leaf.shape[0] != count):
            raise BatchError(
                f"batch{leaf.path}: expected a leading dimension of {count} (gradient_accumulation_steps), got shape "
                f"{leaf.shape}; stack the micro-batches, or pass MicroBatches([...])"
            )
    return [pytree.tree_unflatten([v[i] if isinstance(v, Tensor) else v for v in values], spec) for i in range(count)]


@dataclasses.dataclass
class Slot:
    """Memory of one step's inputs: what came from the host in (pinned) host memory, what came from the device there.

    Attributes:
        values: host tensors [micro-batch][leaf]; None where the batch has None.
        on_device: (micro-batch, leaf) -> device tensor that takes the place of the host's.
        device_hyper: place in the hyper-parameters -> value that the user keeps on the device.
        hyper: fp32 [G * W + scalars], hyper-parameters by group and then device scalars.
        control: int64 [3], launch number, attempt, index of this slot.
        seed: of the step's random numbers.
    """

    values: list[list[Tensor | None]]
    hyper: Tensor
    control: Tensor
    seed: int = 0
    on_device: dict[tuple[int, int], Tensor] = dataclasses.field(default_factory=dict)
    device_hyper: dict[int, Tensor] = dataclasses.field(default_factory=dict)


class InputRing:
    """Static inputs of a program and the slots that they are staged from.

    A slot is filled when `step` is called, so that the caller may overwrite the batch as soon as it returns;
    `stage` runs on the stream just before the replay, and again before a rerun.

    Args:
        shape: of a micro-batch.
        micro_batches: N.
        slots: one more than steps in flight.
        table: (G, W) of the hyper-parameters.
        scalars: the user's device scalars.
        device: of the static inputs.
    """

    def __init__(
        self,
        shape: BatchShape,
        micro_batches: int,
        slots: int,
        table: tuple[int, int],
        scalars: DeviceScalars,
        device: torch.device,
    ) -> None:
        self.shape = shape
        self._device = device
        self.static = [shape.tensors(device) for _ in range(micro_batches)]
        self.hyper_parameters = torch.zeros(table, dtype=torch.float32, device=device)
        self.control = torch.zeros(3, dtype=torch.int64, device=device)
        self._scalars = scalars.place(device)
        host, pinned = torch.device("cpu"), device.type == "cuda"
        self._slots = [
            Slot(
                values=[shape.tensors(host, pinned=pinned) for _ in range(micro_batches)],
                hyper=torch.zeros(self.hyper_parameters.numel() + len(scalars), dtype=torch.float32, pin_memory=pinned),
                control=torch.zeros(3, dtype=torch.int64, pin_memory=pinned),
            )
            for _ in range(slots)
        ]

    @property
    def batches(self) -> list[Any]:
        """What the loss function sees: one batch of static tensors for each micro-batch."""
        return [self.shape.assemble(tensors) for tensors in self.static]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Name -> tensor that `stage` writes, for the book of origins."""
        return {**self.own_tensors, "scalars": self._scalars}

    @property
    def own_tensors(self) -> dict[str, Tensor]:
        """Those that no other program stages."""
        named = {"hyper-parameters": self.hyper_parameters, "step control": self.control}
        for number, tensors in enumerate(self.static):
            for leaf, tensor in zip(self.shape.leaves, tensors, strict=True):
                if tensor is not None:
                    named[f"batch{leaf.path} of micro-batch {number}"] = tensor
        return named

    def fill(
        self,
        index: int,
        batches: Sequence[Sequence[Any]],
        table: Sequence[Sequence[float | Tensor]],
        scalars: Sequence[float],
        launch: int,
        seed: int,
    ) -> None:
        """Copy one step's inputs into slot `index`: values in leaf order for each micro-batch, rounded to fp32 once."""
        slot = self._slots[index]
        slot.on_device.clear()
        slot.device_hyper.clear()
        for number, (stored, values) in enumerate(zip(slot.values, batches, strict=True)):
            for leaf, (target, value) in enumerate(zip(stored, values, strict=True)):
                if target is None:
                    continue
                if not isinstance(value, Tensor):
                    target.fill_(value)
                elif value.is_cuda:
                    # Copied on the user's stream: reading it on the host would wait for the device.
                    slot.on_device[number, leaf] = value.detach().clone()
                else:
                    target.copy_(value.detach())
        for position, value in enumerate([*itertools.chain(*table), *scalars]):
            if isinstance(value, Tensor) and value.is_cuda:
                slot.device_hyper[position] = value.detach().clone()
            else:
                slot.hyper[position] = value
        slot.control.copy_(torch.tensor([launch, 0, index]))
        slot.seed = seed

    def seed(self, index: int) -> int:
        """Random seed of the step in slot `index`."""
        return self._slots[index].seed

    def stage(self, index: int, attempt: int = 0) -> None:
        """Copy slot `index` into the static inputs, in stream order."""
        slot = self._slots[index]
        slot.control[1] = attempt
        for number, (static, stored) in enumerate(zip(self.static, slot.values, strict=True)):
            for leaf, (target, value) in enumerate(zip(static, stored, strict=True)):
                if target is not None and value is not None:
                    target.copy_(slot.on_device.get((number, leaf), value), non_blocking=True)
        table = self.hyper_parameters.view(-1)
        table.copy_(slot.hyper[: table.numel()], non_blocking=True)
        for position, value in slot.device_hyper.items():
            table[position].copy_(value)
        self._scalars.copy_(slot.hyper[table.numel() :], non_blocking=True)
        self.control.copy_(slot.control, non_blocking=True)
