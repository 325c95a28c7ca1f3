"""Operations on fake tensors, remembered: a model's layers repeat themselves, and torch takes long to say each anew.

A fake tensor has shape, strides, device and a storage of a size, and no memory. What an operation makes of such
follows from them and from its other arguments alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from staticmoe.capture.provenance import storage_key, tensors_in

_DEPENDS_ON_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}


@dataclasses.dataclass(frozen=True)
class _Made:
    """How to make one result again.

    Attributes:
        shares: which of the operation's tensors it is a view of, or None.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    shares: int | None


class FakeOperations:
    """Runs operations on fake tensors.

    Args:
        mode: that the tensors belong to.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[Any, tuple[list[_Made], bool]] = {}

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What `func` makes of `args` and `kwargs`, whose tensors are all fake; within the mode."""
        given = tensors_in(args, kwargs)
        writes, literal = func._schema.is_mutable, any(_literal(tensor) for tensor in given)
        key = None if writes or literal else _key(func, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        known = self._known.get(key)
        if known is not None:
            results = [self._make(made, given) for made in known[0]]
            return results if known[1] else results[0]
        result = func(*args, **kwargs)
        several = isinstance(result, (tuple, list))
        recipe = _recipe(list(result) if several else [result], given)
        if recipe is not None and not _DEPENDS_ON_VALUES & set(func.tags):
            self._known[key] = recipe, several
        return result

    def _make(self, made: _Made, given: list[Tensor]) -> Tensor:
        with in_kernel_invocation_manager(self._mode):
            if made.shares is None:
                tensor = torch.empty_strided(made.size, made.stride, dtype=made.dtype, device="meta")
            else:
                tensor = torch.empty(0, dtype=made.dtype, device="meta")
                tensor.set_(given[made.shares].untyped_storage(), made.offset, made.size, made.stride)
        return FakeTensor(self._mode, tensor, made.device)


def _recipe(results: list[Any], given: list[Tensor]) -> list[_Made] | None:
    """How to make `results` again; None where a result is no plain tensor, or memory that two of them share."""
    if not all(isinstance(r, FakeTensor) and not (_literal(r) or r.is_conj() or r.is_neg()) for r in results):
        return None
    # The first that has a storage: what an operation makes a view of comes first among its arguments.
    sources = {storage_key(given[place]): place for place in reversed(range(len(given)))}
    fresh = [storage_key(r) for r in results if storage_key(r) not in sources]
    whole = all(r.storage_offset() == 0 and _fills(r) for r in results if storage_key(r) not in sources)
    if len(fresh) != len(set(fresh)) or not whole:
        return None
    return [
        _Made(tuple(r.shape), r.stride(), r.storage_offset(), r.dtype, r.fake_device, sources.get(storage_key(r)))
        for r in results
    ]


def _literal(tensor: Any) -> bool:
    """Whether it stands for a host value, which torch remembers and computes with."""
    return tensor.constant is not None


def _fills(tensor: Tensor) -> bool:
    """Whether its storage is no larger than its shape and strides need."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (last + 1) * tensor.element_size() if tensor.numel() else 0
    return tensor.untyped_storage().nbytes() == needed


def _key(func: Any, args: Any, kwargs: Any) -> Any:
    """What the results follow from; None where an argument cannot be a part of it."""
    try:
        key = func, _part(args), tuple((name, _part(value)) for name, value in kwargs.items())
        hash(key)
    except TypeError:
        return None
    return key


def _part(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device  # type: ignore[attr-defined]
    if isinstance(value, (list, tuple)):
        return tuple(map(_part, value))
    # 1, 1.0 and True are equal, and give results of different dtypes.
    return type(value), value
