"""The files of a rank of a run: meta.json, metrics.jsonl, layers/layers.jsonl and, on request, layers/experts.jsonl.

    metrics.jsonl        one line a record, flat: kind, step, attempt, void, skipped, reasons, time, and metrics
    layers/layers.jsonl  one line a window of committed training steps, sums and means by layer
    layers/experts.jsonl one line every n-th committed training step, counts by layer and expert

Each begins with a line {"kind": "meta", "schema": 2}. After a resume, before which there is another such line with
"resumed": true, a step can occur again; its last line counts.
Where they lie: `staticmoe.observe.ranks`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from typing import Any

import numpy

from staticmoe.config import RunnerConfig
from staticmoe.observe.derive import Floats, Ints, LayerNumbers, Loads
from staticmoe.observe.outlet import Outlet
from staticmoe.observe.ranks import Rank, rank_folder
from staticmoe.observe.sinks.jsonl import SCHEMA_VERSION, JsonlSink

log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Window:
    """Sums over the committed steps of one line of layers.jsonl; arrays as in `Loads` and `LayerNumbers`."""

    first_step: int
    loads: Loads
    capacity_rows: Ints
    routed: Ints
    dropped: Ints
    vio: Floats
    vio_steps: Ints
    required: Floats
    last_step: int = 0
    steps: int = 0

    @classmethod
    def begin(cls, step: int, loads: Loads) -> _Window:
        layers = len(loads.names)
        counts = [numpy.zeros(layers, dtype=numpy.int64) for _ in range(3)]
        return cls(
            first_step=step,
            loads=loads,
            capacity_rows=counts[0],
            routed=numpy.zeros_like(loads.routed),
            dropped=counts[1],
            vio=numpy.zeros(layers),
            vio_steps=counts[2],
            required=numpy.full(layers, math.nan),
        )

    def add(self, step: int, loads: Loads, layers: LayerNumbers) -> None:
        self.last_step, self.steps = step, self.steps + 1
        self.capacity_rows = layers.capacity_rows
        self.routed += loads.routed
        self.dropped += layers.dropped
        known = ~numpy.isnan(layers.max_vio)
        self.vio += numpy.where(known, layers.max_vio, 0.0)
        self.vio_steps += known
        self.required = numpy.fmax(self.required, layers.required)

    def line(self, time: float) -> dict[str, Any]:
        routed, loads = self.loads.sums(self.routed), self.loads.by_layer(self.routed)
        rows = zip(
            self.loads.names,
            routed.tolist(),
            self.dropped.tolist(),
            (self.vio / numpy.maximum(self.vio_steps, 1)).tolist(),
            self.vio_steps.tolist(),
            self.required.tolist(),
            self.capacity_rows.tolist(),
            strict=True,
        )
        layers = {
            name: {
                "routed": all_routed,
                "dropped": dropped,
                "drop_rate": dropped / max(all_routed, 1),
                "max_vio": vio if vio_steps else None,
                "required_factor": None if math.isnan(required) else required,
                "dead_experts": loads[name].count(0),
                "capacity_rows": capacity_rows,
                "load": loads[name],
            }
            for name, all_routed, dropped, vio, vio_steps, required, capacity_rows in rows
        }
        span = {"first_step": self.first_step, "step": self.last_step, "steps": self.steps}
        return {"kind": "train", **span, "time": time, "layers": layers}


class RunFiles:
    """Writes the files of a rank; with `run_dir=None` writes none.

    Args:
        config: run_dir, rank_files, layers_every, experts_every, rotate_bytes, gradient_accumulation_steps.
        rank: whose records these are.

    Attributes:
        folder: of the rank; None without a run_dir.
        written: whether the rank writes.
    """

    def __init__(self, config: RunnerConfig, rank: Rank) -> None:
        self._config, self._rank = config, rank
        self.folder = None if config.run_dir is None else rank_folder(config.run_dir, rank.number)
        self.written = self.folder is not None and (rank.number == 0 or config.rank_files)
        self._sinks: dict[str, JsonlSink] = {}
        self._outlets: dict[str, Outlet] = {}
        self._window: _Window | None = None

    @property
    def open(self) -> bool:
        """Whether anything is written."""
        return any(outlet.open for outlet in self._outlets.values())

    def start(self, meta: dict[str, Any]) -> None:
        """Write meta.json and open the others; an existing file is continued.

        Raises:
            JsonlError: a file is there that is none of this schema.
            OSError: the directory cannot be written.
        """
        folder, config = self.folder, self._config
        if folder is None or not self.written:
            return
        folder.mkdir(parents=True, exist_ok=True)
        # As many as have files here, so that a reader knows what to wait for.
        ranks = self._rank.count if config.rank_files else 1
        facts = {"schema": SCHEMA_VERSION, "rank": self._rank.number, "ranks": ranks, "processes": self._rank.count}
        partial = folder / "meta.json.partial"
        partial.write_text(json.dumps({**facts, **meta}, indent=2) + "\n")
        os.replace(partial, folder / "meta.json")
        heads: dict[str, dict[str, Any]] = {"metrics": {}, "layers/layers": {}}
        if config.experts_every:
            heads["layers/experts"] = {"micro_batches": config.gradient_accumulation_steps}
        for name, head in heads.items():
            sink = JsonlSink(folder / f"{name}.jsonl", head, max_bytes=config.rotate_bytes, say_resumed=True)
            self._sinks[name], self._outlets[name] = sink, Outlet(sink, str(sink.path))

    def record(self, line: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        self._write("metrics", line)

    def committed(self, step: int, number: int, time: float, loads: Loads, layers: LayerNumbers) -> None:
        """Take a committed training step, the `number`-th of the run, into the window and into experts.jsonl."""
        if not loads.names:
            return
        if self._config.experts_every and number % self._config.experts_every == 0:
            routed, kept = loads.by_layer(loads.routed), loads.by_layer(loads.kept)
            each = {name: {"routed": routed[name], "kept": kept[name]} for name in loads.names}
            self._write("layers/experts", {"kind": "train", "step": step, "time": time, "layers": each})
        if self._window is None:
            self._window = _Window.begin(step, loads)
        self._window.add(step, loads, layers)
        if self._window.steps == self._config.layers_every:
            self.end_window(time)

    def end_window(self, time: float) -> None:
        """Write the window as it is, if there is one; the next step begins another."""
        window, self._window = self._window, None
        if window is not None:
            self._write("layers/layers", window.line(time))

    def _write(self, name: str, line: dict[str, Any]) -> None:
        if name in self._outlets:
            self._outlets[name](line)

    def close(self, time: float) -> None:
        """Write the last window and close the files; a second call does nothing."""
        self.end_window(time)
        for name, sink in self._sinks.items():
            try:
                sink.close()
            except OSError:
                log.exception("%s: the last lines may be missing", self._sinks[name].path)
        self._sinks, self._outlets = {}, {}
