"""What a runner needs of a device, in bytes by part: the numbers of a forecast, and how they add up."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence

from staticmoe.runner.segments import Events, Segments, allocated

_WIDTH = 80


@dataclasses.dataclass(frozen=True)
class Allocation:
    """Memory that one line of the user's has made.

    Attributes:
        bytes: of all its tensors that are alive at a time.
        tensors: how many.
        place: file, line and module.
    """

    bytes: int
    tensors: int
    place: str


@dataclasses.dataclass(frozen=True)
class Variant:
    """What one graph needs: bytes.

    Attributes:
        name: its capacity.
        gradients: that it keeps between replays.
        activations: the most that an iteration has allocated at one time beside the gradients it ends with: what is
            saved for the backward, and temporaries.
        largest: of these, at that time, by line.
    """

    name: str
    gradients: int
    activations: int
    largest: tuple[Allocation, ...] = dataclasses.field(default=(), compare=False)

    @property
    def peak(self) -> int:
        """The most that an iteration allocates."""
        return self.gradients + self.activations


@dataclasses.dataclass(frozen=True)
class MemoryForecast:
    """Bytes on the device that a runner will need, by part.

    The graphs of all variants share one pool. It is as large as the largest needs it, not their sum: they never run at
    the same time. While the runner is built, uncaptured iterations (warm-up, self-check) run beside the pool and need
    as much once more.

    Attributes:
        parameters, buffers: of the model; what is tied counts once.
        optimizer: its state, whether it exists already or not.
        inputs: static inputs and the slots that they are staged from.
        variants: the graphs, in the order in which they are captured; the first is the one that usually runs.
        capacity_slack: part of the first one's activations: what a capacity factor above 1 costs.
        pool: that the graphs share.
        beside: the most that uncaptured iterations need beside the pool.
        fragments: what the allocator holds in the end beyond all that is in use at the highest point.
        others: what the process holds on the device for something else.
    """

    parameters: int
    buffers: int
    optimizer: int
    inputs: int
    variants: tuple[Variant, ...]
    capacity_slack: int
    pool: int
    beside: int
    fragments: int
    others: int

    @property
    def gradients(self) -> int:
        """Bytes of the gradients of the graph that usually runs."""
        return self.variants[0].gradients

    @property
    def activations(self) -> int:
        """Bytes that the iteration of the graph that usually runs needs at its peak, beside its gradients."""
        return self.variants[0].activations

    @property
    def total(self) -> int:
        """Bytes at the highest point, which is while the runner is built."""
        persistent = self.parameters + self.buffers + self.optimizer + self.inputs
        return persistent + self.pool + self.beside + self.fragments + self.others

    def lines(self, measured: int | None = None) -> list[str]:
        """A table of at most 80 columns; with `measured` bytes the total is compared with them."""
        rows = [
            ("parameters", self.parameters),
            ("buffers", self.buffers),
            ("optimizer state", self.optimizer),
            ("inputs", self.inputs),
            ("pool of the graphs", self.pool),
            ("  gradients", self.gradients),
            ("  activations", self.activations),
            ("    of them capacity slack", self.capacity_slack),
            *((f"  variant {variant.name}", variant.peak) for variant in self.variants),
            ("warm-up and self-check beside the pool", self.beside),
            ("fragments of the allocator", self.fragments),
            ("other memory of this process", self.others),
            ("total at the highest point", self.total),
        ]
        if measured is not None:
            difference = f" (forecast {self.total / max(measured, 1) - 1:+.1%})"
            rows.append(("measured" + difference, measured))
        return [f"{what:<{_WIDTH - 12}.{_WIDTH - 12}}{in_words(size):>12}" for what, size in rows]


def in_words(size: int) -> str:
    """Bytes as GiB, or as MiB below one."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"


@dataclasses.dataclass(frozen=True)
class Memory:
    """A forecast beside what was measured.

    Attributes:
        forecast: of the latest training graphs; None where the iteration cannot be rehearsed.
        reserved: the most bytes that torch has held on the GPU since the process began; None on a CPU.
        graphs: bytes that the graphs keep between replays; on a CPU those of the tape, which frees nothing.
    """

    forecast: MemoryForecast | None
    reserved: int | None
    graphs: int

    def line(self) -> str:
        """Both in one line."""
        foreseen = "none" if self.forecast is None else in_words(self.forecast.total)
        if self.reserved is None:
            return f"memory: forecast {foreseen}; the emulated graphs keep {in_words(self.graphs)}"
        return f"memory: forecast {foreseen}, measured {in_words(self.reserved)}; graphs keep {in_words(self.graphs)}"


