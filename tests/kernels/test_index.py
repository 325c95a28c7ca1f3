"""The index of the kernels' folder names every kernel that lies in it, and no other."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "kernels"


def test_the_index_is_complete() -> None:
    """A row may name several kernels of one prefix: `staticmoe_plan_a`, `_b`."""
    defined = {
        n for path in FOLDER.rglob("*.py") for n in re.findall(r"^def (staticmoe_\w+)\(", path.read_text(), re.M)
    }
    listed: set[str] = set()
    for row in re.findall(r"^\| (`staticmoe_.*?) \|", (FOLDER / "README.md").read_text(), re.M):
        first, *more = re.findall(r"`(\w+)`", row)
        listed.add(first)
        for suffix in more:
            # The longest stem that makes a kernel.
            stems = [first[: m.start()] for m in re.finditer("_", first)]
            listed.add(next((s + suffix for s in reversed(stems) if s + suffix in defined), suffix))
    assert len(defined) > 20
    assert listed == defined
