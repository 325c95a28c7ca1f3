"""What a way of running iterations offers: the seam between the runner and emulation, CUDA graphs or neither."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from staticmoe.capture.recorder import Recorder
from staticmoe.capture.seeding import StepSeeds


class Graph(Protocol):
    """A captured iteration."""

    def replay(self) -> None:
        """Run the iteration once more, in stream order, without its Python."""

    def release(self) -> None:
        """Give up memory and whatever else the graph holds, whoever still holds the graph; it cannot run again."""

    @property
    def owned_bytes(self) -> int:
        """Bytes that the graph keeps between replays."""


class Upload(Protocol):
    """The way of one slot's host memory to the device, beside the work that is under way."""

    def wait_until_free(self) -> None:
        """Return when the host's memory may be written: earlier copies have read it."""

    def run(self, copies: Callable[[], None]) -> None:
        """Start `copies`, host to device; work that is launched from here on waits for them."""

    def mark_read(self) -> None:
        """Say that work launched so far reads the device's memory; the next `run` waits for that work."""


class Stream(Protocol):
    """An order of device work, seen from the host.

    Attributes:
        overtakes: whether a tensor that the user writes by hand changes before launched work runs, not after.
    """

    overtakes: bool

    def launch(self, work: Callable[[], None], copy_out: Callable[[], None] | None = None) -> int:
        """Put `work` behind all earlier work, and `copy_out` behind `work` alone; returns a ticket for both."""

    def upload(self) -> Upload | None:
        """A way from the host to the device; None where their memory is the same."""

    def is_done(self, ticket: int) -> bool:
        """Whether the work of `ticket` has finished. Never waits."""

    def wait(self, ticket: int, seconds: float | None = None) -> None:
        """Return when the work of `ticket` has finished; raises what it raised.

        Args:
            seconds: that a device may take; a host that does the work itself takes what it takes.

        Raises:
            TimeoutError: it took longer.
        """


class Capture(Protocol):
    """A backend.

    Attributes:
        name: "cuda", "emulate" or "off".
        seeds: of the steps' random numbers.
    """

    name: str
    seeds: StepSeeds

    @property
    def stream(self) -> Stream:
        """The order of the work that it launches."""

    def capture(self, iteration: Callable[[], None], recorder: Callable[..., Recorder]) -> Graph:
        """Capture one run of `iteration`; `recorder(tape)` makes the eye for it.

        Raises:
            CaptureError: with nothing left behind.
        """

    def pool_bytes(self) -> int:
        """Bytes that the memory of all its graphs holds. On a GPU it asks the allocator for all it knows: slow."""

    def prepare(self, parameters: Iterable[torch.Tensor]) -> None:
        """Make trained parameters ready for a capture; called before the iterations that precede it."""

    def warming_up(self) -> contextlib.AbstractContextManager[None]:
        """Context for iterations that run before a capture."""
