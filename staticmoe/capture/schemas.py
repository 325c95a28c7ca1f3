"""What is known of an operation: name, what it writes by its schema or, where that is silent, its name; its Python."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from staticmoe.capture import collectives
from staticmoe.capture.provenance import tensors_in

# Batch norms whose schemas do not say that training (argument 5) writes the running statistics (3 and 4).
_SILENT_BATCH_NORMS = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}
_OVERWRITES = {"copy_", "zero_", "fill_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_"}


@functools.cache
def namespace_of(func: Any) -> str:
    """Namespace of an operation; asking torch for it takes its name apart each time."""
    return func.namespace


@functools.cache
def name_of(func: Any) -> str:
    """Operation name without namespace and overload."""
    return func._schema.name.split("::")[-1]


@functools.cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that the schema says are written."""
    arguments = enumerate(func._schema.arguments)
    return tuple((at, one.name) for at, one in arguments if one.alias_info is not None and one.alias_info.is_write)


@functools.cache
def _outs(func: Any) -> tuple[str, ...]:
    """Names of the arguments that only take results."""
    return tuple(argument.name for argument in func._schema.arguments if argument.is_out)


def mutated(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Tensors that the operation writes."""
    silent = name_of(func) in _SILENT_BATCH_NORMS and args[5]
    written = tensors_in(args[3:5]) if silent else collectives.written(func, args)
    for position, name in _written(func):
        written.extend(tensors_in(args[position] if position < len(args) else kwargs.get(name)))
    return written


def overwritten(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Tensors that the operation writes and does not read."""
    if name_of(func) in _OVERWRITES:
        # bernoulli_(p) with a tensor p reads p; only the first argument is the target.
        return tensors_in(args[0])
    return collectives.overwritten(func, args) + tensors_in([kwargs.get(name) for name in _outs(func)])


def python_implementation(func: Any, args: Any, kwargs: Any) -> Any:
    """The Python function behind a `torch.library.custom_op`, or None for any other operation."""
    if namespace_of(func) == "aten":
        return None
    definition = torch._library.custom_ops.OPDEFS.get(func._schema.name)
    if definition is None or func._overloadname != "default":
        return None
    devices = {tensor.device.type for tensor in tensors_in(args, kwargs)}
    device = devices.pop() if len(devices) == 1 else None
    functions = definition._backend_fns
    return functions.get(device) or functions.get(None) or definition._init_fn
