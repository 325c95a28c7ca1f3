"""What a capacity would have dropped of recorded loads: exact counts, step by step.

Expert parallelism is made of what was recorded: EP consecutive micro-batches stand for the EP ranks of one step, rank r
holding E/EP consecutive experts. Ranks that read different sources at the same time can differ more than that. Of
recorded ranks each has its own capacity, and the step of all overflows where one of them does.

Dimensions: G steps, N micro-batches of a step, E experts, EP ranks, T·K assignments of a micro-batch on one rank, C
rows of an expert, R rows of a rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from staticmoe.errors import ConfigError
from staticmoe.shapes import StaticShape
from staticmoe.tune.loads import Ints, Layer, Loads


def shape_of(layer: Layer, factor: float | None, scope: str, ranks: int) -> StaticShape:
    """The sizes of a layer at a capacity; only those in rows mean anything."""
    # Capacity knows T and K by their product alone, and no width.
    return StaticShape(
        tokens=layer.assignments,
        top_k=1,
        num_experts=layer.num_experts,
        hidden=1,
        intermediate=1,
        capacity_factor=factor,
        capacity_scope=scope,
        expert_parallel=ranks,
    )


def limit_of(shape: StaticShape) -> int:
    """Rows of what is bounded: of one expert where C bounds it, else of a rank."""
    return shape.capacity_rows if shape.expert_capacity is None else shape.expert_capacity


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """What becomes of each step at one capacity.

    Attributes:
        dropped: module name -> int64 [G].
        overflowed: bool [G], whether any layer dropped anything in any micro-batch.
        shapes: module name -> its sizes.
    """

    dropped: Mapping[str, Ints]
    overflowed: NDArray[np.bool_]
    shapes: Mapping[str, StaticShape]

    @property
    def lost(self) -> Ints:
        """Assignments dropped in each step, [G]."""
        return np.sum(list(self.dropped.values()), axis=0, dtype=np.int64)


class Arrivals:
    """Loads as they arrive where a capacity bounds them.

    Args:
        loads: the recording.
        scope: "rank" or "expert".
        ranks: EP.

    Attributes:
        routed: module name -> int64 [G], assignments of each step over all ranks.
        rows_per_step: recorded rows that a step is made of: EP·N of one recorded rank.

    Raises:
        ConfigError: E is no multiple of EP, fewer than two steps, or rows that are sums of micro-batches.
    """

    def __init__(self, loads: Loads, scope: str, ranks: int = 1) -> None:
        self.loads, self.scope, self.ranks = loads, scope, ranks
        self.rows_per_step = loads.rows_per_step(ranks)
        self.shapes = {name: shape_of(layer, None, scope, ranks) for name, layer in loads.layers.items()}
        self.steps = len(loads) // self.rows_per_step
        if self.steps < 2:
            raise ConfigError(
                f"loads: expected at least two steps of {self.rows_per_step // loads.accumulate} ranks with "
                f"{loads.accumulate} micro-batches each, {2 * self.rows_per_step} recorded rows; got {len(loads)}: "
                "record more steps"
            )
        if loads.summed > 1 and not (scope == "rank" and ranks == 1):
            raise ConfigError(
                f"loads: expected the counts of single micro-batches, which are what a capacity bounds; each record "
                f"is the sum of {loads.summed}: record with gradient_accumulation_steps=1 or use calibrate"
            )
        self.cells = {name: self._cells(rows) for name, rows in loads.routed.items()}
        self.routed = {name: self._by_step(cells.sum(1)) for name, cells in self.cells.items()}

    def _cells(self, rows: Ints) -> Ints:
        """Of each micro-batch over all ranks [G·N, E], or [G·N, EP] where a rank is bounded: what arrives there."""
        used = rows[: self.steps * self.rows_per_step]
        # Ranks of one micro-batch lie side by side, and the micro-batches of a step behind each other.
        experts = used.reshape(-1, self.ranks, rows.shape[1]).sum(1)
        return experts if self.scope == "expert" else experts.reshape(len(experts), self.ranks, -1).sum(2)

    def _by_step(self, values: Ints) -> Ints:
        return values.reshape(self.steps, -1).sum(1)

    def at(self, factor: float | None) -> Outcome:
        """What a capacity factor would have done.

        Raises:
            ConfigError: a factor that is not above 0; one that can overflow where rows are sums of micro-batches.
        """
        shapes = {name: shape_of(layer, factor, self.scope, self.ranks) for name, layer in self.loads.layers.items()}
        if self.loads.summed > 1 and any(shape.can_overflow for shape in shapes.values()):
            raise ConfigError(
                f"factors: expected at least 1, where nothing can overflow; got {factor}, and records that are sums "
                f"of {self.loads.summed} micro-batches: record with gradient_accumulation_steps=1 or use calibrate"
            )
        dropped = {}
        for name, cells in self.cells.items():
            # Of a sum nothing is over a capacity that one micro-batch cannot exceed.
            over = np.maximum(cells - limit_of(shapes[name]), 0) if shapes[name].can_overflow else np.zeros_like(cells)
            dropped[name] = self._by_step(over.sum(1))
        overflowed = np.any([counts > 0 for counts in dropped.values()], axis=0)
        return Outcome(dropped, overflowed, shapes)

    @property
    def one_row(self) -> float:
        """The most that one row of what is bounded is worth, as a difference of capacity factors."""
        layers = self.loads.layers.values()
        if self.scope == "rank":
            return max(1 / layer.assignments for layer in layers)
        return max(layer.num_experts / (self.ranks * layer.assignments) for layer in layers)

    def required(self) -> NDArray[np.float64]:
        """[G], the capacity factor with which a step would have dropped nothing, before rows are rounded up."""
        factors = []
        for name, cells in self.cells.items():
            balanced = self.loads.layers[name].assignments * self.loads.summed
            if self.scope == "expert":
                factors.append(cells.max(1) * (cells.shape[1] / (self.ranks * balanced)))
            else:
                factors.append(cells.max(1) / balanced)
        highest = np.max(factors, axis=0)
        return np.asarray(highest.reshape(self.steps, -1).max(1))
