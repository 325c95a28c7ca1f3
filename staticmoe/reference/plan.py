"""From routing to rows: counts, capacity victims, and the two maps between assignments and rows.

Dimensions: T tokens, K top_k, N = T·K assignments, E experts, R capacity rows, C rows of one expert.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingPlan:
    """Where each assignment's row lies. Rows are ordered by expert, then by assignment.

    Attributes:
        tokens_per_expert: [E] int32, rows kept.
        routed_per_expert: [E] int32, assignments before capacity.
        expert_offsets: [E+1] int32, exclusive prefix sum of `tokens_per_expert`, all 0 where the plan is doomed; its
            last entry is the rows in use.
        row_assignment: [R] int32, row -> t·K + k; -1 for an empty row.
        assignment_row: [T,K] int32, assignment -> row; -1 where it was dropped or names no expert.
        num_experts: E.
        top_k: K.
        capacity_rows: R.
    """

    tokens_per_expert: Tensor
    routed_per_expert: Tensor
    expert_offsets: Tensor
    row_assignment: Tensor
    assignment_row: Tensor
    num_experts: int
    top_k: int
    capacity_rows: int


def make_plan(
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    num_experts: int,
    capacity_rows: int,
    expert_capacity: int | None = None,
    doomed: Tensor | None = None,
    overflow_dooms: bool = False,
) -> RoutingPlan:
    """Lay the assignments out as rows; what exceeds the capacity is dropped.

    The lowest weights lose, and among equal ones the highest assignment. An id outside 0..E-1 is no expert. Where
    `doomed` is not 0, or with `overflow_dooms` anything is dropped, no row is in use; the counts are the true ones.

    Shapes:
        topk_ids [T,K] int32 or int64; topk_weights [T,K] any float (NaN counts as the lowest); doomed 0-dim.
    Graph-safe: yes; integer sums do not depend on their order.
    """
    tokens, top_k = topk_ids.shape
    count = tokens * top_k
    ids = topk_ids.reshape(count).to(torch.int64)
    # Assignments without expert form a last group, E, that gets no row.
    expert = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    routed = _count(expert, num_experts)
    survivors = expert
    if expert_capacity is not None and expert_capacity < count:
        survivors = _evict(survivors, topk_weights, num_experts, expert_capacity, per_expert=True)
    most = count if expert_capacity is None else min(count, num_experts * expert_capacity)
    if capacity_rows < most:
        survivors = _evict(survivors, topk_weights, num_experts, capacity_rows, per_expert=False)
    kept = _count(survivors, num_experts)
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids.device)
    offsets[1:] = torch.cumsum(kept, 0, dtype=torch.int32)
    # Stable: by expert, then by assignment. Row r of the plan is entry r of this order, whatever R is.
    order = torch.sort(survivors, stable=True).indices
    position = torch.arange(count, dtype=torch.int32, device=ids.device)
    used = min(capacity_rows, count)
    row_assignment = torch.full((capacity_rows,), -1, dtype=torch.int32, device=ids.device)
    row_assignment[:used] = torch.where(position < offsets[num_experts], order.to(torch.int32), -1)[:used]
    inverse = torch.zeros_like(position).scatter(0, order, position)
    assignment_row = torch.where(survivors < num_experts, inverse, -1).reshape(tokens, top_k)
    if doomed is not None or overflow_dooms:
        doom = (kept < routed).any() if overflow_dooms else torch.zeros((), dtype=torch.bool, device=ids.device)
        doom = doom if doomed is None else doom | (doomed != 0)
        offsets = torch.where(doom, 0, offsets)
        row_assignment = torch.where(doom, -1, row_assignment)
        assignment_row = torch.where(doom, -1, assignment_row)
    return RoutingPlan(
        tokens_per_expert=kept,
        routed_per_expert=routed,
        expert_offsets=offsets,
        row_assignment=row_assignment,
        assignment_row=assignment_row,
        num_experts=num_experts,
        top_k=top_k,
        capacity_rows=capacity_rows,
    )


def _count(expert: Tensor, num_experts: int) -> Tensor:
    """Return [E] int32 counts of the experts named in `expert` [N]; the group E is left out."""
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=expert.device)
    return counts.scatter_add(0, expert, torch.ones_like(expert, dtype=torch.int32))[:num_experts].clone()


def _evict(expert: Tensor, topk_weights: Tensor, num_experts: int, limit: int, *, per_expert: bool) -> Tensor:
    """Return `expert` [N] with the lowest weights beyond `limit` (of each expert, or of all) moved to group E."""
    weight = topk_weights.reshape(-1)
    weight = torch.where(torch.isnan(weight), float("-inf"), weight)
    # Two stable sorts: by weight downwards, then by group. Within a group: weight downwards, assignment upwards.
    by_weight = torch.sort(weight, descending=True, stable=True).indices
    group = expert if per_expert else torch.where(expert < num_experts, 0, 1)
    sorted_group, by_group = torch.sort(group[by_weight], stable=True)
    order = by_weight[by_group]
    # searchsorted finds where each entry's group starts, so the difference is its rank within the group.
    rank = torch.arange(order.shape[0], device=order.device) - torch.searchsorted(sorted_group, sorted_group)
    rank_of_assignment = torch.zeros_like(rank).scatter(0, order, rank)
    return torch.where(rank_of_assignment < limit, expert, num_experts)
