"""A recorded iteration: operations on fixed storages, run again in order without the Python that made them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from staticmoe.capture.provenance import raw_bytes
from staticmoe.errors import ReplayError


@dataclasses.dataclass(frozen=True)
class Entry:
    """One operation.

    Attributes:
        run: calls the operation on the recorded arguments.
        fresh: (position in the flat results, recorded tensor) of results that are new memory, not an alias.
        name: operation name, for messages.
    """

    run: Callable[[], Any]
    fresh: tuple[tuple[int, Tensor], ...]
    name: str


class Tape:
    """Operations of one iteration and the memory that they own.

    A replay runs every operation on the tensors of the recording and copies each new result into the tensor
    that the recording made, so that storages stay where they are as in a CUDA graph. Before a replay all
    memory that the tape owns is filled with NaN (floats) or out-of-range integers: what reads a value left
    by an earlier replay shows.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._owned: dict[int, tuple[Tensor, int]] = {}
        self._external: dict[int, tuple[Tensor, int]] = {}

    def append(self, entry: Entry) -> None:
        """Add an operation at the end."""
        self.entries.append(entry)

    def own(self, tensor: Tensor) -> None:
        """Take the memory of `tensor`, made by this tape, for poisoning between replays."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._owned and storage.nbytes():
            fill = 0xFF if tensor.dtype.is_floating_point or tensor.dtype.is_complex else 0x7F
            self._owned[storage._cdata] = (raw_bytes(tensor), 1 if tensor.dtype == torch.bool else fill)

    def refer(self, tensor: Tensor) -> None:
        """Remember the size of memory that the tape reads or writes and does not own."""
        storage = tensor.untyped_storage()
        self._external.setdefault(storage._cdata, (tensor, storage.nbytes()))

    @property
    def owned_bytes(self) -> int:
        """Bytes of intermediate results that the tape keeps."""
        return sum(raw.numel() for raw, _ in self._owned.values())

    def replay(self) -> None:
        """Run the recorded iteration once.

        Raises:
            ReplayError: memory the tape refers to was resized, or an operation failed.
        """
        self._check_external()
        with torch.no_grad():
            for raw, fill in self._owned.values():
                raw.fill_(fill)
            for entry in self.entries:
                self._run(entry)

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
        except Exception as error:
            raise ReplayError(f"{entry.name} failed in a replay: {error}") from error
        if entry.fresh:
            results = result if isinstance(result, (tuple, list)) else (result,)
            for position, recorded in entry.fresh:
                recorded.copy_(results[position])
