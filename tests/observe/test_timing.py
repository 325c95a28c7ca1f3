"""Speed from the host's clock: which spans are timed, which are not, and what is made of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from staticmoe.observe.derive import StepWork
from staticmoe.observe.timing import Span, Speed, StepClock

NOTHING = {
    "time/step_p50": None,
    "time/step_p99": None,
    "time/data_wait": None,
    "time/host_wait": None,
    "throughput/tokens_per_s": None,
    "throughput/mfu": None,
    "throughput/executed_tflops": None,
}


class Time:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    @contextlib.contextmanager
    def passing(self, seconds: float) -> Iterator[None]:
        yield
        self.now += seconds


def step(
    clock: StepClock, time: Time, number: int, *, wait: float = 0.25, work: float = 0.75, data: float = 0.5
) -> None:
    with clock.step(number):
        with clock.waiting():
            time.now += wait
        time.now += work
    time.now += data


def test_a_span_reaches_from_call_to_call() -> None:
    time = Time()
    clock = StepClock(time)
    for number in (1, 2, 3):
        step(clock, time, number, data=0.5 * number)
    # The last has not ended.
    assert clock.take() == [Span(1, 1.5, 0.5, 0.25), Span(2, 2.0, 1.0, 0.25)]
    assert clock.take() == []
    step(clock, time, 4)
    assert clock.take() == [Span(3, 2.5, 1.5, 0.25)]


def test_an_interrupted_span_is_not_timed_and_the_next_one_is() -> None:
    """Between two steps, as by an evaluation, and within one, as by a capture."""
    time = Time()
    clock = StepClock(time)
    step(clock, time, 1)
    clock.interrupt()
    time.now += 1000
    step(clock, time, 2)
    with clock.step(3):
        clock.interrupt()
        time.now += 1000
    step(clock, time, 4)
    step(clock, time, 5)
    assert [span.step for span in clock.take()] == [2, 4]


def test_a_call_that_raises_is_no_step() -> None:
    time = Time()
    clock = StepClock(time)
    step(clock, time, 1)
    with pytest.raises(ValueError, match="bad batch"), clock.step(2):
        raise ValueError("bad batch")
    time.now += 1000
    step(clock, time, 2)
    step(clock, time, 3)
    assert [(span.step, span.seconds) for span in clock.take()] == [(1, 1.5), (2, 1.5)]


def test_a_wait_that_raises_is_counted() -> None:
    time = Time()
    clock = StepClock(time)
    with clock.step(1), contextlib.suppress(ValueError), clock.waiting():
        time.now += 3
        raise ValueError
    step(clock, time, 2)
    assert clock.take() == [Span(1, 3.0, 0.0, 3.0)]


def test_without_anything_nothing_is_told() -> None:
    assert Speed().metrics() == NOTHING
    speed = Speed(1e12)
    speed.add_work(1, StepWork(10, 1.0, 1.0))
    assert speed.metrics() == NOTHING


def test_percentiles_are_of_the_last_200_and_means_of_the_last_50() -> None:
    speed = Speed()
    # 1000 s each; none of the first hundred is among the last 200.
    speed.add_spans([Span(n, 1000.0, 1000.0, 1000.0) for n in range(100)])
    speed.add_spans([Span(100 + n, float(n + 1), float(n), 2.0 * n) for n in range(200)])
    found = speed.metrics()
    assert (found["time/step_p50"], found["time/step_p99"]) == (100.0, 198.0)
    assert (found["time/data_wait"], found["time/host_wait"]) == (
        sum(range(150, 200)) / 50,
        2 * sum(range(150, 200)) / 50,
    )
    short = Speed()
    short.add_spans([Span(1, 3.0, 0.0, 0.0)])
    assert short.metrics()["time/step_p50"] == short.metrics()["time/step_p99"] == 3.0


@pytest.mark.parametrize("records_first", [True, False])
def test_throughput_is_tokens_over_time_of_the_same_steps(records_first: bool) -> None:
    """Step 2 has no span, step 4 no record: neither its tokens nor its time count."""
    speed = Speed(peak_flops=500.0)
    spans = [Span(1, 1.0, 0.0, 0.0), Span(3, 3.0, 0.0, 0.0), Span(4, 50.0, 0.0, 0.0)]
    works = {1: StepWork(100, 400.0, 2e12), 2: StepWork(999, 1e9, 1e9), 3: StepWork(300, 600.0, 6e12)}
    if not records_first:
        speed.add_spans(spans)
    for number, work in works.items():
        speed.add_work(number, work)
    if records_first:
        speed.add_spans(spans)
    found = speed.metrics()
    assert found["throughput/tokens_per_s"] == 100.0
    assert found["throughput/mfu"] == 1000.0 / 4 / 500 and found["throughput/executed_tflops"] == 2.0


def test_a_step_that_committed_nothing_takes_time_and_has_no_tokens() -> None:
    speed = Speed(peak_flops=1.0)
    speed.add_work(1, StepWork(100, 10.0, 1e12))
    speed.add_work(2, StepWork(0, 0.0, 1e12))
    speed.add_spans([Span(1, 1.0, 0.0, 0.0), Span(2, 1.0, 0.0, 0.0)])
    found = speed.metrics()
    assert [found[f"throughput/{name}"] for name in ("tokens_per_s", "mfu", "executed_tflops")] == [50.0, 5.0, 1.0]


def test_what_is_not_known_is_null_and_tokens_are_told_all_the_same() -> None:
    unknown_peak, unknown_weights = Speed(), Speed(1e15)
    unknown_peak.add_work(1, StepWork(100, 10.0, 1e12))
    unknown_weights.add_work(1, StepWork(100, None, None))
    for speed in (unknown_peak, unknown_weights):
        speed.add_spans([Span(1, 2.0, 0.0, 0.0)])
        assert speed.metrics()["throughput/tokens_per_s"] == 50.0 and speed.metrics()["throughput/mfu"] is None
    assert unknown_peak.metrics()["throughput/executed_tflops"] == 0.5
    assert unknown_weights.metrics()["throughput/executed_tflops"] is None


def test_only_the_last_fifty_steps_count_and_halves_are_not_kept_for_ever() -> None:
    speed = Speed()
    for number in range(10_000):
        speed.add_work(number, StepWork(1 if number < 9_950 else 7, None, None))
        speed.add_spans([Span(number, 1.0, 0.0, 0.0), Span(-number - 1, 1.0, 0.0, 0.0)])
    assert speed.metrics()["throughput/tokens_per_s"] == 7.0
    assert len(speed._unpaired) <= 50 and len(speed._work) == 0
