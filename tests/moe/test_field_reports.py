"""Faults that others met with routing, dispatch and combine, as far as the layer shows them without a runner."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from staticmoe import functional
from staticmoe.moe import StaticMoE

NAN = float("nan")


def one_choice(device: torch.device, num_experts: int, hidden: int = 64, width: int = 128, **options: Any) -> StaticMoE:
    return StaticMoE(hidden, width, num_experts, 1, norm_topk_prob=False, device=device, **options)


def spread(counts: list[int]) -> list[tuple[int]]:
    return [(e,) for e, n in enumerate(counts) for _ in range(n)]


def test_unused_rows_turn_nothing_into_nan(
    device: torch.device,
    force: Callable[..., Tensor],
    bind: Callable[..., Any],
    loop: Callable[..., Any],
    poison: Callable[..., None],
    error: Callable[[Tensor, Tensor], float],
) -> None:
    """O19: step 1 clean, step 2 NaN: rows past the used count were never written, and 0·NaN spread them."""
    layer = one_choice(device, 8)
    x = force(layer, spread([40, 0, 3, 0, 0, 0, 0, 21])) + 0.01 * torch.randn(64, 64, device=device)
    with torch.no_grad():
        # Logits of 16 would saturate the weights, and the router's gradient would be rounding errors alone.
        layer.router.weight.mul_(0.1)
    # All 64 rows are used without a mask, 32 of them with half of the tokens masked.
    bind(layer, factor=1.0)
    for mask in (None, torch.arange(64, device=device) % 2 == 0):
        leaf = x.clone().requires_grad_()
        named = {"x": leaf, **dict(layer.named_parameters())}
        want = loop(layer, leaf, mask)
        want_grads = torch.autograd.grad(want.y.square().sum(), list(named.values()))
        first: list[Tensor] = []
        for _ in range(3):
            poison(device)
            y = layer(leaf, mask)
            got = [y, *torch.autograd.grad(y.square().sum(), list(named.values()))]
            assert error(y, want.y) < 1e-5
            for name, grad, want_grad in zip(named, got[1:], want_grads, strict=True):
                assert error(grad, want_grad) < 1e-5, name
            first = first or got
            assert all(torch.equal(a, b) for a, b in zip(first, got, strict=True))


@pytest.mark.parametrize("capacity", [16, 4])
def test_token_zero_is_not_corrupted(
    capacity: int,
    device: torch.device,
    force: Callable[..., Tensor],
    constant: Callable[..., Tensor],
    bind: Callable[..., Any],
    poison: Callable[..., None],
) -> None:
    """O20: empty slots that carry index 0 add to token 0; dropped assignments leave readable unwritten slots."""
    layer = one_choice(device, 4, 8, 8)
    x = constant(layer, force(layer, [(0,)] + [(3,)] * 15), [1.0, 2.0, 3.0, 4.0])
    bind(layer, factor=capacity / 4, scope="expert", overflow="drop")
    for _ in range(3):
        poison(device)
        y = layer(x)
        assert torch.allclose(y[0], torch.ones(8, device=device), atol=1e-5)
        kept = min(15, capacity)
        assert torch.allclose(y[1 : 1 + kept], torch.full((kept, 8), 4.0, device=device), atol=1e-5)
        assert (y[1 + kept :] == 0).all() and y[1 + kept :].shape[0] == 15 - kept


def test_counts_are_those_of_the_batch(
    device: torch.device, force: Callable[..., Tensor], bind: Callable[..., Any], loop: Callable[..., Any]
) -> None:
    """O21: a later batch routed with the counts of the first one."""
    layer = one_choice(device, 4, 16, 8)
    for counts in ([16, 16, 16, 16], [64, 0, 0, 0], [0, 0, 0, 64], [1, 62, 1, 0], [0, 32, 0, 32]):
        x = force(layer, spread(counts)) + 0.01 * torch.randn(64, 16, device=device)
        binding = bind(layer, factor=4.0, scope="expert")
        y, want = layer(x), loop(layer, x)
        layer.bind_step(None)
        assert binding.fields["routed"].tolist() == binding.fields["kept"].tolist() == counts
        assert torch.allclose(y, want.y, rtol=1e-5, atol=1e-6)


def test_idle_experts_get_exact_zeros(
    device: torch.device, force: Callable[..., Tensor], loop: Callable[..., Any], error: Callable[..., float]
) -> None:
    """O22: an expert without tokens kept a garbage or an old weight gradient."""
    layer = one_choice(device, 8, 64, 96)
    x = force(layer, spread([5, 0, 17, 1, 0, 41, 0, 0])) + 0.01 * torch.randn(64, 64, device=device)
    weights = [layer.experts.gate_up_proj, layer.experts.down_proj]
    got = torch.autograd.grad(layer(x).square().sum(), weights)
    for grad, want in zip(got, torch.autograd.grad(loop(layer, x).y.square().sum(), weights), strict=True):
        assert error(grad, want) < 1e-5
        assert (grad[[1, 4, 6, 7]] == 0).all() and (grad[[0, 2, 3, 5]] != 0).any(-1).any(-1).all()


def test_padding_takes_no_capacity(
    device: torch.device, force: Callable[..., Tensor], bind: Callable[..., Any], error: Callable[..., float]
) -> None:
    """O24: padding ate capacity and skewed losses and counts; with the mask all equals a run on the real tokens."""
    options = {"router_aux_loss_coef": 1.0, "router_z_loss_coef": 1.0}
    layer = one_choice(device, 4, 8, 8, **options)
    x = force(layer, [(0,)] * 12 + [(1,)] * 4) + 0.01 * torch.randn(16, 8, device=device)
    mask = torch.arange(16, device=device) >= 8
    results = []
    # C = 4 both times: ceil(1 · 16 / 4) with padding, ceil(2 · 8 / 4) without.
    for tokens, token_mask, factor in ((x, mask, 1.0), (x[8:], None, 2.0)):
        leaf = tokens.clone().requires_grad_()
        binding = bind(layer, factor=factor, scope="expert", overflow="drop")
        y = layer(leaf, token_mask)
        assert binding.fields["routed"].tolist() == binding.fields["kept"].tolist() == [4, 4, 0, 0]
        assert int(binding.reasons) == 0
        losses = [term.value for term in binding.take_losses()]
        parameters = list(layer.parameters())
        d_x, *grads = torch.autograd.grad(y.square().sum() + sum(losses), [leaf, *parameters])
        layer.bind_step(None)
        results.append([y[-8:], d_x[-8:], *losses, *grads])
        assert y.isfinite().all() and (d_x[:-8] == 0).all()
    for got, want in zip(*results, strict=True):
        assert error(got, want) < 1e-6
    # Without the mask the padding, first in line and no lighter, leaves no room for all of tokens 8 to 11.
    binding = bind(layer, factor=1.0, scope="expert", overflow="drop")
    layer(x)
    assert binding.fields["routed"].tolist() == [12, 4, 0, 0] and binding.fields["kept"].tolist() == [4, 4, 0, 0]


@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
@pytest.mark.parametrize("factor", [4.0, 0.01])
@pytest.mark.parametrize("tokens", [5, 1])
def test_capacity_beyond_and_far_below_the_tokens(
    top_k: int,
    factor: float,
    tokens: int,
    device: torch.device,
    bind: Callable[..., Any],
    loop: Callable[..., Any],
    error: Callable[..., float],
) -> None:
    """O25: capacity above the token count crashed; a tiny one must leave at least one slot for an expert."""
    layer = StaticMoE(8, 4, 4, top_k, norm_topk_prob=False, device=device)
    x = torch.randn(tokens, 8, device=device)
    binding = bind(layer, factor=factor, scope="expert", overflow="drop")
    shape = layer.static_shape(tokens)
    y, want = layer(x), loop(layer, x, rows=shape.capacity_rows, expert_rows=shape.expert_capacity)
    assert error(y, want.y) < 1e-5 and binding.fields["kept"].tolist() == want.kept
    if factor == 4.0:
        assert want.kept == want.routed
    else:
        assert want.kept == [min(n, 1) for n in want.routed]


def test_an_unmasked_nan_token_does_not_crash(device: torch.device) -> None:
    """O26: a NaN token without mask: other tokens are as they were, the NaN shows in its own row."""
    layer = StaticMoE(16, 8, 16, 8, device=device)
    x = torch.randn(6, 16, device=device)
    want = layer(x)
    bad = x.clone()
    bad[2] = NAN
    y = layer(bad)
    others = [0, 1, 3, 4, 5]
    assert torch.allclose(y[others], want[others], rtol=1e-5, atol=1e-6) and y[2].isnan().all()


def test_ties_choose_and_drop_alike(device: torch.device, bind: Callable[..., Any]) -> None:
    """O27: with equal logits the experts chosen and the tokens dropped differed between runs."""
    layer = StaticMoE(16, 8, 8, 2, device=device)
    torch.nn.init.zeros_(layer.router.weight)
    x = torch.randn(32, 16, device=device)
    binding = bind(layer, factor=1.0, scope="expert", overflow="drop")
    first = layer(x)
    assert binding.fields["routed"].tolist() == [32, 32, 0, 0, 0, 0, 0, 0]
    assert int((binding.fields["routed"] - binding.fields["kept"]).sum()) == 48
    assert (first[8:] == 0).all() and (first[:8] != 0).any(-1).all()
    for _ in range(20):
        assert torch.equal(layer(x), first)


def test_an_overfull_expert_does_not_reach_its_neighbours(
    device: torch.device, force: Callable[..., Tensor], bind: Callable[..., Any], loop: Callable[..., Any]
) -> None:
    """O31: overload wrote past the buffer, or a full earlier expert zeroed a later one."""
    layer = one_choice(device, 4, 8, 8)
    # ceil(f · 37 / 4) = 16 rows for an expert
    for counts in ([21, 0, 0, 16], [37, 0, 0, 0]):
        x = force(layer, spread(counts)) + 0.01 * torch.randn(37, 8, device=device)
        before = [tensor.clone() for tensor in (x, *layer.parameters())]
        binding = bind(layer, factor=1.72, scope="expert", overflow="drop")
        assert layer.static_shape(37).expert_capacity == 16
        y, want = layer(x), loop(layer, x, expert_rows=16)
        layer.bind_step(None)
        assert binding.fields["kept"].tolist() == [min(n, 16) for n in counts] == want.kept
        assert torch.allclose(y, want.y, rtol=1e-5, atol=1e-6)
        assert all(torch.equal(a, b) for a, b in zip(before, (x, *layer.parameters()), strict=True))


@pytest.mark.parametrize("num_experts", [6, 10, 60, 160, 300, 512])
@pytest.mark.parametrize("tokens", [1, 3, 17, 127, 129, 1025])
def test_any_number_of_experts_and_tokens(
    num_experts: int, tokens: int, device: torch.device, constant: Callable[..., Tensor], bind: Callable[..., Any]
) -> None:
    """O33: experts from 256 on never chosen, 8-bit ids, E no power of two, rows past the first block unprocessed."""
    layer = one_choice(device, num_experts, num_experts + 4, 4)
    targets = [(7 * t) % num_experts for t in range(tokens)]
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[range(num_experts), range(num_experts)] = 50.0
    x = torch.zeros(tokens, num_experts + 4, device=device)
    x[range(tokens), targets] = 2.0
    x = constant(layer, x, [float(e % 64 + 1) for e in range(num_experts)])
    binding = bind(layer)
    y = layer(x)
    assert binding.fields["routed"].tolist() == [targets.count(e) for e in range(num_experts)]
    want = torch.tensor([float(e % 64 + 1) for e in targets], device=device)
    assert torch.allclose(y, want[:, None].expand_as(y), rtol=1e-5)


def test_room_that_nobody_uses_is_not_computed(device: torch.device) -> None:
    """O41: a capacity of four times the balanced rows took as long as the rows: a tail was folded into an expert.

    What a launch works through does not know the capacity: the tiles of every product are the same ones. The times, on
    the wide experts of Qwen3, are a benchmark's: `python profiles/static_shape.py` has captured forward and backward
    with buffers of four times the rows beside as many (`profiles/results/h200/static_shape.json`, "room").
    """
    pytest.importorskip("triton")
    from staticmoe.ops.launch.products import Products

    tokens, experts, top_k = 192, 8, 2
    ids = (torch.arange(tokens * top_k, dtype=torch.int32, device=device) % experts).view(tokens, top_k)
    weights = torch.rand(tokens, top_k, device=device)
    plans = [
        functional.make_plan(ids, weights, num_experts=experts, capacity_rows=times * tokens * top_k)
        for times in (1, 4)
    ]
    assert [plan.row_assignment.shape[0] for plan in plans] == [384, 1536]
    for plan in plans:
        assert plan.tokens_per_expert.tolist() == [48] * experts and (plan.row_assignment[384:] == -1).all()
    made = [Products(torch.bfloat16, plan.expert_offsets, plan.row_assignment, plan.assignment_row) for plan in plans]
    for rows in (16, 64, 128):
        (narrow, count), (wide, same) = (one.schedule(rows) for one in made)
        assert int(count) == int(same) == experts * -(-48 // rows)
        assert torch.equal(narrow[: int(count)], wide[: int(count)])
    result = json.loads((Path(__file__).parents[2] / "profiles/results/h200/static_shape.json").read_text())
    room = result["room"]
    assert result["provenance"]["commit"] and room["four times as many"]["ms"] / room["as many"]["ms"] <= 1.3
