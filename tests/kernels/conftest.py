"""What the kernel tests share: routed problems with their plan and schedule, guarded buffers, one relative error.

Without a GPU the kernels run in Triton's interpreter, on CPU tensors; with one they are compiled.

Letters: T tokens, K top_k, E experts, H hidden, I intermediate, R capacity rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from staticmoe import reference
from staticmoe.reference import RoutingPlan
from staticmoe.reference.schedule import tile_schedule

pytest.importorskip("triton")

KERNEL_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclasses.dataclass
class Problem:
    """A routing laid out as rows, and what a kernel needs to work on it.

    Attributes:
        weights: [T,K] fp32, the routing weights.
        plan: of the routing.
        device: where everything lies.
    """

    weights: Tensor
    plan: RoutingPlan
    device: torch.device

    @property
    def used(self) -> int:
        """Rows in use."""
        return int(self.plan.expert_offsets[-1])

    def schedule(self, block_rows: int, base_row: int = 0) -> tuple[Tensor, Tensor]:
        """The tile schedule at the largest size that any routing needs."""
        experts, rows = self.plan.num_experts, self.plan.capacity_rows
        most = (rows + min(experts, rows) * (block_rows - 1)) // block_rows
        base = torch.tensor(base_row, dtype=torch.int64, device=self.device)
        return tile_schedule(self.plan.expert_offsets, block_rows, max(most, 1), base)

    def draw(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        """Normal random numbers."""
        return (torch.randn(shape, dtype=torch.float64) * scale).to(self.device, dtype)

    def unwritten(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Memory that holds NaN."""
        return torch.full(shape, float("nan"), dtype=dtype, device=self.device)


def make_problem(counts: list[int], *, top_k: int = 1, tokens: int | None = None, spare: int = 3) -> Problem:
    """`counts` rows for each expert, assignments in random order, `spare` empty rows behind them.

    With `top_k` above 1 the assignments are dealt out as they come: a token may name an expert twice.
    """
    ids = torch.cat([torch.full((n,), e) for e, n in enumerate(counts)] or [torch.zeros(0)]).to(torch.int32)
    total = tokens * top_k if tokens is not None else -(-max(int(ids.numel()), 1) // top_k) * top_k
    padded = torch.full((total,), -1, dtype=torch.int32)
    padded[: ids.numel()] = ids
    shuffled = padded[torch.randperm(total)].reshape(-1, top_k).to(KERNEL_DEVICE)
    weights = torch.rand(shuffled.shape).to(KERNEL_DEVICE)
    plan = reference.make_plan(shuffled, weights, num_experts=len(counts), capacity_rows=int(ids.numel()) + spare)
    return Problem(weights=weights, plan=plan, device=KERNEL_DEVICE)


@pytest.fixture
def kernel_device() -> torch.device:
    """Where the kernels run."""
    return KERNEL_DEVICE


@pytest.fixture
def problem() -> Callable[..., Problem]:
    """Builds a routed problem: problem([rows of each expert], top_k=..., spare=...)."""
    return make_problem


@pytest.fixture
def error() -> Callable[[Tensor, Tensor], float]:
    """Largest difference over the largest wanted value; NaN anywhere is infinitely wrong."""

    def relative(got: Tensor, want: Tensor) -> float:
        assert got.shape == want.shape, (got.shape, want.shape)
        if not got.numel():
            return 0.0
        scale = want.double().abs().max().clamp(min=1e-30)
        gap = (got.double() - want.double()).abs().max() / scale
        return float(torch.nan_to_num(gap, nan=float("inf")))

    return relative
