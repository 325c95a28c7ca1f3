"""Loads from a run's files, a sink and a calibration; and that what they predict is what the layers drop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from staticmoe import RunnerConfig, StaticMoE, StaticMoERunner
from staticmoe.errors import ConfigError
from staticmoe.observe.ranks import rank_folder
from staticmoe.observe.results import LayerLoad
from staticmoe.tune import Arrivals, Layer, LoadRecorder, calibrate, read_run

WriteRun = Callable[..., Path]
STEPS = 12


class Model(nn.Module):
    """Two layers side by side: what one of them drops changes nothing for the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.first, self.second = StaticMoE(16, 16, 8, 2), StaticMoE(16, 16, 4, 1, norm_topk_prob=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x).flatten(0, 1)
        return self.head(h + self.first(h) + self.second(h))


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), (batch["x"].flatten() * 3 + 1) % 32)


def batch_of(step: int) -> dict[str, Tensor]:
    """Skewed every third step."""
    x = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(step))
    if step % 3 == 0:
        x[:, 3:] = step
    return {"x": x}


def runner_of(**options: Any) -> StaticMoERunner:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    config = RunnerConfig(capture="emulate", self_check=False, **options)
    return StaticMoERunner(model, optimizer, example_batch=batch_of(1), loss_fn=loss_fn, config=config)


def test_what_is_predicted_is_what_the_layers_drop() -> None:
    """At a learning rate of 0 routing stays what it was, and the capacity alone decides."""
    with runner_of(capacity_factor=1.0, capacity_scope="expert", overflow="drop") as runner:
        loads = calibrate(runner, (batch_of(step) for step in range(STEPS)))
        assert loads.layers == {"first": Layer(8, 64), "second": Layer(4, 32)} and len(loads) == STEPS
        assert runner.telemetry()["committed"] == 0
        for factor in (1.0, 1.3):
            if factor != 1.0:
                runner.set_capacity_factor(factor)
            results = [runner.step(batch_of(step)).moe for step in range(STEPS)]
            counted = {name: [found[name].dropped for found in results] for name in loads.layers}
            predicted = Arrivals(loads, "expert").at(factor)
            for name, drops in counted.items():
                assert [sum(counts) for counts in drops] == predicted.dropped[name].tolist()
                assert sum(map(sum, drops)) > 0
            kept = [sum(map(sum, (found[name].kept for name in counted))) for found in results]
            assert kept == [96 - int(lost) for lost in predicted.lost]


class Evaluating:
    """A runner as a calibration sees it: each batch is its own load."""

    def __init__(self, **options: Any) -> None:
        self.config = RunnerConfig(**options)

    def evaluate(self, batch: tuple[list[int], int]) -> Any:
        return SimpleNamespace(moe={"a": LayerLoad(batch[0], batch[0], batch[1])})


def test_a_calibration_knows_steps_of_several_micro_batches_and_refuses_what_would_mislead() -> None:
    runner: Any = Evaluating(gradient_accumulation_steps=3)
    loads = calibrate(runner, [([5, 3], 8), ([4, 4], 8)])
    assert (loads.accumulate, loads.summed) == (3, 1) and loads.routed["a"].tolist() == [[5, 3], [4, 4]]
    assert loads.layers == {"a": Layer(2, 8)}
    with pytest.raises(ConfigError, match="batches: expected at least one"):
        calibrate(runner, [])
    with pytest.raises(ConfigError, match=r"expected one batch shape; got micro-batches with T·K of \[8, 16\]"):
        calibrate(runner, [([5, 3], 8), ([5, 3], 16)])
    bounded: Any = Evaluating(eval_capacity_factor=1.0)
    with pytest.raises(ConfigError, match="eval_capacity_factor: expected None.*got 1.0"):
        calibrate(bounded, [([5, 3], 8)])


