"""Weights with their rows side by side, copied into rows and back: every element at odd sizes, and nothing beside."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from staticmoe.kernels.transpose import has_rows_side_by_side, transpose

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [(1, 2, 3), (3, 5, 7), (2, 64, 64), (2, 65, 130), (3, 200, 40)]


def side_by_side(experts: int, parts: int, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[E,G,I,W] that lies in memory as [E,W,I,G]."""
    stored = torch.randn(experts, width, rows, parts, device=device).to(dtype)
    return stored.permute(0, 3, 2, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("size", SIZES)
def test_there_and_back(size: tuple[int, int, int], parts: int, dtype: torch.dtype, device: torch.device) -> None:
    experts, rows, width = size
    given = side_by_side(experts, parts, rows, width, dtype, device)
    assert has_rows_side_by_side(given)
    # A margin of NaN on both sides: what is written beside the tensor shows.
    count = given.numel()
    space = torch.full((count + 32,), float("nan"), dtype=dtype, device=device)
    copied = space[16 : 16 + count].view(experts, parts, rows, width)
    transpose(given, copied)
    assert torch.equal(copied, given) and space[:16].isnan().all() and space[16 + count :].isnan().all()
    space = torch.full((count + 32,), float("nan"), dtype=dtype, device=device)
    back = space[16 : 16 + count].view(experts, width, rows, parts).permute(0, 3, 2, 1)
    transpose(copied, back)
    assert torch.equal(back, given) and space[:16].isnan().all() and space[16 + count :].isnan().all()


def test_three_dimensions_and_gaps(device: torch.device) -> None:
    """[E,I,W] without parts; experts and columns further apart than they need to be."""
    stored = torch.randn(3, 9, 24, device=device)
    given = stored[:, :7, :20].transpose(1, 2)
    assert given.shape == (3, 20, 7) and has_rows_side_by_side(given)
    copied = torch.full((3, 20, 7), float("nan"), device=device)
    transpose(given, copied)
    assert torch.equal(copied, given)


@pytest.mark.parametrize(
    ("tensor", "whether"),
    [
        (torch.zeros(2, 3, 4), False),
        (torch.zeros(2, 4, 3).transpose(1, 2), True),
        (torch.zeros(2, 4, 3, dtype=torch.float64).transpose(1, 2), False),
        (torch.zeros(2, 3, 8)[:, :, ::2], False),
        (torch.zeros(2, 6, 4).unflatten(1, (3, 2)).transpose(1, 2), False),
        (torch.zeros(2, 4, 6).transpose(1, 2).unflatten(1, (3, 2)).transpose(1, 2), True),
        (torch.zeros(2, 4, 6).transpose(1, 2).unflatten(1, (2, 3)), False),
        (torch.zeros(4, 3).T, False),
        (torch.zeros(0, 4, 3).transpose(1, 2), False),
    ],
    ids=["rows", "columns", "fp64", "gaps", "alternating rows", "alternating columns", "halves", "2-D", "empty"],
)
def test_what_it_is_for(tensor: Tensor, whether: bool) -> None:
    assert has_rows_side_by_side(tensor) is whether
