"""The records of several ranks as those of one run: each metric by its rule, each step once and whole, in order."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from staticmoe import RunnerConfig, StaticMoE, StaticMoERunner
from staticmoe.errors import ConfigError
from staticmoe.observe.derive import LayerNumbers, Loads, Told, moe_metrics
from staticmoe.observe.merge import BACKLOG, Merger, RanksFollower
from staticmoe.observe.metrics import METRICS, Reduce
from staticmoe.observe.ranks import Rank, rank_folder, reduce_records, reduce_values, reduce_windows
from staticmoe.observe.record import Reason, Record
from staticmoe.observe.sinks.jsonl import JsonlSink, encode_record, read_rotated


def line(step: int, **more: Any) -> dict[str, Any]:
    record = {"kind": "train", "step": step, "attempt": 0, "void": False, "skipped": False, "reasons": []}
    return {**record, "time": 100.0 + step, **more}


def test_each_metric_is_reduced_as_the_registry_says() -> None:
    one = {metric.name: 2.0 for metric in METRICS}
    two = {metric.name: 6.0 for metric in METRICS}
    found = reduce_records([line(3, **one), line(3, **two)])
    expected = {Reduce.SUM: 8.0, Reduce.MEAN: 4.0, Reduce.BY_LOAD: 5.0, Reduce.MAX: 6.0, Reduce.MIN: 2.0}
    expected[Reduce.SAME] = 2.0
    assert {metric.name: found[metric.name] for metric in METRICS} == {
        metric.name: expected[metric.reduce] for metric in METRICS
    }
    assert {metric.reduce for metric in METRICS} == set(Reduce)
    by_rule = {rule: {metric.name for metric in METRICS if metric.reduce is rule} for rule in Reduce}
    assert by_rule[Reduce.SUM] == {
        "moe/assignments", "moe/capacity_rows", "throughput/tokens_per_s", "throughput/executed_tflops",
        "gpu/power_watts",
    }  # fmt: skip
    assert by_rule[Reduce.BY_LOAD] == {"moe/drop_rate", "moe/max_vio", "moe/router_entropy"}
    assert by_rule[Reduce.SAME] == {"train/lr", "graph/variant"}


def test_what_is_no_metric_speaks_for_every_rank() -> None:
    found = reduce_records([
        line(7, attempt=1, reasons=["capacity_overflow"], **{"user/x": 1.0, "note": "a"}),
        line(7, skipped=True, reasons=["nonfinite_loss", "capacity_overflow"], time=500.0, **{"user/x": 3.0}),
        line(7),
    ])  # fmt: skip
    assert found == {
        "kind": "train", "step": 7, "ranks": 3, "attempt": 1, "void": False, "skipped": True, "time": 500.0,
        "reasons": ["capacity_overflow", "nonfinite_loss"], "user/x": 2.0,
    }  # fmt: skip


def test_a_nan_on_one_rank_is_one_of_the_run_and_no_missing_value() -> None:
    ranks = [json.loads(encode_record(line(1, **{"train/loss": value, "train/grad_norm": value}))) for value in
             (2.0, math.nan, 4.0)]  # fmt: skip
    assert ranks[1]["train/loss"] is None
    found = reduce_records(ranks)
    assert math.isnan(found["train/loss"]) and math.isnan(found["train/grad_norm"])
    endless = json.loads(encode_record(line(1, **{"train/loss": math.inf})))
    assert reduce_records([ranks[0], endless])["train/loss"] == math.inf


@pytest.mark.parametrize(
    ("how", "values", "loads", "expected"),
    [
        (Reduce.MEAN, [None, 2.0, 4.0], [1, 1, 1], 3.0),
        (Reduce.SUM, [None, 2.0, 4.0], [1, 1, 1], None),
        (Reduce.SUM, [2**60, 2**60 + 1], [1, 1], 2**61 + 1),
        (Reduce.MAX, [None, None], [1, 1], None),
        (Reduce.BY_LOAD, [1.0, 4.0], [3, 0], 1.0),
        (Reduce.BY_LOAD, [1.0, 4.0], [0, 0], 2.5),
        (Reduce.SAME, [None, 2.0], [1, 1], None),
    ],
)
def test_ranks_without_a_value(how: Reduce, values: list[Any], loads: list[int], expected: float | None) -> None:
    assert reduce_values(how, values, loads) == expected


@given(st.lists(st.lists(st.integers(0, 40), min_size=4, max_size=4), min_size=1, max_size=5), st.integers(0, 40))
@settings(max_examples=60)
def test_the_drop_rate_of_the_run_is_that_of_all_assignments(ranks: list[list[int]], capacity: int) -> None:
    """Beside the metrics of one record that holds the ranks' assignments side by side."""

    def metrics(layers: list[list[int]]) -> dict[str, Any]:
        fields = {str(n): {"routed": o, "kept": [min(x, capacity) for x in o]} for n, o in enumerate(layers)}
        loads = Loads.of(Record(1, 0, False, Reason(0), False, 1, {}, fields))
        facts = {name: {"capacity_rows": 8, "tokens": 10, "top_k": 2} for name in fields}
        return moe_metrics(loads, LayerNumbers.of(loads, Told.of(loads, facts), 1, "rank"), 1)

    found = reduce_records([line(1, **metrics([rank])) for rank in ranks])
    whole = metrics(ranks)
    for name in ("moe/assignments", "moe/capacity_rows", "moe/required_factor", "moe/drop_rate_max_layer"):
        assert found[name] == whole[name], name
    assert found["moe/drop_rate"] == pytest.approx(whole["moe/drop_rate"], rel=1e-12)


