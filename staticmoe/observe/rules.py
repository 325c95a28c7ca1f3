"""What an alert is about: rules over metrics, signals that look back over several steps, and the rules that ship.

A rule reads a metric of the registry, a user's own, or one of these signals, which `Signals` derives from the records:

    alert/rerun_rate        share of the last 100 steps that were run again
    alert/nonfinite_in_row  steps in a row, up to this one, whose loss or gradient was not finite
    alert/dead_experts      experts, of all layers, without a token in the last 200 committed steps
    alert/step_slowdown     time/step_p50 over its median in the first 200 steady steps, minus 1

Rate and slowdown are absent until they have seen enough steps. A steady step committed at the first attempt, and no
recapture came before it.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import operator
import statistics
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import numpy

from staticmoe.errors import ConfigError
from staticmoe.observe.derive import Ints, Loads

COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
SEVERITIES = ("warning", "critical")

_RERUN_WINDOW = 100
_DEAD_AFTER = 200
_BASELINE_STEPS = 200
_HEADROOM = 0.9
_NONFINITE = frozenset({"nonfinite_loss", "nonfinite_gradient"})


@dataclasses.dataclass(frozen=True)
class Rule:
    """A condition on a metric that should not last.

    Attributes:
        name: of the alert; one of its kind in a sink.
        metric: key of a record, or a signal.
        comparison: one of ">", ">=", "<", "<=", between the metric and `threshold`.
        threshold: in the metric's unit.
        for_steps: records in a row that meet the condition before the alert fires, and that miss it before it
            resolves.
        severity: "warning" or "critical".
        message: what is the case, one line.
        runbook: what it means and what to do, one line.

    Raises:
        ConfigError: an entry that cannot work.
    """

    name: str
    metric: str
    comparison: str
    threshold: float
    for_steps: int
    severity: str
    message: str
    runbook: str

    def __post_init__(self) -> None:
        problems = [
            (not self.name, "name", "a word", self.name, "name the alert"),
            ("/" not in self.metric, "metric", 'a key with a "/"', self.metric, 'write for example "moe/drop_rate"'),
            (self.comparison not in COMPARISONS, "comparison", "one of > >= < <=", self.comparison, 'use ">"'),
            (not math.isfinite(self.threshold), "threshold", "a finite number", self.threshold, "choose a limit"),
            (self.for_steps < 1, "for_steps", "at least 1", self.for_steps, "1 fires at the first step"),
            (self.severity not in SEVERITIES, "severity", f"one of {SEVERITIES}", self.severity, 'use "warning"'),
        ]
        for wrong, field, expected, got, fix in problems:
            if wrong:
                raise ConfigError(f"Rule {self.name!r}: {field}: expected {expected}; got {got!r}: {fix}")

    def met(self, value: float) -> bool:
        """Whether `value` meets the condition."""
        return COMPARISONS[self.comparison](value, self.threshold)


class Signals:
    """Derives the signals, from the records of training steps that are not void, in order."""

    def __init__(self) -> None:
        self._reruns: collections.deque[bool] = collections.deque(maxlen=_RERUN_WINDOW)
        self._nonfinite_in_row = 0
        # Steps in a row without a token, of the experts of these layers.
        self._idle: tuple[tuple[str, ...], Ints] = (), numpy.zeros(0, dtype=numpy.int64)
        self._recaptures: float | None = None
        self._baseline: list[float] | float = []

    def update(self, record: Mapping[str, Any], loads: Loads | None = None) -> dict[str, float]:
        """Return the signals that are known after `record`; `loads` spares it the lists under "moe"."""
        self._reruns.append(record["attempt"] > 0)
        # A step that ran again also names the reasons of its first attempt; one that committed was finite in the last.
        bad = record["skipped"] and not _NONFINITE.isdisjoint(record["reasons"])
        self._nonfinite_in_row = self._nonfinite_in_row + 1 if bad else 0
        known: dict[str, float] = {"alert/nonfinite_in_row": self._nonfinite_in_row}
        if len(self._reruns) == _RERUN_WINDOW:
            known["alert/rerun_rate"] = sum(self._reruns) / _RERUN_WINDOW
        if record["skipped"]:
            return known
        if loads is None and "moe" in record:
            loads = Loads.of_views(record["moe"])
        if loads is not None:
            known["alert/dead_experts"] = self._dead_experts(loads)
        slowdown = self._slowdown(record)
        if slowdown is not None:
            known["alert/step_slowdown"] = slowdown
        return known

    def _dead_experts(self, loads: Loads) -> int:
        names, idle = self._idle
        if names != loads.names or len(idle) != len(loads.routed):
            idle = numpy.zeros_like(loads.routed)
        if loads.routed.all():
            # Most steps leave no expert without a token.
            idle[:] = 0
        else:
            # A layer without any token says nothing of its experts.
            some = numpy.repeat(loads.sums(loads.routed) > 0, loads.sizes)
            idle = numpy.where(some, numpy.where(loads.routed == 0, idle + 1, 0), idle)
        self._idle = loads.names, idle
        return int((idle >= _DEAD_AFTER).sum())

    def _slowdown(self, record: Mapping[str, Any]) -> float | None:
        p50 = record.get("time/step_p50")
        recaptures = record.get("graph/recaptures")
        steady = record["attempt"] == 0 and recaptures == self._recaptures
        self._recaptures = recaptures
        if not is_number(p50):
            return None
        if isinstance(self._baseline, list):
            if steady:
                self._baseline.append(p50)
            if len(self._baseline) == _BASELINE_STEPS:
                self._baseline = statistics.median(self._baseline)
            return None
        return p50 / self._baseline - 1 if self._baseline else None


def is_number(value: object) -> TypeGuard[float]:
    """Whether a record's entry can be compared: a number, and not NaN. Infinity can."""
    return isinstance(value, (int, float)) and not math.isnan(value)


