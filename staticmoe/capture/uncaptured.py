"""No capture: the iteration's Python at every step. What a capture is compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import torch

from staticmoe.capture.cuda_graph import CudaStream
from staticmoe.capture.interface import Graph, Stream, Upload
from staticmoe.capture.recorder import Recorder
from staticmoe.capture.seeding import StepSeeds


class ImmediateStream:
    """Work that runs as it is launched."""

    overtakes = False

    def __init__(self) -> None:
        self._done = 0

    def launch(self, work: Callable[[], None], copy_out: Callable[[], None] | None = None) -> int:
        """Run `work` and `copy_out` now."""
        work()
        if copy_out is not None:
            copy_out()
        self._done += 1
        return self._done

    def upload(self) -> Upload | None:
        """None: there is no other memory."""
        return None

    def is_done(self, ticket: int) -> bool:
        """Always true of a ticket that was given out."""
        return ticket <= self._done

    def wait(self, ticket: int, seconds: float | None = None) -> None:
        """Nothing is ever outstanding."""


class Uncaptured:
    """Runs the iteration's Python at every step."""

    name = "off"

    def __init__(self, device: torch.device) -> None:
        self.stream: Stream = CudaStream(device) if device.type == "cuda" else ImmediateStream()
        self.seeds = StepSeeds(device)

    def pool_bytes(self) -> int:
        """0: there is no pool that could grow."""
        return 0

    def prepare(self, parameters: Iterable[torch.Tensor]) -> None:
        """Nothing to prepare."""

    def warming_up(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to prepare."""
        return contextlib.nullcontext()

    def capture(self, iteration: Callable[[], None], recorder: Callable[..., Recorder]) -> Graph:
        """Return `iteration` itself as the graph."""
        return _PythonGraph(iteration)


class _PythonGraph:
    owned_bytes = 0

    def __init__(self, iteration: Callable[[], None]) -> None:
        self.replay = iteration

    def release(self) -> None:
        """Nothing is held."""
