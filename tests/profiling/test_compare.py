"""A time regressed where it grew by more than is allowed and by more than it spreads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from staticmoe.profiling.compare import compare
from staticmoe.profiling.errors import ProfileError
from staticmoe.profiling.metrics import analyse
from staticmoe.profiling.nsys import read_nsys
from staticmoe.profiling.result import Analysis, PhaseTime


@pytest.fixture
def base(golden: Callable[..., Any], tmp_path: Path) -> Analysis:
    """The whole run."""
    return analyse(read_nsys(golden("2025.3").write(tmp_path / "base")))


def with_phase(found: Analysis, phase: str, ns: float, spread: float = 0.0) -> Analysis:
    others = [one for one in found.phases if one.phase != phase]
    return dataclasses.replace(found, phases=(*others, PhaseTime(phase, 1, ns, ns, 0.1, spread)))


def names(before: Analysis, after: Analysis, tolerance: float = 0.05) -> list[str]:
    return [one.what for one in compare(before, after, tolerance).regressed]


def test_the_same_twice(base: Analysis) -> None:
    found = compare(base, base)
    assert found.regressed == () and found.notes == ()
    assert [one.what for one in found.differences][:3] == ["iteration", "optimizer", "down"]
    assert len(found.differences) == 12 and all(one.growth == 0 for one in found.differences)


def test_a_slower_kernel_is_found(base: Analysis, golden: Callable[..., Any], tmp_path: Path) -> None:
    slower = analyse(read_nsys(golden("2023.4", slower=1.2).write(tmp_path / "slower")))
    found = compare(base, slower)
    (one,) = found.regressed
    assert (one.what, one.before_ns, one.after_ns) == ("optimizer", 200_000, 240_000)
    assert one.growth == pytest.approx(0.2)
    assert compare(slower, base).regressed == ()
    assert compare(base, slower, tolerance=0.2).regressed == ()
    assert compare(base, slower, tolerance=0.19).regressed == (one,)


def test_a_growth_within_the_spread_is_none(base: Analysis) -> None:
    """Of either profile."""
    for before, after in ((39_999, 0), (0, 39_999)):
        old, new = with_phase(base, "up", 100_000, before), with_phase(base, "up", 140_000, after)
        assert names(old, new) == ["up"]
    for before, after in ((40_000, 0), (0, 40_000)):
        old, new = with_phase(base, "up", 100_000, before), with_phase(base, "up", 140_000, after)
        assert names(old, new) == []


def test_a_slower_iteration_is_found(base: Analysis) -> None:
    """Gaps may grow where no phase does."""
    slower = dataclasses.replace(base, iteration_ns=1_060_000)
    assert names(base, slower) == ["iteration"]
    assert names(base, dataclasses.replace(slower, iteration_spread_ns=60_000)) == []
    assert names(base, dataclasses.replace(base, iteration_ns=1_050_000)) == []


def test_a_phase_that_is_new_grew_from_nothing(base: Analysis) -> None:
    new = with_phase(base, "exchange", 5_000)
    (one,) = compare(base, new).regressed
    assert (one.what, one.before_ns, one.growth) == ("exchange", 0, None)
    gone = compare(new, base)
    assert gone.regressed == () and {one.what: one.after_ns for one in gone.differences}["exchange"] == 0


def test_phases_of_two_levels_are_not_compared(base: Analysis) -> None:
    for other in (dataclasses.replace(base, level="graph"), dataclasses.replace(base, tool="kineto")):
        found = compare(base, with_phase(other, "up", 1e9))
        assert [one.what for one in found.differences] == ["iteration"] and found.regressed == ()
        assert "phases are not compared: one profile is nsys at node level" in found.notes[0]


@pytest.mark.parametrize("tolerance", [-0.1, float("nan")])
def test_a_tolerance_that_cannot_work(base: Analysis, tolerance: float) -> None:
    with pytest.raises(ProfileError, match="--tolerance: expected a fraction of at least 0"):
        compare(base, base, tolerance)
