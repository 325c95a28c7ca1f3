"""Operations that a graph cannot hold, and why: the one list for the recording and its messages.

Each rule looks at an operation and its arguments and answers with a code, a reason and a mend, or None.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from staticmoe.capture import collectives
from staticmoe.capture.schemas import name_of

aten = torch.ops.aten


class Refusal(NamedTuple):
    """Why an operation cannot be replayed.

    Attributes:
        code: of the kind, such as "SM101".
        why: what it does.
        mend: what to write instead.
        ends: whether going on after it would change what is to be left alone, or not work.
    """

    code: str
    why: str
    mend: str
    ends: bool = False


MEND_READ = "keep it on the device: torch.where instead of a branch, tensor arithmetic instead of a Python number"
_MEND_SHAPE = "use a form of fixed size: torch.where with a mask, a fixed capacity, or an explicit output size"

_READS = {
    aten._local_scalar_dense.default: (
        "SM101",
        "copies a value to the host (.item(), float(), int(), bool() or a Python branch)",
    ),
    aten.equal.default: ("SM109", "copies a comparison to the host (torch.equal)"),
    aten.allclose.default: ("SM109", "copies a comparison to the host (torch.allclose)"),
    aten.is_nonzero.default: ("SM106", "copies a truth value to the host (a Python branch on a tensor)"),
}
# Operation -> code and the form of it that has a fixed size.
_SIZED_BY_VALUES = {
    "nonzero": ("SM110", "keep the mask and use torch.where(mask, a, b), or nonzero_static(size=n)"),
    "masked_select": ("SM111", "keep the shape: torch.where(mask, x, 0)"),
    "unique": ("SM113", "sort, and mark where neighbours differ"),
    "bincount": ("SM114", "torch.zeros(n).scatter_add_(0, ids, ones)"),
    "repeat_interleave": ("SM115", "pass output_size="),
}
_INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}
_REPLACES_STORAGE = {"set_", "resize_", "resize_as_", "resize"}


def refusal(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_literal: Callable[[Tensor], bool]
) -> Refusal | None:
    """Return why `func` cannot be replayed and what to write instead, or None where it can.

    Args:
        is_literal: whether a tensor is a Python number in disguise.
    """
    if func in _READS:
        return Refusal(*_READS[func], MEND_READ)
    if collectives.is_collective(func):
        obstacle = collectives.obstacle(func, args)
        mend = "leave it out, or exchange by a collective of all ranks (all_to_all, all_gather)"
        return Refusal("SM503", obstacle, mend) if obstacle is not None else None
    name = name_of(func)
    if name in _INDEXING:
        return _mask_index(name, args, is_literal)
    if name == "_to_copy" and args[0].device.type != "cpu" and _is_cpu(kwargs.get("device")):
        return Refusal("SM103", "copies a tensor to the host (.to('cpu'))", MEND_READ)
    if name in _REPLACES_STORAGE and func.namespace == "aten":
        why = "replaces or resizes the memory of a tensor, which a replay cannot follow"
        return Refusal("SM501", why, "allocate the final size once", ends=True)
    if _is_sized_by_values(func):
        if name == "repeat_interleave" and kwargs.get("output_size") is not None:
            return None
        # _unique2, unique_dim, unique_consecutive: one thing to whoever wrote torch.unique.
        code, mend = _SIZED_BY_VALUES.get("unique" if "unique" in name else name, ("SM116", ""))
        mend = f"{_MEND_SHAPE}; here: {mend}" if mend else _MEND_SHAPE
        return Refusal(code, "has a result whose size depends on values", mend)
    return None


@functools.cache
def _is_sized_by_values(func: Any) -> bool:
    return torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags


def _is_cpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cpu"


def _mask_index(name: str, args: tuple[Any, ...], is_literal: Callable[[Tensor], bool]) -> Refusal | None:
    """A boolean mask as an index looks like any other index: tell it by its dtype."""
    masks = [index for index in args[1] if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)]
    if not masks:
        return None
    # Storing a Python number through one mask is a masked fill, which has a fixed shape; a device value is not.
    if name.startswith(("index_put", "_index_put")) and len(args[1]) == 1 and is_literal(args[2]):
        return None
    return Refusal("SM112", "uses a boolean mask as an index, so its size depends on values", _MEND_SHAPE)
