"""The router's auxiliary losses, over real tokens only.

Dimensions: T tokens, E experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def load_balancing_loss(
    logits: Tensor, routed_per_expert: Tensor, *, score_function: str = "softmax", token_mask: Tensor | None = None
) -> Tensor:
    """Return E · Σ_e (share of assignments routed to e) · (mean probability of e): 1 when balanced.

    Counts are those before capacity, so that dropping does not look like balance. The probability of a sigmoid
    router is the score's share of the token's scores, taken in log space: an epsilon in that division would let the
    router lower this loss by making all its scores tiny.

    Shapes:
        logits [T,E] fp32 or fp64; routed_per_expert [E] integers; token_mask [T] bool. Returns a scalar, 0 when
        every token is masked.
    Source: Switch Transformer (arXiv 2101.03961), with shares of assignments for top_k > 1.
    Graph-safe: yes.
    """
    values = _real_rows(logits, token_mask)
    probability = torch.softmax(values if score_function == "softmax" else F.logsigmoid(values), dim=-1)
    mean = _mean_over_real(probability, token_mask)
    share = routed_per_expert.to(values.dtype) / routed_per_expert.sum().clamp(min=1).to(values.dtype)
    return values.shape[1] * (share * mean).sum()


def router_z_loss(logits: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
    """Return the mean over real tokens of logsumexp(logits) squared.

    Shapes:
        logits [T,E] fp32 or fp64; token_mask [T] bool. Returns a scalar, 0 when every token is masked.
    Source: ST-MoE (arXiv 2202.08906).
    Graph-safe: yes.
    """
    values = _real_rows(logits, token_mask)
    return _mean_over_real(torch.logsumexp(values, dim=-1, keepdim=True).square(), token_mask).sum()


def _real_rows(logits: Tensor, token_mask: Tensor | None) -> Tensor:
    # Before any function is applied: NaN in a masked row would survive a later multiplication by zero.
    return logits if token_mask is None else torch.where(token_mask[:, None], logits, 0.0)


def _mean_over_real(values: Tensor, token_mask: Tensor | None) -> Tensor:
    """Return the mean over real tokens of `values` [T,*] -> [*]; zeros when there are none."""
    if token_mask is None:
        return values.mean(0)
    count = token_mask.sum().clamp(min=1).to(values.dtype)
    return torch.where(token_mask[:, None], values, 0.0).sum(0) / count
