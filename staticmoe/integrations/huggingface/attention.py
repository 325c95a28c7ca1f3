"""Attention without any mask, for batches in which nothing is padded and nothing is packed.

torch's attention takes its flash kernels without a mask alone. transformers leaves the mask out where it can, but finds
that out by reading positions on the host, which no capture can hold. Under an attention of a name for which it makes no
masks it does not ask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from staticmoe.errors import ConfigError, ModelError
from staticmoe.integrations.huggingface.masks import sliding_window_of

ATTENTION_NAME = "staticmoe_causal"
# Each may follow on the other.
_OURS = (ATTENTION_NAME, "staticmoe_varlen")
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
    require_plain(model, "attend_causally")
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    switch(model, ATTENTION_NAME, sdpa_attention_forward)
    decoder = decoder_of(model)
    if not any(hook is _refuse_masks for hook in decoder._forward_pre_hooks.values()):
        decoder.register_forward_pre_hook(_refuse_masks, with_kwargs=True)


def require_plain(model: nn.Module, caller: str) -> None:
    """Refuse a model whose layers do not all attend to every token so far, by torch's attention or that of ours.

    Raises:
        ConfigError: see `attend_causally`.
    """
    config: Any = getattr(model, "config", None)
    attention = getattr(config, "_attn_implementation", None)
    if attention not in ("sdpa", *_OURS):
        raise ConfigError(
            f"{caller}: expected a transformers model with attn_implementation='sdpa', got {attention!r}; "
            "a model that knows no other attention takes ready_masks(...)"
        )
    kinds = set(getattr(config, "layer_types", None) or ())
    other = kinds - {"full_attention"}
    if other or (not kinds and sliding_window_of(config) is not None):
        raise ConfigError(
            f"{caller}: expected layers that attend to every token so far, got "
            f"{', '.join(sorted(other)) or f'sliding_window={sliding_window_of(config)}'}; {_OTHERWISE}"
        )
    bidirectional = [name for name, module in model.named_modules() if getattr(module, "is_causal", True) is False]
    if bidirectional:
        raise ConfigError(f"{caller}: expected causal attention, got {bidirectional[0]!r} that is not")


def switch(model: nn.Module, name: str, function: Callable[..., Any]) -> None:
    """Register `function` with transformers, and let `model` call it.

    Raises:
        ModelError: a family that does not ask transformers for its attention.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(name, function)
    model.set_attn_implementation(name)  # type: ignore[operator]
    if model.config._attn_implementation != name:  # type: ignore[union-attr]
        raise ModelError(
            f"{type(model).__name__}: expected a family that asks transformers for its attention, got one whose "
            f"attention stays {model.config._attn_implementation!r}; {_OTHERWISE}"  # type: ignore[union-attr]
        )


def decoder_of(model: nn.Module) -> nn.Module:
    """Return the part of a model that hands its layers their masks. Adapters call it, and go past what is around it."""
    return cast(nn.Module, model.get_decoder())  # type: ignore[operator]


def _refuse_masks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A mask that nobody looks at would leave padding in."""
    # The second argument, by transformers' custom.
    mask: Tensor | None = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    if mask is None or module.config._attn_implementation != ATTENTION_NAME:  # type: ignore[union-attr]
        return
    if module.training or mask.dim() != 2:
        raise ConfigError(
            f"attention_mask: expected none after attend_causally, got {tuple(mask.shape)}; leave it out where nothing "
            f"is padded, use attend_within_sequences(model), or {_OTHERWISE}"
        )
    refuse_padding(mask, "attend_causally", _OTHERWISE)


def refuse_padding(mask: Tensor | None, caller: str, otherwise: str) -> None:
    """Look at a mask's values, which a capture could not: `generate` hands over masks of ones.

    Raises:
        ConfigError: some of them are 0.
    """
    if mask is not None and not bool(torch.all(mask != 0)):
        raise ConfigError(f"attention_mask: expected no padding after {caller}, got some; {otherwise}")
