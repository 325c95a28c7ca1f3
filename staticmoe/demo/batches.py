"""In which order `staticmoe train` reads its text: windows as a pure function of (seed, step).

An epoch visits every window of one alignment once, in an order drawn from (seed, epoch); the next epoch
shifts the alignment, so window borders move. Nothing but the step number has to be kept to resume.

Dimensions: N bytes of text, W windows of an epoch, B windows of a batch, S tokens of a window.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from staticmoe.errors import ConfigError

IGNORE_LABEL = -100
# Any fixed odd constant: it spreads (seed, epoch) over the generator's 64-bit seeds.
_EPOCH_STRIDE = 0x9E3779B97F4A7C15


@dataclasses.dataclass(frozen=True)
class WindowSampler:
    """Training batches of windows of S + 1 bytes: S tokens and, one byte later, their labels.

    Attributes:
        data: [N] uint8, CPU.
        batch_size: B.
        seq_len: S.
        seed: decides the order.
    """

    data: Tensor
    batch_size: int
    seq_len: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "seq_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1; got {getattr(self, name)}")
        if len(self.data) < self.seq_len + 1:
            raise ConfigError(
                f"seq_len: expected at most {len(self.data) - 1}, one less than the text's {len(self.data)} bytes; "
                f"got {self.seq_len}"
            )

    @property
    def windows_per_epoch(self) -> int:
        """W. The largest shift, S - 1 or as far as the text goes, still leaves room for all of them."""
        return max(1, (len(self.data) - self.seq_len) // self.seq_len)

    def batch(self, step: int) -> dict[str, Tensor]:
        """Return batch number `step`: the same tensors for the same (data, B, S, seed, step).

        Shapes:
            tokens, labels: [B, S] int64, CPU; labels are the tokens one byte later.
        """
        windows = self.windows_per_epoch
        first = step * self.batch_size
        starts: list[Tensor] = []
        for epoch in range(first // windows, (first + self.batch_size - 1) // windows + 1):
            begin = max(first - epoch * windows, 0)
            end = min(first + self.batch_size - epoch * windows, windows)
            starts.append(_epoch_starts(self.seed, epoch, windows, self.seq_len, len(self.data))[begin:end])
        return _gather(self.data, torch.cat(starts), self.seq_len)


def heldout_batches(data: Tensor, windows: int, batch_size: int, seq_len: int) -> list[dict[str, Tensor]]:
    """Return a fixed set of held-out windows, spread evenly and disjoint, as batches of one shape.

    Fewer windows come back where the text holds no more. The last batch is filled up with rows whose
    labels are all -100, so that shapes stay constant and the rows count for nothing.

    Shapes:
        data: [M] uint8, CPU; each batch: tokens, labels [B, S] int64.
    Raises:
        ConfigError: not one window fits.
    """
    fitting = (len(data) - 1) // seq_len
    if fitting < 1 or windows < 1:
        raise ConfigError(
            f"held-out windows: expected at least one of {seq_len} tokens; got {windows} asked for and "
            f"{len(data)} bytes of text. Give more text or a smaller seq_len"
        )
    count = min(windows, fitting)
    starts = torch.arange(count) * fitting // count * seq_len
    batches = []
    for chunk in starts.split(batch_size):
        batch = _gather(data, torch.cat([chunk, chunk[:1].expand(batch_size - len(chunk))]), seq_len)
        batch["labels"][len(chunk) :] = IGNORE_LABEL
        batches.append(batch)
    return batches


def valid_labels(batch: dict[str, Tensor]) -> int:
    """Return how many labels of a CPU batch count."""
    return int((batch["labels"] != IGNORE_LABEL).sum())


# A pure function, remembered: a batch needs the order of its epoch, at a border that of two.
@functools.lru_cache(maxsize=2)
def _epoch_starts(seed: int, epoch: int, windows: int, seq_len: int, size: int) -> Tensor:
    """Return the first byte of every window of `epoch`, in the order of reading: [W] int64."""
    mixed = ((seed + 1) * _EPOCH_STRIDE + epoch) % (1 << 63)
    generator = torch.Generator().manual_seed(mixed)
    # The last window starts at (W - 1) S + shift and reads S + 1 bytes, so any shift below size - W S fits.
    shifts = min(size - windows * seq_len, seq_len)
    shift = int(torch.randint(shifts, (1,), generator=generator))
    return torch.randperm(windows, generator=generator) * seq_len + shift


def _gather(data: Tensor, starts: Tensor, seq_len: int) -> dict[str, Tensor]:
    """Return the windows that begin at `starts`."""
    window = data[starts[:, None] + torch.arange(seq_len + 1)].long()
    return {"tokens": window[:, :-1].contiguous(), "labels": window[:, 1:].contiguous()}
