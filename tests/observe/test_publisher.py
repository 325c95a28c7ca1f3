"""What is counted, what is not, who is told, and that nobody who is told can stop a run."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest

from staticmoe.config import RunnerConfig
from staticmoe.observe.derive import Arrival
from staticmoe.observe.metrics import metric_of
from staticmoe.observe.publisher import Publisher
from staticmoe.observe.record import Reason, Record

FACTS = {
    "a": {"capacity_rows": 8, "can_overflow": 1, "num_experts": 2, "top_k": 1, "tokens": 8, "expert_weights": 40},
    "b": {"capacity_rows": 16, "can_overflow": 0, "num_experts": 4, "top_k": 2, "tokens": 8, "expert_weights": 80},
}
OVERFLOW = Reason.CAPACITY_OVERFLOW


class FakeProbe:
    """Knows the device and counts how often it is asked."""

    def __init__(self, peak_flops: float | None = 1e3, weights: int | None = 200) -> None:
        self.peak_flops, self.weights = peak_flops, weights
        self.sampled = self.closed = 0

    def sample(self) -> dict[str, float]:
        self.sampled += 1
        return {"memory/pool": float(self.sampled)}

    def close(self) -> None:
        self.closed += 1


def arrival(step: int, routed: list[int], kept: list[int] | None = None, **known: Any) -> Arrival:
    """A record whose layer a has these counts, and whose layer b has sixteen assignments, four an expert."""
    record = {"attempt": 0, "void": False, "reasons": Reason(0), "veto": False, "loss": float(step), **known}
    fields = {"a": {"routed": routed, "kept": kept or routed}, "b": {"routed": [4] * 4, "kept": [4] * 4}, "dense": {}}
    scalars = {"loss": record["loss"], "grad_norm": 2.0, "aux_loss": 3.0, "z_loss": 4.0, "mine": 5.0, "lr": 0.1}
    values = [record[name] for name in ("attempt", "void", "reasons", "veto")]
    own = {key: known[key] for key in ("training", "causes", "lag", "capacity_factor") if key in known}
    return Arrival(step=step, record=Record(step, *values, step, scalars, fields), facts=FACTS, **own)


def started(probe: FakeProbe | None = None, **options: Any) -> tuple[Publisher, list[dict[str, Any]]]:
    """A publisher without files, and the list that its one sink fills."""
    publisher, lines = Publisher(RunnerConfig(**options)), []
    publisher.start({}, probe or FakeProbe())  # type: ignore[arg-type]
    publisher.subscribe(lines.append)
    return publisher, lines


def test_a_line_says_all_that_is_known() -> None:
    publisher, lines = started(capacity_scope="expert")
    publisher.counts.replays = 9
    publisher.publish(arrival(7, [6, 2], [4, 2], lag=1, capacity_factor=1.25, reasons=OVERFLOW))
    (line,) = lines
    assert line.pop("time") > 1.6e9
    assert line.pop("moe")["a"] == {"routed": [6, 2], "dropped": [2, 0], "capacity_rows": 8, "required_factor": 1.5}
    assert {key: line.pop(key) for key in list(line) if key.startswith(("time/", "throughput/"))}.keys() == {
        "time/step_p50", "time/step_p99", "time/data_wait", "time/host_wait",
        "throughput/tokens_per_s", "throughput/mfu", "throughput/executed_tflops",
    }  # fmt: skip
    assert line == {
        "kind": "train", "step": 7, "attempt": 0, "void": False, "skipped": False, "reasons": ["capacity_overflow"],
        "train/loss": 7.0, "train/grad_norm": 2.0, "train/aux_loss": 3.0, "train/z_loss": 4.0, "train/lr": 0.1,
        "user/mine": 5.0,
        "moe/assignments": 24,
        "moe/drop_rate": 2 / 24, "moe/drop_rate_max_layer": 0.25, "moe/max_vio": 0.25, "moe/required_factor": 1.5,
        "moe/buffer_util": (6 / 8 + 1) / 2, "moe/capacity_rows": 24, "moe/dead_experts": 0,
        "moe/router_entropy": pytest.approx((1 + _entropy(0.75)) / 2),
        "graph/replays": 9, "graph/recaptures": 0, "graph/reruns": 0, "graph/skips": 0, "graph/variant": 1.25,
        "graph/record_lag": 1, "memory/pool": 1.0,
    }  # fmt: skip
    assert [key for key in line if "/" in key and metric_of(key) is None] == []


def _entropy(p: float) -> float:
    return -(p * math.log2(p) + (1 - p) * math.log2(1 - p))


def test_void_records_and_evaluations_are_told_and_counted_nowhere() -> None:
    publisher, lines = started()
    publisher.publish(arrival(1, [4, 4]))
    before = publisher.totals()
    publisher.publish(arrival(2, [8, 0], void=True, veto=True, reasons=OVERFLOW))
    publisher.publish(arrival(1, [8, 0], training=False, loss=50.0))
    assert publisher.totals() == before
    assert [(line["kind"], line["void"]) for line in lines] == [("train", False), ("train", True), ("eval", False)]
    assert lines[2]["eval/loss"] == 50.0 and lines[2]["user/mine"] == 5.0
    assert [key for key in lines[2] if key.startswith(("train/", "graph/", "time/", "throughput/"))] == []


def test_skips_and_reruns_are_counted_with_their_reasons() -> None:
    publisher, lines = started()
    publisher.publish(arrival(1, [4, 4]))
    publisher.publish(arrival(2, [4, 4], veto=True, reasons=Reason.NONFINITE_LOSS))
    publisher.publish(arrival(3, [8, 0], attempt=1, causes=OVERFLOW))
    publisher.publish(arrival(4, [8, 0], attempt=2, causes=OVERFLOW | Reason.STASH_OVERFLOW))
    totals = publisher.totals()
    assert [totals[name] for name in ("committed", "skipped", "reruns")] == [3, 1, 2]
    assert totals["reruns_by_reason"] == {"capacity_overflow": 2, "stash_overflow": 1}
    assert totals["moe"]["a"] == {"routed": [20, 4], "kept": [20, 4], "dropped": [0, 0]}
    assert [line["reasons"] for line in lines] == [
        [], ["nonfinite_loss"], ["capacity_overflow"], ["capacity_overflow", "stash_overflow"]
    ]  # fmt: skip
    assert [(line["graph/skips"], line["graph/reruns"]) for line in lines] == [(0, 0), (1, 0), (1, 1), (1, 2)]
    assert "3 steps committed, 1 skipped, 2 run again (capacity overflow 2, stash overflow 1)" in publisher.words()[0]


def test_the_largest_required_factor_is_kept() -> None:
    """Of skipped steps as well: what they lacked is why they were skipped."""
    publisher, _ = started(capacity_scope="expert")
    for step, (routed, veto) in enumerate([([5, 3], False), ([7, 1], True), ([4, 4], False)]):
        publisher.publish(arrival(step, routed, veto=veto))
    assert publisher.totals()["required_factor"] == 7 * 2 / 8
    assert "fitted in: 1.75" in publisher.words()[1]


def test_totals_survive_a_state_dict_and_go_on() -> None:
    first, _ = started()
    straight, lines = started()
    for publisher in (first, straight):
        publisher.publish(arrival(1, [6, 2], [4, 2]))
        publisher.publish(arrival(2, [1, 1], veto=True))
        publisher.publish(arrival(3, [8, 0], attempt=1, causes=OVERFLOW))
        publisher.counts.replays, publisher.counts.recaptures = 4, 1
    second, others = started()
    state = first.state_dict()
    second.load_state_dict(state)
    first.publish(arrival(4, [2, 2]))
    for publisher in (second, straight):
        publisher.publish(arrival(4, [8, 0], [7, 0], attempt=1, causes=OVERFLOW))
    for name in ("committed", "skipped", "reruns", "reruns_by_reason", "replays", "recaptures", "moe"):
        assert second.totals()[name] == straight.totals()[name], name
    assert second.totals()["moe"]["a"] == {"routed": [22, 2], "kept": [19, 2], "dropped": [3, 0]}
    counters = [key for key in others[0] if key.startswith("graph/")]
    assert {key: others[0][key] for key in counters} == {key: lines[-1][key] for key in counters}
    assert second.totals()["window"]["steps"] == 1, "means begin anew"
    assert state["counts"]["reruns_by_reason"] == {"capacity_overflow": 1}, "a state that was taken does not change"


def test_sums_are_exact_beyond_what_a_double_holds() -> None:
    publisher, _ = started()
    for step in range(3):
        publisher.publish(arrival(step, [2**60 + 1, 1], [2**60, 1]))
    layer = publisher.totals()["moe"]["a"]
    assert layer == {"routed": [3 * 2**60 + 3, 3], "kept": [3 * 2**60, 3], "dropped": [3, 0]}
    assert {type(count) for counts in layer.values() for count in counts} == {int}


def test_the_window_has_means_of_the_steps_after_its_reset() -> None:
    """O37. Records of steps that were launched before the reset arrive behind it."""
    publisher, _ = started()
    publisher.publish(arrival(1, [8, 0], [4, 0]))
    publisher.reset_window(3)
    assert publisher.totals()["window"] == {"steps": 0}
    for step, rate in ((2, 4), (3, 4), (4, 2), (5, 0)):
        publisher.publish(arrival(step, [8, 0], [8 - rate, 0]))
    publisher.publish(arrival(6, [8, 0], [1, 0], veto=True))
    publisher.publish(arrival(5, [8, 0], [1, 0], training=False))
    window = publisher.totals()["window"]
    assert window["steps"] == 2 and window["train/loss"] == 4.5
    assert window["moe/drop_rate_max_layer"] == (2 / 8 + 0) / 2 and window["user/mine"] == 5.0
    assert {key.split("/")[0] for key in window} == {"steps", "train", "moe", "user"}


def test_a_value_that_a_step_lacks_is_left_out_of_its_mean() -> None:
    publisher, _ = started()
    publisher.publish(arrival(1, [8, 0]))
    nothing = arrival(2, [0, 0])
    nothing.record.fields["b"].update(routed=[0] * 4, kept=[0] * 4)
    publisher.publish(nothing)
    window = publisher.totals()["window"]
    assert window["steps"] == 2 and window["moe/max_vio"] == 0.5 and window["moe/dead_experts"] == (1 + 6) / 2


@pytest.mark.parametrize("error", [OSError("disk full"), ValueError("odd"), KeyboardInterrupt()])
def test_a_sink_that_fails_is_reported_once_and_dropped(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    publisher, lines = started()
    calls = []

    def failing(record: dict[str, Any]) -> None:
        calls.append(record["step"])
        raise error

    publisher.subscribe(failing)
    last: list[dict[str, Any]] = []
    publisher.subscribe(last.append)
    if isinstance(error, KeyboardInterrupt):
        # The user's own wish to stop is none of a sink's failures.
        with pytest.raises(KeyboardInterrupt):
            publisher.publish(arrival(1, [4, 4]))
        return
    with caplog.at_level(logging.ERROR):
        for step in (1, 2, 3):
            publisher.publish(arrival(step, [4, 4]))
    assert calls == [1] and [line["step"] for line in lines] == [line["step"] for line in last] == [1, 2, 3]
    assert len(caplog.records) == 1 and str(error) in caplog.text
    assert publisher.totals()["committed"] == 3


def test_a_sink_that_keeps_or_changes_its_record_changes_nobody_elses() -> None:
    publisher, lines = started()

    def spoiling(record: dict[str, Any]) -> None:
        record.clear()

    publisher.subscribe(spoiling)
    after: list[dict[str, Any]] = []
    publisher.subscribe(after.append)
    published = arrival(1, [4, 4])
    publisher.publish(published)
    lines[0]["moe"]["a"]["routed"][0] = 99
    assert after[0]["step"] == 1 and published.record.fields["a"]["routed"] == [4, 4]


def test_the_machine_is_sampled_every_so_many_steps() -> None:
    probe = FakeProbe()
    publisher, lines = started(probe, layers_every=3)
    for step in range(1, 8):
        publisher.publish(arrival(step, [4, 4]))
        publisher.publish(arrival(step, [4, 4], training=False))
    assert [line["step"] for line in lines if "memory/pool" in line] == [1, 4, 7]
    publisher.close()
    assert (probe.sampled, probe.closed) == (3, 1)
    alone = FakeProbe()
    silent = Publisher(RunnerConfig())
    silent.start({}, alone)  # type: ignore[arg-type]
    silent.publish(arrival(1, [4, 4]))
    assert alone.sampled == 0, "nobody would see it"


def test_throughput_comes_from_the_clock_of_step_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight tokens a step; a step is two seconds, and one step is skipped: 16 tokens in 6 s."""
    now = [0.0]
    publisher, lines = started(FakeProbe(peak_flops=1e3, weights=200))
    monkeypatch.setattr(publisher.clock, "_now", lambda: now[0])
    for step in (1, 2, 3, 4):
        with publisher.clock.step(step):
            now[0] += 0.5
        now[0] += 1.5
    publisher.publish(arrival(1, [4, 4]))
    publisher.publish(arrival(2, [4, 4], veto=True))
    publisher.publish(arrival(3, [4, 4]))
    assert [line["throughput/tokens_per_s"] for line in lines] == [4.0, 2.0, 16 / 6]
    # 80 dense weights, 40 · 1/2 and 80 · 2/4 of the experts': 140 a token.
    assert lines[2]["throughput/mfu"] == pytest.approx(6 * 140 * 16 / 6 / 1e3)
    # All three were computed: 80 · 8 tokens, 8 rows of 20, 16 rows of 20.
    assert lines[2]["throughput/executed_tflops"] == pytest.approx(3 * 6 * (640 + 160 + 320) / 6 / 1e12)
    assert (lines[2]["time/step_p50"], lines[2]["time/data_wait"]) == (2.0, 1.5)


