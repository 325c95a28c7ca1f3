"""The numbers that views of a run show, from its records: latest values, series, layers, alerts. No file, no clock.

Void attempts and skipped steps committed nothing, and are no points of a series.

Dimensions: E experts of a layer.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from staticmoe.observe.series import POINTS, Series

ALERTS_KEPT = 200
TRAIN_SERIES = (
    "train/loss",
    "train/grad_norm",
    "moe/drop_rate",
    "moe/drop_rate_max_layer",
    "moe/required_factor",
    "graph/variant",
    "time/step_p50",
    "time/step_p99",
    "throughput/tokens_per_s",
)
EVAL_SERIES = ("eval/loss",)
# Load of an expert over the mean load: level 0 is none at all, level n + 1 begins at the n-th of these.
HEAT_BOUNDS = (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)
HEAT_LEVELS = len(HEAT_BOUNDS) + 2
# A required factor from here on, of the capacity factor, is near the bound.
NEAR_CAPACITY = 0.9


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer in the latest window of steps; None and empty before the first window.

    Attributes:
        name: module name.
        drop_rate: dropped over routed, 0 to 1.
        max_vio: busiest expert's load over the mean load, minus 1; mean over the steps.
        required_factor: the capacity factor that would have held every row; largest over the steps.
        capacity_rows: rows of a micro-batch's buffer.
        dead_experts: experts without a token in the window.
        load: rows routed to each expert, E of them.
    """

    name: str
    drop_rate: float | None = None
    max_vio: float | None = None
    required_factor: float | None = None
    capacity_rows: int | None = None
    dead_experts: int | None = None
    load: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Alert:
    """An alert that fired, or, `resolved`, one that is over."""

    resolved: bool
    time: float | None
    step: int | None
    rule: str
    severity: str
    metric: str
    value: float | None
    threshold: float | None
    message: str
    runbook: str


class Overview:
    """Takes the records of a run in, and holds what views show of it.

    Attributes:
        meta: meta.json; empty before it was read.
        step, time: number of the last training step, and unix seconds of the last record of any kind.
        latest: the last training record that was not void.
        last_event: ("rerun" or "skip", step, reasons) of the last step that was one.
        series: metric -> its series.
        window: (first, last) step of the latest window of the layers.
        alerts: the last alerts and their ends, in order.
        open_alerts: rule -> its alert, while it lasts.
    """

    def __init__(self, points: int = POINTS) -> None:
        self._points = points
        self.meta: dict[str, Any] = {}
        for stream in ("metrics", "layers", "alerts"):
            self.restart(stream)

    def restart(self, stream: str) -> None:
        """Forget a stream."""
        if stream == "metrics":
            self.step: int | None = None
            self.time: float | None = None
            self.latest: dict[str, Any] = {}
            self.last_event: tuple[str, int, tuple[str, ...]] | None = None
            self.series = {name: Series(self._points) for name in (*TRAIN_SERIES, *EVAL_SERIES)}
        elif stream == "layers":
            self.window: tuple[int, int] | None = None
            self._layers: tuple[Layer, ...] = ()
        elif stream == "alerts":
            self.alerts: collections.deque[Alert] = collections.deque(maxlen=ALERTS_KEPT)
            self.open_alerts: dict[str, Alert] = {}

    def resume(self, stream: str) -> None:
        """Nothing: where a step comes again, the series forget what came from there on."""

    def take_meta(self, meta: dict[str, Any]) -> None:
        """Take meta.json in."""
        self.meta = meta

    def take(self, stream: str, record: dict[str, Any]) -> None:
        """Take a record of a stream in."""
        if stream == "metrics":
            self._take_metrics(record)
        elif stream == "layers":
            self._take_layers(record)
        elif stream == "alerts":
            self._take_alert(record)

    def _take_metrics(self, record: dict[str, Any]) -> None:
        self.time = number(record.get("time")) or self.time
        step, void = record.get("step"), record.get("void")
        if void or not isinstance(step, int):
            return
        if record.get("kind") == "eval":
            self._add(EVAL_SERIES, step, record)
        elif record.get("kind") == "train":
            if self.step is not None and step <= self.step:
                for series in self.series.values():
                    series.forget_from(step)
            self.step, self.latest = step, record
            if record.get("skipped"):
                self.last_event = ("skip", step, tuple(map(str, record.get("reasons") or ())))
                return
            if record.get("attempt"):
                self.last_event = ("rerun", step, tuple(map(str, record.get("reasons") or ())))
            self._add(TRAIN_SERIES, step, record)

    def _add(self, names: Iterable[str], step: int, record: dict[str, Any]) -> None:
        for name in names:
            value = number(record.get(name))
            if value is not None:
                self.series[name].add(step, value)

    def _take_layers(self, record: dict[str, Any]) -> None:
        if record.get("kind") != "train":
            return
        self.window = (record["first_step"], record["step"])
        self._layers = tuple(
            Layer(
                name=name,
                drop_rate=number(found.get("drop_rate")),
                max_vio=number(found.get("max_vio")),
                required_factor=number(found.get("required_factor")),
                capacity_rows=found.get("capacity_rows"),
                dead_experts=found.get("dead_experts"),
                load=tuple(found.get("load") or ()),
            )
            for name, found in record["layers"].items()
        )

    def _take_alert(self, record: dict[str, Any]) -> None:
        kind = record.get("kind")
        if kind not in ("alert", "resolved"):
            return
        alert = Alert(
            resolved=kind == "resolved",
            time=number(record.get("time")),
            step=record.get("step"),
            value=number(record.get("value")),
            threshold=number(record.get("threshold")),
            **{name: str(record.get(name, "")) for name in ("rule", "severity", "metric", "message", "runbook")},
        )
        self.alerts.append(alert)
        if alert.resolved:
            self.open_alerts.pop(alert.rule, None)
        else:
            self.open_alerts[alert.rule] = alert

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers in the model's order; names alone before the first window."""
        return self._layers or tuple(Layer(name) for name in self.meta.get("participants") or {})

    @property
    def capacity_factor(self) -> float | None:
        """Capacity factor that the last step ran on; None: dropless, or no step yet."""
        return self.value("graph/variant")

    def value(self, name: str) -> float | None:
        """A metric of the last step; None where it is absent or not finite."""
        return number(self.latest.get(name))

    def is_near(self, layer: Layer) -> bool:
        """Whether a layer needs nearly all of the capacity, or more."""
        if layer.required_factor is None or self.capacity_factor is None:
            return False
        return layer.required_factor >= NEAR_CAPACITY * self.capacity_factor


