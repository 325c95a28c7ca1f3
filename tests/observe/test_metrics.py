"""The registry: complete, without doubles, and what the table shows."""

from __future__ import annotations

import pytest

from staticmoe.observe.metrics import METRICS, REGISTRY, Metric, MetricKind, Reduce, markdown_table, metric_of

# Others read files by these names: none may go, none may change.
PINNED = [
    "train/loss", "train/grad_norm", "train/lr", "train/aux_loss", "train/z_loss", "eval/loss",
    "moe/assignments", "moe/drop_rate", "moe/drop_rate_max_layer", "moe/max_vio", "moe/required_factor",
    "moe/buffer_util", "moe/capacity_rows", "moe/router_entropy", "moe/dead_experts",
    "graph/replays", "graph/recaptures", "graph/reruns", "graph/skips", "graph/variant", "graph/record_lag",
    "time/step_p50", "time/step_p99", "time/data_wait", "time/host_wait",
    "throughput/tokens_per_s", "throughput/mfu", "throughput/executed_tflops",
    "memory/allocated", "memory/pool", "memory/cuda_malloc_calls",
    "gpu/power_watts", "gpu/memory_used_bytes", "gpu/sm_clock_mhz", "gpu/throttled",
]  # fmt: skip
COUNTERS = {"graph/replays", "graph/recaptures", "graph/reruns", "graph/skips"}


def test_every_metric_is_there_once() -> None:
    assert [metric.name for metric in METRICS] == list(REGISTRY)
    assert sorted(REGISTRY) == sorted(PINNED)
    assert {metric.name for metric in METRICS if metric.kind == "counter"} == COUNTERS


def test_every_metric_is_explained_in_one_sentence() -> None:
    assert [metric.name for metric in METRICS if not metric.help.endswith(".") or "|" in metric.help] == []
    assert len({metric.help for metric in METRICS}) == len(METRICS)


def test_units_are_of_the_base() -> None:
    """Seconds and bytes, so that no reader converts."""
    units = {name: REGISTRY[name].unit for name in ("time/step_p50", "memory/pool", "moe/drop_rate", "train/loss")}
    assert units == {"time/step_p50": "s", "memory/pool": "bytes", "moe/drop_rate": "ratio", "train/loss": ""}


@pytest.mark.parametrize("key", ["step", "time", "moe", "moe/nothing", "user"])
def test_what_is_no_metric_is_none(key: str) -> None:
    assert metric_of(key) is None


def test_the_users_own_metrics_are_known_by_their_prefix() -> None:
    assert metric_of("user/accuracy") == Metric(
        "user/accuracy", Reduce.MEAN, MetricKind.GAUGE, "", "The loss function's own 'accuracy'."
    )
    assert metric_of("moe/drop_rate") is REGISTRY["moe/drop_rate"]


def test_the_table_has_a_row_for_each_metric() -> None:
    head, rule, *rows = markdown_table().splitlines()
    assert head.count("|") == rule.count("|") == 6 and all(row.count("|") == 6 for row in rows)
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0].strip("`") for row in cells] == [*REGISTRY, "user/<name>"]
    assert cells[list(REGISTRY).index("graph/skips")][1:4] == ["counter", "steps", "max"]
