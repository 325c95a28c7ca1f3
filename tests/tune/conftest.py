"""What the tuner's tests share: made-up recordings, in memory and as the files of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staticmoe.tune import Layer, Loads


def loads_of(rows: Mapping[str, Any], assignments: int, **more: Any) -> Loads:
    """A recording of these rows."""
    arrays = {name: np.array(counts, dtype=np.int64) for name, counts in rows.items()}
    layers = {name: Layer(counts.shape[1], assignments) for name, counts in arrays.items()}
    return Loads(layers, arrays, **more)


def drawn(seed: int, *, steps: int = 200, experts: int = 8, total: int = 128, memory: float = 0.0) -> Loads:
    """One layer whose log-popularities are an AR(1) process with this memory of the step before."""
    random = np.random.default_rng(seed)
    noise = random.normal(size=(steps, experts))
    for step in range(1, steps):
        noise[step] = memory * noise[step - 1] + np.sqrt(1 - memory**2) * noise[step]
    popularity = np.exp(0.3 * noise)
    return loads_of({"a": random.multinomial(total, popularity / popularity.sum(1, keepdims=True))}, total)


def written(folder: Path, lines: list[dict[str, Any]], **meta: Any) -> Path:
    """A run directory whose layers/experts.jsonl holds these lines behind its first."""
    names = lines[0]["layers"] if lines else {"a": {"routed": [0, 0]}}
    facts = {
        name: {"num_experts": len(layer["routed"]), "top_k": 2, "tokens": 8, "capacity_rows": 16, "can_overflow": 0}
        for name, layer in names.items()
    }
    (folder / "layers").mkdir(parents=True)
    whole = {"schema": 2, "micro_batches": 1, "config": {"max_in_flight": 2}, "participants": facts, **meta}
    (folder / "meta.json").write_text(json.dumps(whole))
    head = {"kind": "meta", "schema": 2, "micro_batches": whole["micro_batches"]}
    text = "".join(json.dumps(line) + "\n" for line in [head, *lines])
    (folder / "layers" / "experts.jsonl").write_text(text)
    return folder


@pytest.fixture
def recording() -> Callable[..., Loads]:
    """Rows by layer, and T·K -> loads."""
    return loads_of


@pytest.fixture
def draw() -> Callable[..., Loads]:
    """Seed -> loads."""
    return drawn


@pytest.fixture
def write_run() -> Callable[..., Path]:
    """Folder, lines and entries of meta.json -> run directory."""
    return written
