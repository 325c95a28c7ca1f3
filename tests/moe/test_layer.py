"""StaticMoE against a loop over tokens: output, every gradient, masks, given routing, dtypes, copies."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from staticmoe import functional
from staticmoe.errors import ConfigError
from staticmoe.moe import StaticMoE

NAN, INF = float("nan"), float("inf")

VARIANTS: list[dict[str, Any]] = [
    {},
    {"score_function": "sigmoid", "routed_scaling_factor": 2.5},
    {"norm_topk_prob": False, "bias": True},
    {"shared_intermediate_size": 6, "balancing_bias_rate": 0.1, "score_function": "sigmoid", "norm_topk_prob": False},
]


def layer_of(device: torch.device, *sizes: int, dtype: torch.dtype = torch.float64, **options: Any) -> StaticMoE:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = StaticMoE(*sizes, device=device, dtype=dtype, **options)
    if dtype == torch.float64:
        layer.double()
    torch.nn.init.normal_(layer.router.balancing_bias, std=0.2)
    for bias in (layer.experts.gate_up_proj_bias, layer.experts.down_proj_bias):
        if bias is not None:
            torch.nn.init.normal_(bias)
    return layer


def gradients(layer: StaticMoE, x: Tensor, loss: Tensor) -> dict[str, Tensor]:
    named = {"x": x, **dict(layer.named_parameters())}
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: grad for name, grad in zip(named, grads, strict=True) if grad is not None}


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("sizes", [(8, 4, 5, 2), (9, 7, 4, 3), (8, 8, 3, 1), (6, 5, 4, 4)])
@pytest.mark.parametrize("masked", [False, True])
def test_against_a_loop(
    options: dict[str, Any],
    sizes: tuple[int, ...],
    masked: bool,
    device: torch.device,
    loop: Callable[..., Any],
    error: Callable[[Tensor, Tensor], float],
) -> None:
    layer = layer_of(device, *sizes, router_aux_loss_coef=0.1, router_z_loss_coef=0.01, **options)
    x = torch.randn(11, sizes[0], dtype=torch.float64).to(device).requires_grad_()
    mask = torch.rand(11).to(device) > 0.3 if masked else None
    y, losses = layer(x, mask), layer.router_losses()
    want = loop(layer, x, mask)
    assert error(y, want.y) < 1e-11
    assert error(losses["aux_loss"], want.aux) < 1e-12 and error(losses["z_loss"], want.z) < 1e-12
    direction = torch.randn_like(y)
    got_grads = gradients(layer, x, (y * direction).sum() + losses["aux_loss"] + 0.5 * losses["z_loss"])
    want_grads = gradients(layer, x, (want.y * direction).sum() + want.aux + 0.5 * want.z)
    assert got_grads.keys() >= want_grads.keys()
    for name, grad in got_grads.items():
        assert error(grad, want_grads.get(name, torch.zeros_like(grad))) < 1e-10, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_dtypes(
    dtype: torch.dtype, device: torch.device, loop: Callable[..., Any], error: Callable[[Tensor, Tensor], float]
) -> None:
    """REF tolerances: 1e-5 in fp32, 2e-2 in bf16, output and every gradient."""
    layer = layer_of(device, 32, 16, 6, 2, dtype=dtype, shared_intermediate_size=8)
    x = torch.randn(29, 32).to(device, dtype).requires_grad_()
    assert layer.router.weight.dtype == torch.float32
    wide = copy.deepcopy(layer).double()
    wide_x = x.detach().double().requires_grad_()
    y, want = layer(x), loop(wide, wide_x)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert y.dtype == dtype and error(y, want.y) < tolerance
    direction = torch.randn_like(y)
    got_grads = gradients(layer, x, (y * direction).sum())
    for name, grad in gradients(wide, wide_x, (want.y * direction.double()).sum()).items():
        assert error(got_grads[name], grad) < tolerance, name


@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
def test_one_token(top_k: int, device: torch.device, loop: Callable[..., Any], error: Callable[..., float]) -> None:
    """O25: a single token with every K up to E."""
    layer = layer_of(device, 8, 4, 4, top_k)
    x = torch.randn(1, 8, dtype=torch.float64).to(device)
    assert error(layer(x), loop(layer, x).y) < 1e-11


def test_leading_dimensions(device: torch.device) -> None:
    layer = layer_of(device, 8, 4, 5, 2)
    x = torch.randn(2, 3, 4, 8, dtype=torch.float64).to(device)
    mask = torch.rand(2, 3, 4).to(device) > 0.3
    want = layer(x.view(24, 8), mask.view(24))
    assert torch.equal(layer(x, mask), want.view(2, 3, 4, 8))
    assert torch.equal(layer(x, mask.view(24)), want.view(2, 3, 4, 8))
    assert torch.equal(layer(x, mask.long()), want.view(2, 3, 4, 8))
    assert layer(x[0, 0, 0]).shape == (8,)


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_masked_tokens_may_hold_anything(options: dict[str, Any], value: float, device: torch.device) -> None:
    """O26: masked rows full of NaN or inf change no output, no loss and no gradient, and their rows are zeros."""
    layer = layer_of(
        device, 16, 8, 16, 8, dtype=torch.float32, router_aux_loss_coef=1.0, router_z_loss_coef=1.0, **options
    )
    clean = torch.randn(6, 16, device=device)
    mask = torch.tensor([True, False, True, True, False, True], device=device)
    results = []
    for filling in (0.0, value):
        x = torch.where(mask[:, None], clean, filling).requires_grad_()
        y, losses = layer(x, mask), layer.router_losses()
        grads = gradients(layer, x, y.square().sum() + losses["aux_loss"] + losses["z_loss"])
        results.append([y, *losses.values(), *grads.values()])
        assert (y[~mask] == 0).all() and (grads["x"][~mask] == 0).all()
    assert all(torch.equal(a, b) and b.isfinite().all() for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("options", VARIANTS)
def test_everything_masked(options: dict[str, Any], device: torch.device) -> None:
    """Losses and gradients of a batch without a real token are exact zeros, not 0/0."""
    layer = layer_of(device, 8, 4, 5, 2, router_aux_loss_coef=1.0, router_z_loss_coef=1.0, **options)
    x = torch.full((3, 8), NAN, dtype=torch.float64, device=device, requires_grad=True)
    y, losses = layer(x, torch.zeros(3, dtype=torch.bool, device=device)), layer.router_losses()
    assert (y == 0).all() and all(loss == 0 for loss in losses.values())
    grads = gradients(layer, x, y.sum() + losses["aux_loss"] + losses["z_loss"])
    assert all((grad == 0).all() for grad in grads.values())


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("masked", [False, True])
def test_given_routing(ids_dtype: torch.dtype, masked: bool, device: torch.device, error: Callable[..., float]) -> None:
    """Routing from outside, also where it is an odd slice of something larger (O34); its weights get gradients."""
    layer = layer_of(device, 8, 4, 5, 2)
    x = torch.randn(2, 6, 8, dtype=torch.float64).to(device).requires_grad_()
    own = layer.router(x.reshape(12, 8))
    stack = torch.zeros(2, 6, 3, 2, dtype=ids_dtype, device=device)
    stack[:, :, 1] = own.topk_ids.view(2, 6, 2).to(ids_dtype)
    weights = own.topk_weights.detach().view(2, 6, 2).clone().requires_grad_()
    mask = torch.rand(2, 6).to(device) > 0.3 if masked else None
    given, routed = layer(x, mask, routing=(stack[:, :, 1], weights)), layer(x, mask)
    assert error(given, routed) < 1e-14
    direction = torch.randn_like(given)
    (got,) = torch.autograd.grad(given, weights, direction)
    flat = weights.view(12, 2)
    plan = functional.make_plan(own.topk_ids, flat, num_experts=5)
    (want,) = torch.autograd.grad(layer.experts(x.view(12, 8), flat, plan), weights, direction.view(12, 8))
    real = torch.ones(2, 6, dtype=torch.bool, device=device) if mask is None else mask
    assert error(got[real], want[real]) < 1e-12 and (got[~real] == 0).all()


def test_given_routing_may_name_no_expert(device: torch.device) -> None:
    layer = layer_of(device, 8, 4, 5, 2)
    x = torch.randn(3, 8, dtype=torch.float64).to(device)
    ids = torch.tensor([[0, -1], [-1, -1], [2, 2]], device=device)
    y = layer(x, routing=(ids, torch.full((3, 2), 0.5, dtype=torch.float64, device=device)))
    single = layer(x, routing=(ids.clamp(min=0)[:, :1].expand(3, 2), torch.tensor([[0.5, 0.0]] * 3, device=device)))
    assert (y[1] == 0).all()
    assert torch.allclose(y[0], single[0]) and torch.allclose(y[2], 2 * single[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_strides_and_offsets(dtype: torch.dtype, device: torch.device) -> None:
    """O34: an input with odd offset and widths that are no multiple of 8 give what a contiguous copy gives."""
    layer = layer_of(device, 100, 36, 4, 2, dtype=dtype)
    x = torch.randn(7, 103).to(device, dtype)[:, 1:101]
    got, want = layer(x), layer(x.contiguous())
    assert torch.equal(got, want) and got.isfinite().all()


def test_autocast(device: torch.device, error: Callable[..., float]) -> None:
    """Experts in bf16, routing in fp32; gradients arrive at the fp32 parameters."""
    layer = layer_of(device, 16, 8, 4, 2, dtype=torch.float32, shared_intermediate_size=8)
    x = torch.randn(12, 16, device=device)
    want_routing = layer.router(x)
    want = layer(x)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        routing, got = layer.router(x), layer(x)
    assert got.dtype == torch.bfloat16 and routing.topk_weights.dtype == torch.float32
    assert torch.equal(routing.topk_weights, want_routing.topk_weights)
    assert torch.equal(routing.topk_ids, want_routing.topk_ids)
    assert error(got, want) < 2e-2
    got.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())
    with torch.no_grad():
        layer.experts.down_proj.mul_(2.0)
        assert layer.shared_expert is not None
        layer.shared_expert.down_proj.weight.mul_(2.0)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert torch.equal(layer(x), 2 * got)


def test_a_dtype_that_does_not_fit_is_refused(device: torch.device) -> None:
    layer = layer_of(device, 8, 4, 4, 2, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="x.*bfloat16.*float32.*autocast"):
        layer(torch.zeros(3, 8, device=device))


def test_frozen_experts(device: torch.device) -> None:
    layer = layer_of(device, 8, 4, 4, 2)
    layer.experts.requires_grad_(False)
    x = torch.randn(5, 8, dtype=torch.float64).to(device)
    layer(x).square().sum().backward()
    assert all(p.grad is None for p in layer.experts.parameters())
    assert layer.router.weight.grad is not None and (layer.router.weight.grad != 0).any()


def test_initialisation_follows_the_seed() -> None:
    torch.manual_seed(3)
    layer = StaticMoE(8, 4, 4, 2, shared_intermediate_size=4, bias=True)
    first = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    torch.nn.init.ones_(layer.router.balancing_bias)
    torch.manual_seed(3)
    layer.reset_parameters()
    assert all(torch.equal(first[name], tensor) for name, tensor in layer.state_dict().items())
    assert first["experts.gate_up_proj"].abs().max() <= 8**-0.5
    assert first["experts.down_proj"].abs().max() <= 0.5


def test_meta_construction() -> None:
    with torch.device("meta"):
        layer = StaticMoE(8, 4, 4, 2, shared_intermediate_size=4)
    assert all(tensor.is_meta for tensor in layer.state_dict().values())
    layer.to_empty(device="cpu")
    torch.manual_seed(3)
    layer.reset_parameters()
    torch.manual_seed(3)
    want = StaticMoE(8, 4, 4, 2, shared_intermediate_size=4)
    assert all(torch.equal(want.state_dict()[name], tensor) for name, tensor in layer.state_dict().items())


def test_state_dict_names_and_shapes() -> None:
    layer = StaticMoE(8, 4, 5, 2, bias=True)
    assert {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()} == {
        "router.weight": (5, 8),
        "router.balancing_bias": (5,),
        "experts.gate_up_proj": (5, 8, 8),
        "experts.down_proj": (5, 8, 4),
        "experts.gate_up_proj_bias": (5, 8),
        "experts.down_proj_bias": (5, 8),
    }
    assert tuple(StaticMoE(8, 4, 5, 2, activation="relu2").experts.gate_up_proj.shape) == (5, 4, 8)


def test_copies(device: torch.device) -> None:
    """A copy computes the same, also after a forward whose losses hold a graph."""
    layer = layer_of(device, 8, 4, 4, 2, router_aux_loss_coef=1.0)
    x = torch.randn(5, 8, dtype=torch.float64).to(device)
    want = layer(x)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(layer), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(x), want)


def test_repr_names_the_sizes() -> None:
    assert "hidden_size=8, intermediate_size=4, num_experts=5, top_k=2" in repr(StaticMoE(8, 4, 5, 2))


@pytest.mark.parametrize(
    ("sizes", "options", "words"),
    [
        ((8, 4, 4, 5), {}, "top_k.*num_experts = 4.*5"),
        ((0, 4, 4, 2), {}, "hidden_size.*at least 1.*0"),
        ((8, 4, 4, 2), {"n_group": 3}, "n_group.*divisor.*4.*3"),
        ((8, 4, 4, 2), {"activation": "tanh"}, "activation.*swiglu.*tanh"),
        ((8, 4, 4, 2), {"score_function": "tanh"}, "score_function.*softmax.*tanh"),
        ((8, 4, 4, 2), {"shared_intermediate_size": -1}, "shared_intermediate_size.*-1"),
        ((8, 4, 4, 2), {"router_aux_loss_coef": -0.1}, "router_aux_loss_coef.*-0.1"),
        ((8, 4, 4, 2), {"balancing_bias_rate": NAN}, "balancing_bias_rate.*nan"),
    ],
)
def test_refusals_name_value_and_fix(sizes: tuple[int, ...], options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        StaticMoE(*sizes, **options)


def test_forward_refuses_what_does_not_fit() -> None:
    layer = StaticMoE(8, 4, 4, 2)
    x = torch.zeros(2, 3, 8)
    with pytest.raises(ConfigError, match=r"x.*hidden_size = 8.*\(2, 3, 7\)"):
        layer(torch.zeros(2, 3, 7))
    with pytest.raises(ConfigError, match=r"token_mask.*\(2, 3\) or \(6,\).*\(3, 2\)"):
        layer(x, torch.ones(3, 2))
    with pytest.raises(ConfigError, match=r"topk_ids.*\(6, 2\).*\(6, 3\)"):
        layer(x, routing=(torch.zeros(6, 3, dtype=torch.int32), torch.zeros(6, 2)))
    with pytest.raises(ConfigError, match=r"topk_weights.*\(6, 2\).*\(2, 3\)"):
        layer(x, routing=(torch.zeros(6, 2, dtype=torch.int32), torch.zeros(2, 3)))
