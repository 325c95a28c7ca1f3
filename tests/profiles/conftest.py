"""The scripts of `profiles/`, which are run by path and find each other there."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "profiles"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a script: script("family_card")."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


@pytest.fixture
def run(script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a script's main with these arguments: run("family_card", "--families", "mixtral"); returns the module."""

    def call(name: str, *arguments: str) -> Any:
        module = script(name)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        module.main()
        return module

    return call
