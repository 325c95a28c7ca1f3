"""Launches of `staticmoe::make_plan`.

Dimensions: T tokens, K top_k, E experts, R capacity rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from staticmoe.kernels import plan as kernels


def make_plan(
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    capacity_rows: int,
    expert_capacity: int | None,
    doomed: Tensor | None,
    overflow_dooms: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the plan's tensors, all int32, in the order of `staticmoe.reference.RoutingPlan`."""

    def ints(*shape: int) -> Tensor:
        return topk_ids.new_empty(shape, dtype=torch.int32)

    tokens, top_k = topk_ids.shape
    outs = ints(num_experts), ints(num_experts), ints(num_experts + 1), ints(capacity_rows), ints(tokens, top_k)
    sizes = kernels.scratch_sizes(
        tokens=tokens,
        top_k=top_k,
        num_experts=num_experts,
        capacity_rows=capacity_rows,
        expert_capacity=expert_capacity,
    )
    kernels.make_plan(
        topk_ids,
        topk_weights,
        *outs,
        ints(sizes.total),
        num_experts=num_experts,
        capacity_rows=capacity_rows,
        expert_capacity=expert_capacity,
        doomed=doomed,
        overflow_dooms=overflow_dooms,
    )
    return outs
