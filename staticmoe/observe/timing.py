"""When the host called `step`, and what that says about speed. Wall clock alone: nothing here asks the device.

A step's span is the time from its call to the next call. Spans in which something else happened than training, such
as an evaluation or a checkpoint, are not timed.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

from staticmoe.observe.derive import StepWork

# Spans that percentiles are taken of, and those that means are.
_PERCENTILE_SPANS, _MEAN_SPANS = 200, 50


@dataclasses.dataclass(frozen=True)
class Span:
    """One step, seconds.

    Attributes:
        step: its number.
        seconds: from its call to the next.
        data_wait: from its return to the next call.
        host_wait: within the call, waiting for the oldest step in flight.
    """

    step: int
    seconds: float
    data_wait: float
    host_wait: float


class StepClock:
    """Watches the calls of `step`; `now` is a clock in seconds."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._running: int | None = None
        self._entered = self._left = self._waited = 0.0
        self._timed = False
        self._spans: list[Span] = []

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """The call for step `number`; one that raises has no span."""
        now = self._now()
        if self._running is not None and self._timed:
            self._spans.append(Span(self._running, now - self._entered, now - self._left, self._waited))
        self._running, self._entered, self._waited, self._timed = None, now, 0.0, True
        yield
        self._running, self._left = number, self._now()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Time spent waiting for the oldest step."""
        start = self._now()
        try:
            yield
        finally:
            self._waited += self._now() - start

    def interrupt(self) -> None:
        """Do not time the running span."""
        self._timed = False

    def take(self) -> list[Span]:
        """Return the spans that have ended since the last call."""
        spans, self._spans = self._spans, []
        return spans


class Speed:
    """The "time/" and "throughput/" metrics, from spans and from what the steps processed.

    A span and the work of its step arrive in either order. Tokens a second are those of the last steps that have both:
    the sum of their tokens over the sum of their spans, in which a step that committed nothing has no tokens.

    Args:
        peak_flops: of the device a second, dense bf16; None: not known, so no share of it either.
    """

    def __init__(self, peak_flops: float | None = None) -> None:
        self._peak = peak_flops
        self._spans: collections.deque[Span] = collections.deque(maxlen=_PERCENTILE_SPANS)
        self._unpaired: dict[int, float] = {}
        self._work: dict[int, StepWork] = {}
        self._paired: collections.deque[tuple[StepWork, float]] = collections.deque(maxlen=_MEAN_SPANS)

    def add_spans(self, spans: list[Span]) -> None:
        """Take spans that have ended."""
        for span in spans:
            self._spans.append(span)
            self._unpaired[span.step] = span.seconds
        self._pair()

    def add_work(self, step: int, work: StepWork) -> None:
        """Take what a step processed."""
        self._work[step] = work
        self._pair()

    def _pair(self) -> None:
        for step in sorted(self._work.keys() & self._unpaired.keys()):
            self._paired.append((self._work.pop(step), self._unpaired.pop(step)))
        # A step without a span, or a span without a record, never finds its other half.
        for waiting in (self._work, self._unpaired):
            while len(waiting) > _MEAN_SPANS:
                del waiting[next(iter(waiting))]

    def metrics(self) -> dict[str, float | None]:
        """The metrics now; None where there is nothing to tell them from."""
        seconds = sorted(span.seconds for span in self._spans)
        recent = list(self._spans)[-_MEAN_SPANS:]
        span = sum(seconds for _, seconds in self._paired)
        work = [work for work, _ in self._paired]
        tokens = _per_second([one.tokens for one in work], span)
        flops = _per_second([one.model_flops for one in work], span)
        executed = _per_second([one.executed_flops for one in work], span)
        return {
            "time/step_p50": _percentile(seconds, 50),
            "time/step_p99": _percentile(seconds, 99),
            "time/data_wait": sum(span.data_wait for span in recent) / len(recent) if recent else None,
            "time/host_wait": sum(span.host_wait for span in recent) / len(recent) if recent else None,
            "throughput/tokens_per_s": tokens,
            "throughput/mfu": None if flops is None or self._peak is None else flops / self._peak,
            "throughput/executed_tflops": None if executed is None else executed / 1e12,
        }


def _per_second(amounts: Sequence[float | None], seconds: float) -> float | None:
    known = [amount for amount in amounts if amount is not None]
    return sum(known) / seconds if known and len(known) == len(amounts) and seconds > 0 else None


def _percentile(ascending: list[float], percent: int) -> float | None:
    """The smallest value that at least `percent` percent of the values do not exceed."""
    if not ascending:
        return None
    return ascending[max(-(-percent * len(ascending) // 100), 1) - 1]
