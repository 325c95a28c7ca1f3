"""Attention without any mask, for batches in which nothing is padded and nothing is packed.

torch's attention takes its flash kernels without a mask alone. transformers leaves the mask out where it can, but finds
that out by reading positions on the host, which no capture can hold. Under an attention of a name for which it makes no
masks it does not ask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from staticmoe.errors import ConfigError
from staticmoe.integrations.huggingface.masks import sliding_window_of

ATTENTION_NAME = "staticmoe_causal"
_OTHERWISE = "keep attn_implementation='sdpa' and hand over ready_masks(...)"


def attend_causally(model: nn.Module) -> None:
    """Let the layers of a transformers model attend to every token so far, by torch's attention, without a mask.

    For full sequences: a forward that is given a 2-D mask with padding in it, or any mask while it trains, is refused.
    `model.set_attn_implementation("sdpa")` goes back.

    Raises:
        ConfigError: a model whose attention is not torch's or not causal, or that has layers of another kind, such as
            those that look back over a window only; on a forward, a mask.
    Graph-safe: yes.
    """
    config: Any = getattr(model, "config", None)
    attention = getattr(config, "_attn_implementation", None)
    if attention not in ("sdpa", ATTENTION_NAME):
        raise ConfigError(
            f"attend_causally: expected a transformers model with attn_implementation='sdpa', got {attention!r}; "
            "a model that knows no other attention takes ready_masks(...)"
        )
    kinds = set(getattr(config, "layer_types", None) or ())
    other = kinds - {"full_attention"}
    if other or (not kinds and sliding_window_of(config) is not None):
        raise ConfigError(
            "attend_causally: expected layers that attend to every token so far, got "
            f"{', '.join(sorted(other)) or f'sliding_window={sliding_window_of(config)}'}; {_OTHERWISE}"
        )
    bidirectional = [name for name, module in model.named_modules() if getattr(module, "is_causal", True) is False]
    if bidirectional:
        raise ConfigError(f"attend_causally: expected causal attention, got {bidirectional[0]!r} that is not")
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(ATTENTION_NAME, sdpa_attention_forward)
    model.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
    if not any(hook is _refuse_masks for hook in model._forward_pre_hooks.values()):
        model.register_forward_pre_hook(_refuse_masks, with_kwargs=True)


def _refuse_masks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A mask that nobody looks at would leave padding in."""
    # The second argument, by transformers' custom.
    mask: Tensor | None = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    if mask is None or module.config._attn_implementation != ATTENTION_NAME:  # type: ignore[union-attr]
        return
    if module.training or mask.dim() != 2:
        raise ConfigError(
            f"attention_mask: expected none after attend_causally, got {tuple(mask.shape)}; leave it out where nothing "
            f"is padded, or {_OTHERWISE}"
        )
    # `generate` hands over a mask of ones; outside of a capture it may be looked at.
    if not bool(torch.all(mask != 0)):
        raise ConfigError(f"attention_mask: expected no padding after attend_causally, got some; {_OTHERWISE}")
