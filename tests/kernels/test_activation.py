"""The activation functions of the kernels against the reference, forward and derivative, extremes and NaN included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from staticmoe import reference
from staticmoe.kernels.activation import (
    activate,
    activate_backward,
    activate_ungated,
    activate_ungated_backward,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Far beyond, on, and around the limits of the clamped form; zero; and where a sigmoid or an exp saturates.
EDGES = [0.0, -0.0, 7.0, -7.0, 7.0001, -7.0001, 30.0, -30.0, 90.0, -90.0, 1e-30, 1.0, -1.0, 3.5, -6.9999, 0.25]
COUNT = 256


@triton.jit
def apply_activation(
    gate_ptr, up_ptr, grad_ptr, out_ptr, d_gate_ptr, d_up_ptr, ACT: tl.constexpr, GATED: tl.constexpr, N: tl.constexpr
):
    """One program over N values of each tensor."""
    at = tl.arange(0, N)
    gate, up, grad = tl.load(gate_ptr + at), tl.load(up_ptr + at), tl.load(grad_ptr + at)
    if GATED:
        tl.store(out_ptr + at, activate(gate, up, ACT))
        d_gate, d_up = activate_backward(gate, up, grad, ACT)
        tl.store(d_gate_ptr + at, d_gate)
        tl.store(d_up_ptr + at, d_up)
    else:
        tl.store(out_ptr + at, activate_ungated(gate, ACT))
        tl.store(d_gate_ptr + at, activate_ungated_backward(gate, grad, ACT))


def run(gate: Tensor, up: Tensor, grad: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """Activation, and gradients of gate and up, from the kernel."""
    out, d_gate, d_up = (torch.full_like(gate, float("nan")) for _ in range(3))
    gated = reference.is_gated(activation)
    apply_activation[(1,)](gate, up, grad, out, d_gate, d_up, ACT=activation, GATED=gated, N=COUNT)
    return out, d_gate, d_up


def values() -> tuple[Tensor, Tensor, Tensor]:
    """Every pair of edges, and a random gradient."""
    edges = torch.tensor(EDGES)
    gate, up = torch.meshgrid(edges, edges, indexing="ij")
    return gate.reshape(-1).to(DEVICE), up.reshape(-1).to(DEVICE), torch.randn(COUNT).to(DEVICE)


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("activation", list(reference.ACTIVATIONS))
def test_forward_and_derivative(activation: str, random: bool, error: Callable[[Tensor, Tensor], float]) -> None:
    gate, up, grad = values()
    if random:
        gate, up = 3 * torch.randn(COUNT).to(DEVICE), 3 * torch.randn(COUNT).to(DEVICE)
    out, d_gate, d_up = run(gate, up, grad, activation)
    gated = reference.is_gated(activation)
    pre = torch.cat([gate, up] if gated else [gate])[None].reshape(1, -1).double()
    want = reference.activate(pre, activation)[0]
    derivative = reference.activation_backward(pre, grad[None].double(), activation)[0]
    assert error(out, want) < 2e-6
    assert error(d_gate, derivative[:COUNT]) < 2e-6
    if gated:
        assert error(d_up, derivative[COUNT:]) < 2e-6


@pytest.mark.parametrize("activation", [name for name, gated in reference.ACTIVATIONS.items() if gated])
def test_derivative_is_the_slope(activation: str, error: Callable[[Tensor, Tensor], float]) -> None:
    """Against autograd through the reference's forward, in fp64, away from the kinks."""
    gate, up, grad = (torch.linspace(-6.5, 6.5, COUNT).to(DEVICE) for _ in range(3))
    up, grad = up.flip(0), torch.randn(COUNT).to(DEVICE)
    _, d_gate, d_up = run(gate, up, grad, activation)
    pre = torch.cat([gate, up])[None].double().requires_grad_()
    reference.activate(pre, activation).backward(grad[None].double())
    assert error(torch.cat([d_gate, d_up]), pre.grad[0]) < 2e-6


@pytest.mark.parametrize("activation", list(reference.ACTIVATIONS))
def test_nan_stays_nan(activation: str) -> None:
    """A pre-activation that is NaN must reach the guard."""
    gate, up, grad = values()
    gate[3] = float("nan")
    up[7] = float("nan")
    out, _, _ = run(gate, up, grad, activation)
    wrong = [3, 7] if reference.is_gated(activation) else [3]
    assert torch.isnan(out).nonzero().flatten().tolist() == wrong
