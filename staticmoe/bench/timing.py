"""What the benchmarks share: captured calls, their times, and the ceilings of the device."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

WARMUP, REPLAYS = 3, 20


def poison(device: torch.device) -> None:
    """Leave NaN in the memory that the next allocations get."""
    held = [torch.full((size,), float("nan"), device=device) for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24)]
    del held


class Recorded:
    """A captured call and the tensors that a replay fills."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.results = call()
        self.replay: Callable[[], None] = self._graph.replay


def capture(call: Callable[[], Any]) -> Recorded:
    """Warm up on a side stream, then record."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    return Recorded(call)


def milliseconds(call: Callable[[], Any], count: int = REPLAYS) -> list[float]:
    """Device times of `count` calls after a warm-up, sorted."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for _ in range(WARMUP):
        call()
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events)


def spread(times: Sequence[float]) -> dict[str, Any]:
    """Median and range in ms."""
    return {"ms": statistics.median(times), "ms_range": [min(times), max(times)], "replays": len(times)}


def ceiling(device: torch.device) -> float:
    """TFLOP/s of an 8192^3 bf16 product on random data."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * 8192**3 / statistics.median(milliseconds(lambda: torch.mm(a, b, out=out))) / 1e9


def copy_rate(device: torch.device) -> float:
    """Bytes read and written by a copy of 2 GiB, in TB/s."""
    source = torch.ones(1 << 30, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * source.nbytes / statistics.median(milliseconds(lambda: target.copy_(source))) / 1e9


def clean(device: torch.device) -> None:
    """Give back what the last case held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