@pytest.fixture
def alternating() -> Callable[[int], Arrival]:
    """Drops 0 and 6 by turns, every tenth step skipped, every fifth run again."""

    def of(step: int) -> Arrival:
        kept = [8, 0] if step % 2 else [2, 0]
        again = {"attempt": 1, "causes": OVERFLOW} if step % 5 == 0 else {}
        return arrival(step, [8, 0], kept, veto=step % 10 == 3, **again)

    return of


def test_totals_of_five_thousand_steps_are_exact(alternating: Callable[[int], Arrival]) -> None:
    publisher, lines = started()
    for step in range(1, 5001):
        publisher.publish(alternating(step))
        publisher.publish(arrival(step, [3, 3], training=False))
    totals = publisher.totals()
    # Skipped are 3, 13, 23, ...: five hundred steps, all of the kind that drops nothing.
    assert (totals["committed"], totals["skipped"], totals["reruns"]) == (4500, 500, 1000)
    assert totals["moe"]["a"] == {"routed": [36000, 0], "kept": [2500 * 2 + 2000 * 8, 0], "dropped": [15000, 0]}
    assert totals["moe"]["b"]["routed"] == [18000] * 4
    assert totals["window"]["moe/drop_rate"] == pytest.approx(15000 / (4500 * 24))
    assert len(lines) == 10_000 and [line["step"] for line in lines[::2]] == list(range(1, 5001))
