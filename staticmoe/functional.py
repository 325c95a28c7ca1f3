"""The phases as functions, for experts of another shape than `StaticMoE` has: low-rank banks, many small experts,
weights that are quantised on the way.

    ids, weights = route(logits, top_k=8)
    plan = make_plan(ids, weights, num_experts=64)
    hidden = grouped_linear(x, w_in, plan, gather=True)      # tokens to rows
    rows = grouped_linear(torch.relu(hidden), w_out, plan, gather=False)
    y = combine(rows, weights, plan)

Between two grouped products any function that maps each row by itself may stand. Rows past the plan's last offset
are zeros when a phase returns them, whatever such a function writes there is not read.

Dimensions: T tokens, K top_k, E experts, H hidden, I intermediate, R capacity rows, A and B widths in and out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from staticmoe import ops
from staticmoe.errors import ConfigError
from staticmoe.ops.experts import MainGrads
from staticmoe.reference import ACTIVATIONS, SCORE_FUNCTIONS, RoutingPlan, is_gated

__all__ = ["MainGrads", "RoutingPlan", "combine", "experts", "grouped_linear", "make_plan", "route", "weigh"]


def route(
    logits: Tensor,
    *,
    top_k: int,
    score_function: str = "softmax",
    selection_bias: Tensor | None = None,
    token_mask: Tensor | None = None,
    norm_topk_prob: bool = True,
    routed_scaling_factor: float = 1.0,
    n_group: int = 1,
    topk_group: int = 1,
) -> tuple[Tensor, Tensor]:
    """Choose K experts for each token by score + bias and weigh them by the score; differentiable in the logits.

    The lowest expert number wins a tie. With `norm_topk_prob` the chosen scores are divided by their sum (without
    an epsilon), then all weights are multiplied by `routed_scaling_factor`. With groups, only experts of the
    `topk_group` groups with the largest sum of their two best biased scores can be chosen.

    Shapes:
        logits [T,E] float; selection_bias [E] float; token_mask [T] bool, True for real tokens.
        Returns topk_ids [T,K] int32, -1 for masked tokens; topk_weights [T,K] fp32 (fp64 for fp64 logits), 0 for
        masked tokens, whose logits get an exactly zero gradient whatever they hold.
    Raises:
        ConfigError: a shape or an option that cannot work.
    Source: group-limited selection and selection bias as in DeepSeek-V3 (arXiv 2412.19437).
    Graph-safe: yes, shapes follow from shapes.
    """
    _need_dims("logits", logits, 2, "[T,E]")
    tokens, num_experts = logits.shape
    check_routing_options(
        num_experts=num_experts,
        top_k=top_k,
        score_function=score_function,
        n_group=n_group,
        topk_group=topk_group,
    )
    if selection_bias is not None:
        _need_shape("selection_bias", selection_bias, (num_experts,), "one per expert")
    _need_mask(token_mask, tokens)
    bias = None if selection_bias is None else selection_bias.detach()
    scale = float(routed_scaling_factor)
    topk_weights, topk_ids = ops.routing.route(
        logits, bias, token_mask, top_k, score_function, norm_topk_prob, scale, n_group, topk_group
    )
    return topk_ids, topk_weights


def weigh(
    logits: Tensor,
    topk_ids: Tensor,
    *,
    score_function: str = "softmax",
    token_mask: Tensor | None = None,
    norm_topk_prob: bool = True,
    routed_scaling_factor: float = 1.0,
    n_group: int = 1,
) -> tuple[Tensor, Tensor]:
    """Weigh experts that were chosen elsewhere as `route` would, had it chosen them; differentiable in the logits.

    For ids that `route` returned, weights and gradients are bitwise those of `route` under the same options. A token is
    taken whole or not at all: one whose ids are not K different experts of 0..E-1 is one without expert.

    Shapes:
        logits [T,E] float; topk_ids [T,K] of any integer dtype and any strides; token_mask [T] bool.
        Returns topk_ids [T,K] int32, -1 for tokens without expert; topk_weights [T,K] fp32 (fp64 for fp64 logits), 0
        for those, whose logits get an exactly zero gradient.
    Raises:
        ConfigError: a shape, a dtype or an option that cannot work.
    Graph-safe: yes.
    """
    _need_dims("logits", logits, 2, "[T,E]")
    _need_dims("topk_ids", topk_ids, 2, "[T,K]")
    tokens, num_experts = logits.shape
    top_k = topk_ids.shape[1]
    check_routing_options(
        num_experts=num_experts, top_k=top_k, score_function=score_function, n_group=n_group, topk_group=n_group
    )
    _need_shape("topk_ids", topk_ids, (tokens, top_k), "one row for each token")
    if topk_ids.is_floating_point() or topk_ids.dtype == torch.bool:
        raise ConfigError(f"topk_ids: expected integers; got {topk_ids.dtype}")
    _need_mask(token_mask, tokens)
    ids = topk_ids if topk_ids.dtype in (torch.int32, torch.int64) else topk_ids.to(torch.int32)
    topk_weights, ids = ops.weigh.weigh(
        logits, ids, token_mask, score_function, norm_topk_prob, float(routed_scaling_factor), n_group
    )
    return ids, topk_weights


def check_routing_options(*, num_experts: int, top_k: int, score_function: str, n_group: int, topk_group: int) -> None:
    """Refuse options of `route` that cannot work.

    Raises:
        ConfigError: naming the option, the value and what it must fit.
    """
    if not 1 <= top_k <= num_experts:
        raise ConfigError(f"top_k: expected 1 to num_experts = {num_experts}; got {top_k}")
    if score_function not in SCORE_FUNCTIONS:
        raise ConfigError(f"score_function: expected one of {', '.join(SCORE_FUNCTIONS)}; got {score_function!r}")
    if n_group < 1 or num_experts % n_group:
        raise ConfigError(f"n_group: expected a divisor of num_experts = {num_experts}; got {n_group}")
    if not 1 <= topk_group <= n_group:
        raise ConfigError(f"topk_group: expected 1 to n_group = {n_group}; got {topk_group}")
    open_experts = topk_group * (num_experts // n_group)
    if top_k > open_experts:
        raise ConfigError(
            f"top_k: expected at most the {open_experts} experts of {topk_group} groups; got {top_k}: "
            "raise topk_group or lower n_group"
        )


def make_plan(
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    num_experts: int,
    capacity_rows: int | None = None,
    expert_capacity: int | None = None,
    doomed: Tensor | None = None,
    overflow_dooms: bool = False,
) -> RoutingPlan:
    """Lay assignments out as rows, ordered by expert, then by assignment.

    What exceeds a capacity is dropped: the lowest weights lose, among equal ones the highest assignment. An id
    outside 0..E-1 is an assignment without expert. A doomed plan has the true counts and no row in use: what
    follows costs nothing and gives zeros.

    Shapes:
        topk_ids [T,K] int32 or int64; topk_weights [T,K] float; capacity_rows R (None: T·K, nothing can be
        dropped for want of rows); expert_capacity C (None: no bound per expert); doomed 0-dim, the plan is doomed where
        it is not 0; overflow_dooms: so it is where anything is dropped.
    Raises:
        ConfigError: shapes that differ, an id dtype that is not an integer, a size below 1.
    Graph-safe: yes. The plan carries no gradient.
    """
    _need_dims("topk_ids", topk_ids, 2, "[T,K]")
    _need_shape("topk_weights", topk_weights, tuple(topk_ids.shape), "as topk_ids")
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise ConfigError(f"topk_ids: expected int32 or int64; got {topk_ids.dtype}")
    rows = topk_ids.numel() if capacity_rows is None else capacity_rows
    for name, value in (("num_experts", num_experts), ("capacity_rows", rows), ("expert_capacity", expert_capacity)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}: expected at least 1; got {value}")
    tensors = ops.plan.make_plan(
        topk_ids, topk_weights.detach(), num_experts, rows, expert_capacity, doomed, overflow_dooms
    )
    return RoutingPlan(
        tokens_per_expert=tensors[0],
        routed_per_expert=tensors[1],
        expert_offsets=tensors[2],
        row_assignment=tensors[3],
        assignment_row=tensors[4],
        num_experts=num_experts,
        top_k=topk_ids.shape[1],
        capacity_rows=rows,
    )


def grouped_linear(rows_or_tokens: Tensor, weight: Tensor, plan: RoutingPlan, *, gather: bool) -> Tensor:
    """Multiply each row with the weight of its expert; differentiable in both.

    `gather` says what the input is, because T and R may be equal: True for tokens, which are dispatched to rows
    first, False for rows. Empty rows of the input are not read, those of the result are zeros. An expert without
    rows gets an exactly zero weight gradient.

    Shapes:
        rows_or_tokens [T,A] with gather, else [R,A]; weight [E,B,A], same dtype. Returns [R,B].
    Raises:
        ConfigError: a shape or dtype that does not fit the plan or the other operand.
    Graph-safe: yes.
    """
    _need_dims("weight", weight, 3, "[E,B,A]")
    tokens = plan.assignment_row.shape[0]
    first = tokens if gather else plan.capacity_rows
    hint = "tokens: pass gather=False for rows" if gather else "rows: pass gather=True for tokens"
    _need_shape("weight", weight, (plan.num_experts, weight.shape[1], weight.shape[2]), "one per expert of the plan")
    _need_shape("rows_or_tokens", rows_or_tokens, (first, weight.shape[2]), hint)
    _need_dtype("weight", weight, rows_or_tokens.dtype, "rows_or_tokens")
    return ops.grouped_linear.grouped_linear(
        rows_or_tokens, weight, plan.expert_offsets, plan.row_assignment, plan.assignment_row, gather
    )


def combine(rows: Tensor, topk_weights: Tensor, plan: RoutingPlan) -> Tensor:
    """Return each token's weighted sum of its rows, in fp32 and slot order; differentiable in rows and weights.

    A dropped assignment adds exactly nothing, and its weight gets an exactly zero gradient.

    Shapes:
        rows [R,H]; topk_weights [T,K]. Returns [T,H] in the dtype of `rows`.
    Raises:
        ConfigError: a shape that does not fit the plan.
    Graph-safe: yes; no atomics, so bitwise the same every time.
    """
    _need_dims("rows", rows, 2, "[R,H]")
    _need_shape("rows", rows, (plan.capacity_rows, rows.shape[1]), "the capacity rows of the plan")
    _need_shape("topk_weights", topk_weights, tuple(plan.assignment_row.shape), "the routing that the plan was made of")
    return ops.combine.combine(rows, topk_weights, plan.expert_offsets, plan.row_assignment, plan.assignment_row)


def experts(
    x: Tensor,
    topk_weights: Tensor,
    plan: RoutingPlan,
    gate_up: Tensor,
    down: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "swiglu",
    main_grads: MainGrads | None = None,
) -> Tensor:
    """Return the whole expert block: dispatch, up, activation, down, combine; differentiable in every float input.

    Keeps x and the pre-activation for the backward, nothing else. "relu2" has no gate: its `gate_up` is [E,I,H].

    Weights whose gate and up rows alternate go in as the view `w.unflatten(1, (I, 2)).transpose(1, 2)`, [E,2,I,H]: the
    kernels read and write such a view where it lies.

    Both weights may be fp32 beside an x of 16 bits: products run in the dtype of x, on casts that are kept for the
    backward, and the weight gradients come in fp32 as they were summed. With `main_grads` they are stored in its
    buffers, or added to them, and autograd sees zeros.

    Shapes:
        x [T,H]; topk_weights [T,K]; gate_up [E,2I,H], gate rows first, or [E,2,I,H] of any strides; down [E,H,I];
        gate_up_bias [E,2I] or [E,2,I]; down_bias [E,H]; all in the dtype of x, the weights or both fp32; the buffers
        of `main_grads` as the weights. Returns [T,H].
    Raises:
        ConfigError: an unknown activation, a shape or dtype that does not fit.
    Graph-safe: yes.
    """
    if activation not in ACTIVATIONS:
        raise ConfigError(f"activation: expected one of {', '.join(ACTIVATIONS)}; got {activation!r}")
    _need_dims("x", x, 2, "[T,H]")
    _need_dims("down", down, 3, "[E,H,I]")
    hidden, intermediate = x.shape[1], down.shape[2]
    width = 2 * intermediate if is_gated(activation) else intermediate
    _need_shape("topk_weights", topk_weights, tuple(plan.assignment_row.shape), "the routing that the plan was made of")
    _need_shape("x", x, (plan.assignment_row.shape[0], hidden), "the tokens that the plan was made of")
    _need_shape("down", down, (plan.num_experts, hidden, intermediate), "[E,H,I]")
    halves = (width // intermediate, intermediate)
    rows = halves if gate_up.dim() == 4 else (width,)
    _need_shape("gate_up", gate_up, (plan.num_experts, *rows, hidden), f"[E,{width},H] for {activation}")
    if gate_up_bias is not None:
        rows = halves if gate_up_bias.dim() == 3 else (width,)
        _need_shape("gate_up_bias", gate_up_bias, (plan.num_experts, *rows), "one per row of gate_up")
    if down_bias is not None:
        _need_shape("down_bias", down_bias, (plan.num_experts, hidden), "one per row of down")
    named = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    if gate_up.dtype != torch.float32 or x.dtype not in (torch.bfloat16, torch.float16):
        named["gate_up"] = gate_up
    for name, tensor in named.items():
        if tensor is not None:
            _need_dtype(name, tensor, x.dtype, "x")
    _need_dtype("down", down, gate_up.dtype, "gate_up")
    main: tuple[Any, ...] = ()
    if main_grads is not None:
        main = (main_grads.gate_up, main_grads.down, main_grads.seen, main_grads.add)
        _need_shape("main_grads.gate_up", main_grads.gate_up, tuple(gate_up.shape), "as the weight")
        _need_shape("main_grads.down", main_grads.down, tuple(down.shape), "as the weight")
    y, *_ = ops.experts.experts(
        x,
        topk_weights,
        gate_up,
        down,
        gate_up_bias,
        down_bias,
        plan.expert_offsets,
        plan.row_assignment,
        plan.assignment_row,
        activation,
        *main,
    )
    return y


def _need_mask(token_mask: Tensor | None, tokens: int) -> None:
    if token_mask is None:
        return
    _need_shape("token_mask", token_mask, (tokens,), "one per token: flatten the mask as the tokens were")
    if token_mask.dtype != torch.bool:
        raise ConfigError(f"token_mask: expected bool, True for real tokens; got {token_mask.dtype}: use mask != 0")


def _need_dims(name: str, tensor: Tensor, dims: int, legend: str) -> None:
    if tensor.dim() != dims:
        raise ConfigError(f"{name}: expected {dims} dimensions {legend}; got shape {tuple(tensor.shape)}")


def _need_shape(name: str, tensor: Tensor, shape: tuple[int, ...], why: str) -> None:
    if tuple(tensor.shape) != shape:
        raise ConfigError(f"{name}: expected shape {shape} ({why}); got {tuple(tensor.shape)}")


def _need_dtype(name: str, tensor: Tensor, dtype: torch.dtype, other: str) -> None:
    if tensor.dtype != dtype:
        raise ConfigError(f"{name}: expected {dtype} as {other}; got {tensor.dtype}: cast one of them")
