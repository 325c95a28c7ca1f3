"""Attention masks without a host read: transformers looks at a 2-D mask's values to see whether it needs one at all.

Under a capture it does not look, and builds what it would have left out in the warm-up: the graph then holds other
kernels than the warm-up ran. A ready 4-D mask is taken as it is, in both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

from staticmoe.errors import ConfigError

FLEX_NAME = "staticmoe_flex"
# Kinds of layers that transformers hands a mask of their own, and whether it looks back over the window alone.
_KINDS = {"full_attention": False, "sliding_attention": True}


def causal_mask(
    attention_mask: Tensor,
    *,
    sequence_ids: Tensor | None = None,
    sliding_window: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return which keys each query sees: real ones, not later than itself, in its sequence, within the window.

    In a float dtype the mask is what is added to the scores: torch's attention takes that, and so does the eager one. A
    bool mask is for attn_implementation="sdpa" alone: eager attention, GPT-OSS's own, would add it as zeros and ones.

    A token of padding sees itself alone, so that its row of scores is finite; nobody should look at its output. Layers
    of another kind (convolution, linear attention, state space: LFM2, MiniMax, Nemotron-H) take padding out by a 2-D
    mask alone: with this one pad on the right, where it comes after all that is real.

    Shapes:
        attention_mask [B,S], not 0 for real tokens, on either side; sequence_ids [B,S] integer, one number for the
        tokens of one packed sequence. Returns [B,1,S,S], queries before keys: 0 and the lowest value of `dtype`, or
        with torch.bool True where a query sees a key.
    Raises:
        ConfigError: shapes that differ, a window below 1, or an integer dtype.
    Graph-safe: yes.
    """
    refuse_shapes(attention_mask, sequence_ids, sliding_window)
    if dtype != torch.bool and not dtype.is_floating_point:
        raise ConfigError(f"dtype: expected a float dtype or torch.bool, got {dtype}")
    real = attention_mask != 0
    place = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    behind = place[:, None] - place[None, :]
    near = behind >= 0
    if sliding_window is not None:
        near = near & (behind < sliding_window)
    seen = near[None] & real[:, None, :] & real[:, :, None]
    if sequence_ids is not None:
        seen = seen & (sequence_ids[:, :, None] == sequence_ids[:, None, :])
    seen = (seen | (behind == 0)[None])[:, None]
    if dtype == torch.bool:
        return seen
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)


def refuse_shapes(attention_mask: Tensor, sequence_ids: Tensor | None, sliding_window: int | None) -> None:
    """Refuse what no mask can be made of.

    Raises:
        ConfigError: shapes that differ, or a window below 1.
    """
    if attention_mask.dim() != 2:
        raise ConfigError(f"attention_mask: expected [batch, tokens], got {tuple(attention_mask.shape)}")
    if sequence_ids is not None and sequence_ids.shape != attention_mask.shape:
        raise ConfigError(
            f"sequence_ids: expected {tuple(attention_mask.shape)} as attention_mask, got {tuple(sequence_ids.shape)}"
        )
    if sliding_window is not None and sliding_window < 1:
        raise ConfigError(f"sliding_window: expected at least 1, got {sliding_window}")


def block_mask(
    attention_mask: Tensor,
    *,
    sequence_ids: Tensor | None = None,
    sliding_window: int | None = None,
    block_size: int = 128,
) -> BlockMask:
    """Return `causal_mask` for flex attention: the blocks of keys that each block of queries looks at, and a rule.

    Made of the least and the greatest number in each block, of N² numbers for N blocks and none for S²; a block more
    than needed may be looked at where numbers go up and down in it. To be made anew from each batch, within what is
    captured.

    Shapes:
        As `causal_mask`; N = ceil(S / block_size).
    Raises:
        ConfigError: as `causal_mask`.
    Graph-safe: yes.
    """
    refuse_shapes(attention_mask, sequence_ids, sliding_window)
    length = attention_mask.shape[1]
    count = -(-length // block_size)
    places = torch.arange(count * block_size, device=attention_mask.device)
    behind = (0, count * block_size - length)
    real = functional.pad(attention_mask != 0, behind)
    numbers = real.long() if sequence_ids is None else functional.pad(sequence_ids.long(), behind)
    # Odd for what is real; each token of padding has an even number that it alone has.
    codes = torch.where(real, 2 * numbers + 1, -2 * places)
    window = len(places) if sliding_window is None else sliding_window

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < window) & (codes[batch, query] == codes[batch, key])

    def blocks(tokens: Tensor) -> Tensor:
        return tokens.view(-1, 1, count, block_size)

    least = blocks(codes.masked_fill(~real, torch.iinfo(torch.long).max)).amin(-1, keepdim=True)
    most = blocks(codes.masked_fill(~real, torch.iinfo(torch.long).min)).amax(-1, keepdim=True)
    filled = blocks(real).all(-1, keepdim=True) & (least == most)
    first = places[::block_size, None]
    last = first + block_size - 1
    # Padding sees itself, in the block that it lies in.
    meet = (least <= most.mT) & (least.mT <= most) | (first == first.mT)
    looked_at = meet & (first >= first.mT) & (first - last.mT < window)
    whole = filled & filled.mT & (least == least.mT) & (first > first.mT) & (last - first.mT < window)
    some, every = _ordered(looked_at & ~whole), _ordered(whole)
    return BlockMask.from_kv_blocks(*some, *every, BLOCK_SIZE=block_size, mask_mod=seen, seq_lengths=(length, length))


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries has, [B,1,N] int32, and which, those first: [B,1,N,N] int32."""
    order = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.int()


def sliding_window_of(config: Any) -> int | None:
    """Tokens that layers with a window look back over, themselves included; None where the config has no window."""
    window = getattr(config, "sliding_window", None)
    return window if getattr(config, "use_sliding_window", True) else None


def ready_masks(
    model: nn.Module, attention_mask: Tensor, *, sequence_ids: Tensor | None = None
) -> Tensor | BlockMask | dict[str, Tensor | BlockMask]:
    """Return what a transformers model takes as `attention_mask`: one mask, or one for each kind of its layers.

    The dtype is the model's, the window that of its config; after `attend_by_blocks` they are block masks.

    Shapes: as `causal_mask`.
    Raises:
        ConfigError: as `causal_mask`, or a kind of layer that has no such mask.
    Graph-safe: yes.
    """
    config: Any = model.config
    dtype, window = model.dtype, sliding_window_of(config)
    assert isinstance(dtype, torch.dtype), "transformers models have a dtype"

    def mask(sliding: bool) -> Tensor | BlockMask:
        near = window if sliding else None
        if config._attn_implementation in ("flex_attention", FLEX_NAME):
            return block_mask(attention_mask, sequence_ids=sequence_ids, sliding_window=near)
        return causal_mask(attention_mask, sequence_ids=sequence_ids, sliding_window=near, dtype=dtype)

    kinds = set(getattr(config, "layer_types", None) or ())
    if "sliding_attention" not in kinds:
        return mask(sliding=not kinds)
    if not kinds <= _KINDS.keys():
        unknown = ", ".join(sorted(kinds - _KINDS.keys()))
        raise ConfigError(
            f"layer_types: expected {' and '.join(_KINDS)}, got {unknown}; make a mask for each kind with causal_mask, "
            "and hand them over as a dict"
        )
    return {kind: mask(sliding) for kind, sliding in _KINDS.items()}
