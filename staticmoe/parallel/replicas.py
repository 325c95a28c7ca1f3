"""Ranks that hold copies of one model, each with a batch of its own: what they exchange in a step.

Letters: W ranks, n elements.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from staticmoe.errors import ConfigError, ReplicaError
from staticmoe.parallel.agreement import Agreement

# 16-bit addends: like those of several micro-batches, which are added in fp32.
_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
# Large enough for a link's full rate; what a sum of gradients needs beside them is at most this.
_BUCKET_BYTES = 128 * 2**20
# Of a comparison.
_CHUNK_BYTES = 64 * 2**20
# Elements: 16 bytes of the narrowest sum, fp32.
_ALIGNED = 4
# The newer name of one function.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# What a captured iteration can speak through.
_BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


class Replicas:
    """The ranks of a group, W of them, seen from one.

    What stands in a graph is marked so; everything is a call of all ranks.

    Args:
        group: of more than one rank, this one among them.

    Attributes:
        size: W.
        agreement: where the hosts meet.
    """

    _backend: Any

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.size = dist.get_world_size(group)
        self.agreement = Agreement(group)

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Replicas | None:
        """The replicas of a group; None for one rank.

        Raises:
            ConfigError: this rank is not of the group; or there is none, and several ranks that may have wanted one.
        """
        initialized = dist.is_available() and dist.is_initialized()
        if group is None:
            if initialized and dist.get_world_size() > 1:
                raise ConfigError(
                    f"process_group: expected the ranks that train together, since torch.distributed runs with "
                    f"{dist.get_world_size()}, got None, with which their models would drift apart; pass "
                    "torch.distributed.group.WORLD, or a group of this rank alone (dist.new_subgroups(1)[0])"
                )
            return None
        if not initialized or not isinstance(group, dist.ProcessGroup):
            raise ConfigError(
                f"process_group: expected a group of torch.distributed that this rank is in, got {group!r}; call "
                "torch.distributed.init_process_group first, and construct the runner on the ranks of the group alone"
            )
        return cls(group) if dist.get_world_size(group) > 1 else None

    def connect(self, device: torch.device) -> None:
        """Open the way between the devices, which a capture could not.

        Raises:
            ConfigError: the group has none that a captured iteration could use.
        """
        wanted = _BACKENDS.get(device.type, "nccl")
        try:
            self._backend = self._group._get_backend(device)
            backend = self._backend.name()
        except RuntimeError as error:
            backend = str(error)
        if backend != wanted:
            raise ConfigError(
                f"process_group: expected the backend {wanted} for a model on {device}, got {backend}; "
                f"torch.distributed.init_process_group('{wanted}')"
            )
        dist.all_reduce(torch.zeros(1, device=device), group=self._group)

    @property
    def patience(self) -> datetime.timedelta:
        """How long a collective of the group may take, as `init_process_group` was told; once it is connected."""
        timeout: datetime.timedelta = self._backend.options._timeout
        return timeout

    def compare_values(self, tensors: Mapping[str, Tensor]) -> None:
        """Compare each tensor bitwise with that of rank 0; names, shapes and dtypes are known to be the same.

        Raises:
            ReplicaError: on every rank, with the name of the first that differs.
        """
        # All of them, whatever is found: the others wait in each broadcast.
        differing = [name for name, tensor in tensors.items() if self._differs(tensor)]
        found = self.agreement.exchange("the values of the replicas", differing[:1])
        others = [rank for rank, names in enumerate(found) if names]
        if others:
            raise ReplicaError(
                f"replicas: expected bitwise the same values on every rank, got others than rank 0 has on rank "
                f"{', '.join(map(str, others))}, first in {found[others[0]][0]}; seed every rank alike before the "
                "model is made, or load the same checkpoint"
            )

    def _differs(self, tensor: Tensor) -> bool:
        differs = False
        mine = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        for chunk in mine.split(_CHUNK_BYTES) if mine.numel() else ():
            first = chunk.clone()
            dist.broadcast(first, group=self._group, group_src=0)
            differs = differs or not torch.equal(chunk, first)
        return differs

    def gather(self, row: Tensor) -> Tensor:
        """[n] of every rank -> [W,n]. Graph-safe."""
        rows = torch.empty(self.size * row.numel(), dtype=row.dtype, device=row.device)
        _all_gather(rows, row, group=self._group)
        return rows.view(self.size, row.numel())

    def add_up(self, tensors: list[Any]) -> list[Tensor]:
        """The sums over ranks of a list of tensors, in new memory; of 16-bit ones in fp32. Empties the list.

        Graph-safe. Every rank gets the same bits, and gets them again: the buckets follow from shapes and dtypes alone.
        """
        results: dict[int, Tensor] = {}
        for places in _buckets(tensors):
            addends = [tensors[place] for place in places]
            # Two buckets at a time, not two copies of everything.
            for place in places:
                tensors[place] = None
            results.update(zip(places, self._add_up(addends), strict=True))
        tensors.clear()
        return [results[place] for place in range(len(results))]

    def _add_up(self, addends: list[Tensor]) -> list[Tensor]:
        """The sums of one bucket, each where a vector access could begin."""
        dtype = _wide(addends[0])
        sizes = [_room(addend) for addend in addends]
        flat = torch.zeros(sum(sizes), dtype=dtype, device=addends[0].device)
        parts = zip(flat.split(sizes), addends, strict=True)
        sums = [part[: addend.numel()].view(addend.shape) for part, addend in parts]
        torch._foreach_copy_(sums, addends)
        dist.all_reduce(flat, group=self._group)
        # Optimizers walk a parameter and its gradient by one index.
        return [
            total if addend.is_contiguous() else torch.empty_like(addend, dtype=dtype).copy_(total)
            for total, addend in zip(sums, addends, strict=True)
        ]


def _wide(addend: Tensor) -> torch.dtype:
    return _WIDE.get(addend.dtype, addend.dtype)


def _room(addend: Tensor) -> int:
    """Elements that a tensor takes in a bucket: a multiple of 16 bytes, and of any dtype's size."""
    return -(-addend.numel() // _ALIGNED) * _ALIGNED


def _buckets(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Places of the tensors that travel together: of one dtype, in order, and of at most 128 MiB or alone."""
    buckets: list[list[int]] = []
    last: dict[torch.dtype, tuple[list[int], int]] = {}
    for place, tensor in enumerate(tensors):
        dtype = tensor.dtype
        size = _room(tensor) * _wide(tensor).itemsize
        bucket, filled = last.get(dtype, ([], _BUCKET_BYTES))
        if filled + size > _BUCKET_BYTES:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(place)
        last[dtype] = bucket, filled + size
    return buckets
