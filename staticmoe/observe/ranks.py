"""A run of several ranks: where the files of each lie, and what the records of all of them say of the run.

    run_dir/             of rank 0, and of a run of one process: meta.json, metrics.jsonl, layers/, alerts.jsonl
    run_dir/rank1/ ...   the same files of each other rank

Each rank writes its own files and knows nothing of the others: nothing is sent, nothing waits for the slowest. Who
reads the files reduces their records, each metric as the registry declares it.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed

from staticmoe.errors import ConfigError
from staticmoe.observe.metrics import Reduce, metric_of
from staticmoe.observe.sinks.jsonl import NONFINITE_KEY


@dataclasses.dataclass(frozen=True)
class Rank:
    """Which of the processes of a run this is.

    Attributes:
        number: from 0.
        count: of the processes.
    """

    number: int = 0
    count: int = 1

    @classmethod
    def of_process(cls, environment: Mapping[str, str] = os.environ) -> Rank:
        """By torch.distributed's default group, else by RANK and WORLD_SIZE as torchrun sets them, else rank 0 of 1.

        Raises:
            ConfigError: the variables are no rank of a run.
        """
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return cls(torch.distributed.get_rank(), torch.distributed.get_world_size())
        number, count = environment.get("RANK"), environment.get("WORLD_SIZE")
        if number is None or count is None:
            return cls()
        if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
            raise ConfigError(
                f"RANK, WORLD_SIZE: expected a number from 0, below the number of processes; got {number!r} of "
                f"{count!r}: start the program with torchrun, or unset them"
            )
        return cls(int(number), int(count))


def rank_folder(run_dir: str | os.PathLike[str], number: int) -> Path:
    """Return the folder of the files of a rank."""
    return Path(run_dir) / f"rank{number}" if number else Path(run_dir)


def reduce_records(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what lines of metrics.jsonl, of one step and one a rank, say of the run; "ranks" is their number.

    The record is skipped where it is on any rank, and has the reasons and the highest attempt of all of them.
    """
    given = [_with_nonfinite(record) for record in records]
    found: dict[str, Any] = {
        "kind": given[0]["kind"],
        "step": given[0]["step"],
        "ranks": len(given),
        "attempt": max(record.get("attempt", 0) for record in given),
        "void": any(record.get("void") for record in given),
        "skipped": any(record.get("skipped") for record in given),
        "reasons": list(dict.fromkeys(reason for record in given for reason in record.get("reasons") or ())),
        "time": max((record["time"] for record in given if record.get("time") is not None), default=None),
    }
    loads = [record.get("moe/assignments") or 0 for record in given]
    for key in dict.fromkeys(key for record in given for key in record):
        metric = metric_of(key)
        if metric is not None:
            found[key] = reduce_values(metric.reduce, [record.get(key) for record in given], loads)
    return found


def reduce_values(how: Reduce, values: Sequence[float | None], loads: Sequence[float]) -> float | None:
    """Return the value of the run; NaN where one of the values that count is NaN.

    Args:
        how: as the registry declares it.
        values: of the ranks, rank 0 first; None where a rank has none.
        loads: weights of the ranks, for `Reduce.BY_LOAD`; where they are all 0 the ranks weigh the same.
    """
    if how is Reduce.SAME:
        return values[0]
    known = [(value, load) for value, load in zip(values, loads, strict=True) if value is not None]
    if not known or (how is Reduce.SUM and len(known) < len(values)):
        return None
    numbers, weights = [value for value, _ in known], [load for _, load in known]
    if any(math.isnan(value) for value in numbers):
        return math.nan
    if how is Reduce.SUM:
        return sum(numbers)
    if how is Reduce.MAX:
        return max(numbers)
    if how is Reduce.MIN:
        return min(numbers)
    if how is Reduce.BY_LOAD and sum(weights) > 0:
        # A rank without a load has nothing to say of it.
        return sum(value * load for value, load in known if load) / sum(weights)
    return sum(numbers) / len(numbers)


def reduce_windows(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what lines of layers/layers.jsonl, of one window and one a rank, say of the run.

    Loads, drops and rows are summed up, so that the drop rate and the experts without a token are exact; `max_vio` is
    the ranks' mean weighted by load, `required_factor` the largest of the ranks'.
    """
    names = dict.fromkeys(name for record in records for name in record["layers"])
    return {
        "kind": records[0]["kind"],
        "ranks": len(records),
        "first_step": min(record["first_step"] for record in records),
        "step": max(record["step"] for record in records),
        "steps": max(record["steps"] for record in records),
        "time": max(record["time"] for record in records),
        "layers": {
            name: _layer([record["layers"][name] for record in records if name in record["layers"]]) for name in names
        },
    }


def _layer(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    routed = [part["routed"] for part in parts]
    dropped = sum(part["dropped"] for part in parts)
    load = [sum(rows) for rows in zip(*(part["load"] for part in parts), strict=True)]
    return {
        "routed": sum(routed),
        "dropped": dropped,
        "drop_rate": dropped / max(sum(routed), 1),
        "max_vio": reduce_values(Reduce.BY_LOAD, [part["max_vio"] for part in parts], routed),
        "required_factor": reduce_values(Reduce.MAX, [part["required_factor"] for part in parts], routed),
        "dead_experts": load.count(0),
        "capacity_rows": sum(part["capacity_rows"] for part in parts),
        "load": load,
    }


def _with_nonfinite(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with NaN and infinity back where JSON has null: a NaN on one rank is no rank without a value."""
    found = dict(record)
    for key, text in (found.pop(NONFINITE_KEY, None) or {}).items():
        if key in found and found[key] is None:
            found[key] = float(text)
    return found
