"""Tile configurations of the grouped GEMMs.

Dimensions: BM rows, BN columns, BK depth of a tile.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """How one grouped GEMM is cut and run. The numbers change speed, and the order of sums through `depth`.

    Attributes:
        rows: BM, rows of one expert in a tile.
        columns: BN, columns of the output in a tile (of each half, where an operand has two).
        depth: BK, terms of the inner product taken at once.
        warps: of a program.
        stages: of the software pipeline.
        group: consecutive row tiles that are worked on before the next column, for the L2 cache.
        flatten: whether the loops over tiles and depth are pipelined as one.
        registers: upper bound per thread, or None.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int = 8
    flatten: bool = True
    registers: int | None = None
