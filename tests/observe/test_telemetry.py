"""What a runner counts as it goes: replays, reruns, recaptures, and what it times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from staticmoe import RunnerConfig, StaticMoE, StaticMoERunner
from staticmoe.errors import BatchError, ConfigError
from staticmoe.observe.sinks.jsonl import read_rotated

T, E = 16, 4
EVEN = [expert for expert in range(E) for _ in range(T // E)]
# Seven to expert 0: it fits from a factor of 7 · 4 / 16 = 1.75 on.
SKEWED = [0] * 7 + [1] * 3 + [2] * 3 + [3] * 3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = StaticMoE(8, 4, E, 1, norm_topk_prob=False)
        # Routing comes with the batch.
        self.moe.router.requires_grad_(False)
        self.scale = 1.0

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.scale * self.moe(x, routing=(ids[:, None], torch.ones(T, 1))).square().mean()


def batch(experts: list[int]) -> dict[str, Tensor]:
    return {"x": torch.randn(T, 8), "ids": torch.tensor(experts, dtype=torch.int32)}


def loss_fn(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    return model(**given)


def wrap(lines: list[dict[str, Any]], **options: Any) -> StaticMoERunner:
    model = Model()
    config = RunnerConfig(**{"capture": "emulate", "capacity_scope": "expert", **options})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runner = StaticMoERunner(model, optimizer, example_batch=batch(EVEN), loss_fn=loss_fn, config=config)
    runner.subscribe(lines.append)
    return runner


def test_a_rerun_is_told_with_its_reason_its_variant_and_every_replay() -> None:
    """Step 3 of 5 does not fit at 1.25 and runs again at 2; step 4, launched behind it, was void and runs again too."""
    lines: list[dict[str, Any]] = []
    with wrap(lines, capacity_factor=1.25, capacity_ladder=(2.0,), max_rerun_fraction=1.0) as runner:
        for step in range(1, 6):
            runner.step(batch(SKEWED if step == 3 else EVEN))
        runner.flush()
        totals, words = runner.telemetry(), runner.summary()
    assert [(line["step"], line["attempt"], line["reasons"], line["graph/variant"]) for line in lines] == [
        (1, 0, [], 1.25), (2, 0, [], 1.25), (3, 1, ["capacity_overflow"], 2.0), (4, 0, [], 1.25), (5, 0, [], 1.25)
    ]  # fmt: skip
    assert [line["skipped"] or line["void"] for line in lines] == [False] * 5
    assert [line["graph/reruns"] for line in lines] == [0, 0, 1, 1, 1]
    assert lines[2]["moe/required_factor"] == 1.75 and lines[2]["moe/drop_rate"] == 0.0
    assert (totals["reruns"], totals["reruns_by_reason"]) == (1, {"capacity_overflow": 1})
    assert totals["required_factor"] == 1.75 and totals["replays"] == 5 + 2
    assert totals["moe"]["moe"]["routed"] == [4 * 4 + 7, 4 * 4 + 3, 4 * 4 + 3, 4 * 4 + 3]
    assert "5 steps committed, 0 skipped, 1 run again (capacity overflow 1)" in words


@pytest.mark.parametrize("max_in_flight", [1, 2, 4])
def test_records_are_as_late_as_there_are_steps_in_flight(max_in_flight: int) -> None:
    lines: list[dict[str, Any]] = []
    with wrap(lines, max_in_flight=max_in_flight) as runner:
        for _ in range(8):
            runner.step(batch(EVEN))
    lag = max_in_flight - 1
    assert [line["graph/record_lag"] for line in lines] == [lag] * (8 - lag) + list(range(lag))[::-1]


def test_dropless_steps_have_no_variant_and_skips_are_counted() -> None:
    lines: list[dict[str, Any]] = []
    with wrap(lines, capacity_factor=1.0, overflow="skip") as runner:
        for step in range(1, 5):
            runner.step(batch(SKEWED if step == 2 else EVEN))
        runner.set_capacity_factor(None)
        runner.step(batch(SKEWED))
        runner.flush()
        assert runner.telemetry()["skipped"] == 1 and runner.telemetry()["moe"]["moe"]["routed"][0] == 3 * 4 + 7
    assert [line["graph/variant"] for line in lines] == [1.0, 1.0, 1.0, 1.0, None]
    assert [line["graph/skips"] for line in lines] == [0, 1, 1, 1, 1]
    assert [line["skipped"] for line in lines] == [False, True, False, False, False]


def test_recaptures_are_counted_whatever_asked_for_them() -> None:
    """By hand, by a changed attribute, by another factor; the count goes on after a resume."""
    lines: list[dict[str, Any]] = []
    with wrap(lines, capacity_factor=1.0, overflow="drop", self_check=False) as runner:
        runner.step(batch(EVEN))
        runner.recapture()
        runner.step(batch(EVEN))
        runner._parts._model.scale = 2.0
        runner.step(batch(EVEN))
        runner.set_capacity_factor(2.0)
        runner.step(batch(EVEN))
        runner.flush()
        assert [line["graph/recaptures"] for line in lines] == [0, 1, 2, 3]
        state = runner.state_dict()
        assert "3 recaptures" in runner.summary()
    with wrap(lines) as runner:
        runner.load_state_dict(state)
        runner.step(batch(EVEN))
        runner.flush()
        assert runner.telemetry()["recaptures"] == 3 and runner.telemetry()["replays"] == 5
    with wrap(lines) as runner, pytest.raises(ConfigError, match="expected version 2, got 1"):
        runner.load_state_dict({**state, "version": 1})


def test_evaluations_checkpoints_and_refused_batches_are_in_no_timing() -> None:
    """Each takes a second or more by the clock; steps take one hundredth."""
    lines: list[dict[str, Any]] = []
    with wrap(lines) as runner:
        now = [0.0]
        runner._publisher.clock._now = lambda: now[0]
        for step in range(1, 13):
            runner.step(batch(EVEN))
            now[0] += 0.01
            if step == 4:
                runner.evaluate(batch(EVEN))
                now[0] += 1
            elif step == 6:
                runner._parts._model.state_dict()
                now[0] += 2
            elif step == 8:
                with pytest.raises(BatchError):
                    runner.step({"x": torch.zeros(3, 8), "ids": torch.zeros(3)})
                now[0] += 0.03
    last = lines[-1]
    assert last["step"] == 12
    assert (last["time/step_p50"], last["time/step_p99"]) == (pytest.approx(0.01), pytest.approx(0.01))
    assert last["time/data_wait"] == pytest.approx(0.01)
    assert last["throughput/tokens_per_s"] == pytest.approx(T / 0.01)


def test_masked_tokens_are_no_throughput_and_no_load() -> None:
    """Four of sixteen tokens are real."""
    model = nn.Sequential(StaticMoE(8, 4, E, 2))
    given = {"x": torch.randn(T, 8), "real": torch.arange(T) < 4}
    lines: list[dict[str, Any]] = []

    def own_loss(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
        return model(given["x"]).square().mean()

    config = RunnerConfig(capture="emulate")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with StaticMoERunner(
        model, optimizer, example_batch=given, loss_fn=own_loss, token_mask="real", config=config
    ) as runner:
        runner.subscribe(lines.append)
        now = [0.0]
        runner._publisher.clock._now = lambda: now[0]
        for _ in range(5):
            runner.step(given)
            now[0] += 0.5
    assert lines[-1]["throughput/tokens_per_s"] == 4 / 0.5
    assert [line["moe/required_factor"] for line in lines] == [4 / T] * 5
    # Router and experts: 4·8 and 4·(8·8 + 4·8) elements, of which a token uses half of the latter.
    assert lines[-1]["throughput/mfu"] is None
    executed = 6 * (32 * T + 8 * (8 * 8 + 4 * 8)) / 0.5 / 1e12
    assert lines[-1]["throughput/executed_tflops"] == pytest.approx(executed)


def test_time_spent_waiting_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the optimizer outside of the graph the host waits for each step, and that is no idle time of the user's."""
    lines: list[dict[str, Any]] = []
    now = 0.0
    with wrap(lines, capture_scope="forward_backward") as runner:
        flush = runner._flight.flush

        def slow() -> None:
            nonlocal now
            now += 0.02
            flush()

        monkeypatch.setattr(runner._flight, "flush", slow)
        monkeypatch.setattr(runner._publisher.clock, "_now", lambda: now)
        for _ in range(4):
            runner.step(batch(EVEN))
            now += 0.5
        monkeypatch.undo()
    assert lines[-1]["time/host_wait"] == pytest.approx(0.02)
    assert lines[-1]["time/step_p50"] == pytest.approx(0.52) and lines[-1]["time/data_wait"] == pytest.approx(0.5)


