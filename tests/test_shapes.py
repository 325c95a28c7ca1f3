"""Capacities, tile bounds and bytes against counting by hand and by brute force."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from staticmoe.errors import ConfigError
from staticmoe.shapes import StaticShape, scaled_ceil


def shape(**options: Any) -> StaticShape:
    return StaticShape(**{"tokens": 64, "top_k": 1, "num_experts": 4, "hidden": 8, "intermediate": 16, **options})


@pytest.mark.parametrize(
    ("factor", "count", "divisor", "want"),
    [
        (1.1, 10, 1, 11),
        (1.1, 100, 1, 110),
        (0.1, 30, 1, 3),
        (1.25, 64, 4, 20),
        (1.0, 7, 3, 3),
        (2, 5, 1, 10),
        (0.01, 1, 1, 1),
    ],
)
def test_ceil_of_the_decimal_number(factor: float, count: int, divisor: int, want: int) -> None:
    """1.1 · 10 is 11 rows, though the float product is above 11."""
    assert scaled_ceil(factor, count, divisor) == want


@pytest.mark.parametrize(
    ("options", "rows", "per_expert", "overflows"),
    [
        ({}, 64, None, False),
        ({"capacity_factor": 1.0}, 64, None, False),
        ({"capacity_factor": 4.0}, 64, None, False),
        ({"capacity_factor": 0.5}, 32, None, True),
        ({"capacity_factor": 0.001}, 1, None, True),
        ({"capacity_factor": 1.0, "capacity_scope": "expert"}, 64, 16, True),
        ({"capacity_factor": 2.0, "capacity_scope": "expert"}, 64, 32, True),
        ({"capacity_factor": 4.0, "capacity_scope": "expert"}, 64, 64, False),
        ({"capacity_factor": 9.0, "capacity_scope": "expert"}, 64, 64, False),
        ({"capacity_factor": 0.25, "capacity_scope": "expert"}, 16, 4, True),
        ({"capacity_factor": 0.01, "capacity_scope": "expert"}, 4, 1, True),
        ({"capacity_factor": 1.0, "expert_parallel": 2}, 64, None, True),
        ({"capacity_factor": None, "expert_parallel": 2}, 128, None, False),
        ({"capacity_factor": 1.0, "capacity_scope": "expert", "expert_parallel": 2}, 64, 32, True),
    ],
)
def test_capacity(options: dict[str, Any], rows: int, per_expert: int | None, overflows: bool) -> None:
    got = shape(**options)
    assert (got.capacity_rows, got.expert_capacity, got.can_overflow) == (rows, per_expert, overflows)


def test_capacity_above_the_token_count() -> None:
    """O25: a nominal capacity larger than the tokens is clamped to what can arrive, not beyond it."""
    got = StaticShape(
        tokens=5, top_k=2, num_experts=4, hidden=8, intermediate=8, capacity_factor=4.0, capacity_scope="expert"
    )
    assert (got.expert_capacity, got.capacity_rows, got.can_overflow) == (10, 10, False)


@pytest.mark.parametrize("scope", ["rank", "expert"])
@pytest.mark.parametrize("factor", [None, 0.5, 1.0, 1.5])
@pytest.mark.parametrize("block_m", [1, 2, 3, 4])
def test_tile_bound_holds_and_is_reached(scope: str, factor: float | None, block_m: int) -> None:
    """Against every distribution of rows over three experts."""
    got = StaticShape(
        tokens=6, top_k=1, num_experts=3, hidden=1, intermediate=1, capacity_factor=factor, capacity_scope=scope
    )
    limit = got.capacity_rows if got.expert_capacity is None else got.expert_capacity
    counts = [n for n in itertools.product(range(limit + 1), repeat=3) if sum(n) <= got.capacity_rows]
    most = max(sum(-(-n // block_m) for n in row) for row in counts)
    assert most <= got.max_tiles(block_m)
    if factor is None:
        assert most == got.max_tiles(block_m)


def test_bytes_and_widths() -> None:
    assert shape(capacity_factor=0.5).saved_bytes(2) == 2 * (64 * 8 + 32 * 32)
    assert shape(gated=False).pre_width == 16
    shared = shape(expert_parallel=2)
    assert (shared.assignments, shared.arrivals, shared.local_experts) == (64, 128, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokens": 0}, "tokens.*at least 1.*0"),
        ({"top_k": 5}, "top_k.*at most num_experts = 4.*5"),
        ({"expert_parallel": 3}, "num_experts.*multiple of expert_parallel = 3.*4"),
        ({"capacity_factor": -1.0}, "capacity_factor.*above 0.*-1"),
        ({"capacity_factor": float("nan")}, "capacity_factor.*finite.*nan"),
        ({"capacity_scope": "layer"}, "capacity_scope.*rank.*layer"),
        ({"hidden": True}, "hidden.*integer.*True"),
    ],
)
def test_refusals_name_value_and_fix(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        shape(**options)


def test_tiles_need_a_block() -> None:
    with pytest.raises(ConfigError, match="block_m.*at least 1.*0"):
        shape().max_tiles(0)
