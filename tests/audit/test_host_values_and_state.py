"""Each planted frozen value and each misplaced state is named with code, module and line, alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PLANTS = ("host_values", "state")


def test_a_planted_fault_is_found_and_nothing_else(plant: Any, assert_found_alone: Callable[[Any], None]) -> None:
    assert_found_alone(plant)