def test_alerts_hold_the_loads_against_the_factor_in_force(tmp_path: Path) -> None:
    """Every step needs 1.75. Near 1.9, the factor of the start, and far from 4, which is asked for after 5 steps."""
    run_dir = tmp_path / "run"
    with wrap([], capacity_factor=1.9, overflow="drop", run_dir=run_dir, self_check=False) as runner:
        for step in range(1, 46):
            if step in (6, 21, 41):
                runner.set_capacity_factor({6: 4.0, 21: 1.8, 41: None}[step])
            runner.step(batch(SKEWED))
    events = [e for e in read_rotated(run_dir / "alerts.jsonl") if e["rule"] == "headroom"]
    assert [(event["kind"], event["step"], event["threshold"]) for event in events] == [
        ("alert", 30, pytest.approx(0.9 * 1.8)), ("resolved", 41, pytest.approx(0.9 * 1.8))
    ]  # fmt: skip


def test_alerts_become_parts_at_the_size_that_the_run_is_told(tmp_path: Path) -> None:
    """A rule that fires and resolves by turns: what it wrote is in parts of at most `rotate_bytes`, and all there."""
    with wrap([], capacity_factor=1.9, overflow="drop", run_dir=tmp_path, rotate_bytes=2000) as runner:
        for step in range(60):
            runner.step(batch(SKEWED if step // 10 % 2 == 0 else EVEN))
    events = [(event["kind"], event["step"]) for event in read_rotated(tmp_path / "alerts.jsonl")]
    assert events == [("alert" if step // 10 % 2 else "resolved", step) for step in range(10, 61, 10)]
    assert len(list(tmp_path.glob("alerts.*.jsonl"))) >= 1