@dataclasses.dataclass(frozen=True)
class Run:
    """What a rehearsed iteration of one variant has shown: its bytes, and its allocations in order."""

    variant: Variant
    events: Events

    def of_part(self, parts: int) -> Run:
        """About what a micro-batch of 1/parts the size would need: less of everything but of the gradients."""
        ends = {key: number for number, (key, _) in enumerate(self.events)}
        events = [
            (key, allocated(nbytes // parts) if nbytes > 0 and number != ends[key] else nbytes)
            for number, (key, nbytes) in enumerate(self.events)
        ]
        return Run(dataclasses.replace(self.variant, activations=self.variant.activations // parts), events)


@dataclasses.dataclass(frozen=True)
class Checks:
    """What is run while graphs are built: a self-check of each; whether there are graphs; a recheck later on."""

    self_check: bool = True
    replayed: bool = True
    rechecked: bool = False


@dataclasses.dataclass(frozen=True)
class Rehearsed:
    """What a rehearsal has shown, and what forecasts follow from: bytes.

    Attributes:
        parameters, buffers, optimizer, inputs, others: as in the forecast.
        sizes: of each tensor that is there already, or will be before anything runs.
        runs: of each variant.
        balanced: of the first at a capacity factor of 1, where its own is above.
        checks: what the runner is built with.
    """

    parameters: int
    buffers: int
    optimizer: int
    inputs: int
    others: int
    sizes: Sequence[int]
    runs: Sequence[Run]
    balanced: Run | None
    checks: Checks

    @functools.cached_property
    def forecast(self) -> MemoryForecast:
        """What it adds up to."""
        variants = tuple(run.variant for run in self.runs)
        pool, beside = over_construction(variants, self.checks)
        existing = [*self.sizes, self.inputs]
        held = held_over_construction(existing, [run.events for run in self.runs], self.checks)
        slack = 0 if self.balanced is None else variants[0].activations - self.balanced.variant.activations
        return MemoryForecast(
            parameters=self.parameters,
            buffers=self.buffers,
            optimizer=self.optimizer,
            inputs=self.inputs,
            variants=variants,
            capacity_slack=max(slack, 0),
            pool=pool,
            beside=beside,
            fragments=max(held - sum(existing) - pool - beside, 0),
            others=self.others,
        )

    def ways_out(self) -> Iterator[tuple[str, Rehearsed]]:
        """What could be done, and what it would leave."""
        less = functools.partial(dataclasses.replace, self)
        if len(self.runs) > 1:
            yield "overflow='drop', without the other variants,", less(runs=self.runs[:1])
        if self.balanced is not None and self.forecast.capacity_slack:
            yield "capacity_factor=1.0", less(runs=[self.balanced, *self.runs[1:]])
        if self.checks.self_check:
            yield "self_check=False", less(checks=dataclasses.replace(self.checks, self_check=False))
        for parts in (2, 4, 8):
            yield f"a micro-batch of 1/{parts} the size", less(runs=[run.of_part(parts) for run in self.runs])


def over_construction(variants: Sequence[Variant], checks: Checks) -> tuple[int, int]:
    """Bytes of the pool in the end, and the most that there is beyond that at any time while graphs are built.

    Uncaptured iterations run beside the pool: warm-ups, and for a self-check one, then another beside the gradients of
    the first where operations are not deterministic. A graph that is checked again later keeps its gradients.
    """
    if not checks.replayed:
        return variants[0].peak, 0
    pool = kept = highest = 0
    for variant in variants:
        highest = max(highest, pool + variant.peak)
        pool = max(pool, kept + variant.peak)
        if checks.self_check:
            highest = max(highest, pool + variant.peak + variant.gradients)
        if checks.rechecked:
            kept += variant.gradients
    return pool, max(highest - pool, 0)


def held_over_construction(existing: Iterable[int], runs: Iterable[Events], checks: Checks) -> int:
    """Bytes that torch's allocator holds once the graphs are built; `over_construction` has what is in use.

    Args:
        existing: bytes of each tensor that is there already.
        runs: allocations of an iteration of each variant, as `Segments.play` takes them.
    """
    rest, pool = Segments(), Segments()
    for nbytes in existing:
        rest.allocate(nbytes)
    for events in runs:
        rest.release_all(rest.play(events))
        if not checks.replayed:
            continue
        made = pool.play(events)
        if checks.self_check:
            first = rest.play(events)
            rest.release_all([*first, *rest.play(events)])
        if not checks.rechecked:
            pool.release_all(made)
    return rest.held + pool.held
