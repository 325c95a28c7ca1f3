"""The phase of a kernel: name before lineage before range before pattern, and nothing where nothing tells."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from staticmoe.phases import DevicePhase
from staticmoe.profiling.attribution import Attributed, attribute, prefix_phase
from staticmoe.profiling.nsys import read_nsys
from staticmoe.profiling.timeline import Cover, HostCall, Kernel, NodeOrigin, Range, Timeline

PID, MAIN, AUTOGRAD, SIDE = 77, 100, 101, 102
# Kernels of a replay of the whole run, and what each did.
REPLAY = (
    ("cutlass_gemm", "up"),
    ("flash_fwd_kernel", "attention"),
    ("nll_loss_forward", "loss"),
    ("gemm_x", "dense"),
    ("cub_scan", "dact"),
    ("gemm_x", "dense backward"),
    ("flash_bwd_kernel", "attention backward"),
    ("reduce_kernel", "clip"),
    ("staticmoe_down_gemm", "down"),
    ("gemm_x", "unattributed"),
    ("vectorized_kernel", "optimizer"),
)


def kernel(name: str, start: int = 1000, correlation: int = 1, node: int | None = None, stream: int = 7) -> Kernel:
    return Kernel(start, start + 10, 0, stream, PID, correlation, name, f"void {name}<float>(int)", node)


def ours(name: str, start: int, end: int, tid: int = MAIN) -> Range:
    return Range(start, end, PID, tid, name, "staticmoe")


def call(start: int, tid: int = MAIN, name: str = "cudaLaunchKernel", correlation: int = 1) -> HostCall:
    return HostCall(start, start + 5, PID, tid, correlation, name)


def told(kernels: list[Kernel], calls: list[HostCall], ranges: list[Range], *origins: NodeOrigin) -> list[Attributed]:
    return list(attribute(Timeline("x", "nsys", kernels, [], [], calls, ranges, origins)))


def one(kernel: Kernel, calls: list[HostCall], ranges: list[Range], *origins: NodeOrigin) -> tuple[str, str]:
    (found,) = told([kernel], calls, ranges, *origins)
    return found.phase, found.rule


def test_a_replay_by_lineage(age: str, golden: Callable[..., Any], tmp_path: Path) -> None:
    """O42. One and two hops, a circle, a node that was never seen, the engine's thread, foreign kernels, a prefix."""
    found = [one for one in attribute(read_nsys(golden(age).write(tmp_path / "x"))) if one.kernel.stream == 7]
    assert found[0].phase == "unattributed" and found[0].kernel.name == "warm_up"
    for number in range(4):
        replay = found[1 + 11 * number : 12 + 11 * number]
        assert tuple((one.kernel.name, one.phase) for one in replay) == REPLAY
    rules = {one.kernel.name: one.rule for one in found[1:9]}
    assert rules == {
        "cutlass_gemm": "lineage", "flash_fwd_kernel": "pattern", "nll_loss_forward": "pattern", "gemm_x": "pattern",
        "cub_scan": "lineage", "flash_bwd_kernel": "pattern", "reduce_kernel": "lineage",
    }  # fmt: skip
    assert found[9].rule == "prefix" and found[10].rule == "none" and found[11].rule == "lineage"


@pytest.mark.parametrize("phase", [phase for phase in DevicePhase if phase not in ("forward", "backward")])
def test_every_prefix(phase: DevicePhase) -> None:
    assert prefix_phase(f"staticmoe_{phase}_gemm") == phase.value


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("staticmoe_combine_backward_rows", "combine backward"),
        ("staticmoe_router_route_backward", "router backward"),
        ("staticmoe_weight_grad_backward", "weight_grad"),
        ("staticmoe_other_gemm", None),
        ("staticmoe_upper_gemm", None),
        ("my_staticmoe_up_gemm", None),
    ],
)
def test_prefixes(name: str, phase: str | None) -> None:
    assert prefix_phase(name) == phase


def test_the_prefix_wins_over_the_range() -> None:
    assert one(kernel("staticmoe_plan_count"), [call(500)], [ours("optimizer", 0, 900)]) == ("plan", "prefix")


def test_an_eager_kernel_by_the_range_of_its_launch() -> None:
    """The innermost range on the launching thread; where that has none, of any thread of the process."""
    ranges = [ours("forward", 0, 900), ours("router", 400, 600), ours("plan", 450, 600, SIDE)]
    assert one(kernel("gemm"), [call(500)], ranges) == ("router", "range")
    assert one(kernel("gemm"), [call(399)], ranges) == ("dense", "pattern")
    assert one(kernel("gemm"), [call(600)], ranges) == ("dense", "pattern")
    assert one(kernel("gemm"), [call(420, AUTOGRAD)], ranges) == ("router", "range")
    assert one(kernel("gemm"), [call(900)], ranges) == ("unattributed", "none")
    assert one(kernel("gemm"), [], ranges) == ("unattributed", "none")
    assert one(kernel("gemm", correlation=2), [call(500)], ranges) == ("unattributed", "none")


