"""Weights for experts that were chosen elsewhere: what the router's choice does once it has chosen.

Dimensions: T tokens, K top_k, E experts, G groups of S experts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from staticmoe.kernels.routing import tokens_and_warps, weights_of


@triton.jit
def staticmoe_router_weigh(
    logits_ptr,
    logits_token,
    logits_expert,
    given_ptr,
    given_token,
    given_slot,
    mask_ptr,
    mask_token,
    weights_ptr,
    ids_ptr,
    scale,
    tokens,
    K: tl.constexpr,
    KP: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    S: tl.constexpr,
    SP: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORM: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Write weights [T,K] fp32 of the experts given [T,K], and ids [T,K] int32, as `staticmoe_router_route` would.

    Grid: ceil(T / TOKENS) programs. Program i owns the tokens [i * TOKENS, (i + 1) * TOKENS), entire rows. A token
    whose ids are not K different numbers of 0..G*S-1, or whose mask [T] is false, gets -1 and 0, and none of its logits
    is read. The sum over all experts goes by columns of groups, as in the choice, so that it is bitwise the same.
    Deterministic: a token's row is worked on by one program, in one order.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    at = token.to(tl.int64)[:, None]
    slot = tl.arange(0, KP)[None, :]
    written = inside[:, None] & (slot < K)
    given = tl.load(given_ptr + at * given_token + slot * given_slot, mask=written, other=-1).to(tl.int64)
    valid = written & (given >= 0) & (given < G * S)
    real = inside & (tl.sum(valid.to(tl.int32), axis=1) == K)
    if mask_ptr is not None:
        real = real & (tl.load(mask_ptr + token.to(tl.int64) * mask_token, mask=inside, other=0) != 0)
    # What is no expert of this layer is -1 from here on: no address is made of it.
    ids = tl.where(valid, given, -1).to(tl.int32)
    for k in range(K):
        one = tl.sum(tl.where(slot == k, ids, 0), axis=1)
        equal = (ids == one[:, None]) & (slot < K)
        real = real & (tl.sum(equal.to(tl.int32), axis=1) == 1)

    row_ptr = logits_ptr + at * logits_token
    used = real[:, None] & (slot < K)
    x = tl.load(row_ptr + ids.to(tl.int64) * logits_expert, mask=used, other=0.0).to(tl.float32)
    if SIGMOID or NORM:
        weights = weights_of(x, slot, K, SIGMOID, NORM)
    else:
        column = tl.arange(0, GP * SP)
        exists = ((column // SP < G) & (column % SP < S))[None, :]
        expert = (column // SP * S + column % SP)[None, :]
        row = tl.load(row_ptr + expert.to(tl.int64) * logits_expert, mask=real[:, None] & exists, other=0.0)
        row = tl.where(exists, row.to(tl.float32), float("-inf"))
        largest = tl.max(row, axis=1)
        total = tl.sum(tl.exp(row - largest[:, None]), axis=1)
        weights = tl.div_rn(tl.exp(x - largest[:, None]), total[:, None] + tl.zeros_like(x))
    tl.store(ids_ptr + at * K + slot, tl.where(real[:, None], ids, -1), mask=written)
    tl.store(weights_ptr + at * K + slot, tl.where(real[:, None], weights * scale, 0.0), mask=written)


def weigh(
    logits: Tensor,
    given: Tensor,
    token_mask: Tensor | None,
    weights_out: Tensor,
    ids_out: Tensor,
    *,
    score_function: str,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
    n_group: int = 1,
) -> None:
    """Launch the weights of given experts; see `staticmoe.reference.weigh`.

    Shapes:
        logits [T,E] fp32, fp16 or bf16, any strides; given [T,K] int32 or int64, any strides; token_mask [T] bool.
        Written, contiguous: weights_out [T,K] fp32, ids_out [T,K] int32.
    Graph-safe: yes, one launch.
    """
    tokens, num_experts = logits.shape
    if not tokens:
        return
    top_k, size = given.shape[1], num_experts // n_group
    groups, padded = triton.next_power_of_2(n_group), triton.next_power_of_2(size)
    # As `route` launches it: the sums of another shape of block could differ in their last bit.
    block, warps = tokens_and_warps(groups * padded, tokens)
    staticmoe_router_weigh[(triton.cdiv(tokens, block),)](
        logits,
        *logits.stride(),
        given,
        *given.stride(),
        token_mask,
        0 if token_mask is None else token_mask.stride(0),
        weights_out,
        ids_out,
        float(routed_scaling_factor),
        tokens,
        K=top_k,
        KP=triton.next_power_of_2(top_k),
        G=n_group,
        GP=groups,
        S=size,
        SP=padded,
        SIGMOID=score_function == "sigmoid",
        NORM=norm_topk_prob,
        TOKENS=block,
        num_warps=warps,
    )
