"""Each alert fires at the step that the rule names and at no other, resolves once, and stays silent on a clean run."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from staticmoe.errors import ConfigError
from staticmoe.observe.alerts import AlertSink
from staticmoe.observe.follow import Follower
from staticmoe.observe.rules import DEFAULT_RULES, Rule
from staticmoe.observe.sinks.jsonl import read_records, read_rotated

RULES = {rule.name: rule for rule in DEFAULT_RULES}
FACTOR = 1.25


def record(step: int, **entries: Any) -> dict[str, Any]:
    """A step of a healthy run, but for `entries`."""
    healthy = {
        "kind": "train",
        "step": step,
        "attempt": 0,
        "void": False,
        "skipped": False,
        "reasons": [],
        "time": 1000.0 + step,
        "train/loss": 2.0,
        "moe/drop_rate": 0.01,
        "moe/required_factor": 0.9 * FACTOR,
        "time/step_p50": 0.1 * (1 + 0.1 * (step % 2)),
        "graph/recaptures": 0,
        "moe": {"a": {"routed": [step % 199, 7, 5]}, "b": {"routed": [1, (step + 50) % 200]}},
    }
    return {**healthy, **entries}


def rule(**changes: Any) -> Rule:
    fields: dict[str, Any] = {
        "name": "high", "metric": "user/x", "comparison": ">", "threshold": 1.0, "for_steps": 3,
        "severity": "warning", "message": "x is high", "runbook": "lower x",
    }  # fmt: skip
    return Rule(**{**fields, **changes})


def events(records: Iterable[dict[str, Any]], *rules: Rule, **options: Any) -> list[tuple[str, str, int]]:
    """(kind, rule, step) of everything that a sink tells its hook; the shipped rules where none are given."""
    told: list[dict[str, Any]] = []
    sink = AlertSink(rules or DEFAULT_RULES, hook=told.append, **options)
    for entry in records:
        sink(entry)
    on = [event["rule"] for event in told]
    assert set(sink.firing) == {name for name in on if on.count(name) % 2}
    return [(event["kind"], event["rule"], event["step"]) for event in told]


def values(*series: float | None) -> list[dict[str, Any]]:
    return [record(step, **{"user/x": value}) for step, value in enumerate(series, start=1)]


def test_a_clean_run_stays_silent() -> None:
    """Each rule's metric is at its threshold or just misses its duration all the time."""
    assert events([record(step) for step in range(1, 1001)], capacity_factor=FACTOR) == []


def test_drop_rate() -> None:
    drops = {step: 0.011 for step in [*range(20, 69), *range(100, 200)]}
    run = [record(step, **{"moe/drop_rate": drops.get(step, 0.01)}) for step in range(1, 401)]
    assert events(run) == [("alert", "drop_rate", 149), ("resolved", "drop_rate", 249)]


def test_rerun_rate() -> None:
    """The eleventh rerun among 100 steps is over 10 %; the first of them leaves the window 100 steps later."""
    reruns = {*range(1, 11), *range(201, 212)}
    run = [record(step, attempt=int(step in reruns)) for step in range(1, 401)]
    assert events(run) == [("alert", "rerun_rate", 211), ("resolved", "rerun_rate", 301)]
    every_step = [record(step, attempt=1) for step in range(1, 121)]
    assert events(every_step, RULES["rerun_rate"]) == [("alert", "rerun_rate", 100)]


@pytest.mark.parametrize("reason", ["nonfinite_loss", "nonfinite_gradient"])
def test_nonfinite_steps(reason: str) -> None:
    bad = {3, 4, 6, 7, 8, 9, 20, 21}
    run = [
        record(step, skipped=True, reasons=[reason], **{"train/loss": math.nan}) if step in bad else record(step)
        for step in range(1, 31)
    ]
    assert events(run) == [("alert", "nonfinite", 8), ("resolved", "nonfinite", 10)]
    dropping = [record(step, reasons=["capacity_overflow"]) for step in range(1, 31)]
    assert events(dropping) == []
    again = [record(step, attempt=1, reasons=["capacity_overflow", reason]) for step in range(1, 31)]
    assert events(again) == []