def window(step: int, load: list[int], dropped: int, **more: Any) -> dict[str, Any]:
    layer = {
        "routed": sum(load), "dropped": dropped, "drop_rate": dropped / max(sum(load), 1), "max_vio": 1.0,
        "required_factor": 1.5, "dead_experts": load.count(0), "capacity_rows": 16, "load": load, **more,
    }  # fmt: skip
    return {"kind": "train", "first_step": step - 9, "step": step, "steps": 10, "time": 1.0, "layers": {"moe": layer}}


def test_windows_sum_up_loads_and_an_expert_is_dead_where_it_is_on_every_rank() -> None:
    found = reduce_windows([
        window(10, [6, 0, 0, 2], 3), window(10, [0, 0, 4, 20], 1, max_vio=3.0, required_factor=None),
    ])  # fmt: skip
    assert found["ranks"] == 2 and (found["first_step"], found["step"], found["steps"]) == (1, 10, 10)
    assert found["layers"]["moe"] == {
        "routed": 32, "dropped": 4, "drop_rate": 4 / 32, "max_vio": (8 * 1.0 + 24 * 3.0) / 32, "required_factor": 1.5,
        "dead_experts": 1, "capacity_rows": 32, "load": [6, 0, 4, 22],
    }  # fmt: skip


class Run:
    """What a merger hands on: (step, ranks)."""

    def __init__(self, ranks: int) -> None:
        self.told: list[tuple[int, str]] = []
        self.merger = Merger(range(ranks), lambda records: self.told.append(
            (records[0]["step"], "".join(record["of"] for record in records))
        ))  # fmt: skip

    def add(self, rank: int, *steps: int, kind: str = "train", **more: Any) -> None:
        for step in steps:
            self.merger.add(rank, line(step, kind=kind, of=str(rank), **more))


def test_a_step_is_told_when_every_rank_has_it() -> None:
    run = Run(3)
    run.add(0, 1, 2, 3)
    run.add(2, 1)
    assert run.told == [] and run.merger.behind == {1: 3}
    run.add(1, 1, 2)
    assert run.told == [(1, "012")]
    run.add(2, 2, 3)
    run.add(1, 3)
    assert run.told == [(1, "012"), (2, "012"), (3, "012")] and run.merger.behind == {}


@given(st.data())
@settings(max_examples=60)
def test_in_whatever_order_files_are_read_each_step_is_told_once_and_whole(data: st.DataObject) -> None:
    """With a resume that repeats steps, evaluations, and void attempts, which say nothing."""
    script = [("train", s) for s in (1, 2, 3)] + [("eval", 3), ("eval", 3), ("train", 4), ("train", 3), ("train", 4)]
    run, left = Run(3), {rank: list(script) for rank in range(3)}
    while any(left.values()):
        rank = data.draw(st.sampled_from([rank for rank, more in left.items() if more]))
        kind, step = left[rank].pop(0)
        if data.draw(st.booleans()):
            run.add(rank, step, void=True)
        run.add(rank, step, kind=kind)
        run.merger.settle()
    assert run.told == [(step, "012") for _, step in script]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_after_a_resume_ranks_meet_again_whatever_each_had_written(order: tuple[int, int]) -> None:
    """Killed between the writes of a step, all go on from the step before: for one rank that step is new."""
    run = Run(2)
    run.add(0, 1, 2)
    run.add(1, 1)
    for _ in range(2):
        for rank in order:
            run.merger.resume(rank)
        for step in (2, 3):
            for rank in order:
                run.add(rank, step)
    assert run.told == [(1, "01"), (2, "0"), (2, "01"), (3, "01"), (2, "01"), (3, "01")]


