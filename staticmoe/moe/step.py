"""What every layer of experts does in a step, whoever wrote the layer: plan, counts, buffers for gradients.

Without a binding, which is without a runner, nothing is counted, nothing is doomed and nothing is lent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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


def plan_step(binding: StepBinding | None, topk_ids: Tensor, topk_weights: Tensor, shape: StaticShape) -> RoutingPlan:
    """Lay the assignments out at the capacity of `shape`, and count them.

    The plan of a step that will be run again is empty, and from an overflow on that leads to that.

    Shapes:
        topk_ids [T,K] int; topk_weights [T,K] float.
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
    return plan


def _count(binding: StepBinding, plan: RoutingPlan, shape: StaticShape) -> None:
    if not binding.in_recompute():
        binding.entered += 1
        binding.facts = {"capacity_rows": shape.capacity_rows, "can_overflow": int(shape.can_overflow)}
    binding.add("routed", plan.routed_per_expert.long())
    binding.add("kept", plan.tokens_per_expert.long())
    if shape.can_overflow:
        binding.flag(_CAPACITY_OVERFLOW, (plan.tokens_per_expert < plan.routed_per_expert).any())


def main_grads(binding: StepBinding | None, gate_up: nn.Parameter, down: nn.Parameter) -> functional.MainGrads | None:
    """The buffers that the binding lends for the weights' gradients."""
    if binding is None or gate_up not in binding.main_grads or down not in binding.main_grads:
        return None
    lent = binding.main_grads
    return functional.MainGrads(lent[gate_up], lent[down], binding.seen, add=binding.adding)
