"""Flex attention under a capture: block masks made from each batch, and transformers' own compiled attention.

What observes an iteration has a stand-in for it (`staticmoe.capture.attention`), notes that it is compiled, and has it
compiled in a warm-up before the capture. On a CPU, where it has no backward, the same attention runs as plain
operations.

Letters: B rows, S tokens of each, D channels of a head.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_mask

from staticmoe.errors import ConfigError
from staticmoe.integrations.huggingface.attention import switch
from staticmoe.integrations.huggingface.masks import FLEX_NAME


def attend_by_blocks(model: nn.Module) -> None:
    """Let a transformers model attend by flex attention and nothing but block masks, which `ready_masks` then makes.

    For padded and packed batches of models with windows, soft caps or sinks, such as GPT-OSS; one without has
    `attend_within_sequences`. `model.set_attn_implementation("flex_attention")` goes back.

    Raises:
        ConfigError: a model with another attention; on a forward, a mask that is no block mask, or none.
        ModelError: a family that does not ask transformers for its attention.
    Graph-safe: yes.
    """
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if attention not in ("flex_attention", FLEX_NAME):
        raise ConfigError(
            "attend_by_blocks: expected a transformers model with attn_implementation='flex_attention', got "
            f"{attention!r}"
        )
    switch(model, FLEX_NAME, block_attention)


def block_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the attention's output, as transformers calls for it.

    Shapes:
        query [B,heads,S,D]; key, value [B,heads of keys,S,D]; s_aux [heads], the sinks. Returns [B,S,heads,D], and
        where it ran compiled the log of the sums.
    Raises:
        ConfigError: see `attend_by_blocks`; dropout of scores, or a bias added to them.
    Graph-safe: yes.
    """
    if not isinstance(attention_mask, BlockMask):
        raise ConfigError(
            f"{type(module).__name__}: expected a block mask after attend_by_blocks, got "
            f"{type(attention_mask).__name__}: hand over ready_masks(...), or go back by "
            "set_attn_implementation('flex_attention'), for generate as well"
        )
    bias = kwargs.get("position_bias")
    if dropout or bias is not None:
        got = f"dropout={dropout}" if dropout else "position_bias"
        raise ConfigError(f"{type(module).__name__}: expected scores that flex attention takes, got {got}")
    if query.is_cuda:
        from transformers.integrations.flex_attention import flex_attention_forward

        return cast(
            tuple[Tensor, Tensor],
            flex_attention_forward(
                module, query, key, value, attention_mask, scaling=scaling, softcap=softcap, s_aux=s_aux
            ),
        )
    return _plainly(query, key, value, attention_mask, scaling, softcap, s_aux), None


def _plainly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: BlockMask,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The same as plain operations, over all keys."""
    group = query.shape[1] // key.shape[1]
    key, value = (one[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for one in (key, value))
    scores = (query @ key.mT).float() * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    batch, heads = blocks.kv_num_blocks.shape[:2]
    seen = create_mask(blocks.mask_mod, batch, heads, *blocks.seq_lengths, device=query.device)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    shares = scores.softmax(-1)[..., : key.shape[2]]
    return (shares.to(value.dtype) @ value).transpose(1, 2).contiguous()
