"""Data order: a pure function of seed and step, every window once an epoch, held-out windows fixed and counted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from staticmoe.demo.batches import IGNORE_LABEL, WindowSampler, heldout_batches, valid_labels
from staticmoe.errors import ConfigError

# At every position its own number, so that a window tells where it began.
COUNTING = torch.arange(250, dtype=torch.uint8)


def starts(batch: dict[str, torch.Tensor]) -> list[int]:
    return batch["tokens"][:, 0].tolist()


def test_a_step_gives_the_same_batch_in_any_order_and_in_a_fresh_sampler() -> None:
    sampler = WindowSampler(COUNTING, batch_size=3, seq_len=7, seed=5)
    straight = [sampler.batch(step) for step in range(40)]
    fresh = WindowSampler(COUNTING.clone(), batch_size=3, seq_len=7, seed=5)
    for step in (39, 11, 12, 0, 25):
        again = fresh.batch(step)
        assert torch.equal(again["tokens"], straight[step]["tokens"])
        assert torch.equal(again["labels"], straight[step]["labels"])


def test_labels_are_the_tokens_one_byte_later() -> None:
    batch = WindowSampler(COUNTING, batch_size=5, seq_len=9).batch(3)
    assert batch["tokens"].shape == batch["labels"].shape == (5, 9)
    assert batch["tokens"].dtype == batch["labels"].dtype == torch.int64
    assert torch.equal(batch["labels"], batch["tokens"] + 1)


@settings(max_examples=60)
@given(size=st.integers(2, 250), seq_len=st.integers(1, 40), batch_size=st.integers(1, 9), seed=st.integers(0, 2**40))
def test_an_epoch_visits_disjoint_windows_once_and_stays_inside(
    size: int, seq_len: int, batch_size: int, seed: int
) -> None:
    assume(size > seq_len)
    sampler = WindowSampler(COUNTING[:size], batch_size, seq_len, seed)
    windows = sampler.windows_per_epoch
    assert windows == max(1, (size - seq_len) // seq_len)
    seen: list[int] = []
    while len(seen) < 3 * windows:
        batch = sampler.batch(len(seen) // batch_size)
        assert torch.equal(batch["labels"], batch["tokens"] + 1)
        seen += starts(batch)
    for epoch in range(3):
        order = sorted(seen[epoch * windows : (epoch + 1) * windows])
        shift = order[0]
        assert 0 <= shift < seq_len
        assert order == [shift + index * seq_len for index in range(windows)]


def test_seeds_and_epochs_give_different_orders() -> None:
    first = [starts(WindowSampler(COUNTING, 10, 5, seed).batch(0)) for seed in range(4)]
    assert len({tuple(order) for order in first}) == 4
    sampler = WindowSampler(COUNTING, 49, 5, seed=0)
    assert sampler.windows_per_epoch == 49
    assert starts(sampler.batch(0)) != starts(sampler.batch(1))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected at most 249.* got 250"):
        WindowSampler(COUNTING, 1, 250)
    with pytest.raises(ConfigError, match="batch_size: expected at least 1; got 0"):
        WindowSampler(COUNTING, 0, 5)


def test_heldout_windows_are_disjoint_spread_and_padded_with_labels_that_do_not_count() -> None:
    batches = heldout_batches(COUNTING, windows=10, batch_size=4, seq_len=12)
    assert [tuple(batch["tokens"].shape) for batch in batches] == [(4, 12)] * 3
    assert [valid_labels(batch) for batch in batches] == [48, 48, 24]
    assert bool((batches[2]["labels"][2:] == IGNORE_LABEL).all())
    begins = [start for batch in batches for start in starts(batch)][:10]
    assert begins == [index * 20 // 10 * 12 for index in range(10)]
    counted = [batch["labels"][batch["labels"] >= 0] for batch in batches]
    flat = torch.cat(counted).tolist()
    assert len(set(flat)) == len(flat) == 120


def test_no_more_heldout_windows_than_there_are() -> None:
    batches = heldout_batches(COUNTING, windows=1000, batch_size=8, seq_len=50)
    assert sum(valid_labels(batch) for batch in batches) == 4 * 50
    with pytest.raises(ConfigError, match="250 bytes"):
        heldout_batches(COUNTING, windows=4, batch_size=8, seq_len=250)