def test_headroom() -> None:
    near = {step: 0.91 * FACTOR for step in [*range(5, 14), *range(30, 50)]}
    run = [record(step, **{"moe/required_factor": near.get(step, 0.5)}) for step in range(1, 101)]
    assert events(run, capacity_factor=FACTOR) == [("alert", "headroom", 39), ("resolved", "headroom", 59)]
    assert events(run) == []
    assert [rule.name for rule in AlertSink(capacity_factor=FACTOR).rules if rule not in DEFAULT_RULES] == ["headroom"]


def test_headroom_follows_the_capacity_of_the_run() -> None:
    """Steps 1 to 9 are near the first bound and count for nothing at the second, which step 20 begins to be near."""
    told: list[dict[str, Any]] = []
    sink = AlertSink(hook=told.append, capacity_factor=1.0)
    near = {"moe/required_factor": 0.95}

    def steps(first: int, last: int, **entries: Any) -> list[tuple[str, int, float, float]]:
        for step in range(first, last + 1):
            sink(record(step, **entries))
        found = [(event["kind"], event["step"], event["value"], event["threshold"]) for event in told]
        told.clear()
        return found

    assert steps(1, 9, **near) == []
    sink.set_capacity_factor(1.02)
    sink.set_capacity_factor(1.02)
    assert steps(10, 18, **near) == [] and steps(19, 19, **near) == [("alert", 19, 0.95, 0.9 * 1.02)]
    # A wider bound ends it, as a lower load would: after ten steps.
    sink.set_capacity_factor(2.0)
    assert sink.firing == ("headroom",)
    assert steps(20, 28, **near) == [] and steps(29, 29, **near) == [("resolved", 29, 0.95, 1.8)]
    sink.set_capacity_factor(1.0)
    assert steps(30, 39, **near) == [("alert", 39, 0.95, 0.9)]
    # Nothing comes near no bound.
    sink.set_capacity_factor(None)
    assert sink.firing == () and [rule.name for rule in sink.rules] == list(RULES)
    assert steps(40, 60, **near) == [("resolved", 40, 0.95, 0.9)]
    sink.set_capacity_factor(1.0)
    assert steps(61, 70, **near) == [("alert", 70, 0.95, 0.9)]


def test_a_rule_of_the_name_of_headroom_is_refused_when_there_is_a_capacity() -> None:
    sink = AlertSink([rule(name="headroom")])
    with pytest.raises(ConfigError, match="got several of \\['headroom'\\]"):
        sink.set_capacity_factor(1.0)


def test_the_file_becomes_parts_like_the_others_of_a_run(tmp_path: Path) -> None:
    """And who reads it reads across them: once, in order, while it grows."""
    seen: list[int] = []
    follower = Follower(tmp_path / "alerts.jsonl", lambda event: seen.append(event["step"]), lambda: seen.clear())
    sink = AlertSink([rule(for_steps=1)], tmp_path / "alerts.jsonl", rotate_bytes=600)
    for entry in values(*[2, 0] * 10):
        sink(entry)
        follower.poll()
    sink.close()
    parts = sorted(tmp_path.glob("alerts.*.jsonl"))
    assert len(parts) >= 5 and all(part.stat().st_size <= 600 for part in parts)
    assert seen == list(range(1, 21)) == [event["step"] for event in read_rotated(tmp_path / "alerts.jsonl")]


def test_dead_experts() -> None:
    """Expert 1 of `a` gets nothing from step 11 on; others are left out now and then, never for 200 steps."""

    def load(step: int) -> dict[str, Any]:
        return {"a": {"routed": [step % 2, 0 if 11 <= step < 311 else 4, (step + 1) % 2]}, "b": {"routed": [3, 2]}}

    run = [record(step, moe=load(step)) for step in range(1, 401)]
    assert events(run) == [("alert", "dead_experts", 210), ("resolved", "dead_experts", 311)]


