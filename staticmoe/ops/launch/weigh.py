"""Launch of `staticmoe::weigh`.

Dimensions: T tokens, K top_k, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from staticmoe.kernels import weigh as kernels


def weigh(
    logits: Tensor,
    topk_ids: Tensor,
    token_mask: Tensor | None,
    score_function: str,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
    n_group: int,
) -> tuple[Tensor, Tensor]:
    """Return topk_weights [T,K] fp32 and topk_ids [T,K] int32; see `staticmoe.reference.weigh`."""
    shape = topk_ids.shape
    weights, ids = logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)
    kernels.weigh(
        logits,
        topk_ids,
        token_mask,
        weights,
        ids,
        score_function=score_function,
        norm_topk_prob=norm_topk_prob,
        routed_scaling_factor=routed_scaling_factor,
        n_group=n_group,
    )
    return weights, ids
