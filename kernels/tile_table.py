"""Which tile a grouped GEMM runs with: a table in the repository, read once; nothing is tuned at run time.

A tile follows from the kernel, the dtype, the GPU and the mean number of rows of an expert, T·K/E, which are constants
of a model and a batch. Capacity is none of them: captures of different capacity sum in the same order.
`profiles/tune_tiles.py` makes the table anew on a GPU.

Dimensions: T tokens, K top_k, E experts.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import torch

from staticmoe.errors import ConfigError
from staticmoe.kernels.tiles import Tile

TABLE = Path(__file__).with_name("tile_table.json")
KERNELS = ("up", "down", "token_grad", "dact", "weight_grad_up", "weight_grad_down", "grouped_gemm")

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """One line of the table. Of the lines that fit, the first one decides.

    Attributes:
        kernels: names in `KERNELS`.
        dtypes: of the rows and the weights.
        capabilities: (major, minor) of the GPUs that it holds for.
        rows_below: it holds for fewer rows an expert than this; None for any number.
        tile: what to run with.
    """

    kernels: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    capabilities: tuple[tuple[int, int], ...]
    rows_below: float | None
    tile: Tile

    def fits(self, kernel: str, dtype: torch.dtype, rows_per_expert: float, capability: tuple[int, int]) -> bool:
        """Whether the line holds for this case."""
        small_enough = self.rows_below is None or rows_per_expert < self.rows_below
        return kernel in self.kernels and dtype in self.dtypes and capability in self.capabilities and small_enough


def parse(text: str) -> tuple[Rule, ...]:
    """Read the rules of a table.

    Raises:
        ConfigError: a kernel, a dtype, a key or a number that means nothing, with the number of its line.
    """
    rules = []
    for number, line in enumerate(json.loads(text)["rules"]):
        try:
            rules.append(_rule(line))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"tile table: rule {number} is not one: {error!r}; it reads {line}") from error
    return tuple(rules)


def _rule(line: dict[str, Any]) -> Rule:
    unknown = line.keys() - {field.name for field in dataclasses.fields(Rule)}
    if unknown:
        raise ValueError(f"unknown keys {sorted(unknown)}")
    kernels = tuple(line["kernels"])
    if not kernels or set(kernels) - set(KERNELS):
        raise ValueError(f"kernels {kernels}: expected some of {', '.join(KERNELS)}")
    tile = Tile(**line["tile"])
    sizes = (tile.rows, tile.columns, tile.depth, tile.warps)
    if any(size < 1 or size & (size - 1) for size in sizes) or tile.stages < 1 or tile.group < 1:
        raise ValueError(f"{tile}: rows, columns, depth and warps are powers of two, stages and group at least 1")
    return Rule(
        kernels=kernels,
        dtypes=tuple(_DTYPES[name] for name in line["dtypes"]),
        capabilities=tuple((int(major), int(minor)) for major, minor in line["capabilities"]),
        rows_below=line.get("rows_below"),
        tile=tile,
    )


@functools.cache
def rules() -> tuple[Rule, ...]:
    """The rules of the table in the repository."""
    return parse(TABLE.read_text())


def tile_for(kernel: str, *, dtype: torch.dtype, rows_per_expert: float, capability: tuple[int, int]) -> Tile:
    """Return the tile of a kernel.

    Args:
        kernel: one of `KERNELS`.
        dtype: of rows and weights.
        rows_per_expert: T·K/E, the mean load; never a capacity.
        capability: (major, minor) of the GPU.
    Raises:
        ConfigError: the table has no line for this; the message says what it has.
    Graph-safe: yes, a function of constants.
    """
    for rule in rules():
        if rule.fits(kernel, dtype, rows_per_expert, capability):
            return rule.tile
    if kernel not in KERNELS:
        raise ConfigError(f"tile_for: expected a kernel of {', '.join(KERNELS)}; got {kernel!r}")
    if dtype not in _DTYPES.values():
        raise ConfigError(f"tile_for: kernels exist for {', '.join(_DTYPES)}; got {dtype}: cast, or use the reference")
    known = sorted({one for rule in rules() if kernel in rule.kernels for one in rule.capabilities})
    raise ConfigError(
        f"tile_for: no tile of {kernel} for {dtype} on compute capability {capability[0]}.{capability[1]}; the table "
        f"has {', '.join(f'{major}.{minor}' for major, minor in known)}: python profiles/tune_tiles.py adds this GPU"
    )
