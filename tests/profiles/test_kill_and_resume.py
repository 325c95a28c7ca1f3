"""Runs that are killed and resumed: three kills, and that a difference would be seen."""

from __future__ import annotations

import copy
import importlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "profiles"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, which needs no transformers."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("kill_and_resume")


def test_three_kills_leave_no_trace(
    module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checkpoint and records end bitwise as those of a run that nobody killed."""
    path = tmp_path / "out" / "kills.json"
    # Nothing is captured: it starts sooner. The seed aims at a write, at an early moment of a start and at a write,
    # whether a checkpoint was there or not; and no process comes to its end before it is killed.
    monkeypatch.setattr(module, "OPTIONS", (*module.OPTIONS[:-1], "off"))
    monkeypatch.setattr(module, "LATEST", 0.0)
    for odds in ("FIRST_AIMS", "AIMS"):
        monkeypatch.setattr(module, odds, {"write": 0.5, "start": 0.5})
    arguments = f"--kills 3 --steps 42 --seed 31 --commit none --output {path} --folder {tmp_path / 'runs'}"
    monkeypatch.setattr(sys, "argv", ["kill_and_resume", *arguments.split()])
    module.main()
    found = json.loads(path.read_text())
    assert found["kills"] == 3 and found["same"] and found["provenance"]["commit"] == "none"
    assert [hit["signal"] for hit in found["each"]] == ["SIGKILL", "SIGTERM", "SIGKILL"]
    assert [hit["aim"] for hit in found["each"]] == ["write", "start", "write"]
    assert all(hit["saved_step"] <= hit["recorded_step"] <= 42 for hit in found["each"])
    assert sum(sum(row.values()) for row in found["phases"].values()) == 3
    (row,) = found["runs"].values()
    assert row["tensors"] > 30 and row["checkpoint"] == row["records"] == row["held_out"] == []
    assert "3 kills" in capsys.readouterr().out
    # The comparison is not blind: one bit of one tensor, one number of one line.
    straight, killed = (module.load_checkpoint(tmp_path / "runs" / name) for name in ("straight", "run 1"))
    assert killed["step"] == 42 and module.differences(killed, straight) == []
    killed["rng"]["cpu"][100] ^= 1
    assert module.differences(killed, straight) == [".rng.cpu"]
    lines = (tmp_path / "runs" / "run 1" / "metrics.jsonl").read_text().splitlines(keepends=True)
    other = {**json.loads(lines[5]), "train/loss": 0.5}
    lines.insert(6, json.dumps(other) + "\n")
    (tmp_path / "runs" / "run 1" / "metrics.jsonl").write_text("".join(lines))
    again = module.compared(tmp_path / "runs" / "run 1", tmp_path / "runs" / "straight")
    assert again["recorded_again"] == row["recorded_again"] + 1 and again["recorded_again_differently"] == 1
    assert not module.is_same(again)


def test_differences_are_found_bit_by_bit(module: Any) -> None:
    """Signed zeros, another dtype, a missing key; NaN is the same as itself."""
    one = {"a": [torch.tensor([0.0, float("nan")]), 1, float("nan")], "b": (torch.tensor(2),)}
    other = copy.deepcopy(one)
    assert module.differences(one, other) == []
    other["a"][0][0] = -0.0
    other["b"] = (torch.tensor(2.0),)
    assert module.differences(one, other) == [".a[0]", ".b[0]"]
    assert module.differences({"a": 1, "b": 2}, {"a": True}) == [": ['b']"]
    assert module.differences([1, 2.0], [1, 2.5, 3]) == [": 2 against 3"]
    assert module.differences(1, True) == [": 1 against True"]


def test_a_checkpoint_ahead_of_its_records_is_an_error(module: Any, tmp_path: Path) -> None:
    module.torch.save({"format": 1, "step": 3}, tmp_path / "checkpoint.pt")
    lines = [{"kind": "meta"}, *({"kind": "train", "step": step} for step in (1, 3, 4))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(SystemExit, match=r"of step 3, but no record of steps \[2\]"):
        module.left_behind(tmp_path)
    lines[2]["step"] = 2
    lines.append({"kind": "train", "step": 3})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert module.left_behind(tmp_path) == {"saved_step": 3, "recorded_step": 4}


def test_the_text_is_the_same_each_time(module: Any) -> None:
    random.seed(1)
    assert module.text() == module.text() and len(module.text()) > 10_000
