"""The tile schedule kernel against its oracle, entry for entry."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from staticmoe.reference.schedule import tile_schedule as oracle

pytest.importorskip("triton")

from staticmoe.kernels.schedule import tile_schedule  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GUARD = 12345


def offsets_of(counts: list[int]) -> Tensor:
    """Exclusive prefix sum, [E+1] int32."""
    return torch.tensor([0, *counts]).cumsum(0).to(DEVICE, torch.int32)


def scheduled(
    offsets: Tensor, block_rows: int, max_tiles: int, base_row: Tensor | None = None, programs: int = 512
) -> tuple[Tensor, Tensor]:
    """Schedule and count, written between guard elements that must stay."""
    out = torch.full((max_tiles + 2, 4), GUARD, dtype=torch.int32, device=DEVICE)
    count = torch.full((3,), GUARD, dtype=torch.int32, device=DEVICE)
    given = offsets.clone()
    tile_schedule(offsets, out[1:-1], count[1:2], block_rows=block_rows, base_row=base_row, programs=programs)
    assert torch.equal(offsets, given)
    assert (out[[0, -1]] == GUARD).all() and (count[[0, 2]] == GUARD).all()
    return out[1:-1], count[1:2]


COUNTS = {
    "one expert": [37],
    "nothing at all": [0, 0, 0],
    "empty experts between": [40, 0, 3, 0, 0, 0, 0, 21],
    "exact multiples": [16, 32, 0, 16],
    "all to the last": [0, 0, 0, 64],
    "all to the first": [64, 0, 0, 0],
    "no power of two": [i % 7 for i in range(60)],
}


@pytest.mark.parametrize("block_rows", [1, 16, 64, 128])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_entries_equal_the_oracle(counts: list[int], block_rows: int) -> None:
    offsets = offsets_of(counts)
    rows = sum(counts)
    max_tiles = (rows + min(len(counts), rows) * (block_rows - 1)) // block_rows + 5
    want, want_count = oracle(offsets, block_rows, max_tiles)
    got, got_count = scheduled(offsets, block_rows, max_tiles)
    assert torch.equal(got, want)
    assert torch.equal(got_count, want_count)


def test_more_tiles_of_one_expert_than_a_program_writes_at_once() -> None:
    offsets = offsets_of([3, 2100, 1])
    want, want_count = oracle(offsets, 16, 600)
    got, got_count = scheduled(offsets, 16, 600)
    assert int(got_count) == 134
    assert torch.equal(got, want) and torch.equal(got_count, want_count)


@pytest.mark.parametrize("experts", [300, 1030])
def test_many_experts(experts: int) -> None:
    """More experts than a program sums at once; experts past 255 and past a power of two have their tiles."""
    counts = [(7 * i) % 5 for i in range(experts)]
    offsets = offsets_of(counts)
    want, want_count = oracle(offsets, 4, experts + 50)
    got, got_count = scheduled(offsets, 4, experts + 50, programs=9)
    assert torch.equal(got, want) and torch.equal(got_count, want_count)


def test_the_last_column_is_moved_by_the_base_row() -> None:
    offsets = offsets_of([5, 0, 40])
    base = torch.tensor(1000, dtype=torch.int64, device=DEVICE)
    want, _ = oracle(offsets, 16, 8, base)
    got, _ = scheduled(offsets, 16, 8, base)
    assert torch.equal(got, want)
    assert got[:4, 3].tolist() == [1000, 1005, 1021, 1037] and (got[4:] == -1).all()


def test_too_few_entries_are_never_written_past() -> None:
    offsets = offsets_of([40, 40])
    got, count = scheduled(offsets, 16, 2)
    assert torch.equal(got, oracle(offsets, 16, 2)[0])
    assert int(count) == 6
