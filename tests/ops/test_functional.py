"""Experts of other shapes, built from the phases: low-rank banks, a thousand experts, fake-quantised weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from staticmoe import functional


def low_rank_bank(
    x: Tensor, logits: Tensor, a: Tensor, b: Tensor, top_k: int, capacity_rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """y = Σ_k w_k B_e silu(A_e x) with A [E,r,H] and B [E,H,r]; returns y and the kept assignments."""
    ids, weights = functional.route(logits, top_k=top_k, score_function="sigmoid", routed_scaling_factor=1.5)
    plan = functional.make_plan(ids, weights, num_experts=a.shape[0], capacity_rows=capacity_rows)
    hidden = F.silu(functional.grouped_linear(x, a, plan, gather=True))
    rows = functional.grouped_linear(hidden, b, plan, gather=False)
    return functional.combine(rows, weights, plan), plan.assignment_row >= 0


def low_rank_by_loop(x: Tensor, logits: Tensor, a: Tensor, b: Tensor, top_k: int, kept: Tensor) -> Tensor:
    out = []
    for t in range(x.shape[0]):
        scores = torch.sigmoid(logits[t])
        ids = sorted(range(a.shape[0]), key=lambda e: (-float(scores[e].detach()), e))[:top_k]
        total = torch.stack([scores[e] for e in ids]).sum()
        y = torch.zeros_like(x[t])
        for k, e in enumerate(ids):
            if kept[t, k]:
                y = y + 1.5 * scores[e] / total * (b[e] @ F.silu(a[e] @ x[t]))
        out.append(y)
    return torch.stack(out)


@pytest.mark.parametrize("rank", [4, 3])
@pytest.mark.parametrize("capacity_rows", [None, 11])
def test_low_rank_bank(
    rank: int, capacity_rows: int | None, device: torch.device, error: Callable[[Tensor, Tensor], float]
) -> None:
    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(device).requires_grad_()

    leaves = [leaf(9, 8), leaf(9, 6), leaf(6, rank, 8), leaf(6, 8, rank)]
    x, logits, a, b = leaves
    got, kept = low_rank_bank(x, logits, a, b, top_k=2, capacity_rows=capacity_rows)
    want = low_rank_by_loop(x, logits, a, b, top_k=2, kept=kept)
    assert int(kept.sum()) == (18 if capacity_rows is None else 11)
    assert error(got, want) < 1e-12
    direction = torch.randn_like(want)
    for grad, want_grad in zip(
        torch.autograd.grad(got, leaves, direction), torch.autograd.grad(want, leaves, direction), strict=True
    ):
        assert error(grad, want_grad) < 1e-11


def test_a_thousand_experts(device: torch.device, error: Callable[[Tensor, Tensor], float]) -> None:
    x, logits = torch.randn(40, 8, device=device), torch.randn(40, 1024, device=device)
    weight = torch.randn(1024, 8, 8, device=device, requires_grad=True)
    ids, weights = functional.route(logits, top_k=4)
    plan = functional.make_plan(ids, weights, num_experts=1024)
    y = functional.combine(functional.grouped_linear(x, weight, plan, gather=True), weights, plan)
    want = torch.einsum("tk,tkba,ta->tb", weights, weight[ids.long()], x)
    assert error(y, want) < 1e-5
    assert int(plan.routed_per_expert.sum()) == 160
    (grad,) = torch.autograd.grad(y.sum(), weight)
    assert error(grad, torch.autograd.grad(want.sum(), weight)[0]) < 1e-5
    assert (grad[plan.routed_per_expert == 0] == 0).all()


def test_fake_quantised_weights(device: torch.device, error: Callable[[Tensor, Tensor], float]) -> None:
    """Weights rounded on the way, the gradient passed straight through."""
    master = torch.randn(4, 8, 8, device=device, requires_grad=True)
    x, logits = torch.randn(12, 8, device=device), torch.randn(12, 4, device=device)
    quantised = master + (torch.round(master * 4) / 4 - master).detach()
    ids, weights = functional.route(logits, top_k=2)
    plan = functional.make_plan(ids, weights, num_experts=4)
    y = functional.combine(functional.grouped_linear(x, quantised, plan, gather=True), weights, plan)
    want = torch.einsum("tk,tkba,ta->tb", weights, quantised[ids.long()], x)
    assert error(y, want) < 1e-5
    assert error(torch.autograd.grad(y.sum(), master)[0], torch.autograd.grad(want.sum(), master)[0]) < 1e-5
