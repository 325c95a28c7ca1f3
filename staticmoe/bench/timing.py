"""What the benchmarks share: captured calls, their times, and the ceilings of the device.

Times are those of a device that has been busy for a while. One that comes from idle runs its first 50 ms or so at a
clock that its power limit does not let it keep (an H200 1980 MHz, and then 1450 to 1650, by what it computes): short
calls would be timed at the one and long calls at the other, and a ceiling at the first would belong to neither.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

WARMUP, REPLAYS = 3, 20
# Seconds of the call before it is timed, and seconds for which it is timed, if that takes more than REPLAYS calls.
SETTLE_S, TIMED_S = 0.3, 0.4
_MOST_REPLAYS = 2000


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


def replays_for(call_ms: float, timed_s: float) -> int:
    """How many calls of `call_ms` are timed."""
    return min(max(REPLAYS, math.ceil(timed_s * 1e3 / max(call_ms, 1e-3))), _MOST_REPLAYS)


def _batch(call: Callable[[], Any], count: int) -> list[float]:
    """Device times of `count` calls, one after the other."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for after in events[1:]:
        call()
        after.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in zip(events, events[1:], strict=False)]


def milliseconds(call: Callable[[], Any], *, settle_s: float = SETTLE_S, timed_s: float = TIMED_S) -> list[float]:
    """Device times of calls one after the other, sorted: for `timed_s`, or `REPLAYS`, after `settle_s` of them."""
    start = time.perf_counter()
    times = _batch(call, WARMUP)
    while time.perf_counter() - start < settle_s:
        times = _batch(call, replays_for(times[-1], settle_s / 10))
    return sorted(_batch(call, replays_for(statistics.median(times), timed_s)))


def spread(times: Sequence[float]) -> dict[str, Any]:
    """Median and range in ms."""
    return {"ms": statistics.median(times), "ms_range": [min(times), max(times)], "replays": len(times)}


def ceiling(device: torch.device, *, settle_s: float = SETTLE_S) -> float:
    """TFLOP/s of an 8192^3 bf16 product on random data; with a `settle_s` of 0, of a device that was idle."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    timed_s = TIMED_S if settle_s else 0.0
    times = milliseconds(lambda: torch.mm(a, b, out=out), settle_s=settle_s, timed_s=timed_s)
    return 2 * 8192**3 / statistics.median(times) / 1e9


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
