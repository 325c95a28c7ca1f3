"""Records on their way out: totals, means since a reset, subscribers, and the files of a run."""

from __future__ import annotations

import dataclasses
import logging
import time
from pathlib import Path
from typing import Any

import numpy

from staticmoe.config import RunnerConfig
from staticmoe.observe.alerts import AlertSink
from staticmoe.observe.derive import (
    Arrival,
    Facts,
    Ints,
    LayerNumbers,
    Loads,
    StepWork,
    Told,
    largest,
    layer_views,
    moe_metrics,
    step_work,
)
from staticmoe.observe.device import Probe
from staticmoe.observe.files import RunFiles
from staticmoe.observe.metrics import USER_PREFIX
from staticmoe.observe.outlet import Outlet, Sink
from staticmoe.observe.ranks import Rank
from staticmoe.observe.record import Reason
from staticmoe.observe.timing import Speed, StepClock
from staticmoe.observe.watchdog import Watchdog

log = logging.getLogger(__name__)

# Scalars of a training record that are no metric of the user's.
_TRAIN_SCALARS = frozenset({"loss", "grad_norm", "lr", "aux_loss", "z_loss"})
# Without a step for so long, and for ten times the median, a run stands still; a large checkpoint takes less.
_STALL_SECONDS = 120.0
# What `telemetry()["window"]` has the means of.
_MEANT = ("train/", "moe/", USER_PREFIX)


@dataclasses.dataclass
class Counts:
    """What has happened so far in a run, resumes included.

    Attributes:
        committed, skipped: training steps that changed the model, and those that a policy kept from it.
        reruns: training steps that were run again.
        reruns_by_reason: reason -> such steps; a step with two reasons is in both.
        recaptures: times that graphs were dropped to be captured again.
        replays: iterations launched, evaluations and repeated attempts included.
        required_factor: largest capacity factor that a step would have needed; 0 before the first.
    """

    committed: int = 0
    skipped: int = 0
    reruns: int = 0
    reruns_by_reason: dict[str, int] = dataclasses.field(default_factory=dict)
    recaptures: int = 0
    replays: int = 0
    required_factor: float = 0.0


class _Means:
    """Means of a line's values over the committed steps after a step; a value that is None or absent is left out."""

    def __init__(self, after: int = 0) -> None:
        self._after = after
        self._steps = 0
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, line: dict[str, Any]) -> None:
        if line["step"] <= self._after:
            return
        self._steps += 1
        for key, value in line.items():
            if value is not None and key.startswith(_MEANT):
                total, count = self._sums.get(key, (0.0, 0))
                self._sums[key] = (total + value, count + 1)

    def values(self) -> dict[str, float]:
        return {"steps": self._steps, **{key: total / count for key, (total, count) in self._sums.items()}}


