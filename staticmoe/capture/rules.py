"""Operations that a graph cannot hold, and why: the one list for the recording and its messages.

Each rule looks at an operation and its arguments and answers with a reason and a mend, or None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_READS = {
    aten._local_scalar_dense.default: "copies a value to the host (.item(), float(), int(), bool() or a Python branch)",
    aten.equal.default: "copies a comparison to the host (torch.equal)",
    aten.is_nonzero.default: "copies a truth value to the host (a Python branch on a tensor)",
}
_MEND_READ = "keep it on the device: torch.where instead of a branch, tensor arithmetic instead of a Python number"
_MEND_SHAPE = "use a form of fixed size: torch.where with a mask, a fixed capacity, or an explicit output size"
_INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}
_REPLACES_STORAGE = {"set_", "resize_", "resize_as_", "resize"}


def refusal(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_literal: Callable[[Tensor], bool]
) -> str | None:
    """Return why `func` cannot be replayed and what to write instead, or None where it can.

    Args:
        is_literal: whether a tensor is a Python number in disguise.
    """
    if func in _READS:
        return f"{_READS[func]}; {_MEND_READ}"
    if func.namespace in ("c10d", "_c10d_functional"):
        return "is a collective, which the emulated capture does not record yet; run with capture='off'"
    name = func._schema.name.split("::")[-1]
    if name in _INDEXING:
        return _mask_index(name, args, is_literal)
    if func.namespace == "aten" and name in _REPLACES_STORAGE:
        return "replaces or resizes the memory of a tensor, which a replay cannot follow; allocate the final size once"
    if torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags:
        if name == "repeat_interleave" and kwargs.get("output_size") is not None:
            return None
        return f"has a result whose size depends on values; {_MEND_SHAPE}"
    return None


def _mask_index(name: str, args: tuple[Any, ...], is_literal: Callable[[Tensor], bool]) -> str | None:
    """A boolean mask as an index looks like any other index: tell it by its dtype."""
    masks = [index for index in args[1] if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)]
    if not masks:
        return None
    # Storing a Python number through one mask is a masked fill, which has a fixed shape; a device value is not.
    if name.startswith(("index_put", "_index_put")) and len(args[1]) == 1 and is_literal(args[2]):
        return None
    return f"uses a boolean mask as an index, so its size depends on values; {_MEND_SHAPE}"
