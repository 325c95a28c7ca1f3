"""What makes the host wait is counted once and in its place; gaps are named by what the host did."""

from __future__ import annotations

import dataclasses

import pytest

from staticmoe.profiling.host import ITEM, find_gaps, host_waits, launch_times
from staticmoe.profiling.timeline import Copy, HostCall, Kernel, Range, Timeline
from staticmoe.profiling.window import find_window

PID, MAIN, SIDE = 77, 100, 102
STEPS = 4


def timeline(calls: list[HostCall], copies: list[Copy] | None = None, kernels: list[Kernel] | None = None) -> Timeline:
    """Four steps of 900 ns in 1000."""
    steps = [Range(1000 * number, 1000 * number + 900, PID, MAIN, "iteration", "staticmoe") for number in range(STEPS)]
    return Timeline(
        "x", "nsys", kernels or [Kernel(0, 3900, 0, 7, PID, 0, "gemm", "gemm")], copies or [], [], calls, steps
    )


def call(name: str, start: int, correlation: int = 0, tid: int = MAIN, ns: int = 10) -> HostCall:
    return HostCall(start, start + ns, PID, tid, correlation, name)


def copy(correlation: int, kind: str = "DtoH", pageable: bool = False) -> Copy:
    return Copy(1, 2, 0, 7, PID, correlation, kind, 4, pageable)


def waits(calls: list[HostCall], copies: list[Copy] | None = None) -> dict[tuple[str, str], tuple[float, float]]:
    made = timeline(calls, copies)
    return {(one.where, one.call): (one.count * STEPS, one.ns * STEPS) for one in host_waits(made, find_window(made))}


@pytest.mark.parametrize(
    "name",
    [
        "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize",
        "cuCtxSynchronize", "cuEventSynchronize", "cudaMemcpy", "cudaMemcpy2D", "cuMemcpyDtoH", "cudaMemcpyToSymbol",
    ],
)  # fmt: skip
def test_calls_that_wait(name: str) -> None:
    assert waits([call(name, 100), call(name, 200)]) == {("in step", name): (2, 20)}


@pytest.mark.parametrize(
    "name",
    [
        "cudaStreamWaitEvent",
        "cudaEventQuery",
        "cudaEventRecord",
        "cudaLaunchKernel",
        "cudaMemsetAsync",
        "cudaMemcpyAsync",
    ],
)
def test_calls_that_do_not_wait(name: str) -> None:
    assert waits([call(name, 100, 1)], [copy(1, "HtoD")]) == {}


def test_asynchronous_copies_wait_with_pageable_memory() -> None:
    calls = [call("cudaMemcpyAsync", 100, 1), call("cudaMemcpyAsync", 200, 2), call("cudaMemcpyAsync", 300, 3)]
    copies = [copy(1, "HtoD", pageable=True), copy(2, "HtoD"), copy(3, "DtoH", pageable=True)]
    assert waits(calls, copies) == {("in step", "cudaMemcpyAsync, pageable memory"): (2, 20)}


@pytest.mark.parametrize("pageable", [False, True])
def test_an_item_counts_once(pageable: bool) -> None:
    """The copy and the wait for it are one, also with a question between, and even where the copy alone would wait."""
    calls = [call("cudaMemcpyAsync", 100, 1), call("cudaStreamIsCapturing", 120), call("cudaStreamSynchronize", 140)]
    calls += [call("cudaMemcpyAsync", 1100, 2), call("cudaStreamSynchronize", 1140)]
    assert waits(calls, [copy(1, pageable=pageable), copy(2, pageable=pageable)]) == {("in step", ITEM): (2, 100)}


def test_what_is_no_item() -> None:
    """Work between copy and wait; a copy to the device; a second wait."""
    calls = [
        call("cudaMemcpyAsync", 100, 1), call("cudaLaunchKernel", 120), call("cudaStreamSynchronize", 140),
        call("cudaMemcpyAsync", 200, 2), call("cudaStreamSynchronize", 240),
        call("cudaMemcpyAsync", 300, 3), call("cudaStreamSynchronize", 340), call("cudaStreamSynchronize", 360),
    ]  # fmt: skip
    found = waits(calls, [copy(1), copy(2, "HtoD"), copy(3)])
    assert found == {("in step", "cudaStreamSynchronize"): (3, 30), ("in step", ITEM): (1, 50)}


