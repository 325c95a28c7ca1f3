"""The structure of a batch: what a graph is captured for, and what a batch given later is held against.

Letters: N micro-batches of a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from staticmoe.errors import BatchError


class MicroBatches(list):
    """The N micro-batches of one `step` under gradient accumulation, each like the example batch."""


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

    def __str__(self) -> str:
        return "; ".join(f"batch{leaf.path} {_words(leaf)}" for leaf in self.leaves)

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