def test_a_run_a_sink_and_a_calibration_agree(tmp_path: Path) -> None:
    recorder = LoadRecorder()
    with runner_of(run_dir=tmp_path, experts_every=1) as runner:
        runner.subscribe(recorder)
        for step in range(STEPS):
            runner.step(batch_of(step))
        runner.synchronize()
        calibrated = calibrate(runner, [batch_of(step) for step in range(STEPS)])
    for found in (read_run(tmp_path), recorder.loads()):
        assert found.layers == calibrated.layers and found.summed == 1 and found.notes == ()
        for name, rows in found.routed.items():
            assert rows.tolist() == calibrated.routed[name].tolist()


def record(step: int, routed: list[int], **more: Any) -> dict[str, Any]:
    moe = {"a": {"routed": routed, "dropped": [0] * len(routed), "capacity_rows": 8, "required_factor": 1.0}}
    line = {"kind": "train", "step": step, "void": False, "skipped": False, "reasons": [], "graph/variant": None}
    return {**line, "moe": moe, **more}


def test_a_recorder_keeps_what_counts() -> None:
    recorder = LoadRecorder()
    for line in (
        record(1, [4, 4]),
        record(2, [8, 0], kind="eval"),
        record(2, [7, 1], void=True),
        record(2, [6, 2], skipped=True, reasons=["nonfinite_loss"]),
        record(3, [5, 3], skipped=True, reasons=["capacity_overflow"]),
        record(1, [2, 6]),
    ):
        recorder(line)
    found = recorder.loads()
    # Step 1 was repeated after a resume: its last record counts.
    assert found.routed["a"].tolist() == [[2, 6], [5, 3]] and found.layers == {"a": Layer(2, 8)}
    given = LoadRecorder({"a": 16}, micro_batches=2)
    given(record(1, [20, 4], **{"graph/variant": 1.5}))
    assert given.loads().layers == {"a": Layer(2, 16)} and given.loads().summed == 2


def test_a_recorder_says_what_it_misses() -> None:
    with pytest.raises(ConfigError, match="expected at least one training step"):
        LoadRecorder().loads()
    bounded = LoadRecorder()
    bounded(record(4, [4, 4], **{"graph/variant": 1.5}))
    with pytest.raises(ConfigError, match="as step 4 has; give LoadRecorder"):
        bounded.loads()
    other = LoadRecorder({"b": 8})
    other(record(1, [4, 4]))
    with pytest.raises(ConfigError, match="expected T·K of each layer; missing: a"):
        other.loads()
    shapes, changed = LoadRecorder(), LoadRecorder({"a": 8})
    for number, recorder in ((1, shapes), (2, shapes), (1, changed)):
        line = record(number, [4, 4])
        line["moe"]["a"]["capacity_rows"] = 8 * number
        recorder(line)
    with pytest.raises(ConfigError, match=r"expected one batch shape; got micro-batches with T·K of \[8, 16\]"):
        shapes.loads()
    changed(record(2, [2, 3, 3]))
    with pytest.raises(ConfigError, match=r"record 1 has others than the first: \['a'\]"):
        changed.loads()


def line_of(step: int, routed: list[int], kind: str = "train") -> dict[str, Any]:
    return {"kind": kind, "step": step, "time": 0.0, "layers": {"a": {"routed": routed, "kept": routed}}}


