"""Tells what was made of weights before anything was observed from a constant.

An uncaptured step that ran earlier may have left such a copy behind a cache: it looks like any tensor that was there
before, and every replay would read the weights of then. Two things give it away: a history that leads to a parameter,
and values that are still those of a parameter, or were before a few steps moved it.

Letters: n elements of a parameter, m of them compared.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from staticmoe.capture.provenance import storage_key
from staticmoe.capture.source import Source

# Enough to tell two matrices of random numbers apart, and few enough for thousands of parameters.
_MOST_COMPARED = 1024
_FEWEST = 32
# A copy differs from its parameter by the steps since then; of unlike matrices the correlation is 1 / sqrt(m) or so.
_ALIKE, _CHANCE = 0.7, 5.0
_MOST_NODES = 10_000


@dataclasses.dataclass(frozen=True)
class WeightCopy:
    """A tensor from before the observation that holds weights.

    Attributes:
        parameter: name of the one that it was made of.
        certain: its history says so, or nothing else reads that parameter; else its values alone do.
        tracked: whether it hands a gradient on.
        source: where the iteration reads it first.
    """

    parameter: str
    certain: bool
    tracked: bool
    source: Source


@dataclasses.dataclass(frozen=True)
class _Constant:
    values: Tensor
    parameter: str | None
    source: Source


class WeightCopies:
    """Book of the constants that iterations read.

    Args:
        parameters: name -> parameter. Those that do not train are constants themselves, and so are their copies.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = {name: tensor for name, tensor in parameters.items() if tensor.requires_grad}
        self._names = {id(tensor): name for name, tensor in self._parameters.items()}
        self._unread = {storage_key(tensor): name for name, tensor in self._parameters.items()}
        self._constants: dict[int, _Constant | None] = {}

    def begin(self, alive: Iterable[Tensor]) -> None:
        """Leave out what of `alive` is a parameter of another model, as of a teacher: a copy, and meant to be one."""
        self._constants = {storage_key(tensor): None for tensor in alive if issubclass(type(tensor), nn.Parameter)}

    def end(self) -> None:
        """Let go of all tensors."""
        self._constants = {}

    def read(self, keys: Iterable[int]) -> None:
        """Note which memory an operation read."""
        for key in keys:
            self._unread.pop(key, None)

    def is_new(self, tensor: Tensor) -> bool:
        """Whether nothing is noted of the constant `tensor` yet."""
        return storage_key(tensor) not in self._constants

    def note(self, tensor: Tensor, source: Source) -> None:
        """Enter a constant that the iteration reads, at its first read; its values are looked at later."""
        numbers = tensor.dtype.is_floating_point or tensor.dtype == torch.int8
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        if not numbers or size < _FEWEST or tensor.layout != torch.strided:
            self._constants[storage_key(tensor)] = None
            return
        values = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
        self._constants[storage_key(tensor)] = _Constant(values, self._ancestor(tensor), source)

    def found(self) -> Iterator[WeightCopy]:
        """Constants that hold weights. Reads device values: not within a capture."""
        for constant in self._constants.values():
            if constant is None:
                continue
            if constant.parameter is not None:
                yield WeightCopy(constant.parameter, True, True, constant.source)
                continue
            like = next((name for name, p in self._parameters.items() if _holds(constant.values, p.detach())), None)
            if like is not None:
                unread = like in self._unread.values()
                yield WeightCopy(like, unread, False, constant.source)

    def _ancestor(self, tensor: Tensor) -> str | None:
        """Name of a parameter that the history of `tensor` leads to."""
        nodes: list[Any] = [tensor.grad_fn]
        seen: set[Any] = set()
        while nodes and len(seen) < _MOST_NODES:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            name = self._names.get(id(getattr(node, "variable", None)))
            if name is not None:
                return name
            nodes += [following for following, _ in node.next_functions]
        return None


def _holds(values: Tensor, parameter: Tensor) -> bool:
    """Whether a block of `values` is `parameter`, or was: as it lies in memory, or transposed."""
    n = parameter.numel()
    if parameter.dim() < 2 or n < _FEWEST or values.numel() % n or values.device != parameter.device:
        return False
    blocks = values.view(-1, n)[:, :_MOST_COMPARED].float()
    matrix = parameter.flatten(0, -3)[0] if parameter.dim() > 2 else parameter
    return any(_alike(blocks, layout) for layout in (matrix, matrix.mT))


def _alike(blocks: Tensor, matrix: Tensor) -> bool:
    """Whether the start of one of `blocks` [B, m] is correlated with that of `matrix`."""
    m = min(blocks.shape[1], matrix.numel())
    start = matrix[: math.ceil(m / matrix.shape[-1])].flatten()[:m].float()
    start, blocks = start - start.mean(), blocks[:, :m] - blocks[:, :m].mean(dim=1, keepdim=True)
    correlation = (blocks @ start) / (blocks.norm(dim=1) * start.norm())
    # Values that are all one number have none.
    return bool((correlation.abs().nan_to_num(0.0) > max(_ALIKE, _CHANCE / math.sqrt(m))).any())
