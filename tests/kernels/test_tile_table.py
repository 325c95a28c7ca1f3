"""The tile table: what it answers, what it refuses, and that it knows no capacity."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
import torch

from staticmoe.errors import ConfigError
from staticmoe.kernels import tile_table
from staticmoe.kernels.tile_table import KERNELS, parse, tile_for

GPUS = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_has_a_tile_at_every_load(kernel: str, dtype: torch.dtype, capability: tuple[int, int]) -> None:
    """One row an expert (1024 experts, one token each) to all rows of a large batch on one expert."""
    for rows in (0.008, 1.0, 16.0, 191.9, 192.0, 4096.0, 1e6):
        tile = tile_for(kernel, dtype=dtype, rows_per_expert=rows, capability=capability)
        # A row operand and a column operand, `stages` times over, without what an epilogue stages.
        columns = tile.columns * (2 if kernel == "up" else 1)
        held = tile.stages * tile.depth * (tile.rows + columns) * dtype.itemsize
        limit = {(8, 0): 163, (9, 0): 227, (10, 0): 227}.get(capability, 99)
        assert tile.rows >= 16 and 0 < held <= limit * 1024


def test_small_loads_on_hopper_take_64_rows() -> None:
    """A tile of 128 rows would be three quarters empty; half empty it still wins, as it was timed."""
    for kernel in ("up", "down", "token_grad", "dact"):
        taken = [
            tile_for(kernel, dtype=torch.bfloat16, rows_per_expert=rows, capability=(9, 0)).rows
            for rows in (32, 64, 512)
        ]
        assert taken == [64, 128, 128]


def test_capacity_is_no_argument() -> None:
    """Captures of different capacity must sum in the same order."""
    assert list(inspect.signature(tile_for).parameters) == ["kernel", "dtype", "rows_per_expert", "capability"]


def test_the_first_rule_that_fits_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        line(rows_below=8, tile={**TILE, "rows": 16}),
        line(rows_below=64, tile={**TILE, "rows": 32}),
        line(tile={**TILE, "rows": 64}),
        line(tile={**TILE, "rows": 128}),
    ]
    ruled = parse(json.dumps({"rules": lines}))
    monkeypatch.setattr(tile_table, "rules", lambda: ruled)
    got = [
        tile_for("up", dtype=torch.float16, rows_per_expert=rows, capability=(9, 0)).rows for rows in (7.9, 8, 64, 1e9)
    ]
    assert got == [16, 32, 64, 64]


@pytest.mark.parametrize(
    ("kernel", "dtype", "capability", "says"),
    [
        ("upp", torch.bfloat16, (9, 0), "'upp'"),
        ("up", torch.float64, (9, 0), "torch.float64"),
        ("up", torch.bfloat16, (7, 5), "7.5; the table has 8.0"),
        ("up", torch.bfloat16, (13, 0), "tune_tiles.py adds this GPU"),
    ],
)
def test_what_is_not_there_is_refused_in_words(
    kernel: str, dtype: torch.dtype, capability: tuple[int, int], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        tile_for(kernel, dtype=dtype, rows_per_expert=512.0, capability=capability)


TILE: dict[str, Any] = {"rows": 64, "columns": 64, "depth": 32, "warps": 4, "stages": 3}


def line(**changes: Any) -> dict[str, Any]:
    """A line of a table that is right but for `changes`."""
    return {"kernels": ["up"], "dtypes": ["float16"], "capabilities": [[9, 0]], "tile": TILE, **changes}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kernels": ["sideways"]}, "sideways"),
        ({"kernels": []}, "expected some of"),
        ({"dtypes": ["float8"]}, "float8"),
        ({"capacity": 4}, "capacity"),
        ({"tile": {**TILE, "rows": 48}}, "powers of two"),
        ({"tile": {**TILE, "pages": 1}}, "pages"),
        ({"tile": {"rows": 64}}, "columns"),
    ],
)
def test_a_table_that_means_nothing_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"rule 1 is not one.*{says}"):
        parse(json.dumps({"rules": [line(), line(**changes)]}))
