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


def test_a_run_that_was_cut_off_goes_on(
    run: Run, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each card is in the file once it is made; of the next run those that went well, by whose commit, are kept."""
    module, path, made = script("family_card"), tmp_path / "families.json", []

    def card(name: str) -> dict[str, Any]:
        made.append(name)
        if made == ["mixtral", "gpt_oss", "olmoe"]:
            raise KeyboardInterrupt
        captured = "CaptureError: no" if made == ["mixtral", "gpt_oss"] else "bitwise"
        return {"experts": "one op", "attention": "sdpa", "captured": captured, "host_reads_with_2d_mask": []}

    monkeypatch.setattr(module, "card", card)
    arguments = ("family_card", "--families", "mixtral", "gpt_oss", "olmoe", "--output", str(path))
    with pytest.raises(KeyboardInterrupt):
        run(*arguments, "--commit", "first")
    assert list(json.loads(path.read_text())["families"]) == ["mixtral", "gpt_oss"]
    run(*arguments, "--commit", "second", "--skip-done", str(path))
    found = json.loads(path.read_text())["families"]
    assert made == ["mixtral", "gpt_oss", "olmoe", "gpt_oss", "olmoe"]
    assert {name: one["commit"] for name, one in found.items()} == {
        "mixtral": "first", "gpt_oss": "second", "olmoe": "second"
    }  # fmt: skip
    assert all(one["captured"] == "bitwise" for one in found.values())
    with pytest.raises(SystemExit, match="got .*nowhere.json, which is not there"):
        run(*arguments, "--skip-done", str(tmp_path / "nowhere.json"))
    path.write_text(json.dumps({"provenance": {"gpu": "one", "commit": "x"}, "families": {}}))
    with pytest.raises(SystemExit, match="expected cards of a cpu device"):
        run(*arguments, "--skip-done", str(path))


@pytest.mark.parametrize(
    ("captured", "grouped_mm", "well"), [({"ms": 1}, {"ms": 2}, True), ({"failed": "no"}, {"ms": 2}, False),
     ({"ms": 1}, {"failed": "no"}, False), (None, {"ms": 2}, False)]
)  # fmt: skip
def test_a_card_of_a_gpu_went_well_when_both_rows_did(
    captured: Any, grouped_mm: Any, well: bool, script: Script
) -> None:
    rows = {"captured": captured, "grouped_mm": grouped_mm}
    assert script("family_card").went_well({key: row for key, row in rows.items() if row is not None}) is well


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
