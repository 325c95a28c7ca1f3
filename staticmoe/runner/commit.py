"""Two-phase step: what the forward writes into memory that outlives the step is undone where the step is vetoed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from staticmoe.capture.provenance import Mutation


class Shadow:
    """Copies of the memory that a forward and backward mutate, taken at the start, selected at the commit.

    Args:
        mutations: found by observing one forward and backward.
    """

    def __init__(self, mutations: Iterable[Mutation]) -> None:
        self.names = [mutation.name for mutation in mutations]
        self._pairs = [(mutation.raw, torch.zeros_like(mutation.raw)) for mutation in mutations]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Name -> tensor, for the book of origins."""
        return {f"shadow {number}": saved for number, (_, saved) in enumerate(self._pairs)}

    def save(self) -> None:
        """Copy the memory. Graph-safe."""
        for live, saved in self._pairs:
            saved.copy_(live)

    def select(self, veto: Tensor) -> None:
        """Put the saved bytes back where `veto` (0-dim) is not 0. Graph-safe."""
        for live, saved in self._pairs:
            live.copy_(torch.where(veto > 0, saved, live))


def restore(mutations: Iterable[Mutation]) -> None:
    """Undo observed writes at once, on the host's order."""
    for mutation in mutations:
        mutation.raw.copy_(mutation.before)