def test_an_expert_is_dead_after_200_committed_steps_in_a_row() -> None:
    """A token now and then starts the count anew; what a skipped step routed counts neither way."""
    now_and_then = [record(step, moe={"a": {"routed": [3, int(step % 150 == 0)]}}) for step in range(1, 601)]
    assert events(now_and_then) == []
    skipped = [record(1, skipped=True, reasons=["nonfinite_loss"], moe={"a": {"routed": [x, 1 - x]}}) for x in (0, 1)]
    idle = [record(step, moe={"a": {"routed": [3, 0]}}) for step in range(1, 201)]
    mixed = [*skipped, *idle[:150], *skipped, *idle[150:199], *skipped]
    assert events([*mixed, idle[199]]) == [("alert", "dead_experts", 200)]
    assert events(mixed) == []


def test_a_layer_without_a_token_says_nothing_about_its_experts() -> None:
    run = [record(step, moe={"a": {"routed": [0, 0] if step % 2 else [4, 4]}}) for step in range(1, 401)]
    assert events(run) == []
    idle = [record(step, moe={"a": {"routed": [0, 0] if step % 2 else [4, 0]}}) for step in range(1, 402)]
    assert events(idle) == [("alert", "dead_experts", 400)]


def test_step_time() -> None:
    """The baseline is 0.1 s, the median of 200 steady steps, one of four; the others are slow, run again or skipped."""

    def step_time(step: int) -> dict[str, Any]:
        if step > 810:
            return {"time/step_p50": 0.121 if 850 <= step < 950 else 0.119}
        again, skipped = int(step % 4 in (0, 3)), step % 4 == 1
        # Of the steady steps a few are as slow, which moves a mean.
        slow = again or skipped or step % 40 == 2
        return {"attempt": again, "skipped": skipped, "time/step_p50": 0.9 if slow else 0.1}

    run = [record(step, **step_time(step)) for step in range(1, 1101)]
    run[855]["time/step_p50"] = run[20]["time/step_p50"] = None
    found = events(run, RULES["step_time"])
    assert found == [("alert", "step_time", 860), ("resolved", "step_time", 959)]
    early = [record(step, **{"time/step_p50": 0.1 if step <= 200 else 0.5}) for step in range(1, 251)]
    # The first record has nothing to compare its recaptures with, so that the baseline ends at step 201.
    assert events(early, RULES["step_time"]) == [("alert", "step_time", 211)]


