"""Faults that others met in what a run tells about itself, through sinks, files and telemetry, on emulated graphs.

Routing comes with the batch, so that every count is known. Letters: T tokens, E experts, C rows of one expert.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from staticmoe import RunnerConfig, StaticMoE, StaticMoERunner
from staticmoe.observe.sinks.jsonl import read_rotated

T, E = 64, 4
BALANCED = [expert for expert in range(E) for _ in range(T // E)]
TO_ZERO = [0] * T
# C = ceil(1.0 · 64 / 4) = 16.
BOUND = {"capacity_factor": 1.0, "capacity_scope": "expert", "overflow": "drop"}


def layer(**options: Any) -> StaticMoE:
    return StaticMoE(8, 4, E, 1, norm_topk_prob=False, **options)


class Forced(nn.Module):
    """Layers one after another; the batch says to which expert each token goes in each of them."""

    def __init__(self, *layers: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(layers)
        self.dropout = nn.Dropout(dropout)
        for block in layers:
            if isinstance(block, StaticMoE):
                block.router.requires_grad_(False)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        place = 0
        for block in self.blocks:
            if isinstance(block, StaticMoE):
                chosen = ids[place][:, None], torch.ones(x.shape[0], 1)
                x, place = x + block(self.dropout(x), routing=chosen), place + 1
            else:
                x = block(x)
        return x.square().mean()


def by_name(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch)


def batch(*experts: Sequence[int]) -> dict[str, Tensor]:
    """Tokens, and an expert for each of them in each layer."""
    return {"x": torch.randn(T, 8), "ids": torch.tensor(experts, dtype=torch.int32)}


def wrap(model: nn.Module, example: Any, loss_fn: Any = by_name, **options: Any) -> StaticMoERunner:
    optimizer = torch.optim.SGD(model.parameters(), lr=options.pop("lr", 0.0))
    config = RunnerConfig(**{"capture": "emulate", **options})
    return StaticMoERunner(model, optimizer, example_batch=example, loss_fn=loss_fn, config=config)


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_logged_losses_are_those_of_their_steps(max_in_flight: int, tmp_path: Path) -> None:
    """O4. Not [5, 5, 5, 5, 5]: in results that are read late, in what sinks kept, and in the file."""
    model = Forced(layer())

    def loss_fn(model: nn.Module, given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return given["s"] + 0 * model(given["x"], given["ids"]), {"double": 2 * given["s"]}

    def of(s: float) -> dict[str, Tensor]:
        return {**batch(BALANCED), "s": torch.tensor(s)}

    kept: list[dict[str, Any]] = []
    with wrap(model, of(0.0), loss_fn, max_in_flight=max_in_flight, run_dir=tmp_path) as runner:
        runner.subscribe(kept.append)
        results = [runner.step(of(float(s))) for s in range(1, 6)]
        assert [result.loss for result in reversed(results)] == [5, 4, 3, 2, 1]
    for lines in (kept, list(read_rotated(tmp_path / "metrics.jsonl"))):
        assert [(line["step"], line["train/loss"], line["user/double"]) for line in lines] == [
            (s, s, 2 * s) for s in range(1, 6)
        ]


def test_metrics_are_the_same_replayed_or_not_and_a_window_is_a_mean_of_its_own_steps() -> None:
    """O37. The aux loss of five batches, an evaluation after each; then a reset: later calls only, mean and not sum."""
    found = []
    for capture in ("emulate", "off"):
        torch.manual_seed(1)
        model = nn.Sequential(layer(router_aux_loss_coef=0.1))
        batches = [torch.randn(T, 8) for _ in range(5)]
        lines: list[dict[str, Any]] = []

        def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
            return model(x).square().mean()

        with wrap(model, batches[0], loss_fn, capture=capture, lr=0.1) as runner:
            runner.subscribe(lines.append)
            for number, x in enumerate(batches):
                # Steps 2 and 3 may still be in flight when the window begins.
                if number == 3:
                    runner.reset_window()
                runner.step(x)
                if number != 2:
                    runner.evaluate(batches[2])
            runner.flush()
            window = runner.telemetry()["window"]
            runner.reset_window()
            assert runner.telemetry()["window"] == {"steps": 0}
        train = [line for line in lines if line["kind"] == "train"]
        own = [{key: line[key] for key in line if key.startswith(("train/", "moe/"))} for line in train]
        assert [line["step"] for line in train] == [1, 2, 3, 4, 5] and len(lines) == 9
        assert window.pop("steps") == 2 and window.keys() == own[0].keys()
        for key, mean in window.items():
            assert mean == pytest.approx((own[3][key] + own[4][key]) / 2, rel=1e-12), key
        found.append(own)
    assert found[0] == found[1]
    assert len({line["train/aux_loss"] for line in found[0]}) == 5


def test_each_snapshot_is_of_one_step_and_the_total_is_exact() -> None:
    """O38. Two layers, drops 0 and 48 by turns in both, 500 calls without a wait, everything read after each."""
    model = Forced(layer(), layer())
    batches = [batch(BALANCED, BALANCED), batch(TO_ZERO, TO_ZERO)]
    lines: list[dict[str, Any]] = []
    names = ["blocks.0", "blocks.1"]
    with wrap(model, batches[0], max_in_flight=2, **BOUND) as runner:
        runner.subscribe(lines.append)
        for call in range(500):
            runner.step(batches[call % 2])
            assert 0 <= call + 1 - len(lines) <= 2, "late by the steps in flight, never ahead"
            totals = runner.telemetry()
            arrived = [sum(totals["moe"][name]["dropped"]) if totals["moe"] else 0 for name in names]
            assert arrived == [48 * (len(lines) // 2)] * 2 and totals["committed"] == len(lines)
        runner.flush()
        totals = runner.telemetry()
    assert [line["step"] for line in lines] == list(range(1, 501))
    for line in lines:
        dropped = 0 if line["step"] % 2 else 48
        assert [sum(line["moe"][name]["dropped"]) for name in names] == [dropped, dropped]
        assert line["moe/drop_rate"] == dropped / T and line["moe/required_factor"] == (1.0 if dropped == 0 else 4.0)
    assert sum(sum(totals["moe"][name]["dropped"]) for name in names) == 250 * 48 * 2 == 24_000
    assert {type(count) for name in names for count in totals["moe"][name]["dropped"]} == {int}
    assert sum(totals["moe"]["blocks.1"]["routed"]) == 500 * T


def test_evaluations_are_alike_at_the_capacity_of_evaluation_and_leave_no_trace(tmp_path: Path) -> None:
    """O39. Training drops 48 of 64 at factor 1; evaluation at factor 4 none, without dropout, four times alike."""
    model = Forced(layer(), dropout=0.5)
    given = batch(TO_ZERO)
    lines: list[dict[str, Any]] = []
    with wrap(model, given, eval_capacity_factor=4.0, run_dir=tmp_path, **BOUND) as runner:
        runner.subscribe(lines.append)
        trained = [runner.step(given).loss for _ in range(3)]
        before = runner.telemetry()
        losses = [runner.evaluate(given).loss for _ in range(4)]
        after = runner.telemetry()
        assert runner.step(given).moe["blocks.0"].dropped == [48, 0, 0, 0]
    assert len(set(losses)) == 1 and len({*trained, losses[0]}) == 4, "dropout in training, none in evaluation"
    assert [line["moe/drop_rate"] for line in lines] == [0.75] * 3 + [0.0] * 4 + [0.75]
    assert [line["eval/loss"] for line in lines if line["kind"] == "eval"] == losses
    assert {line["moe/capacity_rows"] for line in lines if line["kind"] == "eval"} == {T}
    assert {**after, "replays": 0} == {**before, "replays": 0} and after["replays"] == before["replays"] + 4
    (window,) = read_rotated(tmp_path / "layers" / "layers.jsonl")
    assert window["steps"] == 4 and window["layers"]["blocks.0"]["dropped"] == 4 * 48


@pytest.mark.parametrize("rates", [(0.0, 0.01), (0.01, 0.0), (0.0, 0.0)])
def test_dense_layers_and_layers_without_balancing_shift_nothing(rates: tuple[float, float], tmp_path: Path) -> None:
    """O40. Dense, all to expert 0, dense, balanced: two entries, under their names, drops 48 and 0."""
    first, second = (layer(balancing_bias_rate=rate) for rate in rates)
    model = Forced(nn.Linear(8, 8), first, nn.Linear(8, 8), second)
    given = batch(TO_ZERO, BALANCED)
    lines: list[dict[str, Any]] = []
    with wrap(model, given, run_dir=tmp_path, **BOUND) as runner:
        runner.subscribe(lines.append)
        result = runner.step(given)
        assert {name: sum(load.dropped) for name, load in result.moe.items()} == {"blocks.1": 48, "blocks.3": 0}
        totals, words = runner.telemetry()["moe"], runner.summary()
        runner.step(batch(BALANCED, TO_ZERO))
    assert {name: view["dropped"] for name, view in lines[0]["moe"].items()} == {
        "blocks.1": [48, 0, 0, 0],
        "blocks.3": [0, 0, 0, 0],
    }
    assert {name: sum(sums["dropped"]) for name, sums in totals.items()} == {"blocks.1": 48, "blocks.3": 0}
    assert "blocks.1: 48 of 64 assignments dropped (75.000%)" in words and "blocks.3: 0 of 64" in words
    (window,) = read_rotated(tmp_path / "layers" / "layers.jsonl")
    assert {name: one["load"] for name, one in window["layers"].items()} == {
        "blocks.1": [80, 16, 16, 16],
        "blocks.3": [80, 16, 16, 16],
    }
    assert list(json.loads((tmp_path / "meta.json").read_text())["participants"]) == ["blocks.1", "blocks.3"]
    # Each load was uneven once, so that the bias of a layer with a rate has moved once.
    for one, rate in zip((first, second), rates, strict=True):
        assert one.router.balancing_bias.tolist() == pytest.approx([-rate, rate, rate, rate])
