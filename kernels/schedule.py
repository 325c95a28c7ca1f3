"""The tile schedule of one BM: which rows of which expert each tile of a grouped GEMM takes.

Dimensions: E experts, BM rows of a tile, M the most tiles of any routing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_ENTRIES = 128
_EXPERTS_AT_ONCE = 1024


@triton.jit
def staticmoe_plan_schedule(
    offsets_ptr,
    schedule_ptr,
    count_ptr,
    base_row_ptr,
    num_experts,
    max_tiles,
    BLOCK_ROWS: tl.constexpr,
    PER_PROGRAM: tl.constexpr,
    EXPERTS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Write schedule [M,4] int32 (expert, first row, rows, first row in saved buffers) and the tile count.

    Grid: ceil(E / PER_PROGRAM) = P programs. Program i owns the entries of the experts from i * PER_PROGRAM on, and
    past the count every P-th block of ENTRIES entries, which become -1; program 0 owns the count. All M entries are
    written and nothing past them, even where M is too small for the count. Each program takes the prefix sum over
    the experts anew: E loads are cheaper than a launch.
    Deterministic: integers, each entry written once.
    """
    pid = tl.program_id(0)
    begin = pid * PER_PROGRAM
    before = 0
    total = 0
    for start in range(0, num_experts, EXPERTS):
        e = start + tl.arange(0, EXPERTS)
        first_row = tl.load(offsets_ptr + e, mask=e < num_experts, other=0)
        end_row = tl.load(offsets_ptr + e + 1, mask=e < num_experts, other=0)
        tiles = (end_row - first_row + (BLOCK_ROWS - 1)) // BLOCK_ROWS
        before += tl.sum(tl.where(e < begin, tiles, 0), axis=0)
        total += tl.sum(tiles, axis=0)
    if pid == 0:
        tl.store(count_ptr, total)

    base = 0
    if base_row_ptr is not None:
        base = tl.load(base_row_ptr).to(tl.int32)
    column = tl.arange(0, 4)[None, :]
    for expert in range(begin, tl.minimum(begin + PER_PROGRAM, num_experts)):
        first = tl.load(offsets_ptr + expert)
        rows = tl.load(offsets_ptr + expert + 1) - first
        tiles_here = (rows + (BLOCK_ROWS - 1)) // BLOCK_ROWS
        for start in range(0, tiles_here, ENTRIES):
            within = (start + tl.arange(0, ENTRIES)) * BLOCK_ROWS
            entry = before + start + tl.arange(0, ENTRIES)
            row = (first + within)[:, None]
            size = tl.minimum(rows - within, BLOCK_ROWS)[:, None]
            value = tl.where(column == 2, size, tl.where(column == 1, row, row + base))
            value = tl.where(column == 0, expert, value)
            inside = (within < rows) & (entry < max_tiles)
            tl.store(schedule_ptr + entry[:, None] * 4 + column, value, mask=inside[:, None])
        before += tiles_here
    nothing = tl.full([ENTRIES, 4], -1, tl.int32)
    for start in range(total + pid * ENTRIES, max_tiles, tl.num_programs(0) * ENTRIES):
        entry = start + tl.arange(0, ENTRIES)
        tl.store(schedule_ptr + entry[:, None] * 4 + column, nothing, mask=(entry < max_tiles)[:, None])


def tile_schedule(
    expert_offsets: Tensor,
    schedule_out: Tensor,
    tile_count_out: Tensor,
    *,
    block_rows: int,
    base_row: Tensor | None = None,
    programs: int = 512,
) -> None:
    """Launch the schedule of tiles of `block_rows` rows; see `staticmoe.reference.schedule.tile_schedule`.

    Shapes:
        expert_offsets [E+1] int32, exclusive; schedule_out [M,4] int32; tile_count_out [1] int32; base_row int64 0-dim,
        first row of the layer in the buffers that are saved for the backward (None: 0). All contiguous, on one device.
    Graph-safe: yes, one launch of at most `programs` programs.
    """
    num_experts = expert_offsets.shape[0] - 1
    per_program = triton.cdiv(num_experts, programs)
    staticmoe_plan_schedule[(triton.cdiv(num_experts, per_program),)](
        expert_offsets,
        schedule_out,
        tile_count_out,
        base_row,
        num_experts,
        schedule_out.shape[0],
        BLOCK_ROWS=block_rows,
        PER_PROGRAM=per_program,
        EXPERTS=min(triton.next_power_of_2(num_experts), _EXPERTS_AT_ONCE),
        ENTRIES=_ENTRIES,
    )
