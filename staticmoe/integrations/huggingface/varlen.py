"""Attention within sequences, by flash kernels that take offsets in place of a mask: padded and packed batches.

On a GPU torch's `varlen_attn` runs, which is part of torch and takes bf16 and fp16. On a CPU, where there is no such
kernel, torch's attention runs with the mask that the offsets mean, in any dtype.

Letters: B rows, S tokens of each, T = B·S, N sequences, D channels of a head.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from staticmoe.errors import ConfigError, ModelError
from staticmoe.integrations.huggingface.attention import decoder_of, refuse_padding, require_plain, switch
from staticmoe.integrations.huggingface.sequences import offsets_of, safe_offsets, sequence_of

VARLEN_NAME = "staticmoe_varlen"
_OTHERWISE = "use attn_implementation='sdpa' and hand over ready_masks(...)"
# What some families hand to their attention that changes scores, and that is not done here.
_SCORES = ("softcap", "s_aux", "position_bias")
_CACHES = ("cache", "past_key_values")
_KERNEL_DTYPES, _WIDEST = (torch.bfloat16, torch.float16), 256
# Newer versions of torch want it said that keys have fewer heads; older ones take them so.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def attend_within_sequences(
    model: nn.Module, *, max_sequences: int | None = None, max_length: int | None = None
) -> None:
    """Let each token of a transformers model attend to those of its sequence so far, padding aside, without a mask.

    A forward takes what transformers takes, and the loss function stays as it was: a 2-D `attention_mask` for padding
    on either side, `position_ids` that start anew with each packed sequence, or offsets in `cu_seq_lens_q`
    (`pad_packed`), which then say all. Called again, set the sizes; `model.set_attn_implementation("sdpa")` goes back.

    Offsets on the device cannot be refused on the host. Those that lead outside of the batch are mended, so that no
    kernel reads there, and the output is then NaN, as it is for more sequences than max_sequences, one longer than
    max_length, and padding within a sequence: a runner vetoes such a step and counts it as not finite. `pad_packed`
    refuses them on the host.

    Args:
        max_sequences: most sequences in a batch whose offsets are not given; None: one in each row. Each place for one,
            taken or not, costs the backward scratch for 128 more tokens.
        max_length: most tokens of a sequence, a constant that kernels are launched with: the closer, the fewer blocks
            of theirs find nothing to do. None: a row, or with offsets given all of the batch.
    Raises:
        ConfigError: sizes below 1; a model whose attention is not torch's or not causal, or with layers of another
            kind, such as those with a window; on a forward a ready mask, dropout of scores, attention with sinks, a
            soft cap or a bias, a dtype that the kernels lack.
        ModelError: a family that does not ask transformers for its attention, or hands it no offsets.
    Graph-safe: yes.
    """
    for name, size in (("max_sequences", max_sequences), ("max_length", max_length)):
        if size is not None and size < 1:
            raise ConfigError(f"{name}: expected 1 or more, got {size}")
    require_plain(model, "attend_within_sequences")
    switch(model, VARLEN_NAME, varlen_attention)
    decoder = decoder_of(model)
    offsets = next((hook for hook in decoder._forward_pre_hooks.values() if isinstance(hook, _Offsets)), None)
    if offsets is None:
        offsets = _Offsets()
        decoder.register_forward_pre_hook(offsets, with_kwargs=True)
        decoder.register_forward_hook(offsets.judge)
    offsets.max_sequences, offsets.max_length = max_sequences, max_length


class _Offsets:
    """Hands a decoder's layers the offsets of each batch, and makes its output NaN where there are none.

    Attributes:
        max_sequences, max_length: see `attend_within_sequences`.
        wrong: whether the forward that runs has such a batch, bool scalar; None between forwards.
    """

    def __init__(self) -> None:
        self.max_sequences: int | None = None
        self.max_length: int | None = None
        self.wrong: Tensor | None = None

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Add what transformers' flash attention takes to the keywords of a forward."""
        self.wrong = None
        if module.config._attn_implementation != VARLEN_NAME:  # type: ignore[union-attr]
            return None
        given = {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **kwargs}
        mask, tokens = given.get("attention_mask"), given.get("input_ids")
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
            got = tuple(mask.shape) if hasattr(mask, "shape") else type(mask).__name__
            raise ConfigError(
                f"attention_mask: expected [batch, tokens] after attend_within_sequences, got {got}; {_OTHERWISE}"
            )
        rows = tokens if tokens is not None else given["inputs_embeds"][..., 0]
        if any(given.get(name) is not None and int(given[name].get_seq_length()) > 0 for name in _CACHES):
            refuse_padding(mask, "attend_within_sequences over a cache", _OTHERWISE)
            return None
        offsets, longest = self._of(given, rows)
        lengths = {"max_length_q": longest, "max_length_k": longest}
        return args, {**kwargs, "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, **lengths}

    def _of(self, given: dict[str, Any], rows: Tensor) -> tuple[Tensor, int]:
        """The offsets of a batch, and the most tokens of a sequence."""
        offsets = given.get("cu_seq_lens_q")
        if offsets is not None:
            if offsets.dim() != 1 or offsets.dtype != torch.int32 or offsets.numel() < 2:
                raise ConfigError(
                    f"cu_seq_lens_q: expected [sequences + 1] int32, got {tuple(offsets.shape)} {offsets.dtype}: see "
                    "pad_packed"
                )
            longest = min(self.max_length or rows.numel(), rows.numel())
            safe, self.wrong = safe_offsets(offsets, rows.numel(), longest)
            return safe, longest
        longest = min(self.max_length or rows.shape[1], rows.shape[1])
        safe, self.wrong = offsets_of(
            given.get("attention_mask"), given.get("position_ids"), rows,
            max_sequences=self.max_sequences or rows.shape[0], max_length=longest,
        )  # fmt: skip
        return safe, longest

    def judge(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Make the output NaN where the offsets were wrong: what a step commits is decided on the device."""
        wrong, self.wrong = self.wrong, None
        if wrong is None:
            return None
        hidden = output[0]
        hidden = hidden + torch.where(wrong, torch.nan, 0.0).to(hidden.dtype)
        if isinstance(output, tuple):
            return (hidden, *output[1:])
        output[next(iter(output))] = hidden
        return output


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention's output, as transformers calls for it.

    Shapes:
        query [B,heads,S,D]; key, value [B,heads of keys,S,D or another width]; cu_seq_lens_q [N+1] int32 from 0 to T.
        Returns [B,S,heads,width of value].
    Raises:
        ConfigError, ModelError: as `attend_within_sequences`.
    Graph-safe: yes.
    """
    for name, value_ in (("attention_mask", attention_mask), ("dropout", dropout or None), *kwargs.items()):
        if value_ is not None and name in ("attention_mask", "dropout", "sliding_window", *_SCORES):
            got = tuple(value_.shape) if isinstance(value_, Tensor) else value_
            raise ConfigError(
                f"{type(module).__name__}: expected attention without {name} after attend_within_sequences, got {got}; "
                f"{_OTHERWISE}"
            )
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise ConfigError(f"{type(module).__name__}: expected causal attention, got is_causal=False; {_OTHERWISE}")
    if cu_seq_lens_q is None or max_length_q is None:
        return _without_offsets(module, query, key, value, scaling)
    if key.shape[2] != query.shape[2]:
        raise ConfigError(
            f"{type(module).__name__}: expected as many keys as queries, got {key.shape[2]} and {query.shape[2]}: a "
            f"cache of constant size is not served; {_OTHERWISE}"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attend = _by_kernel if query.is_cuda else _by_mask
    out = attend(*_one_dtype(query, key, value), cu_seq_lens_q, max_length_q, scale)
    return out.view(query.shape[0], query.shape[2], *out.shape[1:]), None


def _without_offsets(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
) -> tuple[Tensor, None]:
    """One new token over a cache, which sees all of it; anything else should have come with offsets."""
    if query.shape[2] != 1 or key.shape[2] == 1:
        raise ModelError(
            f"{type(module).__name__}: expected cu_seq_lens_q from the model's forward, got none: this family does not "
            f"hand its attention what its forward is given, or the forward goes past the decoder; {_OTHERWISE}"
        )
    grouped = query.shape[1] != key.shape[1]
    out = functional.scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2), None


def _one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What torch's attention does under autocast, where positions are added in fp32."""
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        return query.to(dtype), key.to(dtype), value.to(dtype)
    return query, key, value


def _in_line(heads: Tensor) -> Tensor:
    """[B,heads,S,D] as [T,heads,D]: a view where the projection's output was one."""
    return heads.transpose(1, 2).reshape(-1, heads.shape[1], heads.shape[3])


def _by_kernel(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, scale: float) -> Tensor:
    """Flash attention, [T,heads,width of value]. Heads are widened with zeros to what it takes."""
    if query.dtype not in _KERNEL_DTYPES or not query.dtype == key.dtype == value.dtype:
        raise ConfigError(
            f"attend_within_sequences: expected bf16 or fp16 on a GPU, the same in queries, keys and values, got "
            f"{query.dtype}, {key.dtype} and {value.dtype}: cast the model, use autocast, or {_OTHERWISE}"
        )
    wide = -(-max(query.shape[-1], value.shape[-1]) // 8) * 8
    if wide > _WIDEST:
        raise ConfigError(f"attend_within_sequences: expected heads of at most {_WIDEST}, got {wide}; {_OTHERWISE}")
    q, k, v = (functional.pad(_in_line(one), (0, wide - one.shape[-1])) for one in (query, key, value))
    out = varlen_attn(q, k, v, offsets, offsets, longest, longest, scale=scale, window_size=(-1, 0), **_GROUPED)
    return cast(Tensor, out)[..., : value.shape[-1]]


def _by_mask(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, scale: float) -> Tensor:
    """The same by the mask that the offsets mean, over all of the batch."""
    q, k, v = (_in_line(one).transpose(0, 1)[None] for one in (query, key, value))
    tokens = q.shape[2]
    number, place = sequence_of(offsets, tokens), torch.arange(tokens, device=query.device)
    seen = (number[:, None] == number[None, :]) & (place[:, None] >= place[None, :])
    grouped = query.shape[1] != key.shape[1]
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=grouped)
    return out[0].transpose(0, 1)
