"""Texts of a random chain, padded and packed: what the scripts beside this file train on.

Dimensions: B sequences, S tokens of each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from staticmoe.integrations import huggingface

SYMBOLS, SUCCESSORS = 256, 4


def texts(symbols: int, shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    """Texts [batches,B,S] int64 in which each symbol has four successors, all of them as likely."""
    count, rows, tokens = shape
    successor = torch.randint(symbols, (symbols, SUCCESSORS), generator=generator)
    choices = torch.randint(SUCCESSORS, (tokens, count, rows), generator=generator)
    chain = [torch.randint(symbols, (count, rows), generator=generator)]
    for choice in choices[1:]:
        chain.append(successor[chain[-1], choice])
    return torch.stack(chain, -1)


def padded(text: Tensor, lengths: Sequence[int]) -> dict[str, Tensor]:
    """Rows [B,S] that end after so many tokens, and the mask that says so."""
    real = torch.arange(text.shape[1]) < torch.tensor(lengths)[:, None]
    return {
        "input_ids": torch.where(real, text, 0),
        "labels": torch.where(real, text, -100),
        "attention_mask": real.long(),
    }


def packed(text: Tensor, lengths: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
    """One row [1,B·S] of sequences of these lengths, in an order drawn anew, by `pad_packed`."""
    order = [lengths[place] for place in torch.randperm(len(lengths), generator=generator).tolist()]
    row = text.reshape(1, -1)[:, : sum(order)]
    places = torch.cat([torch.arange(length) for length in order])[None]
    offsets = [0, *torch.tensor(order).cumsum(0).tolist()]
    batch = {"input_ids": row, "labels": torch.where(places == 0, -100, row), "position_ids": places}
    return huggingface.pad_packed(
        {**batch, "cu_seq_lens_q": offsets},
        tokens=text.numel(), max_sequences=len(lengths), max_length=text.shape[1],
    )  # fmt: skip
