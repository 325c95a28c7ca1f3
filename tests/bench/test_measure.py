"""Which cases are run in which order, and the form of their rows; the clock and the graph are made up."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from staticmoe.bench import blocks, measure
from staticmoe.bench.problems import Problem, Shape

MEASURED = Path(__file__).resolve().parents[2] / "profiles" / "results" / "h200" / "moe_block_peers.json"
CPU = torch.device("cpu")


def sweep() -> measure.Sweep:
    return measure.Sweep(
        name="own",
        shape=Shape(16, 8, 4, 2),
        tokens=(3, 5),
        routings=("natural", "one-hot"),
        dtype=torch.bfloat16,
        candidates=blocks.candidates(main_grad=True, eager=True),
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every call takes 2 ms; returns what was captured and what was not."""
    log: list[str] = []

    def capture(call: Any) -> SimpleNamespace:
        call()
        return SimpleNamespace(replay=lambda: log.append("replay"))

    def milliseconds(call: Any) -> list[float]:
        before = len(log)
        call()
        log.extend(["call"] if len(log) == before else [])
        return [1.0, 2.0, 4.0]

    for name, made_up in {
        "capture": capture,
        "milliseconds": milliseconds,
        "ceiling": lambda device, settle_s=0.3: 800.0,
        "why_not_captured": lambda block, p: None,
        "memory": lambda block, p, device: {"saved_gib": 0.0, "peak_gib": 0.0},
    }.items():
        monkeypatch.setattr(measure, name, made_up)
    return log


def test_rows_have_the_form_of_the_committed_ones(clock: list[str]) -> None:
    seen: list[tuple[int, int]] = []

    def after(p: Problem, row: dict[str, Any]) -> None:
        seen.append((p.x.shape[0], row["tokens"]))

    rows = measure.measure_sweep(sweep(), CPU, after=after)
    old = json.loads(MEASURED.read_text())["cases"][0]
    assert all(row.keys() == old.keys() - {"kernels"} for row in rows)
    assert [(row["tokens"], row["routing"]) for row in rows] == [
        (3, "natural"), (3, "one-hot"), (5, "natural"), (5, "one-hot")
    ]  # fmt: skip
    assert seen == [(3, 3), (3, 3), (5, 5), (5, 5)]
    found, was = rows[2]["blocks"]["staticmoe"], old["blocks"]["staticmoe"]
    assert found.keys() == was.keys() and found["both"].keys() == was["both"].keys()
    assert list(rows[0]["blocks"]) == ["staticmoe", "grouped_mm", "grouped_mm, eager", "staticmoe, main_grad"]
    # 6·5·2·16·8 operations in the median of 2 ms, and three times as many for both passes.
    assert found["forward"]["tflops"] == pytest.approx(7680 / 2e9)
    assert found["both"]["tflops"] == pytest.approx(3 * 7680 / 2e9)
    assert found["both"]["share"] == pytest.approx(3 * 7680 / 2e9 / 800) and rows[0]["ceiling_tflops"] == [800.0] * 2
    # Of 4 blocks the eager one alone is not replayed: 2 passes of each, 4 cases.
    assert (clock.count("replay"), clock.count("call")) == (24, 8)


def test_what_cannot_be_captured_is_left_out_and_said(clock: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(block: blocks.Block, p: Problem) -> str:
        return "called a synchronizing CUDA operation"

    monkeypatch.setattr(measure, "why_not_captured", waits)
    said: list[str] = []
    row = measure.measure_sweep(sweep(), CPU, say=said.append)[0]
    assert list(row["blocks"]) == ["staticmoe", "grouped_mm, eager", "staticmoe, main_grad"]
    assert row["left_out"] == {"grouped_mm": "not capturable: called a synchronizing CUDA operation"}
    assert any(line.startswith("grouped_mm is left out") for line in said)
    assert said[0].startswith("ceiling") and said[-1].startswith("ceiling")
