"""A run with known answers in numbers: idle share, gaps, phases, copies, launches, kernels, and what limits them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from staticmoe.profiling.errors import ProfileError
from staticmoe.profiling.intervals import clip, length, overlap, union
from staticmoe.profiling.metrics import Shapes, analyse, analyse_processes, median, read_shapes
from staticmoe.profiling.nsys import read_nsys
from staticmoe.profiling.result import Gap, GapKind, from_json, is_analysis, write_file
from staticmoe.profiling.timeline import Copy, GraphLaunch, HostCall, Kernel, Range, Timeline
from staticmoe.profiling.window import find_window, quartile_distance

PID, MAIN = 77, 100
Build = Callable[..., Any]


def step(start: int, end: int, name: str = "iteration", tid: int = MAIN) -> Range:
    return Range(start, end, PID, tid, name, "staticmoe")


def kernel(start: int, end: int, correlation: int = 1, name: str = "gemm", stream: int = 7, device: int = 0) -> Kernel:
    return Kernel(start, end, device, stream, PID, correlation, name, name)


def call(start: int, correlation: int, name: str = "cudaGraphLaunch") -> HostCall:
    return HostCall(start, start + 10, PID, MAIN, correlation, name)


def test_a_whole_run(age: str, golden: Build, tmp_path: Path) -> None:
    """Four iterations of 700 us of work in 1000 us; the fifth one, which captures, counts in nothing."""
    found = analyse(read_nsys(golden(age).write(tmp_path / "x")))
    assert (found.tool, found.level, found.pid, found.iterations) == ("nsys", "node", PID, 4)
    assert found.window == "4 iterations, 1 with a capture or cut off left out"
    assert (found.window_ns, found.iteration_ns, found.iteration_spread_ns) == (3_900_000, 1_000_000, 0)
    (device,) = found.devices
    assert (device.device, device.busy_ns) == (0, 2_800_000)
    assert device.idle_share == pytest.approx(1100 / 3900)
    assert found.gap_kinds == (
        GapKind("host between steps", 3, 600_000, 200_000),
        GapKind("inside a replay", 4, 400_000, 100_000),
        GapKind("host in the step", 1, 50_000, 50_000),
        GapKind("in cudaGraphLaunch", 1, 50_000, 50_000),
    )
    assert found.gaps[0] == Gap(0, 850_000, 200_000, "host between steps")
    assert sum(gap.ns for gap in found.gaps) == 1_100_000 and len(found.gaps) == 9
    assert [(one.call, one.count, one.ns) for one in found.launches] == [("cudaGraphLaunch", 1, 20_000)]
    assert found.waits == () and found.waits_in_step == 0 and found.copies == () and found.notes == ()


def test_phases_of_a_whole_run(age: str, golden: Build, tmp_path: Path) -> None:
    found = analyse(read_nsys(golden(age).write(tmp_path / "x")))
    phases = {one.phase: one for one in found.phases}
    assert found.phases[0].phase == "optimizer" and phases["optimizer"].ns == 200_000
    # Two streams ran at once for half of the time.
    down = phases["down"]
    assert (down.kernels, down.ns, down.union_ns, down.spread_ns) == (2, 100_000, 75_000, 0)
    assert down.share == pytest.approx(100 / 750)
    assert {name for name, one in phases.items() if one.ns == 50_000} == {
        "up", "attention", "loss", "dense", "dact", "dense backward", "attention backward", "clip", "unattributed",
    }  # fmt: skip
    assert found.unattributed_share == pytest.approx(50 / 750)
    assert found.rules == pytest.approx(
        {"lineage": 350 / 750, "none": 50 / 750, "pattern": 250 / 750, "prefix": 100 / 750}
    )
    assert sum(one.share for one in found.phases) == pytest.approx(1)
    gemm = {one.phase: one for one in found.kernels if one.name == "gemm_x"}
    assert {phase: (one.count, one.ns, one.mean_ns) for phase, one in gemm.items()} == {
        phase: (4, 200_000, 50_000) for phase in ("dense", "dense backward", "unattributed")
    }
    assert "warm_up" not in {one.name for one in found.kernels}


def test_rates_only_where_the_work_is_known(golden: Build, tmp_path: Path) -> None:
    shapes = Shapes({"cutlass_gemm": 20e9}, {"cub_scan": 100e6}, {"tflops": 800.0})
    found = analyse(read_nsys(golden("2023.4").write(tmp_path / "x")), shapes)
    rates = {one.name: (one.tflops, one.gb_per_s) for one in found.kernels}
    # 20 GFLOP in 50 us are 400 TFLOP/s; 100 MB in 50 us are 2000 GB/s.
    assert rates["cutlass_gemm"] == (pytest.approx(400), None) and rates["cub_scan"] == (None, pytest.approx(2000))
    assert rates["gemm_x"] == (None, None) and found.ceilings == {"tflops": 800.0}


def test_shapes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "shapes.json"
    path.write_text(
        json.dumps({"kernels": {"a": {"flops": 2, "bytes": 3}, "b": {"bytes": 4}}, "ceilings": {"tflops": 5}})
    )
    assert read_shapes(path) == Shapes({"a": 2.0}, {"a": 3.0, "b": 4.0}, {"tflops": 5.0})
    for text in ("", "[]", '{"kernels": {"a": 3}}', '{"kernels": {"a": {"flops": "x"}}}'):
        path.write_text(text)
        with pytest.raises(ProfileError, match="expected .*kernels"):
            read_shapes(path)


def test_graph_level_is_a_lower_bound(age: str, build: Build, tmp_path: Path) -> None:
    """A replay is one span, whatever pauses it has inside."""
    file = build(age)
    file.domain()
    for number in range(3):
        start = 1000 * number
        file.range("iteration", start, start + 900)
        file.call("cudaGraphLaunch_v10000", start + 10, start + 30, 5 + number)
        file.replay(start + 100, start + 1000, 5 + number)
    file.kernel("eager", 50, 60, 4)
    found = analyse(read_nsys(file.write(tmp_path / "x")))
    assert found.level == "graph" and "the idle share is a lower bound" in found.notes[0]
    # 2900 us, of which 10 and 900 and 900 and 800 are busy.
    assert found.devices[0].idle_share == pytest.approx(290 / 2900)
    assert found.iteration_ns == 1_000_000
    assert [one.phase for one in found.phases] == ["unattributed"]


def test_work_belongs_to_the_iteration_that_launched_it() -> None:
    """The host leaves three steps at once; the device works on them long after."""
    steps = [step(0, 10), step(20, 30), step(40, 50)]
    calls = [call(number * 20 + 1, number) for number in range(3)]
    kernels = [kernel(100 * number, 100 * number + 90 + number, number, "staticmoe_up_gemm") for number in range(3)]
    found = analyse(Timeline("x", "nsys", kernels, [], [], calls, steps))
    (up,) = found.phases
    assert (up.kernels, up.ns, up.spread_ns) == (1, 91, 1)
    # From start to start on the device; the host's own starts say 20.
    assert (found.iteration_ns, found.iteration_spread_ns, found.window_ns) == (100, 0, 50)
    assert found.devices[0].busy_ns == 50


def test_a_side_stream_does_not_move_the_start_of_an_iteration() -> None:
    """The inputs of the next step may be copied, and a small kernel run, while the device is busy with this one."""
    steps = [step(0, 10), step(20, 30), step(40, 50)]
    kernels = [kernel(100 * number, 100 * number + 90, number) for number in range(3)]
    early = [kernel(5 + 20 * number, 6 + 20 * number, number + 5, stream=9) for number in range(3)]
    # Before the window another stream was busier.
    early.append(kernel(-9000, -1, 9, stream=9))
    for name in ("cudaGraphLaunch", "cudaLaunchKernel"):
        calls = [call(20 * number + 1, number, name) for number in range(3)]
        calls += [call(20 * number + 2, number + 5, "cudaLaunchKernel") for number in range(3)]
        made = Timeline("x", "nsys", kernels + early, [], [], calls, steps)
        assert analyse(made).iteration_ns == 100, name


def test_iterations_without_a_capture() -> None:
    """The longest row of them is the window; a range that was cut off is none of them."""
    steps = [step(100 * number, 100 * number + 90) for number in range(6)] + [step(600, 2**63 - 1)]
    timeline = Timeline("x", "nsys", [kernel(0, 700)], [], [], [], [*steps, step(210, 240, "capture")])
    window = find_window(timeline)
    assert window.span == (300, 590) and window.count == 3
    assert [window.number(time) for time in (299, 300, 395, 400, 589, 590)] == [None, 0, 0, 1, 2, None]
    assert [window.within_step(time) for time in (299, 389, 390, 400, 590)] == [False, True, False, True, False]


def test_without_iterations_everything_is_one() -> None:
    calls = [call(5, 1, "cudaLaunchKernel")]
    found = analyse(Timeline("x", "nsys", [kernel(10, 60), kernel(80, 105)], [], [], calls, [step(0, 200, "theirs")]))
    assert (found.window_ns, found.iterations, found.iteration_ns) == (100, 1, 100)
    assert found.devices[0].idle_share == pytest.approx(0.25)
    assert "whole capture" in found.window and "no iteration range" in found.notes[0]


def test_one_iteration_says_what_its_window_is_worth() -> None:
    found = analyse(Timeline("x", "nsys", [kernel(10, 60)], [], [], [call(5, 1)], [step(0, 20)]))
    assert (found.window_ns, found.iteration_ns) == (20, 60) and "one iteration" in found.notes[0]


def test_each_device_has_its_own_idle_share() -> None:
    kernels = [kernel(0, 50), kernel(25, 75, stream=8), kernel(0, 25, device=1)]
    launches = [GraphLaunch(90, 120, 1, 7, PID, 3)]
    found = analyse(
        Timeline("x", "nsys", kernels, [Copy(60, 80, 0, 9, PID, 2, "memset", 8)], launches, [], [step(0, 100)])
    )
    assert {one.device: one.busy_ns for one in found.devices} == {0: 80, 1: 35}
    assert {one.device: one.idle_share for one in found.devices} == {0: pytest.approx(0.2), 1: pytest.approx(0.65)}


def test_copies_of_graphs_and_of_the_host() -> None:
    """How much of either lies under kernels; memsets and copies outside of the window are not counted."""
    copies = [
        Copy(90, 110, 0, 8, PID, 2, "HtoD", 1000),
        Copy(120, 140, 0, 8, PID, 3, "DtoH", 500),
        Copy(150, 190, 0, 7, PID, 1, "DtoD", 10, node=4),
        Copy(195, 199, 0, 7, PID, 9, "DtoD", 7),
        Copy(150, 190, 0, 8, PID, 4, "memset", 10),
        Copy(500, 510, 0, 8, PID, 5, "HtoD", 10),
    ]
    calls = [call(1, 9)]
    timeline = Timeline(
        "x", "nsys", [kernel(0, 100), kernel(50, 105), kernel(180, 185)], copies, [], calls, [step(0, 200)]
    )
    graph, host = analyse(timeline).copies
    assert (graph.origin, graph.count, graph.bytes, graph.ns) == ("graph", 2, 17, 44)
    assert (host.origin, host.count, host.bytes, host.ns) == ("host", 2, 1500, 40)
    assert graph.overlap == pytest.approx(5 / 44) and host.overlap == pytest.approx(15 / 40)


def test_processes_of_one_file_apart(build: Build, tmp_path: Path) -> None:
    file = build("2025.3")
    for pid in (5, 6):
        file.domain(pid=pid)
        file.range("iteration", 0, 100, pid=pid)
        file.kernel("gemm", 0, 10 * pid, 1, pid=pid)
        file.call("cudaDeviceSynchronize", 1, 2, 9, pid=pid)
    found = analyse_processes(read_nsys(file.write(tmp_path / "x")))
    assert [(one.pid, one.devices[0].busy_ns, one.waits_in_step) for one in found] == [(5, 50_000, 1), (6, 60_000, 1)]


def test_without_work_of_a_gpu_there_is_nothing_to_measure(build: Build, tmp_path: Path) -> None:
    file = build("2023.4")
    file.range("iteration", 0, 100)
    with pytest.raises(ProfileError, match="expected work of a GPU .*; got none: record a range"):
        analyse_processes(read_nsys(file.write(tmp_path / "x")))


def test_an_analysis_through_its_file(golden: Build, tmp_path: Path) -> None:
    found = analyse(read_nsys(golden("2023.4").write(tmp_path / "x")), Shapes({"gemm_x": 1e9}, {}, {"tflops": 1.0}))
    path = tmp_path / "deep" / "a.json"
    write_file(path, found.as_json().encode())
    assert is_analysis(path) and from_json(path.read_text(), "a") == found
    assert not is_analysis(tmp_path / "x") and not is_analysis(tmp_path / "none")
    assert [one.name for one in path.parent.iterdir()] == ["a.json"]
    for text in ("{}", "[]", "x", found.as_json().replace("analysis 1", "analysis 9")):
        with pytest.raises(ProfileError, match="a.json: expected an analysis with format"):
            from_json(text, "a.json")


def test_a_file_that_cannot_be_put_in_place_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken" / "deep").mkdir(parents=True)
    with pytest.raises(ProfileError, match="taken: expected a file that can be written; got Is a directory"):
        write_file(tmp_path / "taken", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_arithmetic_of_intervals() -> None:
    merged = union([(5, 7), (0, 3), (2, 4), (4, 5), (9, 9), (8, 11), (9, 10)])
    assert merged == [(0, 7), (8, 11)] and length(merged) == 10
    assert clip([(0, 5), (6, 9), (20, 30)], (4, 8)) == [(4, 5), (6, 8)]
    assert overlap(merged, [(3, 9), (9, 20)]) == 4 + 1 + 2
    assert overlap(merged, []) == 0
    assert median([3, 1, 2]) == 2 and median([4, 1]) == 2.5
    assert quartile_distance([1, 2, 3, 4, 5]) == 2 and quartile_distance([3]) == 0
