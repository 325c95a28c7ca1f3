"""Numbers drawn on the host are laid at the line that draws, in whatever way it is reached; others' draws at none."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable

import numpy
import pytest
import torch

from staticmoe.capture.draws import HostDraws
from staticmoe.capture.findings import Finding, Findings
from staticmoe.capture.rules import refusal


def found(iteration: Callable[[], object], times: int = 2) -> list[Finding]:
    findings = Findings()
    draws = HostDraws(findings, {})
    for _ in range(times):
        with draws.watch():
            iteration()
    draws.report()
    return findings.items


def drawing() -> float:
    return random.random()


def through_a_call() -> float:
    one = drawing()
    return one


def behind_a_call() -> float:
    return abs(len(str(through_nothing()))) + random.random()


def through_nothing() -> int:
    return 1


def by_numpy() -> object:
    x = 1
    return numpy.random.permutation(4) + x


def in_the_library() -> object:
    return random.sample([1, 2, 3], 2)


@pytest.mark.parametrize(
    ("iteration", "code", "text"),
    [
        (drawing, "SM204", "return random.random()"),
        (through_a_call, "SM204", "return random.random()"),
        (behind_a_call, "SM204", "return abs(len(str(through_nothing()))) + random.random()"),
        (in_the_library, "SM204", "return random.sample([1, 2, 3], 2)"),
        (by_numpy, "SM205", "return numpy.random.permutation(4) + x"),
    ],
)
def test_the_line_is_the_one_that_draws(iteration: Callable[[], object], code: str, text: str) -> None:
    (finding,) = found(iteration)
    assert (finding.code, finding.severity, finding.source.text) == (code, "error", text)
    assert finding.source.file == __file__


def test_what_does_not_draw_or_draws_once_is_nothing() -> None:
    assert found(through_nothing) == [] and found(drawing, times=1) == []
    first = iter([drawing, through_nothing, through_nothing])
    assert found(lambda: next(first)(), times=3) == []


def test_draws_between_iterations_are_the_users_own() -> None:
    findings = Findings()
    draws = HostDraws(findings, {})
    for _ in range(3):
        with draws.watch():
            through_nothing()
        drawing()
    draws.report()
    assert findings.items == []


def test_another_line_each_time_is_what_another_thread_looks_like() -> None:
    """A loader that prefetches meanwhile must not keep a runner from being built."""
    places = iter([drawing, drawing, in_the_library])
    (finding,) = found(lambda: next(places)(), times=3)
    assert (finding.code, finding.severity) == ("SM204", "warning")


def test_a_thread_that_the_iteration_waits_for_draws_in_its_name() -> None:
    def elsewhere() -> None:
        thread = threading.Thread(target=random.random)
        thread.start()
        thread.join()

    (finding,) = found(elsewhere)
    assert finding.source.text in ("thread.start()", "thread.join()")


def test_under_a_debugger_there_is_a_warning_without_a_line() -> None:
    seen = []

    def tracer(frame: object, event: str, argument: object) -> None:
        seen.append(event)

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        findings = found(drawing)
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)
    assert seen and [(f.code, f.severity, f.source.line) for f in findings] == [("SM204", "warning", 0)]


@pytest.mark.parametrize(("device", "code"), [("cpu", "SM103"), (torch.device("cpu"), "SM103"), ("meta", None)])
def test_a_copy_to_the_host_is_a_read(device: object, code: str | None) -> None:
    """Told by its devices; a tensor without memory stands in for one on a GPU."""
    x = torch.empty(2, device="meta")
    refused = refusal(torch.ops.aten._to_copy.default, (x,), {"device": device}, lambda tensor: False)
    assert (refused.code if refused is not None else None) == code