DEFAULT_RULES: tuple[Rule, ...] = (
    Rule(
        name="drop_rate",
        metric="moe/drop_rate",
        comparison=">",
        threshold=0.01,
        for_steps=50,
        severity="warning",
        message="more than 1 % of the assignments were dropped, for 50 steps",
        runbook="The busiest experts get more rows than the buffers hold, and the dropped tokens skip them. Raise "
        "capacity_factor to the moe/required_factor of recent steps, or balance more; overflow='rerun' never drops.",
    ),
    Rule(
        name="rerun_rate",
        metric="alert/rerun_rate",
        comparison=">",
        threshold=0.1,
        for_steps=1,
        severity="warning",
        message="more than 10 % of the last 100 steps were run again",
        runbook="Rows did not fit, so steps ran a second time on a wider graph: nothing is lost but time. Raise "
        "capacity_factor to the moe/required_factor of recent steps with runner.set_capacity_factor.",
    ),
    Rule(
        name="nonfinite",
        metric="alert/nonfinite_in_row",
        comparison=">=",
        threshold=3,
        for_steps=1,
        severity="critical",
        message="loss or gradient was not finite in 3 steps in a row",
        runbook="The model has diverged, or batches are broken; a skipped step changed no parameter. Look at them, "
        "lower the learning rate or set max_grad_norm, and go back to a checkpoint from before the first such step.",
    ),
    Rule(
        name="dead_experts",
        metric="alert/dead_experts",
        comparison=">",
        threshold=0,
        for_steps=1,
        severity="warning",
        message="an expert got no token in 200 steps",
        runbook="The router has collapsed away from it, and without tokens it gets no gradient to come back. Raise "
        "balancing_bias_rate or router_aux_loss_coef; layers/layers.jsonl names the layer and the expert.",
    ),
    Rule(
        name="step_time",
        metric="alert/step_slowdown",
        comparison=">",
        threshold=0.2,
        for_steps=10,
        severity="warning",
        message="the median step takes over 20 % longer than in the first 200 steady steps",
        runbook="Compare time/data_wait (the loader), gpu/throttled and gpu/sm_clock_mhz (heat, power) and "
        "graph/recaptures with earlier steps; if none has moved, take a profile with runner.profile(steps).",
    ),
)


def headroom_rule(capacity_factor: float) -> Rule:
    """The rule about a load that comes near the capacity; only for a run that has one.

    Args:
        capacity_factor: of the run, in the scope of its `moe/required_factor`.
    """
    return Rule(
        name="headroom",
        metric="moe/required_factor",
        comparison=">",
        threshold=_HEADROOM * capacity_factor,
        for_steps=10,
        severity="warning",
        message=f"a layer needs over 90 % of capacity_factor={capacity_factor:g}, for 10 steps",
        runbook="The next swing of the load overflows: rows are dropped, or steps skipped or run again, by `overflow`. "
        "Raise capacity_factor, or balance more; `staticmoe tune` tells which factor the recorded loads need.",
    )
