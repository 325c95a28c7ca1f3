"""The tile schedule: which rows of which expert each tile of a grouped GEMM takes.

Dimensions: E experts, BM rows of a tile, M the most tiles of any routing.
"""

from __future__ import annotations

import torch
from torch import Tensor


def tile_schedule(
    expert_offsets: Tensor, block_rows: int, max_tiles: int, base_row: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the tiles in row order, and their number. Entries past that number are -1.

    Shapes:
        expert_offsets [E+1] int32 exclusive; base_row int64 0-dim, first row of the layer in the buffers that are
        saved for the backward (None: 0). Returns [M,4] int32 (expert, first row, rows, first row in saved buffers)
        and [1] int32.
    Graph-safe: yes.
    """
    device = expert_offsets.device
    counts = expert_offsets[1:] - expert_offsets[:-1]
    tiles = (counts + (block_rows - 1)) // block_rows
    # Exclusive prefix sum: the first tile of each expert.
    ends = torch.cumsum(tiles, 0, dtype=torch.int32)
    number = torch.arange(max_tiles, dtype=torch.int32, device=device)
    expert = torch.searchsorted(ends, number, right=True).clamp(max=counts.shape[0] - 1)
    within = (number - (ends - tiles)[expert]) * block_rows
    first = expert_offsets[expert] + within
    rows = (counts[expert] - within).clamp(max=block_rows)
    saved = first if base_row is None else first + base_row.to(torch.int32)
    schedule = torch.stack([expert.to(torch.int32), first, rows, saved], dim=1)
    return torch.where((number < ends[-1])[:, None], schedule, -1), ends[-1:].clone()
