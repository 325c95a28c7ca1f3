"""A recorded iteration: operations on fixed storages, run again in order without the Python that made them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from staticmoe.capture.provenance import raw_bytes
from staticmoe.errors import ReplayError, ReplicaError


@dataclasses.dataclass(frozen=True)
class Entry:
    """One operation.

    Attributes:
        run: calls the operation on the recorded arguments.
        fresh: (position in the flat results, recorded tensor) of results that `run` makes anew.
        name: operation name, for messages.
    """

    run: Callable[[], Any]
    fresh: tuple[tuple[int, Tensor], ...]
    name: str


def operation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], fresh: list[tuple[int, Tensor]]) -> Entry:
    """Entry that runs `func` again and leaves its results in the tensors of the recording.

    Where torch has a form of `func` that writes into given tensors, the entry uses it and saves the copy.

    Args:
        fresh: (position, tensor) of the results that are new memory.
    """
    names = _out_names(func) if len(fresh) == len(func._schema.returns) else None
    if names is None or any(0 in tensor.stride() for _, tensor in fresh):
        return Entry(lambda: func(*args, **kwargs), tuple(fresh), str(func))
    form, places = names
    given = {**kwargs, **{name: tensor for name, (_, tensor) in zip(places, fresh, strict=True)}}
    return Entry(lambda: form(*args, **given), (), str(func))


@functools.cache
def _out_names(func: Any) -> tuple[Any, list[str]] | None:
    """The overload of `func` with the same arguments and an output for each result, and the outputs' names."""
    if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    if any(str(result.type) != "Tensor" for result in func._schema.returns):
        return None

    def plain(schema: Any) -> list[tuple[str, str]]:
        return [(argument.name, str(argument.type)) for argument in schema.arguments if not argument.is_out]

    packet = func._overloadpacket
    for name in packet.overloads():
        form = getattr(packet, name)
        places = [argument.name for argument in form._schema.arguments if argument.is_out]
        if len(places) == len(func._schema.returns) and places and plain(form._schema) == plain(func._schema):
            return form, places
    return None


class Tape:
    """Operations of one iteration and the memory that they own.

    A replay runs every operation on the tensors of the recording and leaves each result in the tensor that the
    recording made, so that storages stay where they are as in a CUDA graph. Memory that no operation overwrites
    whole is filled with NaN (floats) or out-of-range integers before each replay: what reads a value left there
    by an earlier replay shows.

    Attributes:
        has_collectives: a replay waits for other ranks.
    """

    def __init__(self) -> None:
        self.has_collectives = False
        self.entries: list[Entry] = []
        self._owned: dict[int, Tensor] = {}
        self._poisoned: dict[int, tuple[Tensor, int]] = {}
        self._external: dict[int, tuple[Tensor, int]] = {}

    def append(self, entry: Entry) -> None:
        """Add an operation at the end."""
        self.entries.append(entry)

    def own(self, tensor: Tensor, *, overwritten: bool) -> None:
        """Take the memory of `tensor`, made by this tape.

        Args:
            overwritten: the operation that made it writes all of it, at each replay; else it is poisoned before.
        """
        key = tensor.untyped_storage()._cdata
        raw = raw_bytes(tensor)
        self._owned[key] = raw
        if not overwritten and raw.numel():
            fill = 0xFF if tensor.dtype.is_floating_point or tensor.dtype.is_complex else 0x7F
            self._poisoned[key] = (raw, 1 if tensor.dtype == torch.bool else fill)

    def refer(self, tensor: Tensor) -> None:
        """Remember the size of memory that the tape reads or writes and does not own."""
        storage = tensor.untyped_storage()
        self._external.setdefault(storage._cdata, (tensor, storage.nbytes()))

    @property
    def owned_bytes(self) -> int:
        """Bytes of intermediate results that the tape keeps."""
        return sum(raw.numel() for raw in self._owned.values())

    def replay(self) -> None:
        """Run the recorded iteration once.

        Raises:
            ReplayError: memory the tape refers to was resized, or an operation failed.
        """
        self._check_external()
        with torch.no_grad():
            for raw, fill in self._poisoned.values():
                raw.fill_(fill)
            for entry in self.entries:
                self._run(entry)

    def release(self) -> None:
        """Let go of all operations and of the memory."""
        self.entries = []
        self._owned, self._poisoned, self._external = {}, {}, {}

    def _check_external(self) -> None:
        for tensor, size in self._external.values():
            # Writing into memory that was given back crashes the process, so look first.
            if tensor.untyped_storage().nbytes() != size:
                raise ReplayError(
                    f"a tensor of shape {tuple(tensor.shape)} had {size} bytes when the iteration was recorded and has "
                    f"{tensor.untyped_storage().nbytes()} now; do not resize storages (as sharded parameters do) "
                    "under the emulated capture"
                )

    @staticmethod
    def _run(entry: Entry) -> None:
        try:
            result = entry.run()
        except ReplicaError:
            raise
        except Exception as error:
            raise ReplayError(f"{entry.name} failed in a replay: {error}") from error
        if entry.fresh:
            results = result if isinstance(result, (tuple, list)) else (result,)
            for position, recorded in entry.fresh:
                recorded.copy_(results[position])


def without_history(tree: Any) -> Any:
    """Copy of arguments with every tensor cut from the autograd graph, which would else live as long as the tape."""
    if isinstance(tree, Tensor):
        return tree.detach()
    if isinstance(tree, (list, tuple)):
        return type(tree)(without_history(item) for item in tree)
    if isinstance(tree, dict):
        return {key: without_history(item) for key, item in tree.items()}
    return tree
