"""Aux and z loss against hand-computed values, over real tokens only, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from staticmoe.errors import ModelError
from staticmoe.moe import StaticMoE, load_balancing_loss, router_z_loss

NAN = float("nan")


@pytest.mark.parametrize("real", [8, 4, 1])
@pytest.mark.parametrize("masked", [False, True])
def test_z_loss_of_a_zero_router(real: int, masked: bool, device: torch.device) -> None:
    """O10: zero router, 8 experts: (ln 8)^2 = 4.324077 with any mask."""
    mask = torch.arange(8, device=device) < real if masked else None
    assert abs(router_z_loss(torch.zeros(8, 8, device=device), token_mask=mask) - 4.324077) < 1e-6


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_balanced_is_one(score_function: str, device: torch.device) -> None:
    for routed in (torch.full((8,), 5), torch.full((8,), 10)):
        loss = load_balancing_loss(torch.zeros(6, 8, device=device), routed.to(device), score_function=score_function)
        assert abs(loss - 1) < 1e-6


def test_everything_on_one_expert(device: torch.device) -> None:
    """All probability and all tokens on one of E experts: E."""
    logits = torch.zeros(6, 8, device=device)
    logits[:, 3] = 100.0
    routed = torch.tensor([0, 0, 0, 6, 0, 0, 0, 0], device=device)
    assert abs(load_balancing_loss(logits, routed) - 8) < 1e-5


@pytest.mark.parametrize("level", [-60.0, -150.0])
def test_tiny_sigmoid_scores_do_not_cheat(level: float, device: torch.device) -> None:
    """O36: with an epsilon in the normalisation, logits of -60 would make the loss vanish; it is 1."""
    logits = torch.full((4, 8), level, device=device, requires_grad=True)
    loss = load_balancing_loss(logits, torch.full((8,), 2, device=device), score_function="sigmoid")
    assert abs(loss - 1) < 1e-6
    (grad,) = torch.autograd.grad(loss, logits)
    assert grad.isfinite().all() and grad.abs().max() < 1e-6


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_masked_tokens_leave_no_trace(score_function: str, device: torch.device) -> None:
    """O24: loss and gradient equal those of the real tokens alone, though the masked ones hold NaN."""
    logits = torch.randn(9, 6, dtype=torch.float64).to(device)
    mask = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1, 1], dtype=torch.bool, device=device)
    logits[~mask] = NAN
    routed = torch.tensor([3, 0, 2, 4, 1, 2], device=device)
    leaf, alone = logits.clone().requires_grad_(), logits[mask].clone().requires_grad_()
    for loss_of in (
        lambda z, m: load_balancing_loss(z, routed, score_function=score_function, token_mask=m),
        lambda z, m: router_z_loss(z, token_mask=m),
    ):
        got, want = loss_of(leaf, mask), loss_of(alone, None)
        assert abs(got - want) < 1e-14
        (grad,), (want_grad,) = torch.autograd.grad(got, leaf), torch.autograd.grad(want, alone)
        assert torch.allclose(grad[mask], want_grad, atol=1e-15) and (grad[~mask] == 0).all()


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_no_token_at_all(score_function: str, device: torch.device) -> None:
    logits = torch.full((3, 4), NAN, device=device, requires_grad=True)
    mask = torch.zeros(3, dtype=torch.bool, device=device)
    routed = torch.zeros(4, dtype=torch.int32, device=device)
    total = load_balancing_loss(logits, routed, score_function=score_function, token_mask=mask)
    total = total + router_z_loss(logits, token_mask=mask)
    (grad,) = torch.autograd.grad(total, logits)
    assert total == 0 and (grad == 0).all()


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_gradcheck(score_function: str) -> None:
    logits = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    routed = torch.tensor([4, 1, 0, 5])
    mask = torch.tensor([True, True, False, True, True])
    assert torch.autograd.gradcheck(
        lambda z: load_balancing_loss(z, routed, score_function=score_function, token_mask=mask), logits
    )
    assert torch.autograd.gradcheck(lambda z: router_z_loss(z, token_mask=mask), logits)


def test_counts_before_capacity(
    device: torch.device, bind: Callable[..., object], loop: Callable[..., object], force: Callable[..., Tensor]
) -> None:
    """The aux loss of a layer that drops is that of the same layer without drops."""
    layer = StaticMoE(8, 4, 4, 2, router_aux_loss_coef=1.0, device=device)
    x = force(layer, [(0, 1)] * 6 + [(2, 3)] * 2)
    layer(x)
    want = layer.router_losses()["aux_loss"].detach()
    binding = bind(layer, factor=0.5, scope="expert", overflow="drop")
    layer(x)
    terms = {term.name: term for term in binding.take_losses()}  # type: ignore[attr-defined]
    assert torch.equal(terms["aux_loss"].value.detach(), want)
    assert binding.fields["kept"].tolist() == [2, 2, 2, 2]  # type: ignore[attr-defined]
    assert want > 1.2


def test_reachable_without_a_runner(device: torch.device) -> None:
    layer = StaticMoE(8, 4, 4, 2, router_aux_loss_coef=0.1, device=device)
    x = torch.randn(5, 8, device=device)
    with pytest.raises(ModelError, match="router_losses.*gradients enabled"):
        layer.router_losses()
    layer(x)
    losses = layer.router_losses()
    assert losses["aux_loss"].requires_grad and not losses["z_loss"].requires_grad
    (grad,) = torch.autograd.grad(losses["aux_loss"], layer.router.weight)
    assert (grad != 0).any()
    # No value of an earlier forward is passed off as the last one's.
    with torch.no_grad():
        layer(x)
    with pytest.raises(ModelError, match="router_losses"):
        layer.router_losses()


def test_hand_values(device: torch.device) -> None:
    """Two tokens, two experts, worked by hand."""
    logits = torch.tensor([[math.log(3.0), 0.0], [0.0, 0.0]], device=device)
    # Mean probabilities 5/8 and 3/8; shares 3/4 and 1/4: 2 (15/32 + 3/32) = 1.125
    assert abs(load_balancing_loss(logits, torch.tensor([3, 1], device=device)) - 1.125) < 1e-6
    want = (math.log(4.0) ** 2 + math.log(2.0) ** 2) / 2
    assert abs(router_z_loss(logits) - want) < 1e-6
