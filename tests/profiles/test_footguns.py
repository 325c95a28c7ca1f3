"""The table of footguns is the one that the declarations give, and the declarations name tests that exist."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOOTGUNS = Path(__file__).resolve().parents[1] / "footguns"


def test_the_table_in_the_suite_s_readme_is_up_to_date(script: Callable[[str], Any]) -> None:
    wanted = "\n".join(script("footguns").table())
    assert wanted in (FOOTGUNS / "README.md").read_text(), "put in what `python profiles/footguns.py` prints"


def test_every_declaration_names_a_test_and_known_words(script: Callable[[str], Any]) -> None:
    declared = script("footguns").declared()
    assert len(declared.FOOTGUNS) >= 25
    assert len({one.test for one in declared.FOOTGUNS}) == len(declared.FOOTGUNS)
    tests = {
        f"{path.name}::{node.name}"
        for path in FOOTGUNS.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    for one in declared.FOOTGUNS:
        assert one.test in tests and one.raw in declared.RAW and one.caught in declared.CAUGHT, one
        assert one.row in declared.REPORTS and "|" not in one.wrong, one
    assert declared.REPORTS.keys() == {one.row for one in declared.FOOTGUNS}
    assert {one.caught for one in declared.FOOTGUNS} == declared.CAUGHT.keys()


def test_the_short_table_counts_them_all(
    run: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("footguns", "--short", "--output", str(tmp_path / "footguns.json"))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 14
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    written = json.loads((tmp_path / "footguns.json").read_text())["footguns"]
    assert sum(int(row[1]) for row in rows) == len(written)
    assert all(int(row[1]) == sum(int(cell) for cell in row[2:] if cell != "-") for row in rows)
