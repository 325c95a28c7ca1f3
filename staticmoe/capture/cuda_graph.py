"""Capture on a GPU: one `torch.cuda.CUDAGraph` for an iteration, all graphs of a runner in one memory pool."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator

import torch

from staticmoe.capture.interface import Graph, Upload
from staticmoe.capture.recorder import Recorder
from staticmoe.capture.seeding import StepSeeds
from staticmoe.errors import CaptureError

log = logging.getLogger(__name__)

# A step takes hundreds of microseconds at least; asking ten times as often costs nothing and waits little too long.
_POLL_SECONDS = 20e-6


@dataclasses.dataclass(frozen=True)
class _Streams:
    """Streams beside the user's: one to capture on, one for copies in each direction."""

    capture: torch.cuda.Stream
    up: torch.cuda.Stream
    down: torch.cuda.Stream


@functools.cache
def _streams(device: torch.device) -> _Streams:
    """One set for all runners of a device: cuBLAS keeps a workspace for each stream that has seen a product."""
    return _Streams(*(torch.cuda.Stream(device) for _ in range(3)))


class CudaUpload:
    """Copies on a stream of their own, so that the batch of a step travels while the step before it computes.

    Args:
        device: where the copies go.
        stream: that carries them.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        self._stream = stream
        self._arrived = torch.cuda.Event()
        self._read = torch.cuda.Event()
        # The device's memory may have been made, and filled, on the current stream a moment ago.
        self.mark_read()

    def wait_until_free(self) -> None:
        """Ask until the copies of the last `run` have arrived."""
        while not self._arrived.query():
            time.sleep(_POLL_SECONDS)

    def run(self, copies: Callable[[], None]) -> None:
        """Copy behind what still reads the device's memory, and let the current stream wait for it."""
        self._stream.wait_event(self._read)
        with torch.cuda.stream(self._stream):
            copies()
        self._arrived.record(self._stream)
        torch.cuda.current_stream(self._device).wait_event(self._arrived)

    def mark_read(self) -> None:
        """Remember where the current stream is."""
        self._read.record(torch.cuda.current_stream(self._device))


class CudaStream:
    """The user's current stream, seen through events. Waiting asks and sleeps; it calls no synchronizing function.

    Copies between host and device run beside it, each direction on a stream of its own.
    """

    overtakes = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        streams = _streams(device)
        self._up, self._down = streams.up, streams.down
        self._events: dict[int, torch.cuda.Event] = {}
        self._launched = 0

    def launch(self, work: Callable[[], None], copy_out: Callable[[], None] | None = None) -> int:
        """Enqueue `work` on the current stream, and `copy_out` on the stream of copies to the host behind it."""
        work()
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        if copy_out is not None:
            self._down.wait_event(event)
            with torch.cuda.stream(self._down):
                copy_out()
            event = torch.cuda.Event()
            event.record(self._down)
        self._launched += 1
        self._events[self._launched] = event
        return self._launched

    def upload(self) -> Upload | None:
        """A way for one slot; all of them share the stream of copies to the device."""
        return CudaUpload(self._device, self._up)

    def is_done(self, ticket: int) -> bool:
        """Whether the work of `ticket` has finished."""
        event = self._events.get(ticket)
        if event is None or event.query():
            self._events.pop(ticket, None)
            return True
        return False

    def wait(self, ticket: int, seconds: float | None = None) -> None:
        """Ask until the work of `ticket` has finished.

        Raises:
            TimeoutError: it has not, in so many seconds.
        """
        start = time.monotonic()
        while not self.is_done(ticket):
            if seconds is not None and time.monotonic() - start > seconds:
                raise TimeoutError(f"the device has not come to the end of work {ticket} in {seconds:g} s")
            time.sleep(_POLL_SECONDS)


class CudaGraph:
    """A captured iteration."""

    def __init__(self, graph: torch.cuda.CUDAGraph, owned_bytes: int) -> None:
        self._graph = graph
        self.owned_bytes = owned_bytes

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self._graph.replay()

    def release(self) -> None:
        """Destroy the graph: NCCL ends no communicator before the last graph that has captured it is gone."""
        self._graph.reset()


class CudaGraphCapture:
    """Captures iterations into graphs that share a pool and a capture stream.

    Args:
        device: the GPU.
    """

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._side = _streams(device).capture
        self.stream = CudaStream(device)
        self.seeds = StepSeeds(device)
        settings = (
            os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or "torch's defaults"
        )
        log.info("capturing on %s, allocator settings: %s", torch.cuda.get_device_name(device), settings)

    def prepare(self, parameters: Iterable[torch.Tensor]) -> None:
        """Give each parameter a new gradient accumulation node.

        A graph that the user keeps holds the old one, which remembers the default stream; a capture would have to
        wait for that stream, which is forbidden. Data of another type makes torch let go of the node.
        """
        for parameter in parameters:
            data = parameter.data
            other = torch.float64 if data.dtype != torch.float64 else torch.float32
            parameter.data = torch.empty(0, dtype=other, device=data.device)
            parameter.data = data

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        """Run on the stream that captures: what an iteration creates lazily remembers its stream."""
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            yield
        current.wait_stream(self._side)

    def capture(self, iteration: Callable[[], None], recorder: Callable[..., Recorder]) -> Graph:
        """Capture `iteration`. Other threads may allocate and copy meanwhile.

        Raises:
            CaptureError: an operation that a graph cannot hold; the device is usable afterwards.
        """
        gc.collect()
        torch.cuda.synchronize(self._device)
        before = self.pool_bytes()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"):
                iteration()
        except BaseException as error:
            self._forget()
            if isinstance(error, torch.OutOfMemoryError):
                raise
            if isinstance(error, torch.AcceleratorError) or "capture" in str(error).lower():
                raise CaptureError(
                    f"the GPU refused to capture the iteration: {error}; run with capture='off' and "
                    "torch.cuda.set_sync_debug_mode('error') to find the call"
                ) from error
            raise
        torch.cuda.synchronize(self._device)
        return CudaGraph(graph, self.pool_bytes() - before)

    def pool_bytes(self) -> int:
        """Bytes that the graphs' private pool holds."""
        segments = torch.cuda.memory_snapshot()
        return sum(one["total_size"] for one in segments if tuple(one["segment_pool_id"]) == tuple(self._pool))

    def _forget(self) -> None:
        """Leave nothing of a failed capture behind: its pool and its random state are given up."""
        failed, self._pool = self._pool, torch.cuda.graph_pool_handle()
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        try:
            # Where ending the capture failed, torch goes on allocating from its pool, and holds it for ever.
            torch._C._cuda_endAllocateToPool(index, failed)
        except RuntimeError:
            log.debug("the capture had been ended in order")
        else:
            torch._C._cuda_releasePool(index, failed)
        self.seeds.renew()
        gc.collect()
