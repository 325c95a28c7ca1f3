"""Custom op `staticmoe::weigh`: shape contract and autograd rule of weights for experts that were chosen elsewhere.

Dimensions: T tokens, K top_k, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from staticmoe import reference
from staticmoe.ops.precision import as_given
from staticmoe.ops.routing import route_backward
from staticmoe.reference.routing import compute_dtype


@torch.library.custom_op(
    "staticmoe::weigh",
    mutates_args=(),
    schema=(
        "(Tensor logits, Tensor topk_ids, Tensor? token_mask, str score_function, bool norm_topk_prob, "
        "float routed_scaling_factor, int n_group) -> (Tensor, Tensor)"
    ),
)
@as_given
def weigh(
    logits: Tensor,
    topk_ids: Tensor,
    token_mask: Tensor | None,
    score_function: str,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
    n_group: int,
) -> tuple[Tensor, Tensor]:
    """Weigh given experts; see `staticmoe.reference.weigh`. The differentiable output comes first.

    Shapes:
        logits [T,E]; topk_ids [T,K] int32 or int64; token_mask [T] bool; n_group: of the router, whose sums over
        experts go by groups. Returns topk_weights [T,K] fp32 (fp64 for fp64 logits), topk_ids [T,K] int32.
    Graph-safe: yes.
    """
    ids, topk_weights = reference.weigh(
        logits,
        topk_ids,
        score_function=score_function,
        token_mask=token_mask,
        norm_topk_prob=norm_topk_prob,
        routed_scaling_factor=routed_scaling_factor,
    )
    return topk_weights, ids


@weigh.register_kernel("cuda")
@as_given
def _(logits: Tensor, topk_ids: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    # Here, because a machine without a GPU need not have triton.
    from staticmoe.ops.launch import weigh as launch
    from staticmoe.ops.launch.operands import serves

    run = launch.weigh if serves(logits.dtype, logits.shape[1]) else weigh._init_fn
    return run(logits, topk_ids, *options)


@weigh.register_fake
def _(logits: Tensor, topk_ids: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    shape = topk_ids.shape
    return logits.new_empty(shape, dtype=compute_dtype(logits.dtype)), logits.new_empty(shape, dtype=torch.int32)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, _, _, *options = inputs
    ctx.save_for_backward(logits, output[1])
    ctx.options = options[:3]


def _backward(ctx: Any, grad_weights: Tensor, grad_ids: Tensor | None) -> tuple[Tensor | None, ...]:
    logits, topk_ids = ctx.saved_tensors
    return (route_backward(grad_weights, logits, topk_ids, *ctx.options), *([None] * 6))


weigh.register_autograd(_backward, setup_context=_setup_context)
