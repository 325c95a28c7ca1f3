"""The registry: every metric that a record can carry, with its kind, its unit and what it says.

A metric's name is its key in a line of metrics.jsonl. Metrics of the user's loss function are `user/<name>`.

Letters: T tokens of a micro-batch, K top_k, E experts.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

USER_PREFIX = "user/"


class MetricKind(enum.StrEnum):
    """What a metric's values mean one after another."""

    GAUGE = "gauge"
    COUNTER = "counter"


class Reduce(enum.StrEnum):
    """How the values of several ranks become one of the run.

    BY_LOAD is the mean weighted by `moe/assignments`; SAME is the first rank's, for what all ranks agree on. A rank
    without a value is left out, but for SUM: a sum that lacks a rank is none.
    """

    SUM = "sum"
    MEAN = "mean"
    BY_LOAD = "mean by load"
    MAX = "max"
    MIN = "min"
    SAME = "same"


@dataclasses.dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: its key in a line.
        reduce: from the ranks' values to the run's.
        kind: a gauge is a value of its own in each line; a counter is cumulative and survives a resume.
        unit: "" for a plain number; "ratio" lies between 0 and 1 unless the help says otherwise.
        help: what it says, in one sentence.
    """

    name: str
    reduce: Reduce
    kind: MetricKind
    unit: str
    help: str


def _gauge(name: str, reduce: Reduce, unit: str, text: str) -> Metric:
    return Metric(name, reduce, MetricKind.GAUGE, unit, text)


def _counter(name: str, reduce: Reduce, unit: str, text: str) -> Metric:
    return Metric(name, reduce, MetricKind.COUNTER, unit, text)


METRICS: tuple[Metric, ...] = (
    _gauge(
        "train/loss", Reduce.MEAN, "", "The user's loss, joined over micro-batches, without the layers' own losses."
    ),
    _gauge("train/grad_norm", Reduce.MAX, "", "2-norm over all gradients, before clipping."),
    _gauge("train/lr", Reduce.SAME, "", "Learning rate of the first parameter group."),
    _gauge(
        "train/aux_loss",
        Reduce.MEAN,
        "",
        "Load-balancing loss summed over layers, before its coefficient; 1 a layer is even.",
    ),
    _gauge("train/z_loss", Reduce.MEAN, "", "Router z-loss summed over layers, before its coefficient."),
    _gauge("eval/loss", Reduce.MEAN, "", "Loss of one evaluation."),
    _gauge("moe/assignments", Reduce.SUM, "assignments", "Routed assignments of all layers, before capacity."),
    _gauge("moe/drop_rate", Reduce.BY_LOAD, "ratio", "Dropped share of all routed assignments."),
    _gauge("moe/drop_rate_max_layer", Reduce.MAX, "ratio", "The same of the layer where it is largest."),
    _gauge(
        "moe/max_vio",
        Reduce.BY_LOAD,
        "",
        "Busiest expert's load over the mean load, minus 1; mean over layers that got tokens.",
    ),
    _gauge(
        "moe/required_factor",
        Reduce.MAX,
        "",
        "Smallest capacity factor that would have dropped nothing, over all layers.",
    ),
    _gauge("moe/buffer_util", Reduce.MEAN, "ratio", "Rows in use of the layers' buffers; mean over layers."),
    _gauge(
        "moe/capacity_rows", Reduce.SUM, "rows", "Rows that the buffers hold for one micro-batch, summed over layers."
    ),
    _gauge(
        "moe/router_entropy",
        Reduce.BY_LOAD,
        "ratio",
        "Entropy of the routed load over ln E: 1 even, 0 one expert; mean over layers.",
    ),
    _gauge("moe/dead_experts", Reduce.MIN, "experts", "Experts without a token in this step, over all layers."),
    _counter(
        "graph/replays",
        Reduce.MAX,
        "replays",
        "Iterations run, with evaluations and with attempts that were run again.",
    ),
    _counter("graph/recaptures", Reduce.MAX, "recaptures", "Times that graphs were dropped to be captured again."),
    _counter("graph/reruns", Reduce.MAX, "steps", "Steps that were run again because their rows did not fit."),
    _counter("graph/skips", Reduce.MAX, "steps", "Steps that committed nothing, as a policy asks for."),
    _gauge("graph/variant", Reduce.SAME, "", "Capacity factor of the variant that the step ran on; null is dropless."),
    _gauge("graph/record_lag", Reduce.MAX, "steps", "Steps launched after this one when the host read its record."),
    _gauge(
        "time/step_p50",
        Reduce.MAX,
        "s",
        "Median time from one call of step to the next, of the last 200 that are timed.",
    ),
    _gauge("time/step_p99", Reduce.MAX, "s", "99th percentile of the same."),
    _gauge(
        "time/data_wait", Reduce.MAX, "s", "Time between two calls of step, a step; mean of the last 50 that are timed."
    ),
    _gauge(
        "time/host_wait",
        Reduce.MAX,
        "s",
        "Time in step spent waiting for the oldest step in flight; mean of the last 50.",
    ),
    _gauge(
        "throughput/tokens_per_s",
        Reduce.SUM,
        "tokens/s",
        "Unmasked tokens of committed steps a second, over the last 50 steps.",
    ),
    _gauge(
        "throughput/mfu", Reduce.MEAN, "ratio", "6 FLOPs an active weight and token, over the device's dense bf16 peak."
    ),
    _gauge(
        "throughput/executed_tflops", Reduce.SUM, "TFLOP/s", "The same FLOPs for the rows that were computed, a second."
    ),
    _gauge("memory/allocated", Reduce.MAX, "bytes", "What torch has allocated on the device."),
    _gauge("memory/pool", Reduce.MAX, "bytes", "What the graphs keep between replays."),
    _gauge("memory/cuda_malloc_calls", Reduce.MAX, "calls", "Calls of cudaMalloc by torch so far in this process."),
    _gauge("gpu/power_watts", Reduce.SUM, "W", "Power draw, by NVML."),
    _gauge("gpu/memory_used_bytes", Reduce.MAX, "bytes", "Memory in use on the GPU by all processes, by NVML."),
    _gauge("gpu/sm_clock_mhz", Reduce.MIN, "MHz", "Clock of the multiprocessors, by NVML."),
    _gauge(
        "gpu/throttled", Reduce.MAX, "", "1 where the clock is held down by power, heat or a fault, else 0, by NVML."
    ),
)

REGISTRY: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}


def metric_of(key: str) -> Metric | None:
    """Return the metric of a key of a line, made up for the user's own; None for a key that is no metric."""
    if key.startswith(USER_PREFIX):
        return _gauge(key, Reduce.MEAN, "", f"The loss function's own {key.removeprefix(USER_PREFIX)!r}.")
    return REGISTRY.get(key)


def markdown_table() -> str:
    """Return all metrics as a Markdown table, in the order of `METRICS`."""
    rows = [
        f"| `{metric.name}` | {metric.kind} | {metric.unit} | {metric.reduce} | {metric.help} |" for metric in METRICS
    ]
    user = f"| `{USER_PREFIX}<name>` | gauge |  | {Reduce.MEAN} | What the loss function returned under that name. |"
    head = ["| metric | kind | unit | over ranks | what it says |", "|---|---|---|---|---|"]
    return "\n".join([*head, *rows, user]) + "\n"
