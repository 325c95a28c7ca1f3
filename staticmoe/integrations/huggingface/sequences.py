"""Where sequences begin in a batch of constant size: rows with padding, and several sequences in one row.

Offsets are those of flash attention's `cu_seqlens`: N+1 numbers, N constant, the last of them repeated where a step has
fewer sequences. Every token lies between two of them, padding too: a kernel leaves what lies between none unwritten.

Letters: B rows, S tokens of each, T = B·S tokens of all rows one after the other, N sequences and pieces of padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from staticmoe.errors import BatchError, ConfigError

# As transformers' losses have it: a label that counts nowhere.
_IGNORED = -100
_OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k")
_LENGTHS = ("max_length_q", "max_length_k")


def pad_packed(
    batch: Mapping[str, Any], *, tokens: int, max_sequences: int, max_length: int | None = None, pad_token_id: int = 0
) -> dict[str, Tensor]:
    """Bring a packed batch to a constant size, on the host, and say which of its tokens are real.

    For what transformers' `DataCollatorWithFlattening(return_flash_attn_kwargs=True)` returns. Its `max_length_*` go:
    what a kernel is launched with is a constant, the `max_length` of `attend_within_sequences`.

    Args:
        batch: `cu_seq_lens_q`, and what goes with the t tokens.
        tokens: T, of each batch.
        max_sequences: most of them in a batch.
        max_length: most tokens of a sequence, and of a piece of padding; None: T.
    Shapes:
        cu_seq_lens_q [n+1] int, from 0 to t; the others [1,t]. Returns them [1,T], behind what is real labels with
        -100, seq_idx with -1 and the rest with 0; `attention_mask` [1,T] int64; `cu_seq_lens_q` and `cu_seq_lens_k`
        [N+1] int32, N = max_sequences + ceil(T / max_length).
    Raises:
        BatchError: offsets that do not go up from 0 to t, more than max_sequences of them, one that is longer than
            max_length, more than T tokens, tensors of another shape or on a GPU.
        ConfigError: a size below 1, or a max_length above T.
    Graph-safe: no, it reads values; what it returns is.
    """
    longest = tokens if max_length is None else max_length
    for name, size in (("tokens", tokens), ("max_sequences", max_sequences)):
        if size < 1:
            raise ConfigError(f"{name}: expected 1 or more, got {size}")
    if not 1 <= longest <= tokens:
        raise ConfigError(f"max_length: expected 1 to tokens={tokens}, got {longest}")
    if _OFFSETS[0] not in batch:
        raise BatchError(
            f"pad_packed: expected {_OFFSETS[0]}, got {', '.join(batch)}: use "
            "DataCollatorWithFlattening(return_flash_attn_kwargs=True)"
        )
    texts = {key: torch.as_tensor(value) for key, value in batch.items() if key not in (*_OFFSETS, *_LENGTHS)}
    real = _length_of(texts, tokens)
    offsets = _checked(batch[_OFFSETS[0]], real, max_sequences, longest)
    behind = [*range(real + longest, tokens, longest), *([tokens] if real < tokens else [])]
    count = max_sequences + -(-tokens // longest)
    bounds = torch.tensor([*offsets, *behind, *[tokens] * (count + 1 - len(offsets) - len(behind))], dtype=torch.int32)
    fill = {"labels": _IGNORED, "input_ids": pad_token_id, "seq_idx": -1}
    padded = {
        key: torch.nn.functional.pad(text, (0, tokens - real), value=fill.get(key, 0)) for key, text in texts.items()
    }
    mask = (torch.arange(tokens) < real).long()[None]
    return {**padded, "attention_mask": mask, **{name: bounds.clone() for name in _OFFSETS}}


def _length_of(texts: Mapping[str, Tensor], tokens: int) -> int:
    """Tokens of a packed batch, once all of it agrees and fits."""
    shapes = {key: (tuple(text.shape), text.device.type) for key, text in texts.items()}
    if "input_ids" not in texts or any(
        text.dim() != 2 or text.shape != (1, texts["input_ids"].shape[1]) or text.device.type != "cpu"
        for text in texts.values()
    ):
        got = ", ".join(f"{key} {shape} on {device}" for key, (shape, device) in shapes.items()) or "none"
        raise BatchError(f"pad_packed: expected input_ids [1,t] on the host, and all else like it, got {got}")
    real = texts["input_ids"].shape[1]
    if real > tokens:
        raise BatchError(f"input_ids: expected at most tokens={tokens}, got {real}: pack fewer sequences into a batch")
    return real


def _checked(given: Any, real: int, max_sequences: int, longest: int) -> list[int]:
    """The offsets of a packed batch as they are, once they can be."""
    offsets: list[int] = torch.as_tensor(given).tolist()
    lengths = [after - before for before, after in zip(offsets, offsets[1:], strict=False)]
    if not lengths or offsets[0] != 0 or offsets[-1] != real or min(lengths) < 0:
        raise BatchError(f"{_OFFSETS[0]}: expected offsets that go up from 0 to {real}, got {offsets}")
    if len(lengths) > max_sequences:
        raise BatchError(
            f"{_OFFSETS[0]}: expected at most max_sequences={max_sequences}, got {len(lengths)}: pack fewer, or "
            "declare more"
        )
    if max(lengths) > longest:
        raise BatchError(
            f"{_OFFSETS[0]}: expected sequences of at most max_length={longest}, got {max(lengths)}: cut it, or "
            "declare more"
        )
    return offsets


def safe_offsets(given: Tensor, tokens: int, max_length: int) -> tuple[Tensor, Tensor]:
    """Return offsets that no kernel can be led astray by, and whether they are others than those given.

    Shapes:
        given [N+1] int32. Returns [N+1] int32 that go up from 0 to `tokens`, and a bool scalar: True also where a
        sequence is longer than max_length.
    Graph-safe: yes.
    """
    safe = torch.cummax(given.clamp(0, tokens), 0).values
    safe[:1].fill_(0)
    safe[-1:].fill_(tokens)
    return safe, (safe != given).any() | (safe.diff() > max_length).any()


def offsets_of(
    attention_mask: Tensor | None, position_ids: Tensor | None, rows: Tensor, *, max_sequences: int, max_length: int
) -> tuple[Tensor, Tensor]:
    """Return the offsets that a 2-D mask and positions tell, as transformers reads them, and whether they cannot.

    A sequence begins with a row, behind padding, and where positions do not go on. What they cannot tell: more
    sequences than max_sequences, one longer than max_length, and padding within a sequence.

    Shapes:
        attention_mask [B,S], not 0 for real tokens, or None; position_ids [B,S] or [1,S] integer, or None; rows [B,S],
        for its shape and device. Returns [N+1] int32 and a bool scalar, N = 2·max_sequences + the places where padding
        is cut: at each row and at each multiple of max_length.
    Graph-safe: yes.
    """
    length, tokens = rows.shape[1], rows.numel()
    place = torch.arange(tokens, device=rows.device)
    real = torch.ones_like(place, dtype=torch.bool) if attention_mask is None else attention_mask.reshape(-1) != 0
    at_row = place % length == 0
    begins = real & (at_row | ~real.roll(1))
    # Whether a real token of its row came before.
    late = real.view(rows.shape).long().cumsum(1).reshape(-1) > 1
    if position_ids is None:
        torn, restarts = begins & late, torch.zeros_like(real)
    else:
        places = position_ids.expand(rows.shape).reshape(-1)
        torn = begins & late & (places != 0)
        restarts = real & ~begins & (places != places.roll(1) + 1)
    cut = ~real & (at_row | real.roll(1) | (place % max_length == 0))
    order = (begins | restarts | cut).cumsum(0)
    cuts = len({*range(0, tokens, length), *range(0, tokens, max_length)})
    wanted = torch.arange(1, 2 * max_sequences + cuts + 2, device=rows.device)
    # The first token at which so many have begun; T where none has.
    offsets = torch.searchsorted(order, wanted, out_int32=True)
    safe, wrong = safe_offsets(offsets, tokens, max_length)
    return safe, wrong | torn.any()


def sequence_of(offsets: Tensor, tokens: int) -> Tensor:
    """Return the number of each token's sequence, [T] int64, from offsets [N+1] that go up from 0 to T."""
    return torch.searchsorted(offsets, torch.arange(tokens, device=offsets.device, dtype=offsets.dtype), right=True)
