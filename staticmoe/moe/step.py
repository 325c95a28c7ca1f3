"""What every layer of experts does in a step, whoever wrote the layer: plan, counts, buffers for gradients.

Without a binding, which is without a runner, nothing is counted, nothing is doomed and nothing is lent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from staticmoe import functional
from staticmoe.config import CapacityPolicy
from staticmoe.reference import RoutingPlan
from staticmoe.shapes import StaticShape

if TYPE_CHECKING:
    from staticmoe.runner.participants import StepBinding

# Reason.CAPACITY_OVERFLOW of the runner's protocol, which a layer does not import.
_CAPACITY_OVERFLOW = 1


def active(binding: StepBinding | None) -> StepBinding | None:
    """The binding while an iteration of its runner runs; else none, and the layer is one without a runner."""
    return binding if binding is not None and binding.active else None


def capacity_of(binding: StepBinding | None) -> CapacityPolicy:
    """The capacity in force; dropless without a runner."""
    return CapacityPolicy() if binding is None else binding.capacity


def step_fields(num_experts: int) -> dict[str, tuple[int, ...]]:
    """The record fields of a layer: assignments before capacity and rows kept, per expert."""
    return {"routed": (num_experts,), "kept": (num_experts,)}


def plan_step(
    binding: StepBinding | None, topk_ids: Tensor, topk_weights: Tensor, shape: StaticShape
) -> tuple[RoutingPlan, Tensor]:
    """Lay the assignments out at the capacity of `shape`, and count them; return the plan, and the weights to use.

    The plan of a step that will be run again is empty, and from an overflow on that leads to that.

    Shapes:
        topk_ids [T,K] int; topk_weights [T,K] float, as which the weights come back.
    Graph-safe: yes.
    """
    doom: dict[str, Tensor | bool] = {}
    if binding is not None and binding.dooming:
        doom = {"doomed": binding.doomed, "overflow_dooms": bool(binding.dooming & _CAPACITY_OVERFLOW)}
    plan = functional.make_plan(
        topk_ids,
        topk_weights,
        num_experts=shape.num_experts,
        capacity_rows=shape.capacity_rows,
        expert_capacity=shape.expert_capacity,
        **doom,  # type: ignore[arg-type]
    )
    if binding is not None:
        _count(binding, plan, shape)
    if shape.can_overflow and capacity_of(binding).renormalize:
        topk_weights = renormalized(topk_ids, topk_weights, plan)
    return plan, topk_weights


def renormalized(topk_ids: Tensor, topk_weights: Tensor, plan: RoutingPlan) -> Tensor:
    """Scale the weights of what each token kept so that they sum to what all of its weights did.

    A token that lost nothing keeps its weights bit for bit, and so does one that lost everything. Differentiable in the
    kept weights; what was dropped has an exactly zero gradient, the sum that is aimed at being a constant.

    Shapes:
        topk_ids [T,K] int; topk_weights [T,K] float. Returns [T,K].
    Graph-safe: yes.
    """
    kept = plan.assignment_row >= 0
    wanted = (topk_ids >= 0) & (topk_ids < plan.num_experts)
    left = torch.where(kept, topk_weights, 0.0).sum(1, keepdim=True)
    goal = torch.where(wanted, topk_weights, 0.0).sum(1, keepdim=True).detach()
    lost = (wanted & ~kept).any(1, keepdim=True) & (left != 0)
    # The sum is replaced where it is not used: a division by zero would reach the gradient even so.
    return torch.where(lost & kept, topk_weights * (goal / torch.where(lost, left, 1.0)), topk_weights)


def _count(binding: StepBinding, plan: RoutingPlan, shape: StaticShape) -> None:
    if not binding.in_recompute():
        binding.entered += 1
        binding.facts = _facts(shape)
    binding.add("routed", plan.routed_per_expert)
    binding.add("kept", plan.tokens_per_expert)
    if shape.can_overflow:
        binding.flag(_CAPACITY_OVERFLOW, (plan.tokens_per_expert < plan.routed_per_expert).any())


def _facts(shape: StaticShape) -> dict[str, int]:
    """What a layer tells about its buffers and its work: rows, E, K, T, and the elements of all experts' matrices."""
    return {
        "capacity_rows": shape.capacity_rows,
        "can_overflow": int(shape.can_overflow),
        "num_experts": shape.num_experts,
        "top_k": shape.top_k,
        "tokens": shape.tokens,
        "expert_weights": shape.num_experts * shape.hidden * (shape.pre_width + shape.intermediate),
    }


def main_grads(binding: StepBinding | None, gate_up: nn.Parameter, down: nn.Parameter) -> functional.MainGrads | None:
    """The buffers that the binding lends for the weights' gradients."""
    if binding is None or gate_up not in binding.main_grads or down not in binding.main_grads:
        return None
    lent = binding.main_grads
    return functional.MainGrads(lent[gate_up], lent[down], binding.seen, add=binding.adding)


def balance(bias: Tensor, routed: Tensor, rate: float, veto: Tensor) -> None:
    """Raise the bias of experts below the mean load by the rate and lower that of experts above it.

    Shapes:
        bias fp32 of E elements; routed [E] int64, assignments before capacity; veto fp32 scalar, anything but 0 changes
        nothing.
    Source: auxiliary-loss-free balancing (arXiv 2408.15664).
    Graph-safe: yes; the bias is written in place.
    """
    # sign(mean - routed) without a division: sum - E·routed has the same sign and is exact.
    direction = torch.sign(routed.sum() - routed.shape[0] * routed).to(torch.float32).view_as(bias)
    bias.copy_(torch.where(veto == 0, bias + rate * direction, bias))