def test_a_rank_that_stays_behind_is_left_out_and_comes_back() -> None:
    run = Run(2)
    run.add(0, *range(1, BACKLOG + 1))
    run.merger.settle()
    assert run.told == []
    run.add(0, *range(BACKLOG + 1, BACKLOG + 4))
    run.merger.settle()
    assert run.told == [(1, "0"), (2, "0"), (3, "0")]
    # Its late records of steps that were told are no news.
    run.add(1, 1, 2, 3, 4, 5)
    assert run.told[3:] == [(4, "01"), (5, "01")]


def test_a_rank_without_files_is_not_waited_for_at_the_end() -> None:
    run = Run(3)
    run.add(0, 1, 2, 3)
    run.add(1, 1, 2)
    run.merger.settle()
    assert run.told == []
    run.merger.settle(final=True)
    assert run.told == [(1, "01"), (2, "01")], "one step of rank 1 is still to come"


def test_which_rank_a_process_is() -> None:
    assert Rank.of_process({}) == Rank(0, 1) == Rank.of_process({"RANK": "3"})
    assert Rank.of_process({"RANK": "3", "WORLD_SIZE": "4"}) == Rank(3, 4)
    for wrong in ({"RANK": "4", "WORLD_SIZE": "4"}, {"RANK": "-1", "WORLD_SIZE": "4"}, {"RANK": "a", "WORLD_SIZE": ""}):
        with pytest.raises(ConfigError, match="RANK, WORLD_SIZE: expected a number from 0, below"):
            Rank.of_process(wrong)
    assert [rank_folder("run", number) for number in (0, 2)] == [Path("run"), Path("run/rank2")]


class Received:
    def __init__(self) -> None:
        self.log: list[Any] = []

    def take_meta(self, meta: dict[str, Any]) -> None:
        self.log.append({name: meta[name] for name in ("rank", "ranks") if name in meta})

    def take(self, stream: str, record: dict[str, Any]) -> None:
        self.log.append((stream, record.get("rule", record["step"]), record.get("ranks")))

    def restart(self, stream: str) -> None:
        self.log.append(("restart", stream))

    def resume(self, stream: str) -> None:
        self.log.append(("resume", stream))

    def since(self) -> list[Any]:
        found, self.log = self.log, []
        return found


