"""Records on their way out: totals, subscribers, and the files of a run."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from staticmoe.observe.record import Record
from staticmoe.observe.results import StepResult
from staticmoe.observe.sinks.jsonl import JsonlSink

log = logging.getLogger(__name__)

Sink = Callable[[dict[str, Any]], None]


class Publisher:
    """Adds records up and hands them on, in order.

    Args:
        run_dir: folder for meta.json and metrics.jsonl, made if needed, or None.
    """

    def __init__(self, run_dir: str | Path | None) -> None:
        self._run_dir = Path(run_dir) if run_dir is not None else None
        self._sinks: list[Sink] = []
        self._file: JsonlSink | None = None
        self._committed = self._skipped = self._reruns = 0
        self._fields: dict[str, dict[str, list[int]]] = {}

    def start(self, meta: dict[str, Any]) -> None:
        """Write meta.json and open metrics.jsonl."""
        if self._run_dir is None:
            return
        self._run_dir.mkdir(parents=True, exist_ok=True)
        partial = self._run_dir / "meta.json.partial"
        partial.write_text(json.dumps(meta, indent=2) + "\n")
        os.replace(partial, self._run_dir / "meta.json")
        self._file = JsonlSink(self._run_dir / "metrics.jsonl")
        self.subscribe(self._file)

    def subscribe(self, sink: Sink) -> None:
        """Add a sink."""
        self._sinks.append(sink)

    def publish(self, result: StepResult, record: Record, *, training: bool) -> None:
        """Count a record and hand it to the sinks; void attempts count in no total."""
        if training and not record.void:
            self._count(record)
        if not self._sinks:
            return
        line = {
            "kind": "train" if training else "eval",
            "step": result.step,
            "attempt": record.attempt,
            "void": record.void,
            "skipped": record.veto,
            "reasons": [str(reason.name).lower() for reason in record.reasons],
            **record.scalars,
            "drop_rate": result.moe.drop_rate,
            "moe": {
                name: {"routed": load.routed, "dropped": load.dropped, "capacity_rows": load.capacity_rows}
                for name, load in result.moe.items()
            },
        }
        for sink in list(self._sinks):
            try:
                sink(line)
            except Exception:
                # Telemetry never stops training.
                log.exception("a sink failed at step %d and gets no more records", result.step)
                self._sinks.remove(sink)

    def _count(self, record: Record) -> None:
        self._reruns += record.attempt > 0
        if record.veto:
            self._skipped += 1
            return
        self._committed += 1
        for owner, fields in record.fields.items():
            sums = self._fields.setdefault(owner, {})
            for name, values in fields.items():
                sums[name] = [a + b for a, b in zip(sums[name], values, strict=True)] if name in sums else list(values)

    def totals(self) -> dict[str, Any]:
        """Sums over committed steps: committed, skipped, reruns, moe: {module: {routed, kept, dropped}}."""
        layers = {
            name: {
                "routed": list(sums["routed"]),
                "kept": list(sums["kept"]),
                "dropped": [a - b for a, b in zip(sums["routed"], sums["kept"], strict=True)],
            }
            for name, sums in self._fields.items()
            if "routed" in sums and "kept" in sums
        }
        return {"committed": self._committed, "skipped": self._skipped, "reruns": self._reruns, "moe": layers}

    def state_dict(self) -> dict[str, Any]:
        """Totals, to go on from."""
        fields = {owner: {name: list(values) for name, values in sums.items()} for owner, sums in self._fields.items()}
        return {"committed": self._committed, "skipped": self._skipped, "reruns": self._reruns, "fields": fields}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`."""
        self._committed, self._skipped, self._reruns = state["committed"], state["skipped"], state["reruns"]
        self._fields = {owner: {n: list(v) for n, v in sums.items()} for owner, sums in state["fields"].items()}

    def close(self) -> None:
        """Close the files."""
        if self._file is not None:
            self._file.close()
            self._file = None