def test_the_last_line_of_a_step_counts_and_parts_are_read(write_run: WriteRun, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [line_of(1, [8, 8]), line_of(2, [9, 7]), line_of(2, [10, 6]), line_of(3, [7, 9])])
    (run / "layers" / "experts.jsonl").rename(run / "layers" / "experts.1.jsonl")
    more = write_run(tmp_path / "more", [line_of(3, [1, 15])])
    (more / "layers" / "experts.jsonl").rename(run / "layers" / "experts.jsonl")
    loads = read_run(run)
    assert loads.routed["a"].tolist() == [[8, 8], [10, 6], [1, 15]] and loads.layers == {"a": Layer(2, 16)}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"capacity_factor": 1.5, "overflow": "skip"}, "steps that overflowed are not among these"),
        ({"capacity_factor": 1.5, "overflow": "drop"}, "layers behind one that drops"),
        ({"capacity_factor": 1.5, "overflow": "rerun"}, None),
        ({"capacity_factor": None, "overflow": "skip"}, None),
    ],
)
def test_a_recording_under_a_capacity_has_a_note(
    write_run: WriteRun, tmp_path: Path, config: dict[str, Any], words: str | None
) -> None:
    notes = read_run(write_run(tmp_path / "run", [line_of(1, [8, 8])], config=config)).notes
    assert notes == () if words is None else len(notes) == 1 and words in notes[0]


def two_ranks(write_run: WriteRun, folder: Path, rows: list[list[list[int]]], **meta: Any) -> Path:
    """A run whose ranks have these rows by step; step 2 of the last rank is not written yet."""
    for rank, of_rank in enumerate(rows):
        lines = [line_of(step, row) for step, row in enumerate(of_rank)]
        write_run(rank_folder(folder, rank), lines, ranks=len(rows), **meta)
    return folder


def test_the_loads_of_all_ranks_are_read_and_a_step_overflows_where_one_rank_does(
    write_run: WriteRun, tmp_path: Path
) -> None:
    """Rank 0 alone is even: by its files nothing would ever overflow."""
    rows = [[[8, 8], [9, 7], [8, 8], [8, 8]], [[8, 8], [16, 0], [12, 4]]]
    loads = read_run(two_ranks(write_run, tmp_path / "run", rows))
    assert (loads.replicas, loads.notes) == (2, ())
    assert loads.routed["a"].tolist() == [[8, 8], [8, 8], [9, 7], [16, 0], [8, 8], [12, 4]]
    arrivals = Arrivals(loads, "expert")
    assert arrivals.required().tolist() == [1.0, 2.0, 1.5]
    outcome = arrivals.at(1.25)
    assert outcome.lost.tolist() == [0, 6, 2] and outcome.overflowed.tolist() == [False, True, True]
    # Two ranks that share the experts: C = 20 of both together.
    shared = Arrivals(loads, "expert", 2)
    assert shared.at(1.25).lost.tolist() == [0, 5, 0] and shared.steps == 3
    # Four of them: two recorded steps make one.
    assert loads.rows_per_step(4) == 4 and loads.rows_per_step(3) == 6


def test_ranks_that_wrote_nothing_have_a_note(write_run: WriteRun, tmp_path: Path) -> None:
    rows = [[[8, 8], [9, 7]], [[8, 8], [9, 7]], [[8, 8], [9, 7]]]
    run = two_ranks(write_run, tmp_path / "run", rows)
    (rank_folder(run, 1) / "layers" / "experts.jsonl").unlink()
    (note,) = read_run(run).notes
    assert "ranks 1 have no layers/experts.jsonl here" in note and read_run(run).replicas == 2
    alone = write_run(tmp_path / "alone", [line_of(1, [8, 8])], ranks=1, processes=8)
    (note,) = read_run(alone).notes
    assert "recorded by 1 of 8 ranks" in note and "rank_files=True" in note


def test_a_run_that_cannot_be_used_says_why(write_run: WriteRun, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"with meta.json in it; record .*experts_every=1"):
        read_run(tmp_path)
    run = write_run(tmp_path / "run", [line_of(1, [8, 8])], participants={"a": {"num_experts": 2}})
    with pytest.raises(ConfigError, match="expected top_k, tokens of layer 'a'"):
        read_run(run)
    (run / "layers" / "experts.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"did not record; record .*experts_every=1"):
        read_run(run)
    with pytest.raises(ConfigError, match="at least one committed step"):
        read_run(write_run(tmp_path / "empty", []))
    for text, message in (("{", "expected JSON"), ("[]", "expected an object; got list")):
        (run / "meta.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_run(run)
