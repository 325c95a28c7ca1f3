"""The layer as a participant of a step: counts, flags, losses, commit, recomputation, binding."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from staticmoe import Reason, functional
from staticmoe.config import CapacityPolicy
from staticmoe.errors import ModelError
from staticmoe.moe import StaticMoE
from staticmoe.moe.step import renormalized
from staticmoe.runner.participants import StepParticipant

COUNTS = [
    ([16, 16, 16, 16], 1.0, [16, 16, 16, 16]),
    ([17, 15, 16, 16], 1.0, [16, 15, 16, 16]),
    ([64, 0, 0, 0], 1.0, [16, 0, 0, 0]),
    ([64, 0, 0, 0], 2.0, [32, 0, 0, 0]),
    ([64, 0, 0, 0], 4.0, [64, 0, 0, 0]),
    ([0, 32, 0, 32], None, [0, 32, 0, 32]),
]


def choices(counts: list[int]) -> list[tuple[int]]:
    return [(e,) for e, n in enumerate(counts) for _ in range(n)]


def test_is_a_participant() -> None:
    layer = StaticMoE(8, 4, 4, 2)
    assert isinstance(layer, StepParticipant)
    assert layer.step_fields() == {"routed": (4,), "kept": (4,)}


@pytest.mark.parametrize(("counts", "factor", "kept"), COUNTS)
def test_counts_and_flag(
    counts: list[int],
    factor: float | None,
    kept: list[int],
    device: torch.device,
    bind: Callable[..., Any],
    force: Callable[..., Tensor],
) -> None:
    """O23: 0, 1 and 48 drops, flagged exactly when something was dropped."""
    layer = StaticMoE(8, 4, 4, 1, norm_topk_prob=False, device=device)
    x = force(layer, choices(counts))
    binding = bind(layer, factor=factor, scope="expert", overflow="drop")
    layer(x)
    assert binding.fields["routed"].tolist() == counts
    assert binding.fields["kept"].tolist() == kept
    assert int(binding.reasons) == (Reason.CAPACITY_OVERFLOW if counts != kept else 0)
    assert binding.entered == 1
    assert binding.facts["can_overflow"] == (factor in (1.0, 2.0))
    # Micro-batches add up.
    layer(x)
    assert binding.fields["routed"].tolist() == [2 * n for n in counts]
    assert binding.fields["kept"].tolist() == [2 * n for n in kept]
    assert binding.entered == 2 and binding.fields["kept"].dtype == torch.int64


def test_what_a_token_keeps_takes_over_what_it_lost(device: torch.device) -> None:
    """Token 0 keeps both, 1 loses its second choice, 2 loses both, 3 is padding; what was dropped has no gradient."""
    ids = torch.tensor([[0, 1], [2, 1], [1, 1], [-1, -1]], device=device)
    weights = torch.tensor([[0.7, 0.3], [0.8, 0.2], [0.1, 0.15], [0.0, 0.0]], device=device).requires_grad_()
    plan = functional.make_plan(ids, weights, num_experts=3, expert_capacity=1)
    assert (plan.assignment_row >= 0).tolist() == [[True, True], [True, False], [False, False], [False, False]]
    got = renormalized(ids, weights, plan)
    assert torch.equal(got[[0, 2, 3]], weights[[0, 2, 3]])
    assert float(got[1, 0]) == 1.0 and got[1, 1] == weights[1, 1]
    kept = torch.where(plan.assignment_row >= 0, got, 0.0)
    (grad,) = torch.autograd.grad(kept[:2].square().sum(), weights)
    # w / w · goal: what is left is all of it, whatever the weight.
    assert torch.allclose(grad, torch.tensor([[1.4, 0.6], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], device=device))


@pytest.mark.parametrize("renormalize", [False, True])
def test_a_layer_renormalizes_when_it_is_told_to(
    renormalize: bool, device: torch.device, bind: Callable[..., Any]
) -> None:
    """Against the experts with weights scaled here, for tokens that lost none, one or both of their assignments."""
    torch.manual_seed(0)
    layer = StaticMoE(8, 4, 4, 2, device=device)
    x = torch.randn(64, 8, device=device)
    bind(layer, factor=0.6, scope="expert", overflow="drop", renormalize=renormalize)
    y, shape = layer(x), layer.static_shape(64)
    layer.bind_step(None)
    routed = layer.router(x, None)
    plan = functional.make_plan(
        routed.topk_ids, routed.topk_weights, num_experts=4, expert_capacity=shape.expert_capacity
    )
    lost = (plan.assignment_row < 0).sum(1)
    assert {0, 1} <= set(lost.tolist())
    weights = routed.topk_weights
    if renormalize:
        scale = 1 / torch.where(plan.assignment_row >= 0, weights, 0.0).sum(1, keepdim=True)
        weights = torch.where((lost == 1)[:, None], weights * scale, weights)
    want = layer.experts(x, weights, plan)
    assert torch.allclose(y, want, atol=1e-6) and not torch.allclose(y, layer(x), atol=1e-4)


def test_outside_of_an_iteration_it_is_a_layer_without_a_runner(device: torch.device, bind: Callable[..., Any]) -> None:
    """A forward of the user's own between two steps: dropless, not doomed, not masked, not counted."""
    layer = StaticMoE(8, 4, 4, 2, device=device)
    x = torch.randn(5, 8, device=device)
    want = layer(x)
    binding = bind(layer, factor=0.25, scope="expert", overflow="rerun")
    binding.token_mask, binding.active = torch.zeros(7, dtype=torch.bool, device=device), False
    binding.doomed.fill_(1)
    assert torch.equal(layer(x), want)
    assert binding.entered == 0 and not any(field.any() for field in binding.fields.values())
    assert not binding.take_losses() and int(binding.reasons) == 0


