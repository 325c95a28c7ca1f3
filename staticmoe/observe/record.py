"""The record of a step: one row of device memory, copied out once, read late. The only reader of device values.

A row is int64 [W]: counters, then scalars (fp64 bits), then the participants' fields, then, with several ranks, peaks.
The iteration writes the row and puts it into slot `slot` of a device ring; the stream copies that slot to the host
behind it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
from collections.abc import Iterator, Mapping

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor


class Reason(enum.IntFlag):
    """Why a step may not commit; bits of a device scalar and of a record's counter."""

    CAPACITY_OVERFLOW = 1
    STASH_OVERFLOW = 2
    NONFINITE_LOSS = 4
    NONFINITE_GRADIENT = 8


COUNTERS = ("launch", "attempt", "void", "reasons", "veto", "committed")


@dataclasses.dataclass(frozen=True)
class RecordLayout:
    """What stands where in a row.

    Attributes:
        scalars: names of the fp64 values, in order.
        fields: (participant, field, shape) of the int64 fields, in order; those of one participant stand together.
        ranks: how many a step runs on; with more than one there are peaks.
    """

    scalars: tuple[str, ...]
    fields: tuple[tuple[str, str, tuple[int, ...]], ...]
    ranks: int = 1

    @property
    def first_field(self) -> int:
        """Where the fields begin in a row."""
        return len(COUNTERS) + len(self.scalars)

    @property
    def first_peak(self) -> int:
        """Where the peaks begin in a row."""
        return self.first_field + sum(math.prod(shape) for _, _, shape in self.fields)

    @property
    def peaks(self) -> list[str]:
        """Participants that a row has peaks of: those that count what was routed and what was kept."""
        if self.ranks == 1:
            return []
        known: dict[str, set[str]] = {}
        for participant, field, _ in self.fields:
            known.setdefault(participant, set()).add(field)
        return [participant for participant, fields in known.items() if {"routed", "kept"} <= fields]

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.first_peak + 3 * len(self.peaks)

    def alike(self) -> list[tuple[int, int, tuple[slice, slice] | None]]:
        """Runs of participants that have the same fields, in order: how many, elements of each, `routed` and `kept`."""
        everyone = [
            tuple((field, math.prod(shape)) for _, field, shape in group)
            for _, group in itertools.groupby(self.fields, key=lambda one: one[0])
        ]
        runs: list[tuple[int, int, tuple[slice, slice] | None]] = []
        for sizes, same in itertools.groupby(everyone):
            ends = list(itertools.accumulate(size for _, size in sizes))
            parts = {name: slice(end - size, end) for (name, size), end in zip(sizes, ends, strict=True)}
            counted = (parts["routed"], parts["kept"]) if {"routed", "kept"} <= parts.keys() else None
            runs.append((len(list(same)), ends[-1], counted))
        return runs

    @functools.cached_property
    def owners(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Participant -> field -> where it begins and ends among the fields of a row."""
        found: dict[str, dict[str, tuple[int, int]]] = {}
        position = 0
        for owner, field, shape in self.fields:
            end = position + math.prod(shape)
            found.setdefault(owner, {})[field] = position, end
            position = end
        return found

    @functools.cached_property
    def _columns(self) -> dict[tuple[str, ...], Columns]:
        return {}

    def columns(self, *names: str) -> Columns:
        """Where these fields are, of the participants that have all of them; found once."""
        if names not in self._columns:
            owners = {owner: places for owner, places in self.owners.items() if set(names) <= places.keys()}
            sizes = (end - start for start, end in (places[names[0]] for places in owners.values()))
            indices = (
                [numpy.arange(*places[name]) for places in owners.values()] or [numpy.zeros(0, dtype=numpy.int64)]
                for name in names
            )
            self._columns[names] = Columns(tuple(owners), tuple(sizes), tuple(map(numpy.concatenate, indices)))
        return self._columns[names]


@dataclasses.dataclass(frozen=True, eq=False)
class Columns:
    """Fields of several participants, end to end.

    Attributes:
        owners: the participants, in order.
        sizes: elements of the first field, of each.
        places: for each field, where its elements are among the fields of a row.
    """

    owners: tuple[str, ...]
    sizes: tuple[int, ...]
    places: tuple[NDArray[numpy.int64], ...]


class RowFields(Mapping[str, Mapping[str, list[int]]]):
    """The fields of a row by participant and name, as lists once somebody asks for one.

    A large model has tens of thousands of counts, and to make lists of them in every step would cost more than
    everything else that is done with a record.

    Attributes:
        layout: of the row.
        row: all fields, end to end.
    """

    def __init__(self, layout: RecordLayout, row: NDArray[numpy.int64]) -> None:
        self.layout, self.row = layout, row

    @functools.cached_property
    def _lists(self) -> dict[str, dict[str, list[int]]]:
        flat = self.row.tolist()
        return {
            owner: {field: flat[start:end] for field, (start, end) in places.items()}
            for owner, places in self.layout.owners.items()
        }

    def __getitem__(self, owner: str) -> dict[str, list[int]]:
        return self._lists[owner]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.owners)

    def __len__(self) -> int:
        return len(self.layout.owners)


@dataclasses.dataclass(frozen=True)
class Record:
    """One step as the host sees it.

    Attributes:
        launch: number of the step, as staged with its inputs.
        attempt: 0, or how many times the step was run before.
        void: the step ran while the device was halted; nothing in it counts.
        reasons: `Reason` bits.
        veto: the step committed nothing.
        committed: steps committed so far, this one included.
        scalars: name -> value.
        fields: participant -> field -> flat list of ints; with several ranks this rank's own.
        peaks: participant -> over all ranks, the most that was routed on one, the most that was routed to one element
            of `routed` on one, and the most that was not kept on one; empty with one rank.
    """

    launch: int
    attempt: int
    void: bool
    reasons: Reason
    veto: bool
    committed: int
    scalars: dict[str, float]
    fields: Mapping[str, Mapping[str, list[int]]]
    peaks: dict[str, list[int]] = dataclasses.field(default_factory=dict)


class RecordRing:
    """A row that the iteration writes, its ring on the device, and the ring's copy on the host.

    Args:
        layout: of the row.
        slots: rows of the rings; one more than steps in flight.
        device: of the row and the ring.
    """

    def __init__(self, layout: RecordLayout, slots: int, device: torch.device) -> None:
        self.layout = layout
        self.row = torch.zeros(layout.width, dtype=torch.int64, device=device)
        self.ring = torch.zeros(slots, layout.width, dtype=torch.int64, device=device)
        self._host = torch.zeros(slots, layout.width, dtype=torch.int64, pin_memory=device.type == "cuda")
        # The same memory: reading from it costs torch's dispatcher nothing.
        self._rows: NDArray[numpy.int64] = self._host.numpy()

    @property
    def fields(self) -> Tensor:
        """All fields, a view of the row."""
        return self.row[self.layout.first_field : self.layout.first_peak]

    @property
    def peaks(self) -> Tensor:
        """[peaks,3], a view of the row; see `Record`."""
        return self.row[self.layout.first_peak :].view(-1, 3)

    def field(self, participant: str, name: str) -> Tensor:
        """The int64 accumulator of a field, a view of the row in the declared shape."""
        for owner, field, shape in self.layout.fields:
            if (owner, field) == (participant, name):
                start, end = self.layout.owners[participant][name]
                return self.fields[start:end].view(shape)
        raise KeyError(f"no record field {name!r} of {participant!r}")

    def write(self, counters: list[Tensor], scalars: list[Tensor], slot: Tensor) -> None:
        """Complete the row and put it into the ring. Graph-safe: fixed shapes, no host value.

        Shapes:
            counters: one int64 0-dim tensor for each of `COUNTERS`; scalars: one 0-dim tensor for each name;
            slot: int64 [1].
        """
        first = len(COUNTERS)
        self.row[:first].copy_(torch.stack(counters))
        values = torch.stack([value.detach().to(torch.float64) for value in scalars])
        self.row[first : first + len(scalars)].view(torch.float64).copy_(values)
        self.ring.index_copy_(0, slot, self.row.unsqueeze(0))

    def copy_out(self, slot: int) -> None:
        """Copy a slot of the ring to the host; the slot is not written again before the host has read the copy."""
        self._host[slot].copy_(self.ring[slot], non_blocking=True)

    def read(self, slot: int) -> Record:
        """Read a slot from the host's copy, once the stream has passed its `copy_out`."""
        # The slot is written again before everybody has read this record.
        row = self._rows[slot].copy()
        first = len(COUNTERS)
        counters = dict(zip(COUNTERS, row[:first].tolist(), strict=True))
        names = self.layout.scalars
        values = row[first : first + len(names)].view(numpy.float64).tolist()
        peaks = row[self.layout.first_peak :].reshape(-1, 3).tolist()
        return Record(
            launch=counters["launch"],
            attempt=counters["attempt"],
            void=bool(counters["void"]),
            reasons=Reason(counters["reasons"]),
            veto=bool(counters["veto"]),
            committed=counters["committed"],
            scalars=dict(zip(names, values, strict=True)),
            fields=RowFields(self.layout, row[self.layout.first_field : self.layout.first_peak]),
            peaks=dict(zip(self.layout.peaks, peaks, strict=True)),
        )
