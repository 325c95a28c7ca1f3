"""Custom op `staticmoe::make_plan`: shape contract of the plan. Integers only, so there is nothing to differentiate.

Dimensions: T tokens, K top_k, E experts, R capacity rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from staticmoe import reference
from staticmoe.ops.precision import as_given


@torch.library.custom_op(
    "staticmoe::make_plan",
    mutates_args=(),
    schema=(
        "(Tensor topk_ids, Tensor topk_weights, int num_experts, int capacity_rows, int? expert_capacity, "
        "Tensor? doomed=None, bool overflow_dooms=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)
@as_given
def make_plan(
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    capacity_rows: int,
    expert_capacity: int | None,
    doomed: Tensor | None = None,
    overflow_dooms: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the plan's tensors in the order of `staticmoe.reference.RoutingPlan`.

    Shapes:
        topk_ids [T,K] int32 or int64; topk_weights [T,K]; doomed 0-dim.
        Returns tokens_per_expert [E], routed_per_expert [E], expert_offsets [E+1], row_assignment [R],
        assignment_row [T,K], all int32.
    Graph-safe: yes.
    """
    plan = reference.make_plan(
        topk_ids,
        topk_weights,
        num_experts=num_experts,
        capacity_rows=capacity_rows,
        expert_capacity=expert_capacity,
        doomed=doomed,
        overflow_dooms=overflow_dooms,
    )
    return (
        plan.tokens_per_expert,
        plan.routed_per_expert,
        plan.expert_offsets,
        plan.row_assignment,
        plan.assignment_row,
    )


@make_plan.register_kernel("cuda")
@as_given
def _(
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    capacity_rows: int,
    expert_capacity: int | None,
    doomed: Tensor | None = None,
    overflow_dooms: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    # Here, because a machine without a GPU need not have triton.
    from staticmoe.ops.launch import plan as launch
    from staticmoe.ops.launch.operands import serves

    run = launch.make_plan if serves(topk_weights.dtype, num_experts) else make_plan._init_fn
    return run(topk_ids, topk_weights, num_experts, capacity_rows, expert_capacity, doomed, overflow_dooms)


@make_plan.register_fake
def _(
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    capacity_rows: int,
    expert_capacity: int | None,
    doomed: Tensor | None = None,
    overflow_dooms: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    def ints(*shape: int) -> Tensor:
        return topk_ids.new_empty(shape, dtype=torch.int32)

    return ints(num_experts), ints(num_experts), ints(num_experts + 1), ints(capacity_rows), ints(*topk_ids.shape)
