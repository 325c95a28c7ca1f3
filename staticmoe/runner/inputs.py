"""What the host gives a step: batches and hyper-parameters, copied into a slot, staged by the stream.

Letters: N micro-batches of a step, G parameter groups, W staged hyper-parameters of a group.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from staticmoe.capture import Stream, Upload
from staticmoe.errors import ConfigError
from staticmoe.runner.batch_shape import BatchShape


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


@dataclasses.dataclass
class SlotMemory:
    """One step's inputs in one memory.

    Attributes:
        values: [micro-batch][leaf]; None where the batch has None.
        hyper: fp32 [G * W + scalars], hyper-parameters by group and then device scalars.
        control: int64 [3], launch number, attempt, index of the slot.
    """

    values: list[list[Tensor | None]]
    hyper: Tensor
    control: Tensor

    @classmethod
    def make(
        cls, shape: BatchShape, micro_batches: int, hyper: int, device: torch.device, *, pinned: bool = False
    ) -> SlotMemory:
        """Memory on `device` for N micro-batches and `hyper` hyper-parameters and scalars."""
        return cls(
            values=[shape.tensors(device, pinned=pinned) for _ in range(micro_batches)],
            hyper=torch.zeros(hyper, dtype=torch.float32, device=device, pin_memory=pinned),
            control=torch.zeros(3, dtype=torch.int64, device=device, pin_memory=pinned),
        )

    def pairs(self, other: SlotMemory) -> Iterator[tuple[Tensor, Tensor]]:
        """Each tensor here with its counterpart there."""
        for mine, theirs in zip(itertools.chain(*self.values), itertools.chain(*other.values), strict=True):
            if mine is not None and theirs is not None:
                yield mine, theirs
        yield from ((self.hyper, other.hyper), (self.control, other.control))


@dataclasses.dataclass
class Slot:
    """One step's inputs: what came from the host, in pinned memory and on the device, and what came from the device.

    Attributes:
        host: filled by the caller's thread.
        resident: what is staged from; on a CPU the same memory as `host`.
        upload: the way from one to the other; None on a CPU.
        on_device: (micro-batch, leaf) -> device tensor that takes the place of the host's.
        device_hyper: place in the hyper-parameters -> value that the user keeps on the device.
        seed: of the step's random numbers.
    """

    host: SlotMemory
    resident: SlotMemory
    upload: Upload | None
    seed: int = 0
    on_device: dict[tuple[int, int], Tensor] = dataclasses.field(default_factory=dict)
    device_hyper: dict[int, Tensor] = dataclasses.field(default_factory=dict)


class InputRing:
    """Static inputs of a program and the slots that they are staged from.

    A slot is filled when `step` is called, so that the caller may overwrite the batch as soon as it returns, and
    travels to the device beside the steps in flight; `stage` runs on the stream just before the replay, and again
    before a rerun.

    Args:
        shape: of a micro-batch.
        micro_batches: N.
        slots: one more than steps in flight.
        table: (G, W) of the hyper-parameters.
        scalars: the user's device scalars.
        device: of the static inputs.
        stream: runs the steps.
    """

    def __init__(
        self,
        shape: BatchShape,
        micro_batches: int,
        slots: int,
        table: tuple[int, int],
        scalars: DeviceScalars,
        device: torch.device,
        stream: Stream,
    ) -> None:
        self.shape = shape
        self.static = [shape.tensors(device) for _ in range(micro_batches)]
        self.hyper_parameters = torch.zeros(table, dtype=torch.float32, device=device)
        self.control = torch.zeros(3, dtype=torch.int64, device=device)
        self._scalars = scalars.place(device)
        hyper = self.hyper_parameters.numel() + len(scalars)
        on_gpu = device.type == "cuda"
        self._slots = []
        for _ in range(slots):
            host = SlotMemory.make(shape, micro_batches, hyper, torch.device("cpu"), pinned=on_gpu)
            resident = SlotMemory.make(shape, micro_batches, hyper, device) if on_gpu else host
            self._slots.append(Slot(host=host, resident=resident, upload=stream.upload()))

    @property
    def micro_batches(self) -> int:
        """N."""
        return len(self.static)

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
        if slot.upload is not None:
            slot.upload.wait_until_free()
        for number, (stored, values) in enumerate(zip(slot.host.values, batches, strict=True)):
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
                slot.host.hyper[position] = value
        slot.host.control.copy_(torch.tensor([launch, 0, index]))
        slot.seed = seed
        if slot.upload is not None:
            slot.upload.run(lambda: _copy_all(slot.resident.pairs(slot.host)))

    def seed(self, index: int) -> int:
        """Random seed of the step in slot `index`."""
        return self._slots[index].seed

    def stage(self, index: int, attempt: int = 0) -> None:
        """Copy slot `index` into the static inputs, in stream order."""
        slot = self._slots[index]
        for number, (static, stored) in enumerate(zip(self.static, slot.resident.values, strict=True)):
            for leaf, (target, value) in enumerate(zip(static, stored, strict=True)):
                if target is not None and value is not None:
                    target.copy_(slot.on_device.get((number, leaf), value))
        table = self.hyper_parameters.view(-1)
        table.copy_(slot.resident.hyper[: table.numel()])
        for position, value in slot.device_hyper.items():
            table[position].copy_(value)
        self._scalars.copy_(slot.resident.hyper[table.numel() :])
        self.control.copy_(slot.resident.control)
        self.control[1].fill_(attempt)
        if slot.upload is not None:
            slot.upload.mark_read()


def _copy_all(pairs: Iterator[tuple[Tensor, Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source, non_blocking=True)
