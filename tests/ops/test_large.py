"""O32: rows and weights whose elements lie past 2^31, at full size on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from staticmoe import functional

NEEDED_GIB = 60

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < NEEDED_GIB << 30,
    reason=f"needs a GPU with {NEEDED_GIB} GiB",
)


def block(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """One expert on its tokens, weighted, in fp64."""
    gate, up = (x.double() @ gate_up.double().T).chunk(2, dim=-1)
    return weights.double()[:, None] * ((F.silu(gate) * up) @ down.double().T)


def near(got: Tensor, want: Tensor) -> bool:
    """Within the rounding of bf16 between the steps."""
    return float((got.double() - want).norm() / want.norm()) < 1.5e-2


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(std=scale).requires_grad_()


def test_rows() -> None:
    """The last expert's rows start at element 2.15e9 of every buffer of rows of width H."""
    tokens, top_k, experts, hidden, intermediate = 75_000, 8, 16, 4096, 64
    first = experts - top_k
    ids = torch.arange(first, experts, device="cuda", dtype=torch.int32).expand(tokens, top_k).contiguous()
    weights = torch.rand(tokens, top_k, device="cuda").requires_grad_()
    x, gate_up = draw(tokens, hidden), draw(experts, 2 * intermediate, hidden, scale=hidden**-0.5)
    down = draw(experts, hidden, intermediate, scale=intermediate**-0.5)
    plan = functional.make_plan(ids, weights, num_experts=experts)
    y = functional.experts(x, weights, plan, gate_up, down)
    grad = draw(tokens, hidden).detach()
    d_x, d_weights, d_gate_up, d_down = torch.autograd.grad(y, (x, weights, gate_up, down), grad)

    some = torch.tensor([0, 1, tokens // 2, tokens - 1], device="cuda")
    leaves = [t[some].detach().double().requires_grad_() for t in (x, weights)]
    want = torch.zeros(len(some), hidden, dtype=torch.float64, device="cuda")
    for slot in range(top_k):
        want = want + block(leaves[0], leaves[1][:, slot], gate_up[first + slot], down[first + slot])
    assert near(y[some], want)
    for got, wanted in zip((d_x, d_weights), torch.autograd.grad(want, leaves, grad[some].double()), strict=True):
        assert near(got[some], wanted)
    last = [t[-1].detach().double().requires_grad_() for t in (gate_up, down)]
    out = block(x.detach(), weights[:, -1].detach(), *last)
    for got, wanted in zip((d_gate_up, d_down), torch.autograd.grad(out, last, grad.double()), strict=True):
        assert near(got[-1], wanted)
    assert not d_gate_up[:first].any() and not d_down[:first].any()


def test_weights() -> None:
    """The last of 512 experts lies at element 4.29e9 of the up projection."""
    tokens, experts, hidden, intermediate = 64, 512, 4096, 1024
    ids = torch.full((tokens, 1), experts - 1, device="cuda", dtype=torch.int32)
    ids[::2] = 0
    weights = torch.rand(tokens, 1, device="cuda").requires_grad_()
    x, gate_up = draw(tokens, hidden), draw(experts, 2 * intermediate, hidden, scale=hidden**-0.5)
    down = draw(experts, hidden, intermediate, scale=intermediate**-0.5)
    assert gate_up.numel() >= 1 << 32
    plan = functional.make_plan(ids, weights, num_experts=experts)
    y = functional.experts(x, weights, plan, gate_up, down)
    grad = draw(tokens, hidden).detach()
    d_x, _, d_gate_up, d_down = torch.autograd.grad(y, (x, weights, gate_up, down), grad)
    for expert, mine in ((0, slice(0, None, 2)), (experts - 1, slice(1, None, 2))):
        leaves = [t.detach().double().requires_grad_() for t in (x[mine], gate_up[expert], down[expert])]
        want = block(leaves[0], weights[mine, 0].detach(), *leaves[1:])
        assert near(y[mine], want)
        wants = torch.autograd.grad(want, leaves, grad[mine].double())
        for got, wanted in zip((d_x[mine], d_gate_up[expert], d_down[expert]), wants, strict=True):
            assert near(got, wanted)
    assert not d_gate_up[1:-1].any() and not d_down[1:-1].any()