def test_the_step_of_a_recapture_is_not_steady() -> None:
    """With as many slow recaptures as steady steps the median would be slow, and the alert would never come."""
    run = [
        record(step, **{"graph/recaptures": min((step + 1) // 2, 200), "time/step_p50": 0.9 if step % 2 else 0.1})
        for step in range(1, 401)
    ]
    run += [record(step, **{"graph/recaptures": 200, "time/step_p50": 0.13}) for step in range(401, 451)]
    assert events(run, RULES["step_time"]) == [("alert", "step_time", 410)]


def test_an_alert_fires_once_and_resolves_once() -> None:
    assert events(values(0, 2, 2, 2, 2, 2, 2, 0, 0, 0, 0, 0, 2, 2, 2), rule()) == [
        ("alert", "high", 4),
        ("resolved", "high", 10),
        ("alert", "high", 15),
    ]


def test_a_flapping_metric_neither_fires_nor_resolves() -> None:
    flapping = [2, 2, 0] * 20
    assert events(values(*flapping), rule()) == []
    # Once it has fired, two records below in a row do not resolve it either.
    assert events(values(2, *flapping, 2, 0, 0, 2, 0, 0, 2, 2, 0, 0, 0), rule()) == [
        ("alert", "high", 3),
        ("resolved", "high", 72),
    ]


@pytest.mark.parametrize("gap", [None, math.nan])
def test_a_missing_value_counts_neither_way(gap: float | None) -> None:
    assert events(values(2, gap, 2, gap, gap, 2, gap, 0, gap, 0, gap, gap, gap), rule()) == [("alert", "high", 6)]
    without = [record(step) for step in range(1, 50)]
    assert events(without, rule(for_steps=1), rule(name="low", comparison="<", for_steps=1)) == []


def test_only_committed_steps_count() -> None:
    other = [record(1, void=True), record(1, kind="eval"), record(1, skipped=True, reasons=["capacity_overflow"])]
    run = [values(2)[0], *({**entry, "user/x": 2.0} for entry in other * 3), *values(2, 2)]
    assert events(run, rule()) == [("alert", "high", 2)]
    void = [record(1, void=True, attempt=1, reasons=["nonfinite_loss"]) for _ in range(300)]
    assert events(void) == []


@pytest.mark.parametrize(
    ("comparison", "met"), [(">", [2]), (">=", [1, 2]), ("<", [0]), ("<=", [0, 1])], ids=["gt", "ge", "lt", "le"]
)
def test_comparisons(comparison: str, met: list[int]) -> None:
    assert [x for x in range(3) if events(values(x), rule(comparison=comparison, for_steps=1))] == met
    assert events(values(math.inf), rule(for_steps=1)) == [("alert", "high", 1)]


def test_an_event_reaches_file_hook_and_log_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: list[dict[str, Any]] = []
    with caplog.at_level(logging.INFO, "staticmoe"):
        sink = AlertSink([rule(severity="critical")], tmp_path / "alerts.jsonl", told.append)
        for entry in values(2, 3, 4, 0, 0.5, 0.25):
            sink(entry)
        sink.close()
        sink.close()
    common = {
        "rule": "high", "severity": "critical", "metric": "user/x", "threshold": 1.0, "message": "x is high",
        "runbook": "lower x",
    }  # fmt: skip
    expected = [
        {"kind": "alert", "time": 1003.0, "step": 3, "value": 4, **common},
        {"kind": "resolved", "time": 1006.0, "step": 6, "value": 0.25, **common},
    ]
    assert told == expected
    lines = read_records(tmp_path / "alerts.jsonl")
    assert lines[0]["kind"] == "meta" and lines[1:] == expected
    assert [(entry.levelname, entry.getMessage()) for entry in caplog.records] == [
        ("CRITICAL", "alert high at step 3: user/x = 4: x is high. lower x"),
        ("INFO", "resolved high at step 6: user/x = 0.25"),
    ]


def test_a_failing_hook_is_logged_once_and_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def hook(event: dict[str, Any]) -> None:
        calls.append(event["step"])
        event.clear()
        raise OSError("the pager is down")

    sink = AlertSink([rule(for_steps=1)], tmp_path / "alerts.jsonl", hook)
    for entry in values(2, 0, 2):
        sink(entry)
    assert calls == [1, 2, 3]
    assert [line["step"] for line in read_records(tmp_path / "alerts.jsonl")[1:]] == [1, 2, 3]
    failures = [entry for entry in caplog.records if entry.exc_info]
    assert len(failures) == 1 and "the hook of the alerts failed on alert 'high'" in failures[0].getMessage()


def test_a_file_that_fails_keeps_no_event_from_the_hook(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: list[dict[str, Any]] = []
    sink = AlertSink([rule(for_steps=1)], tmp_path / "alerts.jsonl", told.append)
    sink.close()
    for entry in values(2, 0, 2):
        sink(entry)
    assert [event["kind"] for event in told] == ["alert", "resolved", "alert"]
    assert [entry.getMessage()[:20] for entry in caplog.records if entry.exc_info] == ["alerts.jsonl failed "]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": ""}, "name: expected a word; got ''"),
        ({"metric": "loss"}, "metric: expected a key with a \"/\"; got 'loss'"),
        ({"comparison": "=="}, "comparison: expected one of > >= < <=; got '=='"),
        ({"threshold": math.nan}, "threshold: expected a finite number; got nan"),
        ({"for_steps": 0}, "for_steps: expected at least 1; got 0"),
        ({"severity": "fatal"}, "severity: expected one of ('warning', 'critical'); got 'fatal'"),
    ],
)
def test_a_rule_that_cannot_work_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rule(**change)
    assert message in str(caught.value)


def test_names_are_unique_and_every_shipped_rule_tells_what_to_do() -> None:
    with pytest.raises(ConfigError, match="got several of \\['high'\\]"):
        AlertSink([rule(), rule(for_steps=1)])
    assert {rule.name for rule in DEFAULT_RULES} == {
        "drop_rate",
        "rerun_rate",
        "nonfinite",
        "dead_experts",
        "step_time",
    }
    assert all(len(rule.runbook) > 80 and "\n" not in rule.message + rule.runbook for rule in DEFAULT_RULES)
