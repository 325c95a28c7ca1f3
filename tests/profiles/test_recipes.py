"""The recipes that look at a step: each is listed, and what can be seen without a GPU is right."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from staticmoe.bench import Shape

FOLDER = Path(__file__).resolve().parents[2] / "profiles"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a script by its name."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


def test_every_script_is_in_the_table_with_a_result_that_is_there() -> None:
    text = (FOLDER / "README.md").read_text()
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| `")]
    listed = [re.findall(r"`(\w+\.py)`", row[0])[0] for row in rows]
    assert sorted(listed) == sorted(path.name for path in FOLDER.glob("*.py"))
    for name, row in zip(listed, rows, strict=True):
        assert f" profiles/{name}" in row[2] or "imported" in row[2], name
        for result in re.findall(r"`([\w/]+\.(?:json|png))`", row[3]):
            assert (FOLDER / "results" / result).is_file(), result
    named = set(re.findall(r"profiles/(\w+\.py)", text))
    assert named <= set(listed)


def test_one_kernel_launches_what_is_asked_for_and_before_it_what_that_reads(
    module: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the interpreter: warm-ups and launches of the down projection, whose input the up projection wrote once."""
    script = module("one_kernel")
    called: list[str] = []
    original = script.calls_of

    def calls_of(launches: Any) -> dict[str, Any]:
        def counted(name: str, call: Any) -> Any:
            return lambda: (called.append(name), call())[1]

        return {name: counted(name, call) for name, call in original(launches).items()}

    monkeypatch.setattr(script, "calls_of", calls_of)
    monkeypatch.setitem(script.SHAPES, "qwen3", Shape(64, 32, 4, 2))
    monkeypatch.setattr(sys, "argv", ["x", "--kernel", "down", "--tokens", "16", "--launches", "2", "--device", "cpu"])
    script.main()
    assert called == ["up"] + ["down"] * (3 + 2)
    assert "down: 3 + 2 launches" in capsys.readouterr().out


def test_every_kernel_that_can_be_asked_for_is_there(module: Callable[[str], Any]) -> None:
    script = module("one_kernel")
    problem = script.make_problem(Shape(64, 32, 4, 2), 16, "natural", torch.bfloat16, torch.device("cpu"))
    assert tuple(script.calls_of(script.tune_tiles.Launches(problem, torch.device("cpu")))) == script.KERNELS


def event(action: str, size: int, address: int = 0, line: int = 0) -> dict[str, Any]:
    frames = [
        {"filename": "/x/torch/nn/functional.py", "line": 1, "name": "linear"},
        {"filename": "/x/staticmoe/moe/layer.py", "line": line, "name": "forward"},
    ]
    return {"action": action, "size": size, "addr": address, "frames": frames if line else []}


def test_the_highest_point_is_where_most_is_held_and_of_those_where_most_is_used(module: Callable[[str], Any]) -> None:
    trace = [
        event("segment_alloc", 100), event("alloc", 60, 1, 7), event("alloc", 30, 2, 7), event("free_requested", 60, 1),
        event("free_completed", 60, 1), event("segment_alloc", 40), event("alloc", 50, 3),
        event("free_completed", 50, 3), event("segment_free", 40), event("alloc", 70, 4, 9), event("segment_map", 10),
    ]  # fmt: skip
    script = module("memory_snapshot")
    found = script.highest(trace)
    assert (found["held"], found["allocated"], found["idle"]) == (140, 80, 60)
    assert found["by"] == [
        {"where": "no Python line (C++, workspaces)", "bytes": 50, "count": 1},
        {"where": "moe/layer.py:7 forward", "bytes": 30, "count": 1},
    ]
    later = script.highest(trace, held=1000, allocated=500)
    assert (later["held"], later["allocated"]) == (1140, 580)
    assert script.highest([], 5, 3) == {"held": 5, "allocated": 3, "idle": 2, "by": []}


def test_pools_add_up_to_what_is_held(module: Callable[[str], Any]) -> None:
    def segment(pool: tuple[int, int], *blocks: tuple[str, int, int]) -> dict[str, Any]:
        made = [{"state": state, "size": size, "requested_size": asked} for state, size, asked in blocks]
        return {"segment_pool_id": pool, "total_size": sum(size for _, size, _ in blocks), "blocks": made}

    found = module("memory_snapshot").pools([
        segment((0, 1), ("active_allocated", 512, 500), ("inactive", 1536, 0)),
        segment((0, 1), ("active_allocated", 512, 512)),
        segment((0, 0), ("active_pending_free", 2048, 2000), ("active_allocated", 1024, 1000)),
    ])  # fmt: skip
    assert found == {
        "private pools": {"held": 2560, "segments": 2, "in use": 1024, "of it rounding": 12, "free inside": 1536},
        "rest": {"held": 3072, "segments": 1, "in use": 1024, "of it rounding": 24, "pending": 2048},
    }
    for parts in found.values():
        assert parts["held"] == parts["in use"] + parts.get("free inside", 0) + parts.get("pending", 0)


def test_what_watching_costs_is_measured_beside_a_run_without_files(
    module: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("prometheus_client")
    script, path = module("record_cost"), tmp_path / "cost.json"
    arguments = ["--device", "cpu", "--sizes", "tiny", "--rounds", "2", "--steps", "2", "--output", str(path)]
    monkeypatch.setattr(sys, "argv", ["record_cost", *arguments])
    script.main()
    ways = json.loads(path.read_text())["sizes"]["tiny"]["ways"]
    assert list(ways) == list(script.OPTIONS) and ways[script.NONE]["share"] == 0.0
    assert all(way["step_ms"] > 0 and way["publish_us"] > 0 for way in ways.values())
