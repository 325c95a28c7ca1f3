"""Where loads come from: the files of a run, a sink of a runner, or batches that a runner evaluates."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from staticmoe.errors import ConfigError
from staticmoe.observe.ranks import rank_folder
from staticmoe.observe.sinks.jsonl import read_rotated
from staticmoe.tune.loads import Ints, Layer, Loads

if TYPE_CHECKING:
    from staticmoe.runner.runner import StaticMoERunner

_RECORD_AGAIN = "record the loads of every expert with RunnerConfig(run_dir=..., experts_every=1)"


def read_meta(run_dir: str | Path) -> dict[str, Any]:
    """Return meta.json of a run.

    Raises:
        ConfigError: it is missing or no JSON.
    """
    path = Path(run_dir) / "meta.json"
    try:
        meta = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(
            f"{run_dir}: expected the directory of a run, with meta.json in it; {_RECORD_AGAIN}"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: expected JSON that can be read; got {error}: is this the directory of a run?"
        ) from error
    if not isinstance(meta, dict):
        raise ConfigError(f"{path}: expected an object; got {type(meta).__name__}: is this the directory of a run?")
    return meta


def read_run(run_dir: str | Path) -> Loads:
    """Return the loads that the ranks of a run wrote to layers/experts.jsonl, of the steps that all of them wrote.

    Where a resume repeated a step, its last line counts.

    Raises:
        ConfigError: the run did not record the loads of its experts, or not so that they can be used.
    """
    meta, recorded, absent = read_meta(run_dir), [], []
    for rank in range(int(meta.get("ranks", 1))):
        path = rank_folder(run_dir, rank) / "layers" / "experts.jsonl"
        try:
            recorded.append(_steps_of(path))
        except FileNotFoundError as error:
            if rank == 0:
                raise ConfigError(
                    f"{path}: expected the loads of the experts, which this run did not record; {_RECORD_AGAIN}"
                ) from error
            absent.append(rank)
    steps = sorted(set.intersection(*map(set, recorded)))
    if not steps:
        raise ConfigError(
            f"{run_dir}: expected the loads of at least one committed step in layers/experts.jsonl, the same one of "
            "every rank; got none: let the run go on"
        )
    rows = [of_rank[step] for step in steps for of_rank in recorded]
    participants = meta.get("participants", {})
    layers = {name: _layer_of(name, participants.get(name, {}), run_dir) for name in rows[0]}
    return Loads(
        layers,
        _stacked(rows),
        summed=int(meta.get("micro_batches", 1)),
        replicas=len(recorded),
        notes=(*_notes(meta.get("config", {})), *_notes_on_ranks(meta, absent)),
    )


def _steps_of(path: Path) -> dict[int, dict[str, list[int]]]:
    """Step -> layer -> assignments of each expert, of one rank."""
    return {
        record["step"]: {name: layer["routed"] for name, layer in record["layers"].items()}
        for record in read_rotated(path)
        if record["kind"] == "train"
    }


def _notes_on_ranks(meta: Mapping[str, Any], absent: Sequence[int]) -> Iterator[str]:
    processes, ranks = meta.get("processes", 1), meta.get("ranks", 1)
    unseen = "what overflows on the others is not counted, so that more steps are run again or skipped than this says"
    if absent:
        names = ", ".join(map(str, absent))
        yield f"ranks {names} have no layers/experts.jsonl here: {unseen}; copy their folders here"
    if processes > ranks:
        yield f"recorded by {ranks} of {processes} ranks: {unseen}; record with RunnerConfig(rank_files=True)"


def _layer_of(name: str, facts: Mapping[str, int], run_dir: str | Path) -> Layer:
    missing = [key for key in ("num_experts", "top_k", "tokens") if key not in facts]
    if missing:
        raise ConfigError(
            f"{run_dir}/meta.json: expected {', '.join(missing)} of layer '{name}'; not there: {_RECORD_AGAIN}"
        )
    return Layer(facts["num_experts"], facts["tokens"] * facts["top_k"])


def _notes(config: Mapping[str, Any]) -> Iterator[str]:
    factor, overflow = config.get("capacity_factor"), config.get("overflow")
    if factor is None:
        return
    if overflow in ("skip", "raise"):
        yield (
            f"recorded with overflow='{overflow}' at capacity_factor={factor}: steps that overflowed are not among "
            "these, so that the true rates are higher; record dropless, or with overflow='rerun'"
        )
    if overflow == "drop":
        yield (
            f"recorded with overflow='drop' at capacity_factor={factor}: layers behind one that drops were given what "
            "the drops left of their tokens; record dropless for what they would get without"
        )


def _stacked(rows: list[dict[str, list[int]]]) -> dict[str, Ints]:
    for number, row in enumerate(rows):
        different = {name for name, counts in row.items() if len(counts) != len(rows[0].get(name, ()))}
        if row.keys() != rows[0].keys() or different:
            raise ConfigError(
                f"loads: expected the same layers and experts in each record; record {number} has others than the "
                f"first: {sorted(different or row.keys() ^ rows[0].keys())}; tune one model at a time"
            )
    return {name: np.array([row[name] for row in rows], dtype=np.int64) for name in rows[0]}


class LoadRecorder:
    """A sink for `runner.subscribe` that keeps the loads of committed training steps, of several ranks its own one's.

    A step that a policy left out because its rows did not fit is kept as well: leaving it out would flatter.

    Args:
        assignments: module name -> T·K of one micro-batch. None: the steps must be dropless, where it is the capacity.
        micro_batches: of one step, `gradient_accumulation_steps`.
    """

    def __init__(self, assignments: Mapping[str, int] | None = None, *, micro_batches: int = 1) -> None:
        self._assignments = assignments
        self._micro_batches = micro_batches
        self._steps: dict[int, dict[str, list[int]]] = {}
        self._rows: dict[str, set[int]] = {}
        self._bounded: list[int] = []

    def __call__(self, record: dict[str, Any]) -> None:
        """Keep the loads of a record."""
        overflowed = "capacity_overflow" in record["reasons"]
        if record["kind"] != "train" or record["void"] or (record["skipped"] and not overflowed):
            return
        self._steps[record["step"]] = {name: list(layer["routed"]) for name, layer in record["moe"].items()}
        for name, layer in record["moe"].items():
            self._rows.setdefault(name, set()).add(layer["capacity_rows"])
        if record.get("graph/variant") is not None:
            self._bounded.append(record["step"])

    def loads(self) -> Loads:
        """What was recorded so far.

        Raises:
            ConfigError: nothing was, or T·K of a layer is neither given nor told by dropless steps.
        """
        if not self._steps:
            raise ConfigError("loads: expected at least one training step before loads() is asked for; none was seen")
        rows = [self._steps[step] for step in sorted(self._steps)]
        return Loads(_layers(rows[0], self._sizes()), _stacked(rows), summed=self._micro_batches)

    def _sizes(self) -> Mapping[str, int]:
        if self._assignments is not None:
            return self._assignments
        if self._bounded:
            raise ConfigError(
                f"assignments: expected T·K of each layer where steps have a capacity, as step {self._bounded[0]} has; "
                "give LoadRecorder(assignments={module: T*K}), or record with capacity_factor=None"
            )
        return {name: _only(name, found) for name, found in self._rows.items()}


def calibrate(runner: StaticMoERunner, batches: Iterable[Any]) -> Loads:
    """Return the loads of `batches`, each one micro-batch, as `runner.evaluate` routes them: dropless, in eval mode.

    Nothing is committed. One batch is one row; the rows of a step are as many as the runner accumulates. With several
    ranks each has the loads of its own batches.

    Raises:
        ConfigError: evaluation has a capacity, no batches, or batches of several shapes.
        BatchError: a batch does not fit.
    """
    if runner.config.eval_capacity_factor is not None:
        raise ConfigError(
            "eval_capacity_factor: expected None, so that a calibration sees the loads that no layer before has "
            f"changed by dropping; got {runner.config.eval_capacity_factor}: calibrate with a runner without it"
        )
    rows: list[dict[str, list[int]]] = []
    capacities: dict[str, set[int]] = {}
    for batch in batches:
        found = runner.evaluate(batch).moe
        rows.append({name: load.routed for name, load in found.items()})
        for name, load in found.items():
            capacities.setdefault(name, set()).add(load.capacity_rows)
    if not rows:
        raise ConfigError("batches: expected at least one; got none")
    sizes = {name: _only(name, found) for name, found in capacities.items()}
    return Loads(_layers(rows[0], sizes), _stacked(rows), accumulate=runner.config.gradient_accumulation_steps)


def _layers(row: Mapping[str, list[int]], assignments: Mapping[str, int]) -> dict[str, Layer]:
    missing = sorted(row.keys() - assignments.keys())
    if missing:
        raise ConfigError(f"assignments: expected T·K of each layer; missing: {', '.join(missing)}")
    return {name: Layer(len(counts), assignments[name]) for name, counts in row.items()}


def _only(name: str, found: set[int]) -> int:
    if len(found) > 1:
        raise ConfigError(
            f"loads of '{name}': expected one batch shape; got micro-batches with T·K of {sorted(found)}: tune one "
            "shape at a time"
        )
    return next(iter(found))
