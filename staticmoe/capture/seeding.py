"""Random numbers of a step: one draw of the user's generator seeds them all.

Replays run late, while the user's loop draws from the same generator. So a step takes one number from torch's
default CPU generator when it is called, and its random operations follow from that number alone: the order of
replays and user draws does not matter, a rerun repeats its numbers, seeding torch reproduces a run, and a
checkpoint needs no other generator's state.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

# Threads share the default generators and torch's functions about them: iterations of two runners in one process take
# turns.
ONE_AT_A_TIME = threading.RLock()


class StepSeeds:
    """Seeds of the steps on one device.

    On a GPU the iteration draws from a state of its own, put into the device's default generator while it runs:
    graphs are registered with that state alone, and a capture that fails cannot spoil the user's.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            index = device.index if device.index is not None else torch.cuda.current_device()
            self._generator = torch.cuda.default_generators[index]
            self.renew()
        else:
            self._generator = torch.default_generator

    def renew(self) -> None:
        """Start with a new state, after a failed capture; graphs that know the old one must not be replayed again."""
        if self._on_gpu:
            self._own = self._generator.clone_state()

    def draw(self) -> int:
        """Draw the seed of one step, on the host, without a wait."""
        return int(torch.randint(2**62, (), dtype=torch.int64))

    @contextlib.contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """The device's default generator seeded with `seed`, and afterwards as it was.

        Graph-safe: a CUDA graph takes seed and offset when it is launched.
        """
        with ONE_AT_A_TIME:
            yield from self._swapped(seed)

    def _swapped(self, seed: int) -> Iterator[None]:
        generator = self._generator
        if self._on_gpu:
            shared = generator.graphsafe_get_state()
            generator.graphsafe_set_state(self._own)
        else:
            state = generator.get_state()
        generator.manual_seed(seed)
        try:
            yield
        finally:
            if self._on_gpu:
                generator.graphsafe_set_state(shared)
            else:
                generator.set_state(state)
