"""The files that a run leaves behind, against what its results said; and a run whose disk is full.

Letters: E experts, T tokens of a micro-batch, K top_k, N micro-batches.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from staticmoe import MicroBatches, RunnerConfig, StaticMoE, StaticMoERunner
from staticmoe.errors import ConfigError
from staticmoe.observe.metrics import REGISTRY, metric_of
from staticmoe.observe.sinks.jsonl import read_records, read_rotated

T, K = 12, 2


class Model(nn.Module):
    """Two layers of different E behind a dense one."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(8, 8)
        self.wide = StaticMoE(8, 4, 6, K, router_aux_loss_coef=0.01)
        self.narrow = StaticMoE(8, 4, 3, K)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.wide(self.dense(x))
        return (x + self.narrow(x)).square().mean()


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    return model(batch["x"]), {"spread": batch["x"].std()}


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(T, 8)}


@pytest.fixture
def wrap(tmp_path: Path) -> Callable[..., StaticMoERunner]:
    """Builder of a runner that writes to `tmp_path`."""

    def build(micro: int = 1, **options: Any) -> StaticMoERunner:
        torch.manual_seed(0)
        model = Model()
        options = {"capture": "off", "capacity_factor": 0.75, "capacity_scope": "expert", "overflow": "drop", **options}
        config = RunnerConfig(gradient_accumulation_steps=micro, run_dir=tmp_path, **options)
        example = MicroBatches([batch()] * micro) if micro > 1 else batch()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return StaticMoERunner(model, optimizer, example_batch=example, loss_fn=loss_fn, config=config)

    return build


def counts_of(result: Any) -> dict[str, Any]:
    return {name: {"routed": load.routed, "kept": load.kept} for name, load in result.moe.items()}


@pytest.mark.parametrize("capture", ["off", "emulate"])
def test_the_files_say_what_the_results_said(wrap: Any, tmp_path: Path, capture: str) -> None:
    """Seven steps of two micro-batches, windows of three, expert counts every second step, an evaluation between."""
    with wrap(2, layers_every=3, experts_every=2, capture=capture) as runner:
        results = []
        for step in range(7):
            results.append(runner.step(MicroBatches([batch(), batch()])))
            if step == 4:
                evaluation = runner.evaluate(batch())
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert (meta["schema"], meta["backend"], meta["micro_batches"], meta["config"]["layers_every"]) == (
        2,
        capture,
        2,
        3,
    )
    assert meta["started"] > 1.6e9
    # ceil(0.75 · 24 / 6) = 3 rows for each of six experts, ceil(0.75 · 24 / 3) = 6 for each of three.
    assert meta["participants"]["wide"] == {
        "capacity_rows": 18, "can_overflow": 1, "num_experts": 6, "top_k": K, "tokens": T,
        "expert_weights": 6 * (8 * 8 + 4 * 8),
    }  # fmt: skip
    assert meta["participants"]["narrow"]["capacity_rows"] == 18 and meta["participants"]["narrow"]["num_experts"] == 3
    lines = list(read_rotated(tmp_path / "metrics.jsonl"))
    assert [(line["kind"], line["step"]) for line in lines] == [
        *(("train", step) for step in (1, 2, 3, 4, 5)), ("eval", 5), ("train", 6), ("train", 7)
    ]  # fmt: skip
    train = [line for line in lines if line["kind"] == "train"]
    assert [line["train/loss"] for line in train] == [result.loss for result in results]
    assert [line["user/spread"] for line in train] == [result.metrics["spread"] for result in results]
    assert [line["train/aux_loss"] for line in train] == [result.metrics["aux_loss"] for result in results]
    assert [line["moe/drop_rate"] for line in train] == [result.moe.drop_rate for result in results]
    assert 0 < train[0]["moe/drop_rate"] < 1 and train[0]["moe/capacity_rows"] == 36
    assert lines[5]["eval/loss"] == evaluation.loss and lines[5]["moe/drop_rate"] == 0.0
    experts = read_records(tmp_path / "layers" / "experts.jsonl")
    assert experts[0] == {"kind": "meta", "schema": 2, "micro_batches": 2}
    assert [line["step"] for line in experts[1:]] == [2, 4, 6]
    assert [line["layers"] for line in experts[1:]] == [counts_of(results[step - 1]) for step in (2, 4, 6)]


def test_windows_sum_up_the_steps_and_the_last_one_is_partial(wrap: Any, tmp_path: Path) -> None:
    with wrap(2, layers_every=3) as runner:
        results = []
        for _ in range(7):
            results.append(runner.step(MicroBatches([batch(), batch()])))
            runner.evaluate(batch())
    assert not (tmp_path / "layers" / "experts.jsonl").exists()
    windows = list(read_rotated(tmp_path / "layers" / "layers.jsonl"))
    assert [(w["kind"], w["first_step"], w["step"], w["steps"]) for w in windows] == [
        ("train", 1, 3, 3), ("train", 4, 6, 3), ("train", 7, 7, 1)
    ]  # fmt: skip
    for window, part in zip(windows, (results[:3], results[3:6], results[6:]), strict=True):
        for name, layer in window["layers"].items():
            loads = [result.moe[name] for result in part]
            size = len(loads[0].routed)
            load = [sum(one.routed[expert] for one in loads) for expert in range(size)]
            dropped = sum(sum(one.dropped) for one in loads)
            assert layer["load"] == load and layer["routed"] == sum(load) == len(part) * 2 * T * K
            assert (layer["dropped"], layer["drop_rate"]) == (dropped, dropped / sum(load))
            assert layer["max_vio"] == pytest.approx(sum(one.max_vio for one in loads) / len(loads))
            assert layer["required_factor"] == max(max(one.routed) for one in loads) * size / (2 * T * K)
            assert layer["dead_experts"] == load.count(0) and layer["capacity_rows"] == loads[0].capacity_rows == 18


