"""Alerts: rules held against every record, and told once when they begin to hold and once when they no longer do."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from staticmoe.errors import ConfigError
from staticmoe.observe.derive import Loads
from staticmoe.observe.rules import DEFAULT_RULES, Rule, Signals, headroom_rule, is_number
from staticmoe.observe.sinks.jsonl import JsonlSink

log = logging.getLogger(__name__)

Hook = Callable[[dict[str, Any]], None]

_LEVELS = {"warning": logging.WARNING, "critical": logging.CRITICAL}


@dataclasses.dataclass
class _State:
    """Of one rule: whether its alert is on, and records in a row that speak for the other."""

    firing: bool = False
    against: int = 0

    def turns(self, met: bool, for_steps: int) -> bool:
        """Take one record; return whether the alert goes on or off with it."""
        self.against = self.against + 1 if met != self.firing else 0
        if self.against < for_steps:
            return False
        self.firing, self.against = met, 0
        return True


class AlertSink:
    """Holds rules against records; a sink for `runner.subscribe`.

    An alert fires when its condition has held for `for_steps` committed steps in a row, and resolves when it has not
    held for as many: a metric that flaps does neither. A step whose metric is absent, null or NaN counts neither way,
    and so do void attempts, evaluations and, but for the signals about skips and reruns, skipped steps.

    An event is a line of alerts.jsonl: kind ("alert" or "resolved"), time (unix s), step, rule, severity, metric,
    value, threshold, message, runbook. It goes to the log, the file and the hook. File and hook may fail: the first
    failure of each is logged, and they are asked again the next time.

    Args:
        rules: what to look for.
        path: alerts.jsonl, or None.
        hook: called with each event, or None.
        capacity_factor: of the run, for the rule about loads that come near it; None for a dropless run, without it.
        rotate_bytes: alerts.jsonl that grows over this becomes a part, as the other files of a run; None: one file.

    Raises:
        ConfigError: two rules of one name.
        JsonlError: the file holds something else.
    """

    def __init__(
        self,
        rules: Sequence[Rule] = DEFAULT_RULES,
        path: str | os.PathLike[str] | None = None,
        hook: Hook | None = None,
        *,
        capacity_factor: float | None = None,
        rotate_bytes: int | None = None,
    ) -> None:
        self._given = tuple(rules)
        self._headroom = None if capacity_factor is None else headroom_rule(capacity_factor)
        self.rules = self._all_rules()
        self._states = {rule.name: _State() for rule in self.rules}
        self._signals = Signals()
        self._file = JsonlSink(path, max_bytes=rotate_bytes) if path is not None else None
        self._hook = hook
        self._failed: set[str] = set()
        # A rule that went while its alert was on; it is over with the next record.
        self._ending: Rule | None = None

    def set_capacity_factor(self, factor: float | None) -> None:
        """Hold loads against another capacity from the next record on; None is dropless, near which nothing comes.

        What earlier records said of the old capacity counts for nothing. An alert that is on resolves when the new
        rule says so, or with the next record where there is none any more.
        """
        before, self._headroom = self._headroom, None if factor is None else headroom_rule(factor)
        if self._headroom == before:
            return
        self.rules = self._all_rules()
        firing = before is not None and self._states[before.name].firing
        if before is not None:
            del self._states[before.name]
        if self._headroom is not None:
            self._states[self._headroom.name] = _State(firing=firing)
        elif firing:
            self._ending = before

    def _all_rules(self) -> tuple[Rule, ...]:
        rules = self._given if self._headroom is None else (*self._given, self._headroom)
        names = [rule.name for rule in rules]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"AlertSink: expected one rule of a name; got several of {twice}: rename all but one")
        return rules

    @property
    def firing(self) -> tuple[str, ...]:
        """Names of the rules whose alerts are on."""
        return tuple(name for name, state in self._states.items() if state.firing)

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Hold the rules against `record`."""
        self.hold(record)

    def hold(self, record: Mapping[str, Any], loads: Loads | None = None) -> None:
        """The same for a record without its "moe", with the loads as the publisher has them."""
        if record["kind"] != "train" or record["void"]:
            return
        signals = self._signals.update(record, loads)
        # A skipped step changed nothing: its loss and its loads say nothing about the run.
        metrics = {} if record["skipped"] else record
        ended, self._ending = self._ending, None
        if ended is not None:
            self._tell(ended, False, record.get(ended.metric), record)
        for rule in self.rules:
            value = signals.get(rule.metric, metrics.get(rule.metric))
            if not is_number(value):
                continue
            state = self._states[rule.name]
            if state.turns(rule.met(value), rule.for_steps):
                self._tell(rule, state.firing, value, record)

    def _tell(self, rule: Rule, fires: bool, value: float | None, record: Mapping[str, Any]) -> None:
        event = {
            "kind": "alert" if fires else "resolved",
            "time": record["time"],
            "step": record["step"],
            "rule": rule.name,
            "severity": rule.severity,
            "metric": rule.metric,
            "value": value,
            "threshold": rule.threshold,
            "message": rule.message,
            "runbook": rule.runbook,
        }
        shown = "unknown" if value is None else f"{value:.6g}"
        where = f"{rule.name} at step {record['step']}: {rule.metric} = {shown}"
        if fires:
            log.log(_LEVELS[rule.severity], "alert %s: %s. %s", where, rule.message, rule.runbook)
        else:
            log.info("resolved %s", where)
        if self._file is not None:
            self._hand("alerts.jsonl", self._file, event)
        if self._hook is not None:
            self._hand("the hook of the alerts", self._hook, event)

    def _hand(self, who: str, take: Hook, event: dict[str, Any]) -> None:
        try:
            take(dict(event))
        except Exception:
            # Telemetry never stops training, and a receiver that is down would fill the log.
            if who not in self._failed:
                self._failed.add(who)
                log.exception("%s failed on %s %r; more failures are not logged", who, event["kind"], event["rule"])

    def close(self) -> None:
        """Close the file; a second call does nothing. Alerts that are on stay unresolved in it."""
        if self._file is not None:
            self._file.close()