def number(value: Any) -> float | None:
    """The value as a finite float; None for what is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def worst_first(layers: Sequence[Layer]) -> list[Layer]:
    """By drop rate, then required factor, then max_vio; equal ones stay in order."""
    return sorted(
        layers, key=lambda layer: (-(layer.drop_rate or 0), -(layer.required_factor or 0), -(layer.max_vio or 0))
    )


def experts_per_column(layers: Iterable[Layer], columns: int) -> int:
    """Experts that share a column of a heat map, so that the widest layer fits."""
    widest = max((len(layer.load) for layer in layers), default=0)
    return max(1, -(-widest // max(1, columns)))


def relative_load(load: Sequence[int], per_column: int = 1) -> list[float]:
    """Mean load of each `per_column` consecutive experts over the layer's mean load; 1 is even, all 0 without rows."""
    total = sum(load)
    groups = [load[start : start + per_column] for start in range(0, len(load), per_column)]
    return [sum(group) * len(load) / (len(group) * total) if total else 0.0 for group in groups]


def heat_level(ratio: float) -> int:
    """Level of a relative load, 0 to HEAT_LEVELS - 1; an even load is in the middle."""
    return 0 if ratio == 0 else 1 + bisect.bisect_right(HEAT_BOUNDS, ratio)


def heat_legend() -> list[str]:
    """What each level stands for."""
    return ["0", *(f"<{bound:g}" for bound in HEAT_BOUNDS), f">={HEAT_BOUNDS[-1]:g}"]


def in_percent(rate: float | None) -> str:
    """A share of 1 in percent, to about three digits."""
    if rate is None:
        return "-"
    # Some is not none, however few.
    return "<0.01%" if 0 < rate < 5e-5 else f"{rate:.{0 if rate >= 0.9995 else 1 if rate >= 0.0995 else 2}%}"


def in_seconds(seconds: float | None) -> str:
    """A duration in the unit that suits it."""
    if seconds is None:
        return "-"
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def in_digits(value: float | None, digits: int = 4) -> str:
    """A number to so many digits, thousands apart."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:,.{digits}g}"


def in_hundredths(value: float | None) -> str:
    """A number with two decimals."""
    return "-" if value is None else f"{value:.2f}"
