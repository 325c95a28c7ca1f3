"""The router module: fp32 whatever it is cast to, its balancing bias, and a choice of one expert."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch

from staticmoe.moe import Router, StaticMoE


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16, torch.float64])
def test_balancing_bias_stays_fp32(cast: torch.dtype, device: torch.device) -> None:
    """A cast model keeps the bias, bit by bit: in bf16, 1 + 0.001 is 1 and the bias would stand still."""
    layer = StaticMoE(8, 4, 4, 2, balancing_bias_rate=0.001).to(device)
    values = torch.tensor([1.001, -0.3333, 7.0, 1e-6], device=device)
    layer.router.balancing_bias.copy_(values)
    layer.to(cast)
    layer.cpu().to(device)
    assert layer.router.weight.dtype == cast
    assert layer.router.balancing_bias.dtype == torch.float32
    assert torch.equal(layer.router.balancing_bias, values)
    assert layer.state_dict()["router.balancing_bias"].dtype == torch.float32


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
def test_logits_are_fp32(cast: torch.dtype, device: torch.device) -> None:
    router = Router(64, 8, 2, device=device).to(cast)
    x = torch.randn(5, 64).to(device, cast)
    out = router(x)
    want = x.double() @ router.weight.double().t()
    assert out.logits.dtype == torch.float32 and out.topk_weights.dtype == torch.float32
    assert (out.logits.double() - want).abs().max() < 1e-5


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_bias_takes_part_only_with_a_rate(rate: float, device: torch.device) -> None:
    router = Router(4, 4, 1, balancing_bias_rate=rate, device=device)
    with torch.no_grad():
        router.weight.zero_()
        router.balancing_bias.copy_(torch.tensor([0.0, 0.0, 0.0, 1.0]))
    assert router(torch.ones(2, 4, device=device)).topk_ids.tolist() == [[3 if rate else 0]] * 2


@pytest.mark.parametrize(
    ("routed", "direction"),
    [([4, 0, 2, 2], [-1, 1, 0, 0]), ([3, 2, 2, 2], [-1, 1, 1, 1]), ([0, 0, 0, 0], [0, 0, 0, 0])],
)
@pytest.mark.parametrize("veto", [0.0, 1.0])
def test_update(routed: list[int], direction: list[int], veto: float, device: torch.device) -> None:
    """Plus rate under the mean, minus rate over it, nothing on it and nothing under veto."""
    router = Router(4, 4, 1, balancing_bias_rate=0.25, device=device)
    start = torch.tensor([1.0, 2.0, 3.0, 4.0], device=device)
    router.balancing_bias.copy_(start)
    where = router.balancing_bias.data_ptr()
    router.update_balancing_bias(torch.tensor(routed, device=device), torch.tensor(veto, device=device))
    want = start + (0.0 if veto else 0.25) * torch.tensor(direction, device=device)
    assert torch.equal(router.balancing_bias, want)
    assert router.balancing_bias.data_ptr() == where


def test_update_is_exact_for_large_counts(device: torch.device) -> None:
    """Counts above 2^24 differ by one and are still told apart."""
    router = Router(4, 2, 1, balancing_bias_rate=1.0, device=device)
    routed = torch.tensor([2**40 + 1, 2**40], device=device)
    router.update_balancing_bias(routed, torch.zeros((), device=device))
    assert router.balancing_bias.tolist() == [-1.0, 1.0]


def test_one_expert_without_normalisation(device: torch.device, constant: Callable[..., torch.Tensor]) -> None:
    """O35: K=1, logits [1,0]: weight .731059, d out / d logit0 = .196612 · c_0."""
    layer = StaticMoE(4, 4, 2, 1, norm_topk_prob=False, device=device)
    x = constant(layer, torch.zeros(1, 4, device=device), [3.0, 5.0])
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[0, 2] = 1.0
    out = layer(x)
    assert torch.allclose(out, torch.full_like(out, 0.731059 * 3), atol=1e-5)
    (grad,) = torch.autograd.grad(out[0, 0], layer.router.weight)
    assert torch.allclose(grad[:, 2], torch.tensor([0.196612 * 3, -0.196612 * 3], device=device), atol=1e-5)


def test_one_expert_with_normalisation_warns(device: torch.device, constant: Callable[..., torch.Tensor]) -> None:
    """O35: K=1 with renormalisation: the weight is always 1, the router's gradient exactly 0, and a warning says so."""
    with pytest.warns(UserWarning, match="top_k=1 and norm_topk_prob=True.*norm_topk_prob=False"):
        layer = StaticMoE(4, 4, 2, 1, device=device)
    x = constant(layer, torch.zeros(1, 4, device=device), [3.0, 5.0])
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[0, 2] = 1.0
    out = layer(x)
    assert torch.allclose(out, torch.full_like(out, 3.0), atol=1e-5)
    (grad,) = torch.autograd.grad(out.sum(), layer.router.weight)
    assert (grad == 0).all()


def test_no_warning_where_the_router_learns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        StaticMoE(4, 4, 2, 1, norm_topk_prob=False)
        StaticMoE(4, 4, 2, 2)
