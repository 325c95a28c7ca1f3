"""From a record to the numbers about the layers' loads: pure functions of counts and facts.

All layers' counts lie end to end in one array, so that a step costs a few array operations, whatever the layers' sizes.

Letters: L layers that report, E experts of a layer, T tokens of a micro-batch, K top_k, N micro-batches of a step.
"""

from __future__ import annotations

import array
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy
from numpy.typing import NDArray

from staticmoe.observe.record import Reason, Record, RowFields

Facts = Mapping[str, Mapping[str, int]]
Ints = NDArray[numpy.int64]
Floats = NDArray[numpy.float64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrival:
    """A record, and what the runner knows about its step.

    Attributes:
        step: number of the call to `step`, from 1; for an evaluation, of the last step before it.
        record: the values.
        facts: participant -> what it told about its buffers: "capacity_rows", "num_experts", "top_k", "tokens",
            "expert_weights" (elements of all experts' matrices); one that lacks some is left out of what needs them.
        training: whether it is a training step.
        micro_batches: N.
        capacity_factor: of the variant that ran; None is dropless.
        lag: steps launched after this one, at the time of reading.
        causes: reasons of the attempts before the last.
    """

    step: int
    record: Record
    facts: Facts
    training: bool = True
    micro_batches: int = 1
    capacity_factor: float | None = None
    lag: int = 0
    causes: Reason = Reason(0)

    @property
    def counts(self) -> bool:
        """Whether it is a training step that is not void: void attempts and evaluations are in no total."""
        return self.training and not self.record.void

    @property
    def committed(self) -> bool:
        """Whether it is a training step that changed the model."""
        return self.counts and not self.record.veto


@dataclasses.dataclass(frozen=True, eq=False)
class Loads:
    """Assignments of one record, summed over its micro-batches; layers without "routed" and "kept" are left out.

    Attributes:
        names: of the L layers, in module order.
        sizes: [L], E of each.
        routed, kept: [sum of sizes], before capacity and computed.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    routed: Ints
    kept: Ints

    @classmethod
    def of(cls, record: Record) -> Loads:
        """The loads that a record holds."""
        if isinstance(record.fields, RowFields):
            found = record.fields.layout.columns("routed", "kept")
            routed, kept = (record.fields.row[places] for places in found.places)
            return cls(found.owners, found.sizes, routed, kept)
        layers = {name: fields for name, fields in record.fields.items() if {"routed", "kept"} <= fields.keys()}
        sizes = tuple(len(fields["routed"]) for fields in layers.values())
        routed = _flat(fields["routed"] for fields in layers.values())
        return cls(tuple(layers), sizes, routed, _flat(fields["kept"] for fields in layers.values()))

    @classmethod
    def of_views(cls, views: Mapping[str, Mapping[str, Any]]) -> Loads:
        """The loads in what a subscriber gets under "moe", before capacity alone: `kept` is `routed`."""
        routed = _flat(view["routed"] for view in views.values())
        return cls(tuple(views), tuple(len(view["routed"]) for view in views.values()), routed, routed)

    @functools.cached_property
    def starts(self) -> Ints:
        """[L], where each layer's experts begin (exclusive prefix sum of the sizes)."""
        return numpy.array([0, *itertools.accumulate(self.sizes)][:-1], dtype=numpy.int64)

    def by_layer(self, flat: Ints) -> dict[str, list[int]]:
        """An array like `routed` as lists of plain integers by layer."""
        values, ends = flat.tolist(), itertools.accumulate(self.sizes)
        return {name: values[end - size : end] for name, size, end in zip(self.names, self.sizes, ends, strict=True)}

    def sums(self, flat: Ints) -> Ints:
        """[L], sum of an array like `routed` over each layer's experts."""
        return numpy.add.reduceat(flat, self.starts) if self.names else flat


def _flat(lists: Iterable[list[int]]) -> Ints:
    # Quicker by a third than to let numpy look at each integer.
    flat = array.array("q")
    for one in lists:
        flat.fromlist(one)
    return numpy.array(flat, dtype=numpy.int64)


@dataclasses.dataclass(frozen=True, eq=False)
class Told:
    """The facts of the layers that a record has, [L] each; 0 where a layer tells nothing. Constants of a capture.

    Attributes:
        sizes: E.
        capacity_rows: rows of the buffers for one micro-batch.
        tokens, top_k: T and K.
        expert_weights: elements of all experts' matrices.
    """

    sizes: Ints
    capacity_rows: Ints
    tokens: Ints
    top_k: Ints
    expert_weights: Ints

    @classmethod
    def of(cls, loads: Loads, facts: Facts) -> Told:
        """The facts of the layers of `loads`."""

        def column(key: str) -> Ints:
            return numpy.array([facts.get(name, {}).get(key, 0) for name in loads.names], dtype=numpy.int64)

        sizes = numpy.array(loads.sizes, dtype=numpy.int64)
        return cls(sizes, column("capacity_rows"), column("tokens"), column("top_k"), column("expert_weights"))


@dataclasses.dataclass(frozen=True, eq=False)
class LayerNumbers:
    """Numbers of each layer in one record, [L] each; NaN where a layer has no such number.

    Attributes:
        routed, dropped: assignments before capacity, and those over it.
        max_vio: load of the busiest expert over the mean load, minus 1; NaN without a token.
        required: capacity factor with which all rows would have fitted; NaN where T or K is not known.
        capacity_rows: rows of the buffers for one micro-batch.
        entropy: of the routed load over ln E; NaN without a token, 1 for a single expert.
        dead: experts without a token.
    """

    routed: Ints
    dropped: Ints
    max_vio: Floats
    required: Floats
    capacity_rows: Ints
    entropy: Floats
    dead: Ints

    @classmethod
    def of(cls, loads: Loads, told: Told, micro_batches: int, scope: str) -> LayerNumbers:
        """Derive them; `scope` is the capacity's, "rank" or "expert"."""
        if not loads.names:
            none, nan = numpy.zeros(0, dtype=numpy.int64), numpy.zeros(0)
            return cls(none, none, nan, nan, none, nan, none)
        routed = loads.sums(loads.routed)
        dropped = routed - loads.sums(loads.kept)
        busiest = numpy.maximum.reduceat(loads.routed, loads.starts)
        some = numpy.where(routed > 0, routed, 1)
        load = routed if scope == "rank" else busiest * told.sizes
        balanced = told.tokens * told.top_k * micro_batches
        return cls(
            routed=routed,
            dropped=dropped,
            max_vio=numpy.where(routed > 0, busiest * told.sizes / some - 1, math.nan),
            required=load / numpy.where(balanced > 0, balanced, math.nan),
            capacity_rows=told.capacity_rows,
            entropy=_entropy(loads, routed, told.sizes),
            dead=loads.sums((loads.routed == 0).astype(numpy.int64)),
        )


def _entropy(loads: Loads, routed: Ints, sizes: Ints) -> Floats:
    """H = -sum p ln p with p = n / s is ln s - (sum n ln n) / s."""
    n = loads.routed
    terms = numpy.add.reduceat(n * numpy.log(numpy.maximum(n, 1)), loads.starts)
    total = numpy.maximum(routed, 1)
    entropy = numpy.maximum(numpy.log(total) - terms / total, 0.0)
    share = numpy.where(sizes > 1, entropy / numpy.log(numpy.maximum(sizes, 2)), 1.0)
    return numpy.where(routed > 0, share, math.nan)


def moe_metrics(loads: Loads, layers: LayerNumbers, micro_batches: int) -> dict[str, float | int | None]:
    """The "moe/" metrics of one record; none at all where no layer reports."""
    if not loads.names:
        return {}
    rows = layers.capacity_rows * micro_batches
    used = numpy.where(rows > 0, (layers.routed - layers.dropped) / numpy.maximum(rows, 1), math.nan)
    routed = int(layers.routed.sum())
    return {
        "moe/assignments": routed,
        "moe/drop_rate": int(layers.dropped.sum()) / max(routed, 1),
        "moe/drop_rate_max_layer": float((layers.dropped / numpy.maximum(layers.routed, 1)).max()),
        "moe/max_vio": _mean(layers.max_vio),
        "moe/required_factor": largest(layers.required),
        "moe/buffer_util": _mean(used),
        "moe/capacity_rows": int(layers.capacity_rows.sum()),
        "moe/router_entropy": _mean(layers.entropy),
        "moe/dead_experts": int(layers.dead.sum()),
    }


def _mean(values: Floats) -> float | None:
    known = values[~numpy.isnan(values)]
    return float(known.mean()) if known.size else None


def largest(values: Floats) -> float | None:
    """The largest of the values that are not NaN, or None."""
    known = values[~numpy.isnan(values)]
    return float(known.max()) if known.size else None


def layer_views(loads: Loads, layers: LayerNumbers) -> dict[str, dict[str, Any]]:
    """What subscribers get by module name: routed and dropped per expert, capacity_rows, required_factor."""
    routed, dropped = loads.by_layer(loads.routed), loads.by_layer(loads.routed - loads.kept)
    required, rows = layers.required.tolist(), layers.capacity_rows.tolist()
    return {
        name: {
            "routed": routed[name],
            "dropped": dropped[name],
            "capacity_rows": rows[number],
            "required_factor": None if math.isnan(required[number]) else required[number],
        }
        for number, name in enumerate(loads.names)
    }


@dataclasses.dataclass(frozen=True)
class StepWork:
    """What one training step has processed.

    Attributes:
        tokens: unmasked, over all micro-batches; None where no layer tells its K.
        model_flops: 6 FLOPs for each weight that a token uses, times those tokens; None where weights are not known.
        executed_flops: 6 FLOPs for each weight of an expert and row of its that was kept, and for each other weight
            and token, masked ones included; None where weights are not known.
    """

    tokens: int | None
    model_flops: float | None
    executed_flops: float | None


def step_work(layers: LayerNumbers, told: Told, micro_batches: int, weights: int | None) -> StepWork:
    """Derive it; `weights` is the number of trained elements of the model that multiply, all experts included.

    A weight takes part with K/E of its expert. The 6 are 2 in the forward and 4 in the backward; attention's products
    of activations are left out, and so is what checkpointing computes again.
    """
    if not told.top_k.any():
        return StepWork(None, None, None)
    first = int(numpy.flatnonzero(told.top_k)[0])
    tokens = int(layers.routed[first]) // int(told.top_k[first])
    if weights is None or not (told.expert_weights.all() and told.top_k.all()):
        return StepWork(tokens, None, None)
    dense = weights - int(told.expert_weights.sum())
    own = told.expert_weights / told.sizes
    rows = float((own * (layers.routed - layers.dropped)).sum())
    return StepWork(
        tokens=tokens,
        model_flops=6.0 * (dense + float((own * told.top_k).sum())) * tokens,
        executed_flops=6.0 * (dense * int(told.tokens[first]) * micro_batches + rows),
    )
