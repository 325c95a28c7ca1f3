"""What a way of running iterations offers: the seam between the runner and emulation, CUDA graphs or neither."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

from staticmoe.capture.recorder import Recorder


class Graph(Protocol):
    """A captured iteration."""

    def replay(self) -> None:
        """Run the iteration once more, in stream order, without its Python."""

    @property
    def owned_bytes(self) -> int:
        """Bytes that the graph keeps between replays."""


class Stream(Protocol):
    """An order of device work, seen from the host."""

    def launch(self, work: Callable[[], None]) -> int:
        """Put `work` behind all earlier work; returns its ticket."""

    def is_done(self, ticket: int) -> bool:
        """Whether the work of `ticket` has finished. Never waits."""

    def wait(self, ticket: int) -> None:
        """Return when the work of `ticket` has finished; raises what it raised."""


class Capture(Protocol):
    """A backend.

    Attributes:
        name: "cuda", "emulate" or "off".
    """

    name: str

    @property
    def stream(self) -> Stream:
        """The order of the work that it launches."""

    def capture(self, iteration: Callable[[], None], recorder: Callable[..., Recorder]) -> Graph:
        """Capture one run of `iteration`; `recorder(tape)` makes the eye for it.

        Raises:
            CaptureError: with nothing left behind.
        """

    def draw_seed(self) -> int:
        """Draw the random seed of one step from the user's generator, on the host, when `step` is called."""

    def seeded(self, seed: int) -> contextlib.AbstractContextManager[None]:
        """Context in which random numbers follow from `seed`; the user's generator is afterwards as before."""
