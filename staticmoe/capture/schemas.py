"""What an operation's schema, or its name where the schema is silent, says that it writes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from staticmoe.capture import collectives
from staticmoe.capture.provenance import tensors_in

# Batch norms whose schemas do not say that training (argument 5) writes the running statistics (3 and 4).
_SILENT_BATCH_NORMS = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}
_OVERWRITES = {"copy_", "zero_", "fill_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_"}


def name_of(func: Any) -> str:
    """Operation name without namespace and overload."""
    return func._schema.name.split("::")[-1]


def mutated(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Tensors that the operation writes."""
    silent = name_of(func) in _SILENT_BATCH_NORMS and args[5]
    written = tensors_in(args[3:5]) if silent else collectives.written(func, args)
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        written.extend(tensors_in(value))
    return written


def overwritten(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Tensors that the operation writes and does not read."""
    if name_of(func) in _OVERWRITES:
        # bernoulli_(p) with a tensor p reads p; only the first argument is the target.
        return tensors_in(args[0])
    return collectives.overwritten(func, args) + [
        tensor
        for argument in func._schema.arguments
        if argument.is_out
        for tensor in tensors_in(kwargs.get(argument.name))
    ]
