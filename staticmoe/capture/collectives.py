"""Collectives of torch.distributed on a tape: what they write, how they are run again, and which cannot be.

A collective returns before it is done, and the wait for it is no operation, or one that a second run of the collective
would not be known to. So a replay waits where the collective stands: at the latest there its results may be read.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from staticmoe.capture.provenance import tensors_in
from staticmoe.errors import ReplicaError

_IN_PLACE, _FUNCTIONAL = "c10d", ("_c10d_functional", "c10d_functional")
# The other end may ask for it only after something that this end would now be waiting with.
_POINT_TO_POINT = {"send", "recv_", "recv_any_source_", "isend", "irecv", "batch_p2p_ops"}
_BARRIERS = {"barrier", "monitored_barrier_"}
# Their first argument is read as well; that of any other is written alone.
_ADD_TO_FIRST = {"allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_"}


@functools.cache
def is_collective(func: Any) -> bool:
    """Whether `func` speaks with other ranks."""
    return func.namespace == _IN_PLACE or func.namespace in _FUNCTIONAL


@functools.cache
def is_wrapper(func: Any) -> bool:
    """Whether `func` only dresses the result of a collective, for autograd."""
    return func.namespace in _FUNCTIONAL and _name(func) == "_wrap_tensor_autograd"


def is_unfinished(kinds: Any) -> bool:
    """Whether one of these tensor types waits, when it is used, for the collective that it comes from."""
    # By name: its module is a private one.
    return any(kind.__name__ == "AsyncCollectiveTensor" for kind in kinds)


def obstacle(func: Any, args: tuple[Any, ...]) -> str | None:
    """Why a collective cannot be replayed, or None where it can."""
    if _name(func) in _BARRIERS:
        return "is a barrier, at which the host waits"
    if _name(func) in _POINT_TO_POINT and not any(tensor.is_cuda for tensor in tensors_in(args)):
        return "speaks with one rank, which the emulated capture does not replay: both ends might wait for each other"
    return None


@functools.cache
def _writes_first(func: Any) -> bool:
    # A barrier brings memory of its own, in which there is nothing.
    return func.namespace == _IN_PLACE and (_name(func).endswith("_") or _name(func) in _BARRIERS)


def written(func: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """What an in-place collective writes; its schema does not say."""
    return tensors_in(args[0]) if _writes_first(func) else []


def overwritten(func: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """What of that it does not read."""
    return tensors_in(args[0]) if _writes_first(func) and _name(func) not in _ADD_TO_FIRST else []


def run_again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the collective and return when it is done.

    Raises:
        ReplicaError: another rank did not come in the time that the process group gives it, or is gone.
    """
    try:
        result = func(*args, **kwargs)
        if func.namespace == _IN_PLACE:
            work = result[-1] if isinstance(result, (tuple, list)) else result
            torch._C._distributed_c10d.Work.unbox(work).wait()
        else:
            for tensor in tensors_in(result):
                torch.ops._c10d_functional.wait_tensor(tensor)
    except RuntimeError as error:
        raise ReplicaError(
            f"{_name(func)} in a replay: expected every rank of the process group, got: {error}; one that stopped, "
            "failed, or captures again while this one does not is missing: every rank must launch the same steps"
        ) from error
    return result


def _name(func: Any) -> str:
    return func._schema.name.split("::")[-1]
