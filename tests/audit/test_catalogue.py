"""Every code that is used is explained, every code that is explained is planted somewhere, and texts fit a terminal."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import staticmoe
from staticmoe.audit.catalogue import CATALOGUE, FAMILIES, lookup
from staticmoe.audit.report import catalogue_lines, entry_lines
from staticmoe.errors import ConfigError

PACKAGE = Path(staticmoe.__file__).parent
# Needs a process group; an operation that nobody has met; two runners on one model; in test_compiled*.py.
PLANTED_ELSEWHERE = {"SM116", "SM503", "SM705", "SM604", "SM605", "SM606"}


def used() -> set[str]:
    rooms = [PACKAGE / "capture", PACKAGE / "runner", PACKAGE / "audit"]
    texts = [path.read_text() for room in rooms for path in room.rglob("*.py")]
    return {code for text in texts for code in re.findall(r"\"(SM\d{3})\"", text)}


def test_what_is_used_is_explained_and_the_reverse() -> None:
    raised = {
        code
        for path in [*(PACKAGE / "capture").glob("*.py"), *(PACKAGE / "runner").glob("*.py")]
        for code in re.findall(r"\"(SM\d{3})\"", path.read_text())
    }
    assert len(raised) >= 30 and raised <= CATALOGUE.keys()
    assert used() == CATALOGUE.keys()


def test_every_code_has_a_plant(plants: list[Any]) -> None:
    assert CATALOGUE.keys() - {plant.code for plant in plants} == PLANTED_ELSEWHERE
    assert len(plants) >= 40


def test_codes_are_in_a_family_and_entries_are_whole() -> None:
    for code, entry in CATALOGUE.items():
        assert re.fullmatch(r"SM\d{3}", code) and code[:3] in FAMILIES and entry.code == code
        assert entry.severity in ("error", "warning", "note")
        assert all((entry.title, entry.why, entry.mend, entry.before, entry.after)) and entry.before != entry.after
        assert entry.why.endswith(".") and entry.mend.endswith("."), code
        assert all(len(line) <= 80 for line in entry_lines(entry)), code


def test_the_list_names_each_code_once() -> None:
    lines = catalogue_lines()
    assert all(len(line) <= 80 for line in lines)
    assert [line.split()[0] for line in lines if line.startswith("  SM")] == list(CATALOGUE)


def test_a_code_is_found_however_it_is_written() -> None:
    assert lookup("sm106") is lookup("106") is lookup(" SM106 ") is CATALOGUE["SM106"]
    with pytest.raises(ConfigError, match=r"SM201.*SM207.*'SM299'"):
        lookup("SM299")
    with pytest.raises(ConfigError, match="nonsense"):
        lookup("nonsense")