def test_ranges_of_the_host_and_of_others_tell_nothing() -> None:
    ranges = [ours("forward", 0, 900), ours("iteration", 100, 800), ours("replay", 200, 700)]
    ranges += [Range(300, 600, PID, MAIN, "optimizer", "theirs"), Range(300, 600, PID + 1, MAIN, "up", "staticmoe")]
    assert one(kernel("gemm"), [call(500)], ranges) == ("dense", "pattern")
    # But what is launched for the inputs outside a graph is for them.
    assert one(kernel("fill"), [call(500)], [ours("stage inputs", 400, 600)]) == ("stage inputs", "range")


def test_a_launch_of_a_graph_tells_nothing() -> None:
    """Neither of a kernel whose node is unknown, nor where the tool knows no nodes."""
    ranges, launch = [ours("optimizer", 0, 900)], call(500, name="cudaGraphLaunch")
    assert one(kernel("gemm", node=5), [launch], ranges) == ("unattributed", "none")
    assert one(kernel("gemm"), [launch], ranges) == ("unattributed", "none")
    origin = NodeOrigin(300, PID, MAIN, 5, None)
    assert one(kernel("gemm", node=5), [launch], ranges, origin) == ("optimizer", "lineage")
    elsewhere = NodeOrigin(300, PID + 1, MAIN, 5, None)
    assert one(kernel("gemm", node=5), [launch], ranges, elsewhere) == ("unattributed", "none")


def test_the_first_event_of_a_node_is_its_creation() -> None:
    ranges = [ours("clip", 100, 200), ours("optimizer", 200, 300)]
    origins = [NodeOrigin(250, PID, MAIN, 5, None), NodeOrigin(150, PID, MAIN, 5, None)]
    assert one(kernel("gemm", node=5), [], ranges, *origins) == ("clip", "lineage")


def test_a_cloned_node_has_two_events() -> None:
    """Seen of nsys 2025.3: the clone is created, and again with the node that it was cloned from."""
    ranges = [ours("clip", 100, 200), ours("record", 600, 900)]
    origins = [
        NodeOrigin(150, PID, MAIN, 5, None),
        NodeOrigin(700, PID, MAIN, 9, None),
        NodeOrigin(710, PID, MAIN, 9, 5),
    ]
    assert one(kernel("gemm", node=9), [], ranges, *origins) == ("clip", "lineage")


def test_a_node_that_descends_from_itself() -> None:
    assert one(kernel("gemm", node=5), [], [ours("clip", 0, 9)], NodeOrigin(5, PID, MAIN, 5, 5)) == ("clip", "lineage")


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("pytorch_flash::flash_bwd_kernel", "attention backward"),
        ("fmha_cutlassB_bf16", "attention backward"),
        ("cudnn_sdpa_sm90", "attention backward"),
        ("nll_loss_backward_reduce", "loss backward"),
        ("liger_cross_entropy_kernel", "loss backward"),
        ("CrossEntropyBackward", "loss backward"),
        ("cunn_LogSoftMaxBackward", "loss backward"),
        ("ncclDevKernel_AllReduce", "exchange backward"),
        ("softmax_warp_backward", "dense backward"),
        ("triton_poi_fused_add", "dense backward"),
    ],
)
def test_foreign_kernels_of_a_pass(name: str, phase: str) -> None:
    """Launched by the engine's thread, while the range is open on the caller's."""
    assert one(kernel(name), [call(500, AUTOGRAD)], [ours("backward", 0, 900)]) == (phase, "pattern")


def test_our_forward_phases_in_the_backward_pass() -> None:
    """A phase that runs in both passes is told apart; one that belongs to the backward pass is not named twice."""
    ranges = [ours("backward", 0, 900), ours("combine", 400, 600, AUTOGRAD), ours("dact", 700, 800, AUTOGRAD)]
    assert one(kernel("gather"), [call(500, AUTOGRAD)], ranges) == ("combine backward", "range")
    assert one(kernel("gather"), [call(750, AUTOGRAD)], ranges) == ("dact", "range")


def test_a_softmax_belongs_to_attention_near_to_it() -> None:
    names = ["softmax_a", "gemm", "gemm", "gemm", "flash_fwd", "gemm", "softmax_b", "gemm", "softmax_c"]
    kernels = [kernel(name, 1000 + 20 * number) for number, name in enumerate(names)]
    kernels.append(kernel("softmax_d", 1081, stream=8))
    found = told(kernels, [call(500)], [ours("forward", 0, 900)])
    phases = {one.kernel.name: one.phase for one in found if "softmax" in one.kernel.name}
    assert phases == {"softmax_a": "dense", "softmax_b": "attention", "softmax_c": "dense", "softmax_d": "dense"}


def test_the_innermost_of_intervals() -> None:
    outer, inner, twin, empty = ours("a", 0, 100), ours("b", 10, 20), ours("c", 10, 15), ours("d", 30, 30)
    crossing = ours("e", 90, 120)
    cover = Cover([inner, crossing, empty, outer, twin])
    times = (-1, 0, 10, 14, 15, 20, 30, 90, 100, 119, 120)
    assert [found.name if (found := cover.at(time)) else "" for time in times] == [
        "", "a", "c", "c", "b", "a", "a", "e", "e", "e", "",
    ]  # fmt: skip