class Publisher:
    """Adds records up and hands them on, in order.

    Args:
        config: of the runner; capacity_scope and what concerns the files.
        rank: whose records these are; None: this process's.

    Attributes:
        clock: told of the calls of `step`.
        counts: of the run; the runner adds replays and recaptures.
    """

    def __init__(self, config: RunnerConfig, rank: Rank | None = None) -> None:
        self.clock = StepClock()
        self.counts = Counts()
        self._scope = config.capacity_scope
        self._every = config.layers_every
        self._files = RunFiles(config, rank if rank is not None else Rank.of_process())
        self._config = config
        self._alerts: AlertSink | None = None
        self._watchdog: Watchdog | None = None
        self._held: Outlet | None = None
        self._watched: Outlet | None = None
        self._outlets: list[Outlet] = []
        self._probe: Probe | None = None
        self._speed = Speed()
        self._means = _Means()
        self._records = 0
        self._told: tuple[Facts, tuple[str, ...], Told] | None = None
        # By the names and sizes of the layers that a record has: arrays as in `Loads`.
        self._sums: dict[tuple[tuple[str, ...], tuple[int, ...]], tuple[Ints, Ints]] = {}

    def start(self, meta: dict[str, Any], probe: Probe) -> None:
        """Open the files of the run, watch over it where there are any, and sample `probe` from here on.

        Raises:
            JsonlError, OSError: the files cannot be written.
        """
        self._probe = probe
        self._speed = Speed(probe.peak_flops)
        self._files.start(meta)
        folder, config = self.folder, self._config
        if folder is None or not self._files.written:
            return
        # Each is kept as soon as it is made: a thread or a file that nobody closes outlives a failed start.
        self._alerts = AlertSink(
            path=folder / "alerts.jsonl", capacity_factor=config.capacity_factor, rotate_bytes=config.rotate_bytes
        )
        self._watchdog = Watchdog(folder, minimum_seconds=_STALL_SECONDS)
        self._held = Outlet(self._alerts.hold, f"the alerts of {folder}")
        self._watched = Outlet(self._watchdog, f"the watchdog of {folder}")

    @property
    def folder(self) -> Path | None:
        """Folder of this rank; None without a run_dir."""
        return self._files.folder

    def set_capacity_factor(self, factor: float | None) -> None:
        """Hold the loads of the steps to come against another capacity."""
        if self._alerts is not None:
            self._alerts.set_capacity_factor(factor)

    def subscribe(self, sink: Sink) -> None:
        """Add a sink."""
        self._outlets.append(Outlet(sink, f"the sink {sink!r}"))

    def publish(self, arrival: Arrival) -> None:
        """Count a record and hand it on; void attempts and evaluations are in no total, mean or window."""
        loads = Loads.of(arrival.record)
        told = self._told_of(loads, arrival.facts)
        layers = LayerNumbers.of(loads, told, arrival.micro_batches, self._scope)
        now = time.time()
        self._speed.add_spans(self.clock.take())
        if arrival.counts:
            self._count(arrival, loads, layers, told)
        line = self._line(arrival, loads, layers, now)
        if arrival.committed:
            self._means.add(line)
            self._files.committed(arrival.step, self.counts.committed, now, loads, layers)
        self._files.record(line)
        # Both read the line, and lists of all counts are for those who subscribe.
        if self._held is not None and self._watched is not None:
            self._held(line, loads)
            self._watched(line)
        self._outlets = [outlet for outlet in self._outlets if outlet.open]
        if self._outlets:
            line["moe"] = layer_views(loads, layers)
        for outlet in self._outlets:
            # One dictionary for each: a key that a sink adds or removes is nobody else's.
            outlet(dict(line))

    def _told_of(self, loads: Loads, facts: Facts) -> Told:
        """The facts as arrays, kept for as long as the same program runs."""
        if self._told is None or self._told[0] is not facts or self._told[1] != loads.names:
            self._told = facts, loads.names, Told.of(loads, facts)
        return self._told[2]

    def _count(self, arrival: Arrival, loads: Loads, layers: LayerNumbers, told: Told) -> None:
        counts, record = self.counts, arrival.record
        counts.reruns += record.attempt > 0
        for reason in arrival.causes:
            name = _name(reason)
            counts.reruns_by_reason[name] = counts.reruns_by_reason.get(name, 0) + 1
        counts.required_factor = max(counts.required_factor, largest(layers.required) or 0.0)
        weights = self._probe.weights if self._probe is not None else None
        work = step_work(layers, told, arrival.micro_batches, weights)
        if record.veto:
            counts.skipped += 1
            self._speed.add_work(arrival.step, _without_progress(work))
            return
        counts.committed += 1
        self._speed.add_work(arrival.step, work)
        self._add(loads)

    def _add(self, loads: Loads) -> None:
        key = loads.names, loads.sizes
        if key not in self._sums:
            self._sums[key] = numpy.zeros_like(loads.routed), numpy.zeros_like(loads.kept)
        routed, kept = self._sums[key]
        routed += loads.routed
        kept += loads.kept

    def _line(self, arrival: Arrival, loads: Loads, layers: LayerNumbers, now: float) -> dict[str, Any]:
        record, training = arrival.record, arrival.training
        line = {
            "kind": "train" if training else "eval",
            "step": arrival.step,
            "attempt": record.attempt,
            "void": record.void,
            "skipped": record.veto,
            "reasons": [_name(reason) for reason in record.reasons | arrival.causes],
            "time": now,
            **_scalars(record.scalars, training=training),
            **moe_metrics(loads, layers, arrival.micro_batches),
        }
        if not training:
            return line
        counts = self.counts
        line |= {
            "graph/replays": counts.replays,
            "graph/recaptures": counts.recaptures,
            "graph/reruns": counts.reruns,
            "graph/skips": counts.skipped,
            "graph/variant": arrival.capacity_factor,
            "graph/record_lag": arrival.lag,
            **self._speed.metrics(),
        }
        if self._probe is not None and (self._files.open or self._outlets):
            if self._records % self._every == 0:
                line |= self._probe.sample()
            self._records += 1
        return line

    def reset_window(self, step: int) -> None:
        """Let `telemetry()["window"]` begin behind step `step`, the records of which may not have arrived yet."""
        self._means = _Means(after=step)

    def totals(self) -> dict[str, Any]:
        """Sums over committed steps, as `Counts` names them; moe: {module: {routed, kept, dropped}}; window: means."""
        layers = {
            name: {"routed": sums[0], "kept": sums[1], "dropped": [a - b for a, b in zip(*sums, strict=True)]}
            for name, sums in self._layer_sums().items()
        }
        return {**dataclasses.asdict(self.counts), "moe": layers, "window": self._means.values()}

    def _layer_sums(self) -> dict[str, tuple[list[int], list[int]]]:
        found: dict[str, tuple[list[int], list[int]]] = {}
        for (names, sizes), (routed, kept) in self._sums.items():
            loads = Loads(names, sizes, routed, kept)
            lists = loads.by_layer(routed), loads.by_layer(kept)
            for name in names:
                old = found.get(name)
                new = lists[0][name], lists[1][name]
                found[name] = new if old is None else (_plus(old[0], new[0]), _plus(old[1], new[1]))
        return found

    def words(self) -> list[str]:
        """Lines of text: steps, captures and capacity, then one a layer."""
        counts = self.counts
        causes = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts.reruns_by_reason.items())
        lines = [
            f"{counts.committed} steps committed, {counts.skipped} skipped, {counts.reruns} run again"
            + (f" ({causes})" if causes else "")
            + f", {counts.recaptures} recaptures",
            f"capacity factor that every step so far would have fitted in: {counts.required_factor:.4g}",
        ]
        for name, (routed, kept) in self._layer_sums().items():
            dropped = sum(routed) - sum(kept)
            share = dropped / max(sum(routed), 1)
            lines.append(f"{name or '(the model)'}: {dropped} of {sum(routed)} assignments dropped ({share:.3%})")
        return lines

    def state_dict(self) -> dict[str, Any]:
        """Totals, to go on from."""
        layers = {name: {"routed": sums[0], "kept": sums[1]} for name, sums in self._layer_sums().items()}
        return {"counts": dataclasses.asdict(self.counts), "moe": layers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`; means and windows begin anew."""
        counts = state["counts"]
        self.counts = Counts(**{**counts, "reruns_by_reason": dict(counts["reruns_by_reason"])})
        self._sums = {}
        for name, sums in state["moe"].items():
            routed, kept = (numpy.array(sums[key], dtype=numpy.int64) for key in ("routed", "kept"))
            self._sums[(name,), (len(routed),)] = routed, kept
        self._means = _Means()
        self._speed = Speed(self._probe.peak_flops if self._probe is not None else None)
        self.clock.interrupt()
        self._files.end_window(time.time())

    def close(self) -> None:
        """Write what is left, and close the files."""
        try:
            if self._alerts is not None:
                self._alerts.close()
        except OSError:
            log.exception("%s: the last alerts may be missing", self.folder)
        if self._watchdog is not None:
            self._watchdog.close()
        self._files.close(time.time())
        if self._probe is not None:
            self._probe.close()


def _name(reason: Reason) -> str:
    return str(reason.name).lower()


def _plus(one: list[int], other: list[int]) -> list[int]:
    return [a + b for a, b in zip(one, other, strict=True)]


def _without_progress(work: StepWork) -> StepWork:
    """A step that committed nothing took its time and computed, for no token."""
    flops = None if work.model_flops is None else 0.0
    return dataclasses.replace(work, tokens=None if work.tokens is None else 0, model_flops=flops)


def _scalars(scalars: dict[str, float], *, training: bool) -> dict[str, float]:
    own = {name: f"train/{name}" for name in _TRAIN_SCALARS} if training else {"loss": "eval/loss"}
    return {own.get(name, f"{USER_PREFIX}{name}"): value for name, value in scalars.items()}