@pytest.mark.parametrize("scope", ["rank", "expert"])
@pytest.mark.parametrize("factor", [0.3, 0.75, 1.0, None])
def test_output_and_gradients_at_a_capacity(
    scope: str,
    factor: float | None,
    device: torch.device,
    bind: Callable[..., Any],
    loop: Callable[..., Any],
    error: Callable[[Tensor, Tensor], float],
) -> None:
    layer = StaticMoE(8, 4, 4, 2, device=device, dtype=torch.float64).double()
    x = torch.randn(13, 8, dtype=torch.float64).to(device).requires_grad_()
    binding = bind(layer, factor=factor, scope=scope, overflow="drop")
    y = layer(x)
    shape = layer.static_shape(13)
    want = loop(layer, x, rows=shape.capacity_rows, expert_rows=shape.expert_capacity)
    assert binding.fields["routed"].tolist() == want.routed and binding.fields["kept"].tolist() == want.kept
    assert error(y, want.y) < 1e-11
    named = {"x": x, **dict(layer.named_parameters())}
    direction = torch.randn_like(y)
    got = torch.autograd.grad(y, list(named.values()), direction)
    for name, grad, want_grad in zip(
        named, got, torch.autograd.grad(want.y, list(named.values()), direction), strict=True
    ):
        assert error(grad, want_grad) < 1e-10, name


def test_capacity_is_the_one_in_force(
    device: torch.device, bind: Callable[..., Any], force: Callable[..., Tensor]
) -> None:
    """O39: the runner swaps the capacity for evaluation; without a binding nothing is dropped."""
    layer = StaticMoE(8, 4, 4, 1, norm_topk_prob=False, device=device)
    x = force(layer, choices([64, 0, 0, 0]))
    free = layer(x)
    binding = bind(layer, factor=1.0, scope="expert", overflow="drop")
    assert (layer(x) == 0).all(-1).sum() == 48
    binding.capacity = CapacityPolicy(factor=4.0, scope="expert")
    assert torch.equal(layer(x), free)


def test_mask_of_the_runner_is_the_default(device: torch.device, bind: Callable[..., Any]) -> None:
    layer = StaticMoE(8, 4, 4, 2, device=device)
    x = torch.randn(2, 5, 8, device=device)
    mask = torch.rand(2, 5).to(device) > 0.4
    want = layer(x, mask)
    binding = bind(layer)
    binding.token_mask = mask
    assert torch.equal(layer(x), want)
    assert int(binding.fields["routed"].sum()) == 2 * int(mask.sum())
    assert torch.equal(layer(x, torch.ones_like(mask)), layer(x, torch.ones(10, device=device)))


def test_losses_are_handed_over(device: torch.device, bind: Callable[..., Any], loop: Callable[..., Any]) -> None:
    layer = StaticMoE(8, 4, 4, 2, router_aux_loss_coef=0.1, device=device)
    x = torch.randn(7, 8, device=device)
    binding = bind(layer)
    layer(x)
    want = loop(layer, x)
    terms = {term.name: term for term in binding.take_losses()}
    assert {name: term.coefficient for name, term in terms.items()} == {"aux_loss": 0.1, "z_loss": 0.0}
    assert abs(terms["aux_loss"].value - want.aux) < 1e-5 and abs(terms["z_loss"].value - want.z) < 1e-5
    assert terms["aux_loss"].value.requires_grad and not terms["z_loss"].value.requires_grad
    with pytest.raises(ModelError, match="router_losses.*runner"):
        layer.router_losses()
    binding.training = False
    layer(x)
    assert list(binding.take_losses()) == []


def test_given_routing_is_counted_and_has_no_losses(device: torch.device, bind: Callable[..., Any]) -> None:
    layer = StaticMoE(8, 4, 4, 2, router_aux_loss_coef=0.1, device=device)
    binding = bind(layer)
    ids = torch.tensor([[0, 1], [0, 3], [-1, 2]], device=device)
    layer(torch.randn(3, 8, device=device), routing=(ids, torch.full((3, 2), 0.5, device=device)))
    assert binding.fields["routed"].tolist() == [2, 1, 1, 1]
    assert list(binding.take_losses()) == []