def test_a_driver_call_inside_a_runtime_call_is_the_same_wait() -> None:
    calls = [call("cudaDeviceSynchronize", 100, ns=50), call("cuCtxSynchronize", 110)]
    assert waits(calls) == {("in step", "cudaDeviceSynchronize"): (1, 50)}


def test_where_a_wait_was() -> None:
    """Another thread, and the time between two steps, are told apart; what lies outside of the window is not there."""
    names = "cudaEventSynchronize"
    calls = [
        call(names, 100),
        call(names, 950),
        call(names, 300, tid=SIDE),
        call(names, 960, tid=SIDE),
        call(names, 5000),
    ]
    found = waits(calls)
    assert found == {("in step", names): (1, 10), ("between steps", names): (1, 10), ("side thread", names): (2, 20)}


def test_side_threads_do_not_join_an_item() -> None:
    calls = [call("cudaMemcpyAsync", 100, 1), call("cudaStreamSynchronize", 140, tid=SIDE)]
    assert waits(calls, [copy(1)]) == {("side thread", "cudaStreamSynchronize"): (1, 10)}


def test_launches_of_the_training_thread() -> None:
    calls = [call("cudaGraphLaunch", 1000 * number, ns=30) for number in range(STEPS)]
    calls += [call("cudaLaunchKernelExC", 100), call("cudaLaunchKernelExC", 200, tid=SIDE), call("cuLaunchKernel", 950)]
    calls.append(call("cudaGraphLaunch", 5000))
    made = timeline(calls)
    found = {one.call: (one.count, one.ns) for one in launch_times(made, find_window(made))}
    assert found == {"cudaGraphLaunch": (1, 30), "cudaLaunchKernelExC": (0.25, 2.5), "cuLaunchKernel": (0.25, 2.5)}


def test_gaps_by_what_the_host_did() -> None:
    """The call in the middle of a gap, else the range, else nothing of ours; gaps of 5 us and less are none."""
    us = 1000

    def work(start: int, end: int, correlation: int = 0) -> Kernel:
        return Kernel(start * us, end * us, 0, 7, PID, correlation, "gemm", "gemm")

    def span(name: str, start: int, end: int) -> Range:
        return Range(start * us, end * us, PID, MAIN, name, "staticmoe")

    kernels = [work(0, 10), work(20, 30), work(40, 50), work(55, 60), work(70, 80), work(90, 96, 5), work(106, 110, 5)]
    kernels += [work(130, 140), work(150, 200)]
    calls = [
        HostCall(12 * us, 18 * us, PID, MAIN, 1, "cudaEventSynchronize"),
        HostCall(34 * us, 36 * us, PID, SIDE, 2, "cudaMalloc"),
        HostCall(62 * us, 68 * us, PID, MAIN, 3, "cudaMalloc"),
        HostCall(88 * us, 104 * us, PID, MAIN, 5, "cudaGraphLaunch"),
    ]
    ranges = [span("iteration", 0, 111), span("stage inputs", 31, 39), span("iteration", 148, 200)]
    # Neither ranges of others nor those that name work of the device.
    ranges += [Range(70 * us, 90 * us, PID, MAIN, "theirs", ""), span("forward", 80, 90)]
    made = Timeline("x", "nsys", kernels, [], [], calls, ranges)
    gaps, kinds = find_gaps(made, find_window(made))
    by_start = {gap.start_ns // us: (gap.ns // us, gap.during) for gap in gaps}
    assert by_start == {
        10: (10, "waiting in cudaEventSynchronize"),
        30: (10, "host: stage inputs"),
        60: (10, "in cudaMalloc"),
        80: (10, "host in the step"),
        96: (10, "inside a replay"),
        110: (20, "host between steps"),
        140: (10, "host between steps"),
    }
    assert dataclasses.astuple(kinds[0]) == ("host between steps", 2, 30 * us, 20 * us)
    assert gaps[0].ns == 20 * us and sum(kind.count for kind in kinds) == 7
