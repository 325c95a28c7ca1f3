"""Which experts a token goes to, and with which weight.

Dimensions: T tokens, K top_k, E experts, G groups of experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SCORE_FUNCTIONS = ("softmax", "sigmoid")


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums and transcendental functions are computed in: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


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
    """Choose K experts for each token and weigh them.

    The experts with the largest score + bias are chosen; the lowest expert number wins a tie. The weight is the
    score without the bias.

    Shapes:
        logits [T,E] any float; selection_bias [E]; token_mask [T] bool, True for real tokens.
        Returns topk_ids [T,K] int32 (-1 for masked tokens), topk_weights [T,K] fp32 or fp64 (0 for masked ones).
    Source: group-limited selection and selection bias as in DeepSeek-V3 (arXiv 2412.19437).
    Graph-safe: yes, shapes follow from shapes.
    """
    scaled = logits.to(compute_dtype(logits.dtype))
    if token_mask is not None:
        # Before any function is applied: what a masked row holds (NaN, inf) must not reach a derivative.
        scaled = torch.where(token_mask[:, None], scaled, 0.0)
    key = _selection_key(scaled.detach(), score_function, selection_bias, n_group, topk_group)
    # A stable sort keeps equal keys in expert order, which topk does not promise. NaN sorts first, so the ids of
    # a NaN row are distinct and its NaN reaches the loss, where it is seen.
    order = torch.sort(key, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = _weights(scaled, order, score_function, norm_topk_prob) * routed_scaling_factor
    ids = order.to(torch.int32)
    if token_mask is not None:
        ids = torch.where(token_mask[:, None], ids, -1)
        weights = torch.where(token_mask[:, None], weights, 0.0)
    return ids, weights


def weigh(
    logits: Tensor,
    topk_ids: Tensor,
    *,
    score_function: str = "softmax",
    token_mask: Tensor | None = None,
    norm_topk_prob: bool = True,
    routed_scaling_factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Weigh experts that were chosen elsewhere, as `route` weighs those that it chooses: bitwise, for the same ids.

    A token is taken whole or not at all: one whose ids are not K different experts is one without expert.

    Shapes:
        logits [T,E] any float; topk_ids [T,K] int32 or int64; token_mask [T] bool, True for real tokens.
        Returns topk_ids [T,K] int32 (-1 for tokens without expert), topk_weights [T,K] fp32 or fp64 (0 for those).
    Graph-safe: yes, shapes follow from shapes.
    """
    real = ((topk_ids >= 0) & (topk_ids < logits.shape[1])).all(-1) & ~repeats(topk_ids)
    if token_mask is not None:
        real = real & token_mask
    real = real[:, None]
    # As `route` treats a masked row.
    scaled = torch.where(real, logits.to(compute_dtype(logits.dtype)), 0.0)
    order = torch.where(real, topk_ids, 0).to(torch.int64)
    weights = _weights(scaled, order, score_function, norm_topk_prob) * routed_scaling_factor
    return torch.where(real, topk_ids, -1).to(torch.int32), torch.where(real, weights, 0.0)


def repeats(topk_ids: Tensor) -> Tensor:
    """Say of each token whether two of its slots hold the same id.

    Shapes:
        topk_ids [...,K] integer. Returns [...] bool.
    Graph-safe: yes.
    """
    found = torch.zeros(topk_ids.shape[:-1], dtype=torch.bool, device=topk_ids.device)
    for distance in range(1, topk_ids.shape[-1]):
        found |= (topk_ids[..., distance:] == topk_ids[..., :-distance]).any(-1)
    return found


def _selection_key(
    logits: Tensor, score_function: str, selection_bias: Tensor | None, n_group: int, topk_group: int
) -> Tensor:
    if selection_bias is None and n_group == 1:
        # Scores rise with logits, so the logits choose the same experts, and still tell apart those whose scores
        # round to the same number.
        return logits
    scores = torch.softmax(logits, dim=-1) if score_function == "softmax" else torch.sigmoid(logits)
    # One NaN makes all scores of a row NaN: the logit still tells whose it is, and who has it must be chosen.
    scores = torch.where(torch.isnan(scores), logits, scores)
    key = scores if selection_bias is None else scores + selection_bias.to(scores.dtype)
    if n_group == 1:
        return key
    tokens, num_experts = key.shape
    grouped = key.view(tokens, n_group, num_experts // n_group)
    best = torch.topk(grouped, min(2, grouped.shape[-1]), dim=-1).values
    order = torch.sort(best.sum(-1), dim=-1, descending=True, stable=True).indices[:, :topk_group]
    kept = torch.zeros(tokens, n_group, dtype=torch.bool, device=key.device).scatter(1, order, True)
    return torch.where(kept[:, :, None], grouped, float("-inf")).reshape(tokens, num_experts)


def _weights(logits: Tensor, order: Tensor, score_function: str, norm_topk_prob: bool) -> Tensor:
    if not norm_topk_prob:
        scores = torch.softmax(logits, dim=-1) if score_function == "softmax" else torch.sigmoid(logits)
        return scores.gather(1, order)
    chosen = logits.gather(1, order)
    # score_k / sum of the chosen scores, in log space: no epsilon, so the shares of tiny scores are still shares.
    return torch.softmax(chosen if score_function == "softmax" else F.logsigmoid(chosen), dim=-1)


def route_backward(
    grad_weights: Tensor,
    logits: Tensor,
    topk_ids: Tensor,
    *,
    score_function: str,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
) -> Tensor:
    """Return the gradient of the logits from that of the routing weights; exactly zero for masked tokens.

    Shapes:
        grad_weights [T,K]; logits [T,E]; topk_ids [T,K] int32. Returns [T,E] in the dtype of the logits.
    Graph-safe: yes.
    """
    dtype = compute_dtype(logits.dtype)
    routed = topk_ids >= 0
    grad = torch.where(routed, grad_weights.to(dtype) * routed_scaling_factor, 0.0)
    values = torch.where(routed[:, :1], logits.to(dtype), 0.0)
    order = topk_ids.clamp(min=0).to(torch.int64)
    zeros = torch.zeros_like(values)
    if score_function == "softmax" and not norm_topk_prob:
        scores = torch.softmax(values, dim=-1)
        inner = (grad * scores.gather(1, order)).sum(-1, keepdim=True)
        full = scores * (zeros.scatter(1, order, grad) - inner)
    else:
        chosen = values.gather(1, order)
        if score_function == "softmax":
            local = _softmax_backward(grad, chosen)
        elif norm_topk_prob:
            # d logsigmoid(l) = sigmoid(-l)
            local = _softmax_backward(grad, F.logsigmoid(chosen)) * torch.sigmoid(-chosen)
        else:
            local = grad * torch.sigmoid(chosen) * torch.sigmoid(-chosen)
        # A routed row has distinct ids; a masked one writes zeros to expert 0 K times. Either way the result does
        # not depend on the order of the writes.
        full = zeros.scatter(1, order, torch.where(routed, local, 0.0))
    return torch.where(routed[:, :1], full, 0.0).to(logits.dtype)


def _softmax_backward(grad: Tensor, values: Tensor) -> Tensor:
    shares = torch.softmax(values, dim=-1)
    return shares * (grad - (grad * shares).sum(-1, keepdim=True))