@pytest.mark.parametrize("bound", [False, True])
def test_checkpointing_counts_once(bound: bool, device: torch.device, bind: Callable[..., Any]) -> None:
    """O28: the recomputed forward routes alike, counts nothing, gives the same gradients (zero router: all ties)."""
    layer = StaticMoE(8, 4, 4, 2, router_aux_loss_coef=0.1, router_z_loss_coef=0.1, device=device)
    torch.nn.init.zeros_(layer.router.weight)
    x = torch.randn(6, 8, device=device)
    results = []
    for wrap in (False, True):
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        binding = bind(layer, factor=0.5, scope="expert", overflow="drop") if bound else None
        y = checkpoint(layer, leaf, use_reentrant=False) if wrap else layer(leaf)
        if binding is None:
            aux = sum(layer.router_losses().values())
        else:
            aux = sum(term.value for term in binding.take_losses())
        (y.square().sum() + aux).backward()
        grads = [leaf.grad, *(p.grad for p in layer.parameters())]
        results.append([y, *(torch.zeros(()) if grad is None else grad.clone() for grad in grads)])
        if binding is None:
            assert all(loss.isfinite() for loss in layer.router_losses().values())
        else:
            assert binding.fields["routed"].tolist() == [6, 6, 0, 0]
            assert binding.fields["kept"].tolist() == [2, 2, 0, 0]
            assert binding.entered == 1 and list(binding.take_losses()) == []
        layer.bind_step(None)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_reentrant_checkpointing_of_router_losses_is_refused(device: torch.device, bind: Callable[..., Any]) -> None:
    layer = StaticMoE(8, 4, 4, 2, router_aux_loss_coef=0.1, device=device)
    x = torch.randn(6, 8, device=device, requires_grad=True)
    binding = bind(layer)
    with pytest.raises(ModelError, match="reentrant.*use_reentrant=False"):
        checkpoint(layer, x, use_reentrant=True)
    binding.training = False
    with torch.no_grad():
        layer(x)
    binding.training = True
    layer.router.requires_grad_(False)
    checkpoint(layer, x, use_reentrant=True).sum().backward()


def test_reentrant_checkpointing_without_losses_counts_once(device: torch.device, bind: Callable[..., Any]) -> None:
    layer = StaticMoE(8, 4, 4, 2, device=device)
    binding = bind(layer)
    checkpoint(layer, torch.randn(6, 8, device=device, requires_grad=True), use_reentrant=True).sum().backward()
    assert int(binding.fields["routed"].sum()) == 12 and binding.entered == 1


@pytest.mark.parametrize("veto", [0.0, 1.0])
@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_commit(
    veto: float, rate: float, device: torch.device, bind: Callable[..., Any], force: Callable[..., Tensor]
) -> None:
    """The balancing bias moves at commit alone: plus rate under the mean of routed tokens, minus rate over it."""
    layer = StaticMoE(8, 4, 4, 1, norm_topk_prob=False, balancing_bias_rate=rate, device=device)
    x = force(layer, choices([5, 1, 2, 0]))
    binding = bind(layer, factor=0.5, scope="expert", overflow="drop")
    layer(x)
    assert layer.router.balancing_bias.tolist() == [0.0] * 4
    layer.commit_step(torch.tensor(veto, device=device))
    want = [-0.5, 0.5, 0.0, 0.5] if rate and not veto else [0.0] * 4
    assert layer.router.balancing_bias.tolist() == want
    assert binding.fields["routed"].tolist() == [5, 1, 2, 0]


def test_counts_survive_a_cast_of_the_model(device: torch.device, bind: Callable[..., Any]) -> None:
    layer = StaticMoE(8, 4, 4, 2, device=device)
    binding = bind(layer)
    layer.to(torch.bfloat16)
    layer(torch.randn(300, 8, device=device, dtype=torch.bfloat16))
    assert binding.fields["routed"].dtype == torch.int64 and int(binding.fields["routed"].sum()) == 600


def test_one_binding_at_a_time(device: torch.device, bind: Callable[..., Any]) -> None:
    layer = StaticMoE(8, 4, 4, 2, device=device)
    with pytest.raises(ModelError, match="commit_step.*bound"):
        layer.commit_step(torch.zeros((), device=device))
    binding = bind(layer, factor=0.5)
    with pytest.raises(ModelError, match="unbound.*close"):
        layer.bind_step(binding)
    assert "capacity_factor=0.5" in repr(layer)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert "capacity_factor=None" in repr(other)
        bind(other)
    layer.bind_step(None)
    bind(layer)
