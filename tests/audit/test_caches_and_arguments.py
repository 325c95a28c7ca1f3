"""Each planted cache, moved memory and bad argument is named, alone; what is given whole is clean when mended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PLANTS = ("weight_caches", "given", "slices")


def test_a_planted_fault_is_found_and_nothing_else(plant: Any, assert_found_alone: Callable[[Any], None]) -> None:
    assert_found_alone(plant)


def test_its_mended_twin_is_clean(plant: Any, assert_mended: Callable[[Any], None]) -> None:
    assert_mended(plant)
