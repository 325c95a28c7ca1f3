"""The yardstick of `staticmoe train`: what a bigram model needs for the same held-out bytes.

A fair one: bigram counts back off to smoothed unigram counts, and both strengths are fitted on the last
part of the training text, never on the held-out one.

Dimensions: N bytes of training text, M scored pairs, V = 256 byte values.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from staticmoe.demo.text import VOCAB_SIZE

# Pseudo-counts to choose from: how much the unigram weighs in a bigram row, and each byte in the unigram.
BACKOFF_GRID = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
ALPHA_GRID = (1e-3, 1e-2, 0.1, 1.0)
_FIT_SHARE = 0.1


@dataclasses.dataclass(frozen=True)
class BigramModel:
    """A bigram that backs off to a smoothed unigram.

    P(b | a) = (count(a, b) + backoff * P(b)) / (count(a) + backoff), P(b) = (count(b) + alpha) / (N - 1 + V * alpha).
    Counts are of pairs: count(a) of a as a first byte, count(b) of b as a second one.

    Attributes:
        log2_probability: [V, V] fp64, log2 P(b | a) at [a, b].
        backoff: pseudo-counts of the unigram in every row, above 0.
        alpha: pseudo-count of every byte in the unigram, above 0.
    """

    log2_probability: Tensor
    backoff: float
    alpha: float

    def bits_per_byte(self, context: Tensor, target: Tensor) -> float:
        """Return the mean of -log2 P(target | context), in bits.

        Shapes:
            context, target: equal shapes of M elements, integer, CPU, values below V.
        Raises:
            ValueError: the shapes differ, or there is nothing to score.
        """
        if context.shape != target.shape or context.numel() == 0:
            raise ValueError(
                f"expected context and target of one shape with at least one element; got {tuple(context.shape)} "
                f"and {tuple(target.shape)}. Pass text[:-1] and text[1:]"
            )
        return -self.log2_probability[context.long(), target.long()].mean().item()


def fit_bigram(train: Tensor) -> BigramModel:
    """Count the training text; choose backoff and alpha on its last tenth from counts of the first nine, then recount.

    Shapes:
        train: [N] uint8, CPU, N >= 2.
    Raises:
        ValueError: fewer than two bytes.
    """
    if len(train) < 2:
        raise ValueError(f"a bigram needs at least 2 bytes of training text; got {len(train)}")
    cut = len(train) - max(1, int(len(train) * _FIT_SHARE))
    first, last = _pair_counts(train[:cut]), _pair_counts(train[cut - 1 :])
    best, best_bits = (BACKOFF_GRID[0], ALPHA_GRID[0]), math.inf
    for alpha in ALPHA_GRID:
        for backoff in BACKOFF_GRID:
            bits = -(last * _log2_probability(first, backoff, alpha)).sum().item()
            if bits < best_bits:
                best, best_bits = (backoff, alpha), bits
    backoff, alpha = best
    table = _log2_probability(_pair_counts(train), backoff, alpha)
    return BigramModel(log2_probability=table, backoff=backoff, alpha=alpha)


def _pair_counts(text: Tensor) -> Tensor:
    """Return how often b follows a at [a, b]: [V, V] fp64."""
    symbols = text.long()
    pairs = torch.bincount(symbols[:-1] * VOCAB_SIZE + symbols[1:], minlength=VOCAB_SIZE**2)
    return pairs.view(VOCAB_SIZE, VOCAB_SIZE).double()


def _log2_probability(pairs: Tensor, backoff: float, alpha: float) -> Tensor:
    """Return log2 P(b | a) at [a, b] for pair counts [V, V]: [V, V] fp64."""
    unigram = (pairs.sum(dim=0) + alpha) / (pairs.sum() + VOCAB_SIZE * alpha)
    return ((pairs + backoff * unigram) / (pairs.sum(dim=1, keepdim=True) + backoff)).log2()
