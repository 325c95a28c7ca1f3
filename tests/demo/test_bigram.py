"""The yardstick: equal to a loop over the text, a proper distribution, fitted well and without the held-out part."""

from __future__ import annotations

import math

import pytest
import torch

from staticmoe.demo.bigram import ALPHA_GRID, BACKOFF_GRID, fit_bigram
from staticmoe.demo.text import load_plays, synthetic_corpus


def as_bytes(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def loop_bits(train: list[int], text: list[int], backoff: float, alpha: float) -> float:
    """The definition, one byte at a time."""
    total = 0.0
    seconds = train[1:]
    for a, b in zip(text[:-1], text[1:], strict=True):
        unigram = (seconds.count(b) + alpha) / (len(seconds) + 256 * alpha)
        both = sum(1 for x, y in zip(train[:-1], train[1:], strict=True) if (x, y) == (a, b))
        probability = (both + backoff * unigram) / (train[:-1].count(a) + backoff)
        total -= math.log2(probability)
    return total / (len(text) - 1)


TRAIN = "the cat sat on the mat; the dog sat on the log, and that was that. " * 2
HELDOUT = "the hat sat on a \xe9 cog"


def test_bits_equal_a_loop_over_the_text() -> None:
    train, text = as_bytes(TRAIN), as_bytes(HELDOUT)
    model = fit_bigram(train)
    expected = loop_bits(train.tolist(), text.tolist(), model.backoff, model.alpha)
    assert math.isclose(model.bits_per_byte(text[:-1], text[1:]), expected, rel_tol=1e-12)


def test_backoff_and_alpha_are_the_best_on_the_last_tenth_of_the_training_text() -> None:
    train = as_bytes(TRAIN)
    cut = len(train) - len(train) // 10
    first, last = train[:cut].tolist(), train[cut - 1 :].tolist()
    scores = {(b, a): loop_bits(first, last, b, a) for a in ALPHA_GRID for b in BACKOFF_GRID}
    model = fit_bigram(train)
    assert scores[model.backoff, model.alpha] == pytest.approx(min(scores.values()), rel=1e-12)


def test_every_row_is_a_distribution() -> None:
    table = fit_bigram(as_bytes(TRAIN)).log2_probability
    assert table.shape == (256, 256) and bool(torch.isfinite(table).all())
    torch.testing.assert_close(table.exp2().sum(dim=1), torch.ones(256, dtype=torch.float64), rtol=0, atol=1e-12)


def test_it_reaches_the_entropy_of_a_source_that_is_a_bigram() -> None:
    corpus = synthetic_corpus(seed=0, size=400_000)
    weights = [1 / rank for rank in range(1, 65)]
    entropy = -sum(w / sum(weights) * math.log2(w / sum(weights)) for w in weights)
    bits = fit_bigram(corpus.train).bits_per_byte(corpus.heldout[:-1], corpus.heldout[1:])
    assert entropy - 0.02 < bits < entropy + 0.02


def test_the_grids_hold_the_optimum_for_real_text_inside() -> None:
    corpus = load_plays()
    model = fit_bigram(corpus.train)
    assert min(BACKOFF_GRID) < model.backoff < max(BACKOFF_GRID)
    assert model.bits_per_byte(corpus.heldout[:-1], corpus.heldout[1:]) == pytest.approx(3.589, abs=1e-3)


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 bytes .* got 1"):
        fit_bigram(as_bytes("x"))
    with pytest.raises(ValueError, match="one shape"):
        fit_bigram(as_bytes("xy")).bits_per_byte(as_bytes("xy"), as_bytes("x"))
