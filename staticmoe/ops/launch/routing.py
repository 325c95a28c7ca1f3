"""Launches of `staticmoe::route` and its backward.

Dimensions: T tokens, K top_k, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from staticmoe.kernels import routing as kernels


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
    """Return topk_weights [T,K] fp32 and topk_ids [T,K] int32; see `staticmoe.reference.route`."""
    shape = (logits.shape[0], top_k)
    weights, ids = logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)
    kernels.route(
        logits,
        selection_bias,
        token_mask,
        weights,
        ids,
        top_k=top_k,
        score_function=score_function,
        norm_topk_prob=norm_topk_prob,
        routed_scaling_factor=routed_scaling_factor,
        n_group=n_group,
        topk_group=topk_group,
    )
    return weights, ids


def route_backward(
    grad_weights: Tensor,
    logits: Tensor,
    topk_ids: Tensor,
    score_function: str,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
) -> Tensor:
    """Return the gradient of the logits [T,E]; see `staticmoe.reference.route_backward`."""
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    kernels.route_backward(
        grad_weights,
        logits,
        topk_ids,
        out,
        score_function=score_function,
        norm_topk_prob=norm_topk_prob,
        routed_scaling_factor=routed_scaling_factor,
    )
    return out
