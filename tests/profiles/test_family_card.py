"""The card of a family, as it is made on a CPU and, at small widths, as on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Run = Callable[..., Any]
Script = Callable[[str], Any]


def test_the_card_on_a_cpu(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "families.json"
    run("family_card", "--families", "mixtral", "gpt_oss", "--output", str(path))
    found = json.loads(path.read_text())
    for name, attention in (("mixtral", "sdpa"), ("gpt_oss", "eager")):
        card = found["families"][name]
        assert (card["experts"], card["attention"], card["captured"]) == ("one op", attention, "bitwise")
    assert found["families"]["mixtral"]["host_reads_with_2d_mask"]
    assert "added to the scores" in found["provenance"]["masks"]


@pytest.mark.parametrize(
    ("name", "experts"), [("mixtral", "one op"), ("muse_spark_text: norm after the experts", "by parts")]
)
def test_times_of_ours_and_of_grouped_mm(
    name: str, experts: str, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("family_card")
    for constant, value in (("WIDE", {}), ("TIMED_STEPS", 4), ("TIMED_SEQUENCES", 2), ("TIMED_TOKENS", 8)):
        monkeypatch.setattr(module, constant, value)
    module.huggingface.register()
    found = module.speeds(name, torch.device("cpu"))
    assert (found["experts"], found["attention"]) == (experts, "sdpa")
    for key in ("captured", "grouped_mm"):
        assert found[key]["events"]["replays"] == 2 and found[key]["ms"] > 0 and "ms" in module.shown(found[key])


def test_both_ways_take_the_same_steps(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop with `grouped_mm` and a 2-D mask, and the captured iteration with a ready one: the same losses."""
    module = script("family_card")
    for constant, value in (("WIDE", {}), ("TIMED_STEPS", 4), ("TIMED_SEQUENCES", 2), ("TIMED_TOKENS", 8)):
        monkeypatch.setattr(module, constant, value)
    module.huggingface.register()
    ours, theirs = (
        module.timed("qwen3_moe", one, torch.device("cpu"))["losses"] for one in ("staticmoe", "grouped_mm")
    )
    assert len(set(ours)) == 4 and ours == pytest.approx(theirs, rel=1e-4)
