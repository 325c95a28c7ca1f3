"""A trace of torch.profiler reads into the same timeline; of replayed kernels only names tell the phase."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from staticmoe.profiling.errors import ProfileError
from staticmoe.profiling.kineto import read_kineto, short_name
from staticmoe.profiling.metrics import NO_NODES, analyse
from staticmoe.profiling.read import read_profile
from staticmoe.profiling.timeline import Copy, HostCall, Kernel, Range

PID, MAIN, BASE = 1616, 1616, 5169009330223.0


def event(cat: str, name: str, start: float, us: float, tid: Any = MAIN, pid: Any = PID, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": BASE + start, "dur": us, "args": args}


def kernel(name: str, start: float, us: float, correlation: int, stream: int = 7) -> dict[str, Any]:
    return event("kernel", name, start, us, stream, 0, device=0, stream=stream, correlation=correlation, grid=[1, 1, 1])


def trace() -> list[dict[str, Any]]:
    """Two steps of 100 us; each replays 60 us and waits; the first runs a kernel of its own as well."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": PID, "tid": 0, "ts": 0, "args": {}}]
    for start, launch in ((0.0, 1), (100.0, 2)):
        events += [
            event("user_annotation", "iteration", start, 90.5),
            event("cuda_runtime", "cudaGraphLaunch", start + 5, 2.5, correlation=launch),
            kernel("staticmoe_up_gemm", start + 10, 40, launch),
            kernel("void at::native::reduce_kernel<512, 1>(at::native::ReduceOp<float>)", start + 50, 20, launch),
            event("cuda_runtime", "cudaMemcpyAsync", start + 70, 3, correlation=launch + 10),
            event(
                "gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", start + 72, 1, 7, 0,
                device=0, stream=7, correlation=launch + 10, bytes=4,
            ),
            event("cuda_runtime", "cudaStreamSynchronize", start + 75, 5, correlation=launch + 20),
            event("gpu_user_annotation", "iteration", start + 10, 60, 7, 0),
        ]  # fmt: skip
    events += [
        event("user_annotation", "router", 20, 9),
        event("cuda_driver", "cuLaunchKernel", 22, 1, correlation=50),
        kernel("cub_sort", 80, 5, 50, 8),
        event("gpu_memset", "Memset (Device)", 85, 1, 8, 0, device=0, stream=8, correlation=51, bytes=16),
    ]
    return events


@pytest.mark.parametrize("packed", [False, True])
def test_every_kind_of_event(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / ("t.json.gz" if packed else "t.json")
    raw = json.dumps({"schemaVersion": 1, "traceEvents": trace()}).encode()
    path.write_bytes(gzip.compress(raw) if packed else raw)
    found = read_profile(path)
    base = round(BASE * 1000)
    full = "void at::native::reduce_kernel<512, 1>(at::native::ReduceOp<float>)"
    assert found.tool == "kineto" and len(found.kernels) == 5 and len(found.calls) == 7
    assert found.kernels[1] == Kernel(base + 50_000, base + 70_000, 0, 7, PID, 1, "reduce_kernel", full)
    assert found.copies[0] == Copy(base + 72_000, base + 73_000, 0, 7, PID, 11, "DtoH", 4, True)
    assert found.copies[1] == Copy(base + 85_000, base + 86_000, 0, 8, PID, 51, "memset", 16)
    assert found.calls[0] == HostCall(base + 5_000, base + 7_500, PID, MAIN, 1, "cudaGraphLaunch")
    assert [one.name for one in found.ranges] == ["iteration", "router", "iteration"]
    assert found.ranges[0] == Range(base, base + 90_500, PID, MAIN, "iteration", None)


def test_its_numbers(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(trace()))
    found = analyse(read_kineto(path))
    assert (found.tool, found.pid, found.iterations, found.window_ns) == ("kineto", PID, 2, 190_500)
    assert found.iteration_ns == 100_000 and NO_NODES in found.notes
    # 60 us of kernels and 1 us of a copy in each step, and in the first one a kernel and a memset on another stream.
    assert found.devices[0].busy_ns == 2 * 61_000 + 6_000
    assert {one.phase: one.ns for one in found.phases} == {"up": 40_000, "unattributed": 20_000, "router": 2_500}
    assert found.unattributed_share == pytest.approx(40 / 125)
    assert [(one.where, one.count, one.ns) for one in found.waits] == [("in step", 1, 10_000)]
    assert ".item()" in found.waits[0].call


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("staticmoe_up_gemm", "staticmoe_up_gemm"),
        ("void at::native::(anonymous namespace)::cunn_SoftMax<4, float, Log<a::b>>(float*, int)", "cunn_SoftMax"),
        ("void cutlass::Kernel2<cutlass_80_tensorop>(cutlass_80_tensorop::Params)", "Kernel2"),
        ("at::native::<unnamed>::fill(int)", "fill"),
        ("<>", "<>"),
    ],
)  # fmt: skip
def test_short_names(name: str, short: str) -> None:
    assert short_name(name) == short


def test_a_trace_that_torch_wrote(tmp_path: Path) -> None:
    """Its ranges are read where its own exporter puts them; without a GPU there is nothing to measure."""
    path = tmp_path / "t.json"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            with torch.profiler.record_function("iteration"), torch.profiler.record_function("replay"):
                torch.zeros(3) + 1
    profiler.export_chrome_trace(str(path))
    found = read_profile(path)
    assert [one.name for one in found.ranges] == ["iteration", "replay"] * 3
    assert all(one.ours and one.end > one.start for one in found.ranges)
    with pytest.raises(ProfileError, match="expected work of a GPU"):
        analyse(found)


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    bad = {**kernel("x", 1, 1, 1), "args": {"device": 0}}
    said = {
        "missing.json": (None, "there is none"),
        "empty.json": (b"", "got Expecting value"),
        "torn.json": (json.dumps(trace()).encode()[:300], "got "),
        "torn.json.gz": (gzip.compress(json.dumps(trace()).encode())[:60], "got Compressed file ended"),
        "other.json": (b'{"songs": []}', "expected a list traceEvents; got an object with songs"),
        "words.json": (b'{"traceEvents": ["x"]}', "expected a list traceEvents"),
        "foreign.json": (b'{"traceEvents": [{"ph": "X", "cat": "v8", "name": "x"}]}', "cuda_runtime); got v8"),
        "hollow.json": (b'{"traceEvents": []}', "got no event with a duration"),
        "field.json": (json.dumps([bad, *trace()]).encode(), "got one with a bad field (KeyError('stream'))"),
    }
    for name, (content, message) in said.items():
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ProfileError) as error:
            read_profile(path)
        assert str(error.value).startswith(f"{path}: expected") and message in str(error.value), name