def write(path: Path, *records: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    first = [] if path.exists() else [{"kind": "meta", "schema": 2}]
    with path.open("a") as stream:
        stream.write("".join(json.dumps(record) + "\n" for record in [*first, *records]))


def meta(folder: Path, rank: int, ranks: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meta.json").write_text(json.dumps({"schema": 2, "rank": rank, "ranks": ranks}))


def test_the_files_of_two_ranks_are_followed_as_one_run(tmp_path: Path) -> None:
    received = Received()
    run = RanksFollower(tmp_path, received)
    meta(tmp_path, 0, 2)
    write(tmp_path / "metrics.jsonl", line(1), line(2))
    write(tmp_path / "alerts.jsonl", {"kind": "alert", "step": 1, "rule": "drops"})
    run.poll()
    # Rank 1 has no folder yet, and is waited for.
    assert received.since() == [{"ranks": 2}, ("alerts", "drops", None)] and run.behind == {1: 2}
    meta(tmp_path / "rank1", 1, 2)
    write(tmp_path / "rank1" / "metrics.jsonl", line(1))
    write(tmp_path / "rank1" / "alerts.jsonl", {"kind": "alert", "step": 1, "rule": "drops"})
    write(tmp_path / "layers" / "layers.jsonl", window(10, [1, 2], 0))
    write(tmp_path / "rank1" / "layers" / "layers.jsonl", window(10, [1, 2], 0))
    run.poll()
    assert sorted(received.since()) == [("alerts", "drops (rank 1)", None), ("layers", 10, 2), ("metrics", 1, 2)]
    # A file that was written anew is read from its first record on, and with it those of the other ranks.
    (tmp_path / "rank1" / "metrics.jsonl").unlink()
    write(tmp_path / "rank1" / "metrics.jsonl", line(1), line(2))
    while run.poll():
        pass
    assert received.since() == [("restart", "metrics"), ("metrics", 1, 2), ("metrics", 2, 2)]
    assert run.share_read == 1.0 and run.unreadable == 0
    run.close()


def test_files_say_that_a_run_was_taken_up_again(tmp_path: Path) -> None:
    """Rank 0 had written a step when both were killed, and rank 1 had not: from there on they are one run again."""
    meta(tmp_path, 0, 2)
    meta(tmp_path / "rank1", 1, 2)
    received, paths = Received(), [tmp_path / "metrics.jsonl", tmp_path / "rank1" / "metrics.jsonl"]
    run = RanksFollower(tmp_path, received)
    for steps in (((1, 2), (1,)), ((2, 3), (2, 3))):
        for path, each in zip(paths, steps, strict=True):
            with JsonlSink(path, say_resumed=True) as sink:
                for step in each:
                    sink(line(step))
        while run.poll():
            pass
    told = [event[1:] for event in received.since() if isinstance(event, tuple) and event[0] == "metrics"]
    assert told == [(1, 2), (2, 1), (2, 2), (3, 2)] and run.behind == {}
    run.close()


def test_one_rank_is_handed_on_as_it_is_and_the_number_of_ranks_can_change(tmp_path: Path) -> None:
    received = Received()
    run = RanksFollower(tmp_path, received)
    meta(tmp_path, 0, 1)
    # Left over from a run of two.
    meta(tmp_path / "rank1", 1, 2)
    write(tmp_path / "rank1" / "metrics.jsonl", line(1))
    write(tmp_path / "metrics.jsonl", line(1), line(2, void=True))
    run.poll()
    assert received.since() == [{"rank": 0, "ranks": 1}, ("metrics", 1, None), ("metrics", 2, None)]
    meta(tmp_path, 0, 3)
    run.poll()
    assert run.ranks == 3
    meta(tmp_path, 0, 2)
    write(tmp_path / "metrics.jsonl", line(2))
    write(tmp_path / "rank1" / "metrics.jsonl", line(2))
    run.poll()
    assert run.ranks == 2 and received.since()[-1] == ("metrics", 2, 2)


def run_of_rank(rank: int, run_dir: Path) -> None:
    """12 steps with batches of its own."""
    torch.manual_seed(0)
    model = StaticMoE(8, 4, 4, 1, norm_topk_prob=False)
    batches = torch.randn(2, 12, 16, 8)[rank]
    config = RunnerConfig(
        capture="off", run_dir=run_dir, layers_every=4, experts_every=1, rotate_bytes=4000, audit="off",
        capacity_factor=1.0, capacity_scope="expert", overflow="drop",
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with StaticMoERunner(
        model, optimizer, example_batch=batches[0], loss_fn=lambda m, x: m(x).square().mean(), config=config
    ) as runner:
        for x in batches:
            runner.step(x)


def test_two_ranks_write_one_run_and_it_adds_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank its own batches: the run has the sum of their assignments and drops, over rotated files."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        run_of_rank(rank, tmp_path)
    folders = [tmp_path, tmp_path / "rank1"]
    assert [json.loads((folder / "meta.json").read_text())["rank"] for folder in folders] == [0, 1]
    assert all(len(list(folder.glob("metrics.*.jsonl"))) >= 2 for folder in folders)
    records: dict[str, list[dict[str, Any]]] = {"metrics": [], "layers": []}

    class Collect(Received):
        def take(self, stream: str, record: dict[str, Any]) -> None:
            records.setdefault(stream, []).append(record)

    run = RanksFollower(tmp_path, Collect())
    while run.poll(700):
        pass
    run.close()
    assert [(record["step"], record["ranks"]) for record in records["metrics"]] == [(step, 2) for step in range(1, 13)]
    counts = [list(read_rotated(folder / "layers" / "experts.jsonl")) for folder in folders]
    assert counts[0] != counts[1]
    for record, *each in zip(records["metrics"], *counts, strict=True):
        layers = [one["layers"][""] for one in each]
        routed = [sum(layer["routed"]) for layer in layers]
        dropped = sum(routed) - sum(sum(layer["kept"]) for layer in layers)
        assert record["moe/assignments"] == sum(routed) == 32
        assert record["moe/drop_rate"] == pytest.approx(dropped / sum(routed))
    for number, found in enumerate(records["layers"]):
        steps = range(4 * number, 4 * number + 4)
        load = [sum(one[step]["layers"][""]["routed"][e] for one in counts for step in steps) for e in range(4)]
        assert found["ranks"] == 2 and found["layers"][""]["load"] == load
    assert sum(record["moe/drop_rate"] for record in records["metrics"]) > 0