def test_every_key_of_a_line_is_a_metric_of_the_registry(wrap: Any, tmp_path: Path) -> None:
    """And every metric that a CPU can tell occurs."""
    with wrap() as runner:
        for _ in range(3):
            runner.step(batch())
        runner.evaluate(batch())
    keys = {key for line in read_rotated(tmp_path / "metrics.jsonl") for key in line if "/" in key}
    assert [key for key in keys if metric_of(key) is None] == []
    missing = {name for name in REGISTRY if name not in keys}
    assert missing == {name for name in REGISTRY if name.startswith("gpu/")} | {
        "memory/allocated", "memory/cuda_malloc_calls"
    }  # fmt: skip


def test_the_files_of_a_run_rotate(wrap: Any, tmp_path: Path) -> None:
    with wrap(rotate_bytes=4000, layers_every=1) as runner:
        for _ in range(20):
            runner.step(batch())
    for name in ("metrics", "layers/layers"):
        path = tmp_path / f"{name}.jsonl"
        assert path.with_name(f"{path.stem}.1.jsonl").exists() and path.stat().st_size <= 4000
        assert [record["step"] for record in read_rotated(path)] == list(range(1, 21))


def test_a_resumed_run_appends_and_goes_on_counting(wrap: Any, tmp_path: Path) -> None:
    with wrap(layers_every=4, experts_every=2) as runner:
        for _ in range(3):
            runner.step(batch())
        state = runner.state_dict()
    with wrap(layers_every=4, experts_every=2) as runner:
        runner.load_state_dict(state)
        for _ in range(3):
            runner.step(batch())
        runner.flush()
        assert runner.telemetry()["committed"] == 6
    lines = list(read_rotated(tmp_path / "metrics.jsonl"))
    assert [(line["step"], line["graph/replays"]) for line in lines][2:4] == [(3, 3), (4, 5)], "two are in flight"
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in read_rotated(tmp_path / "layers" / "experts.jsonl")] == [2, 4, 6]
    for name in ("metrics", "layers/layers", "layers/experts"):
        heads = [line for line in read_records(tmp_path / f"{name}.jsonl") if line["kind"] == "meta"]
        assert [line.get("resumed") for line in heads] == [None, True], name
    windows = list(read_rotated(tmp_path / "layers" / "layers.jsonl"))
    assert [(window["first_step"], window["step"]) for window in windows] == [(1, 3), (4, 6)]


def test_loading_a_state_ends_the_window_before_it(wrap: Any, tmp_path: Path) -> None:
    with wrap() as runner:
        state = runner.state_dict()
        runner.step(batch())
        runner.load_state_dict(state)
        runner.step(batch())
    windows = list(read_rotated(tmp_path / "layers" / "layers.jsonl"))
    assert [(window["first_step"], window["steps"]) for window in windows] == [(1, 1), (1, 1)]


@pytest.mark.parametrize("capture", ["off", "emulate"])
def test_a_full_disk_stops_the_records_and_not_the_run(
    wrap: Any, tmp_path: Path, capture: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[int] = []
    runner = wrap(layers_every=1, capture=capture)
    runner.subscribe(lambda record: seen.append(record["step"]))
    runner.step(batch())
    runner.flush()

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with caplog.at_level(logging.ERROR):
        monkeypatch.setattr(os, "write", full)
        results = [runner.step(batch()) for _ in range(5)]
        runner.flush()
        monkeypatch.undo()
        assert not any(result.skipped for result in results) and runner.telemetry()["committed"] == 6
        runner.close()
    assert seen == [1, 2, 3, 4, 5, 6]
    assert len(caplog.records) == 2, "one for each file"
    for name in ("metrics.jsonl", "layers/layers.jsonl"):
        assert f"{tmp_path / name} failed at step 2" in caplog.text
        assert [record["step"] for record in read_rotated(tmp_path / name)] == [1]


def test_a_disk_that_fails_at_the_end_is_reported(
    wrap: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = wrap()
    result = runner.step(batch())

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with caplog.at_level(logging.ERROR):
        runner.close()
    assert "the last lines may be missing" in caplog.text and result.loss > 0


@pytest.mark.parametrize(("name", "low"), [("layers_every", 1), ("experts_every", 0), ("rotate_bytes", 1)])
def test_the_options_are_checked(name: str, low: int) -> None:
    assert getattr(RunnerConfig(**{name: low}), name) == low
    for wrong in (low - 1, 1.5, True):
        with pytest.raises(ConfigError, match=rf"{name}: expected an integer of at least {low}; got {wrong}"):
            RunnerConfig(**{name: wrong})
