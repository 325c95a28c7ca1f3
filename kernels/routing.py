"""The router's choice and its gradient: K steps of a maximum over a row of logits that is held in registers.

A choice compares one 64-bit number for each expert: the score's bits, put into an order that integers have, and the
expert's number reversed. So ties go to the lowest expert, NaN comes first, and every step finds another expert.

Dimensions: T tokens, K top_k, E experts, G groups of S experts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# Below the key of -inf: an expert that was chosen already, or does not exist.
_NEVER = tl.constexpr(-(1 << 31))
_MINUS_INF_KEY = tl.constexpr(-0x7F800001)

_ELEMENTS = 1024


@triton.jit
def _key_of(value):
    """An int32 that rises with the fp32 `value`; both zeros are equal, NaN is above everything."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    bits = tl.where(magnitude == 0, 0, bits)
    return tl.where(magnitude > 0x7F800000, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _value_of(key):
    """The value of a key; for that of NaN a NaN."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best(keys, numbers, AXIS: tl.constexpr):
    """The largest of the keys along an axis, and its number; the lowest number where keys are equal."""
    # The complement of a number falls as the number rises.
    packed = tl.max((keys.to(tl.int64) << 32) | (numbers ^ 0x7FFFFFFF).to(tl.int64), axis=AXIS)
    return (packed >> 32).to(tl.int32), (packed & 0x7FFFFFFF).to(tl.int32) ^ 0x7FFFFFFF


@triton.jit
def _sigmoid(x):
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit
def _log_sigmoid(x):
    return tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _shares(x):
    """Softmax of each row of `x` [tokens,slots]; -inf takes no part."""
    p = tl.exp(x - tl.max(x, axis=1)[:, None])
    return tl.div_rn(p, tl.sum(p, axis=1)[:, None] + tl.zeros_like(p))


@triton.jit
def weights_of(x, slot, K: tl.constexpr, SIGMOID: tl.constexpr, NORM: tl.constexpr):
    """Weights of the chosen experts' logits `x` [tokens,slots], where they depend on no other expert."""
    if NORM:
        if SIGMOID:
            x = _log_sigmoid(x)
        weights = _shares(tl.where(slot < K, x, float("-inf")))
    else:
        weights = _sigmoid(x)
    return weights


@triton.jit
def _keep_best_groups(
    keys, TOKENS: tl.constexpr, G: tl.constexpr, S: tl.constexpr, GP: tl.constexpr, SP: tl.constexpr, KEPT: tl.constexpr
):
    """Give -inf to the experts outside of the KEPT groups with the largest sum of their two best keys' values."""
    keys = tl.reshape(keys, (TOKENS, GP, SP))
    within = tl.arange(0, SP)[None, None, :]
    best, first = _best(keys, within, 2)
    score = _value_of(best)
    if S > 1:
        rest = tl.where(within == first[:, :, None], _NEVER, keys)
        score += _value_of(tl.max(rest, axis=2))
    group = tl.arange(0, GP)[None, :]
    group_keys = tl.where(group < G, _key_of(score), _NEVER)
    for _ in range(KEPT):
        _, chosen = _best(group_keys, group, 1)
        group_keys = tl.where(group == chosen[:, None], _NEVER, group_keys)
    dropped = (group_keys != _NEVER)[:, :, None] & (keys != _NEVER)
    return tl.reshape(tl.where(dropped, _MINUS_INF_KEY, keys), (TOKENS, GP * SP))


@triton.jit
def staticmoe_router_route(
    logits_ptr,
    logits_token,
    logits_expert,
    bias_ptr,
    bias_expert,
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
    GROUPS_KEPT: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORM: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Write ids [T,K] int32 and weights [T,K] fp32; where the mask [T] is false -1 and 0, whatever the logits hold.

    Grid: ceil(T / TOKENS) programs. Program i owns the tokens [i * TOKENS, (i + 1) * TOKENS), entire rows of logits
    [T,G*S]. KP, GP and SP are K, G and S up to a power of two. The bias [E] acts on the choice alone.
    Deterministic: a token's row is worked on by one program, in one order.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    real = inside
    if mask_ptr is not None:
        real = inside & (tl.load(mask_ptr + token.to(tl.int64) * mask_token, mask=inside, other=0) != 0)
    row_ptr = logits_ptr + token.to(tl.int64)[:, None] * logits_token

    column = tl.arange(0, GP * SP)
    exists = (column // SP < G) & (column % SP < S)
    expert = (column // SP * S + column % SP)[None, :]
    valid = real[:, None] & exists[None, :]
    # A masked row is one of zeros.
    row = tl.load(row_ptr + expert.to(tl.int64) * logits_expert, mask=valid, other=0.0).to(tl.float32)

    key_value = row
    needs_scores: tl.constexpr = bias_ptr is not None or G > 1
    if not SIGMOID and (needs_scores or not NORM):
        row = tl.where(exists[None, :], row, float("-inf"))
        largest = tl.max(row, axis=1)
        total = tl.sum(tl.exp(row - largest[:, None]), axis=1)
    if needs_scores:
        if SIGMOID:
            key_value = _sigmoid(row)
        else:
            key_value = tl.div_rn(tl.exp(row - largest[:, None]), total[:, None] + tl.zeros_like(row))
            # One NaN makes all scores of a row NaN: the logit still tells whose it is, and who has it must be chosen.
            key_value = tl.where(key_value != key_value, row, key_value)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert.to(tl.int64) * bias_expert, mask=exists[None, :], other=0.0)
        key_value += bias.to(tl.float32)
    keys = tl.where(exists[None, :], _key_of(key_value), _NEVER)
    if G > 1:
        keys = _keep_best_groups(keys, TOKENS, G, S, GP, SP, GROUPS_KEPT)

    slot = tl.arange(0, KP)[None, :]
    ids = tl.zeros([TOKENS, KP], tl.int32)
    for k in range(K):
        _, chosen = _best(keys, expert, 1)
        keys = tl.where(expert == chosen[:, None], _NEVER, keys)
        ids = tl.where(slot == k, chosen[:, None], ids)

    used = real[:, None] & (slot < K)
    x = tl.load(row_ptr + ids.to(tl.int64) * logits_expert, mask=used, other=0.0).to(tl.float32)
    if SIGMOID or NORM:
        weights = weights_of(x, slot, K, SIGMOID, NORM)
    else:
        weights = tl.div_rn(tl.exp(x - largest[:, None]), total[:, None] + tl.zeros_like(x))
    at = token.to(tl.int64)[:, None] * K + slot
    written = inside[:, None] & (slot < K)
    tl.store(ids_ptr + at, tl.where(real[:, None], ids, -1), mask=written)
    tl.store(weights_ptr + at, tl.where(real[:, None], weights * scale, 0.0), mask=written)


@triton.jit
def _scatter(slots, ids, experts, K: tl.constexpr, KP: tl.constexpr, zeros):
    """A row [tokens,experts] with the value of slot k at expert ids[:, k], and 0 elsewhere; id -1 goes nowhere."""
    slot = tl.arange(0, KP)[None, :]
    for k in range(K):
        # Sums with one term.
        to = tl.sum(tl.where(slot == k, ids, 0), axis=1)
        value = tl.sum(tl.where(slot == k, slots, 0.0), axis=1)
        zeros = tl.where(experts == to[:, None], value[:, None], zeros)
    return zeros


@triton.jit
def staticmoe_router_route_backward(
    grad_ptr,
    grad_token,
    grad_slot,
    logits_ptr,
    logits_token,
    logits_expert,
    ids_ptr,
    ids_token,
    ids_slot,
    out_ptr,
    scale,
    tokens,
    K: tl.constexpr,
    KP: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORM: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Write the gradient of the logits, out [T,E] in their dtype; exactly 0 for a token without experts (ids -1).

    Grid: ceil(T / TOKENS) programs. Program i owns the tokens [i * TOKENS, (i + 1) * TOKENS), entire rows of out. What
    grad [T,K] and logits [T,E] hold for a token without experts is not used. KP, EP: K, E up to a power of two.
    Deterministic: a token's row is worked on by one program, in one order.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    at = token.to(tl.int64)[:, None]
    slot = tl.arange(0, KP)[None, :]
    ids = tl.load(ids_ptr + at * ids_token + slot * ids_slot, mask=inside[:, None] & (slot < K), other=-1)
    routed = ids >= 0
    grad = tl.load(grad_ptr + at * grad_token + slot * grad_slot, mask=routed, other=0.0).to(tl.float32) * scale
    row_ptr = logits_ptr + at * logits_token
    x = tl.load(row_ptr + ids.to(tl.int64) * logits_expert, mask=routed, other=0.0).to(tl.float32)

    expert = tl.arange(0, EP)[None, :]
    any_routed = tl.max(ids, axis=1) >= 0
    full = tl.zeros([TOKENS, EP], tl.float32)
    if not SIGMOID and not NORM:
        valid = any_routed[:, None] & (expert < E)
        row = tl.load(row_ptr + expert.to(tl.int64) * logits_expert, mask=valid, other=0.0).to(tl.float32)
        row = tl.where(expert < E, row, float("-inf"))
        largest = tl.max(row, axis=1)[:, None]
        scores = tl.exp(row - largest)
        total = tl.sum(scores, axis=1)[:, None]
        chosen = tl.div_rn(tl.exp(x - largest), total + tl.zeros_like(x))
        inner = tl.sum(tl.where(routed, grad * chosen, 0.0), axis=1)[:, None]
        full = tl.div_rn(scores, total + full) * (_scatter(grad, ids, expert, K, KP, full) - inner)
    else:
        if NORM:
            shares = _shares(tl.where(routed, _log_sigmoid(x) if SIGMOID else x, float("-inf")))
            inner = tl.sum(tl.where(routed, grad * shares, 0.0), axis=1)[:, None]
            local = shares * (grad - inner)
        else:
            local = grad * _sigmoid(x)
        if SIGMOID:
            # Derivative of log sigmoid, and the second factor of that of sigmoid.
            local = local * _sigmoid(-x)
        full = _scatter(local, ids, expert, K, KP, full)
    full = tl.where(any_routed[:, None], full, 0.0)
    tl.store(out_ptr + at * E + expert, full.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (expert < E))


def tokens_and_warps(width: int, tokens: int) -> tuple[int, int]:
    """Tokens of a program whose rows are `width` wide, and its warps."""
    most = triton.next_power_of_2(max(tokens, 1))
    return max(1, min(most, _ELEMENTS // width)), 8 if width > 2 * _ELEMENTS else 4


def route(
    logits: Tensor,
    selection_bias: Tensor | None,
    token_mask: Tensor | None,
    weights_out: Tensor,
    ids_out: Tensor,
    *,
    top_k: int,
    score_function: str,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
    n_group: int = 1,
    topk_group: int = 1,
) -> None:
    """Launch the choice of experts; see `staticmoe.reference.route`.

    Shapes:
        logits [T,E] fp32, fp16 or bf16, any strides; selection_bias [E] any of these dtypes; token_mask [T] bool.
        Written, contiguous: weights_out [T,K] fp32, ids_out [T,K] int32.
    Graph-safe: yes, one launch.
    """
    tokens, num_experts = logits.shape
    if not tokens:
        return
    size = num_experts // n_group
    groups, padded = triton.next_power_of_2(n_group), triton.next_power_of_2(size)
    block, warps = tokens_and_warps(groups * padded, tokens)
    staticmoe_router_route[(triton.cdiv(tokens, block),)](
        logits,
        *logits.stride(),
        selection_bias,
        0 if selection_bias is None else selection_bias.stride(0),
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
        GROUPS_KEPT=topk_group,
        SIGMOID=score_function == "sigmoid",
        NORM=norm_topk_prob,
        TOKENS=block,
        num_warps=warps,
    )


def route_backward(
    grad_weights: Tensor,
    logits: Tensor,
    ids: Tensor,
    out: Tensor,
    *,
    score_function: str,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
) -> None:
    """Launch the gradient of the logits; see `staticmoe.reference.route_backward`.

    Shapes:
        grad_weights [T,K] any float; logits [T,E] fp32, fp16 or bf16; ids [T,K] int32; any strides. Written: out [T,E]
        in the dtype of the logits, contiguous.
    Graph-safe: yes, one launch.
    """
    tokens, num_experts = logits.shape
    if not tokens:
        return
    top_k = ids.shape[1]
    width = triton.next_power_of_2(num_experts)
    block, warps = tokens_and_warps(width, tokens)
    staticmoe_router_route_backward[(triton.cdiv(tokens, block),)](
        grad_weights,
        *grad_weights.stride(),
        logits,
        *logits.stride(),
        ids,
        *ids.stride(),
        out,
        float(routed_scaling_factor),
        tokens,
        K=top_k,
        KP=triton.next_power_of_2(top_k),
        E=num_experts,
        EP=width,
        SIGMOID=score_function == "sigmoid",
        NORM=norm_topk_prob,
        TOKENS=block,
        num_warps=warps,
    )
