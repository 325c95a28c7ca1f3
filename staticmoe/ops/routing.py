"""Custom op `staticmoe::route`: shape contract and autograd rule of the router's choice.

Dimensions: T tokens, K top_k, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from staticmoe import reference
from staticmoe.ops.precision import as_given
from staticmoe.reference.routing import compute_dtype

_OPTIONS = (
    "int top_k, str score_function, bool norm_topk_prob, float routed_scaling_factor, int n_group, int topk_group"
)


@torch.library.custom_op(
    "staticmoe::route",
    mutates_args=(),
    schema=f"(Tensor logits, Tensor? selection_bias, Tensor? token_mask, {_OPTIONS}) -> (Tensor, Tensor)",
)
@as_given
def route(
    logits: Tensor,
    selection_bias: Tensor | None,
    token_mask: Tensor | None,
    top_k: int,
    score_function: str,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
    n_group: int,
    topk_group: int,
) -> tuple[Tensor, Tensor]:
    """Choose experts and weights; see `staticmoe.reference.route`. The differentiable output comes first.

    Shapes:
        logits [T,E]; selection_bias [E]; token_mask [T] bool.
        Returns topk_weights [T,K] fp32 (fp64 for fp64 logits), topk_ids [T,K] int32.
    Graph-safe: yes.
    """
    topk_ids, topk_weights = reference.route(
        logits,
        top_k=top_k,
        score_function=score_function,
        selection_bias=selection_bias,
        token_mask=token_mask,
        norm_topk_prob=norm_topk_prob,
        routed_scaling_factor=routed_scaling_factor,
        n_group=n_group,
        topk_group=topk_group,
    )
    return topk_weights, topk_ids


@route.register_kernel("cuda")
@as_given
def _(
    logits: Tensor, selection_bias: Tensor | None, token_mask: Tensor | None, top_k: int, *options: Any
) -> tuple[Tensor, Tensor]:
    # Here, because a machine without a GPU need not have triton.
    from staticmoe.ops.launch import routing as launch
    from staticmoe.ops.launch.operands import serves

    run = launch.route if serves(logits.dtype, logits.shape[1]) else route._init_fn
    return run(logits, selection_bias, token_mask, top_k, *options)


@route.register_fake
def _(
    logits: Tensor, selection_bias: Tensor | None, token_mask: Tensor | None, top_k: int, *options: object
) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=compute_dtype(logits.dtype)), logits.new_empty(shape, dtype=torch.int32)


@torch.library.custom_op(
    "staticmoe::route_backward",
    mutates_args=(),
    schema=(
        "(Tensor grad_weights, Tensor logits, Tensor topk_ids, str score_function, bool norm_topk_prob, "
        "float routed_scaling_factor) -> Tensor"
    ),
)
@as_given
def route_backward(
    grad_weights: Tensor,
    logits: Tensor,
    topk_ids: Tensor,
    score_function: str,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
) -> Tensor:
    """Return the gradient of the logits; see `staticmoe.reference.route_backward`.

    Shapes:
        grad_weights [T,K]; logits [T,E]; topk_ids [T,K] int32. Returns [T,E] in the dtype of the logits.
    Graph-safe: yes.
    """
    return reference.route_backward(
        grad_weights,
        logits,
        topk_ids,
        score_function=score_function,
        norm_topk_prob=norm_topk_prob,
        routed_scaling_factor=routed_scaling_factor,
    )


@route_backward.register_kernel("cuda")
@as_given
def _(grad_weights: Tensor, logits: Tensor, topk_ids: Tensor, *options: Any) -> Tensor:
    from staticmoe.ops.launch import routing as launch
    from staticmoe.ops.launch.operands import serves

    run = launch.route_backward if serves(logits.dtype, logits.shape[1]) else route_backward._init_fn
    return run(grad_weights, logits, topk_ids, *options)


@route_backward.register_fake
def _(grad_weights: Tensor, logits: Tensor, *rest: object) -> Tensor:
    return logits.new_empty(logits.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, _, _, _, *options = inputs
    ctx.save_for_backward(logits, output[1])
    # score_function, norm_topk_prob, routed_scaling_factor; the groups act on the choice alone.
    ctx.options = options[:3]


def _backward(ctx: Any, grad_weights: Tensor, grad_ids: Tensor | None) -> tuple[Tensor | None, ...]:
    logits, topk_ids = ctx.saved_tensors
    return (route_backward(grad_weights, logits, topk_ids, *ctx.options), *([None] * 8))


route.register_autograd(_backward, setup_context=_setup_context)
