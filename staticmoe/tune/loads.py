"""Recorded loads: how many assignments the router gave to each expert, layer by layer, step by step.

Loads are counted before capacity, so one recording answers for every capacity factor.

Dimensions: S recorded rows, E experts of a layer, T tokens of a micro-batch, K experts a token, EP ranks that share the
experts, N micro-batches of a step, W ranks that were recorded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from staticmoe.errors import ConfigError

Ints = NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer as its capacity sees it.

    Attributes:
        num_experts: E.
        assignments: T·K of one micro-batch on one rank, masked tokens included.
    """

    num_experts: int
    assignments: int

    def __post_init__(self) -> None:
        for name in ("num_experts", "assignments"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1; got {getattr(self, name)}")


@dataclasses.dataclass(frozen=True, eq=False)
class Loads:
    """The loads of a recording.

    Attributes:
        layers: module name -> its sizes.
        routed: module name -> int64 [S,E], assignments before capacity.
        summed: micro-batches that each row is the sum of. What a capacity drops can be told from rows of one alone.
        accumulate: N, rows that a training step of one rank is made of; 1 where a row is a step.
        replicas: W, ranks that were recorded together: the rows of a step lie side by side, one of each.
        notes: what a reader should know about how this was recorded.

    Raises:
        ConfigError: no layers or rows, shapes that do not agree, negative counts, more assignments than there are.
    """

    layers: Mapping[str, Layer]
    routed: Mapping[str, Ints]
    summed: int = 1
    accumulate: int = 1
    replicas: int = 1
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        counts = {name: np.asarray(rows) for name, rows in self.routed.items()}
        if not counts or counts.keys() != self.layers.keys():
            raise ConfigError(
                f"loads: expected the same layers, at least one, in layers and routed; got {sorted(self.layers)} and "
                f"{sorted(counts)}"
            )
        length = next(iter(counts.values())).shape[0]
        for name, rows in counts.items():
            layer = self.layers[name]
            if rows.shape != (length, layer.num_experts) or not np.issubdtype(rows.dtype, np.integer):
                raise ConfigError(
                    f"loads of '{name}': expected integers [{length}, {layer.num_experts}], a row for each recorded "
                    f"step; got {rows.dtype} {list(rows.shape)}"
                )
            most = int(rows.sum(1).max(initial=0))
            if rows.size and (int(rows.min()) < 0 or most > self.summed * layer.assignments):
                raise ConfigError(
                    f"loads of '{name}': expected counts from 0 on, at most T·K = {layer.assignments} together in "
                    f"each of {self.summed} micro-batches; got a row with {most} in all and {int(rows.min())} at "
                    "least: is a row the sum of several micro-batches?"
                )
        if length < 1:
            raise ConfigError("loads: expected at least one recorded step; got none: record more steps")
        object.__setattr__(self, "routed", {name: rows.astype(np.int64) for name, rows in counts.items()})

    def __len__(self) -> int:
        return int(next(iter(self.routed.values())).shape[0])

    def rows_per_step(self, ranks: int) -> int:
        """Rows that make a step of as many ranks as were recorded, and of whole groups of `ranks` with the experts."""
        return math.lcm(ranks, self.replicas) * self.accumulate

    def part(self, start: int, stop: int) -> Loads:
        """The rows from `start` up to `stop`, which is left out."""
        return dataclasses.replace(self, routed={name: rows[start:stop] for name, rows in self.routed.items()})

    def shares(self) -> dict[str, NDArray[np.float64]]:
        """Module name -> [E], the share of all assignments that each expert got; zeros where there were none."""
        sums = {name: rows.sum(0) for name, rows in self.routed.items()}
        return {name: total / max(int(total.sum()), 1) for name, total in sums.items()}
