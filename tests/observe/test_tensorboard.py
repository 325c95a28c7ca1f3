"""TensorBoard's own reader finds every metric of every record, at its step, and the load of every expert."""

from __future__ import annotations

import builtins
import math
from pathlib import Path
from typing import Any

import pytest

from staticmoe.errors import ClosedError, ConfigError
from staticmoe.observe.sinks.tensorboard import TensorBoardSink

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def record(step: int, **entries: Any) -> dict[str, Any]:
    head = {"kind": "train", "step": step, "attempt": 0, "void": False, "skipped": False, "reasons": []}
    return {**head, "time": 1000.0 + step, **entries}


def read(folder: Path) -> Any:
    accumulator = event_accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    accumulator.Reload()
    return accumulator


def points(accumulator: Any, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def test_every_metric_is_a_scalar_at_its_step(tmp_path: Path) -> None:
    with TensorBoardSink(tmp_path / "deep" / "board") as sink:
        for step in range(1, 41):
            sink(record(step, **{"train/loss": 4.0 / step, "moe/dead_experts": step % 3, "user/accuracy": 0.5}))
        sink(record(41, **{"train/loss": math.nan, "throughput/mfu": None}))
    board = read(tmp_path / "deep" / "board")
    assert board.Tags()["scalars"] == ["train/loss", "moe/dead_experts", "user/accuracy"]
    assert points(board, "train/loss")[:40] == [(step, pytest.approx(4.0 / step, rel=1e-6)) for step in range(1, 41)]
    assert points(board, "train/loss")[40][0] == 41 and math.isnan(points(board, "train/loss")[40][1])
    assert points(board, "moe/dead_experts") == [(step, step % 3) for step in range(1, 41)]
    assert [event.wall_time for event in board.Scalars("user/accuracy")] == [1000.0 + step for step in range(1, 41)]


def test_an_evaluation_is_apart_and_a_void_record_is_left_out(tmp_path: Path) -> None:
    with TensorBoardSink(tmp_path) as sink:
        sink(record(7, **{"train/loss": 2.0, "moe/drop_rate": 0.25}))
        sink(record(7, kind="eval", **{"eval/loss": 3.0, "moe/drop_rate": 0.5}))
        sink(record(8, void=True, **{"train/loss": 9.0}))
        sink(record(8, attempt=1, **{"train/loss": 1.5}))
    board = read(tmp_path)
    assert {tag: points(board, tag) for tag in board.Tags()["scalars"]} == {
        "train/loss": [(7, 2.0), (8, 1.5)],
        "moe/drop_rate": [(7, 0.25)],
        "eval/loss": [(7, 3.0)],
        "eval/moe/drop_rate": [(7, 0.5)],
    }


def test_the_histogram_holds_the_assignments_of_each_expert(tmp_path: Path) -> None:
    with TensorBoardSink(tmp_path, histogram_every=3) as sink:
        for step in range(1, 8):
            load = {"routed": [step, 0, 10 * step, 5], "dropped": [0, 0, step, 0], "capacity_rows": 64}
            sink(record(step, moe={"blocks.0": load}))
            sink(record(step, kind="eval", moe={"blocks.0": {**load, "routed": [1, 2]}}))
    board = read(tmp_path)
    assert board.Tags()["histograms"] == ["load/blocks.0", "eval/load/blocks.0"]
    events = board.Histograms("load/blocks.0")
    assert [event.step for event in events] == [1, 4, 7]
    for event in events:
        step, value = event.step, event.histogram_value
        assert value.bucket == [step, 0, 10 * step, 5] and value.bucket_limit == [1, 2, 3, 4]
        assert (value.min, value.max, value.num) == (0, 4, 11 * step + 5)
        assert value.sum == 0.5 * step + 2.5 * 10 * step + 3.5 * 5
        assert value.sum_squares == 0.25 * step + 6.25 * 10 * step + 12.25 * 5
    assert [event.histogram_value.bucket for event in board.Histograms("eval/load/blocks.0")] == [[1, 2]] * 3


def test_after_a_resume_the_last_record_of_a_step_counts(tmp_path: Path) -> None:
    with TensorBoardSink(tmp_path) as sink:
        for step in range(1, 6):
            sink(record(step, **{"train/loss": float(step)}))
    with TensorBoardSink(tmp_path) as sink:
        # An evaluation is of the state that the run goes on from, and hides nothing.
        sink(record(3, kind="eval", **{"eval/loss": 0.5}))
        for step in range(4, 8):
            sink(record(step, **{"train/loss": 10.0 * step}))
    board = read(tmp_path)
    assert points(board, "train/loss") == [(1, 1), (2, 2), (3, 3), (4, 40), (5, 50), (6, 60), (7, 70)]
    assert points(board, "eval/loss") == [(3, 0.5)]


def test_close_writes_what_is_pending_and_ends_the_sink(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink(record(1, **{"train/loss": 1.0}))
    sink(record(2, **{"train/loss": 2.0}))
    sink.close()
    assert points(read(tmp_path), "train/loss") == [(1, 1.0), (2, 2.0)]
    sink.close()
    with pytest.raises(ClosedError, match="TensorBoardSink"):
        sink(record(3))


def test_what_is_missing_or_wrong_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="histogram_every: expected records, at least 1; got 0"):
        TensorBoardSink(tmp_path, histogram_every=0)
    real_import = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "tensorboard":
            raise ModuleNotFoundError("No module named 'tensorboard'", name="tensorboard")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'staticmoe\[report\]'"):
        TensorBoardSink(tmp_path / "board")
    assert not (tmp_path / "board").exists()
