"""Profiles with known answers: a builder of SQLite files as nsys exports them, of both ages, and a whole run of it.

The columns and their meaning are those of real exports; times are given in us and stored in ns.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

OLD, NEW = "2023.4", "2025.3"
PID, MAIN, AUTOGRAD, SIDE = 77, 100, 101, 102
OURS = 3

_COMMON = "start, end, deviceId, contextId, streamId, correlationId, globalPid"
_TABLES = {
    "StringIds": "id, value",
    "NVTX_EVENTS": "start, end, eventType, text, textId, domainId, globalTid",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start, end, nameId, correlationId, globalTid, returnValue",
    "CUPTI_ACTIVITY_KIND_KERNEL": f"{_COMMON}, shortName, demangledName, gridX, graphNodeId",
    "CUPTI_ACTIVITY_KIND_MEMCPY": f"{_COMMON}, bytes, copyKind, srcKind, dstKind, graphNodeId",
    "CUPTI_ACTIVITY_KIND_MEMSET": f"{_COMMON}, bytes, graphNodeId",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": f"{_COMMON}, graphId, graphExecId",
    "CUDA_GRAPH_EVENTS": "start, globalTid, nameId, graphNodeId, originalGraphNodeId",
    "CUDA_GRAPH_NODE_EVENTS": "start, end, eventClass, globalTid, nameId, graphNodeId, originalGraphNodeId",
}
# What the table of the old nodes holds in newer files: graphs.
_GRAPHS = "start, end, eventClass, globalTid, nameId, graphId, originalGraphId, graphExecId"


def us(time: float) -> int:
    return round(time * 1000)


def thread(tid: int, pid: int = PID) -> int:
    return 1 << 56 | pid << 24 | tid


class NsysFile:
    """Collects rows, and writes only the tables that have some."""

    def __init__(self, age: str) -> None:
        self.age = age
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.strings: dict[str, int] = {}

    def text(self, value: str) -> int:
        return self.strings.setdefault(value, len(self.strings) + 1)

    def add(self, table: str, **row: Any) -> None:
        self.rows.setdefault(table, []).append(row)

    def _activity(self, kind: str, start: float, end: float, correlation: int, pid: int, **row: Any) -> None:
        row = {"deviceId": 0, "streamId": 7, "contextId": 1, **row}
        times = {"start": us(start), "end": us(end), "correlationId": correlation}
        self.add(f"CUPTI_ACTIVITY_KIND_{kind}", **times, globalPid=thread(0, pid), **row)

    def kernel(
        self, name: str, start: float, end: float, correlation: int = 0, *, full: str = "", pid: int = PID, **row: Any
    ) -> None:
        names = {"shortName": self.text(name), "demangledName": self.text(full or f"void {name}(int)"), "gridX": 4}
        self._activity("KERNEL", start, end, correlation, pid, **names, **row)

    def copy(self, kind: int, start: float, end: float, correlation: int, *, pid: int = PID, **row: Any) -> None:
        row = {"bytes": 64, "srcKind": 1, "dstKind": 2, **row}
        self._activity("MEMCPY", start, end, correlation, pid, copyKind=kind, **row)

    def memset(self, start: float, end: float, correlation: int = 0, **row: Any) -> None:
        self._activity("MEMSET", start, end, correlation, PID, bytes=8, **row)

    def replay(self, start: float, end: float, correlation: int) -> None:
        self._activity("GRAPH_TRACE", start, end, correlation, PID, graphId=1, graphExecId=2)

    def call(
        self, name: str, start: float, end: float, correlation: int = 0, *, tid: int = MAIN, pid: int = PID
    ) -> None:
        row = {"nameId": self.text(name), "correlationId": correlation, "globalTid": thread(tid, pid)}
        self.add("CUPTI_ACTIVITY_KIND_RUNTIME", start=us(start), end=us(end), returnValue=0, **row)

    def domain(self, name: str = "staticmoe", number: int = OURS, *, pid: int = PID) -> None:
        self.add("NVTX_EVENTS", start=0, eventType=75, text=name, domainId=number, globalTid=thread(MAIN, pid))

    def range(
        self, name: str, start: float, end: float | None, *, tid: int = MAIN, domain: int = OURS, pid: int = PID
    ) -> None:
        row: dict[str, Any] = {"eventType": 59, "domainId": domain, "globalTid": thread(tid, pid)}
        # Texts that were registered beforehand are numbers.
        row |= {"textId": self.text(name)} if len(name) % 2 else {"text": name}
        self.add("NVTX_EVENTS", start=us(start), end=None if end is None else us(end), **row)

    def node(self, number: int, time: float, original: int = 0, *, tid: int = MAIN) -> None:
        row = {"start": us(time), "globalTid": thread(tid), "nameId": self.text("cudaGraphAddNode")}
        row |= {"graphNodeId": number, "originalGraphNodeId": original}
        if self.age == OLD:
            self.add("CUDA_GRAPH_EVENTS", **row)
        else:
            self.add("CUDA_GRAPH_NODE_EVENTS", end=us(time), eventClass=1, **row)

    def write(self, path: Path) -> Path:
        tables = dict(_TABLES)
        if self.age == NEW:
            tables["CUDA_GRAPH_EVENTS"] = _GRAPHS
            tables["CUPTI_ACTIVITY_KIND_KERNEL"] += ", graphId"
            self.add("CUDA_GRAPH_EVENTS", start=0, globalTid=thread(MAIN), graphId=1, graphExecId=2)
        self.rows["StringIds"] = [{"id": number, "value": value} for value, number in self.strings.items()]
        with sqlite3.connect(path) as connection:
            for table, rows in self.rows.items():
                connection.execute(f"CREATE TABLE {table} ({tables[table]})")
                # Newer files keep no order.
                for row in reversed(rows) if self.age == NEW else rows:
                    names, marks = ", ".join(row), ", ".join("?" * len(row))
                    connection.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", list(row.values()))
        connection.close()
        return path


# Kernels of a replay: name, graph node, offset in the iteration, length. Ten in a row, then a pause of 100 us.
KERNELS: tuple[tuple[str, int, int, int], ...] = (
    ("cutlass_gemm", 201, 50, 50),
    ("flash_fwd_kernel", 102, 100, 50),
    ("nll_loss_forward", 103, 150, 50),
    ("gemm_x", 104, 200, 50),
    ("cub_scan", 105, 250, 50),
    ("gemm_x", 106, 300, 50),
    ("flash_bwd_kernel", 107, 350, 50),
    ("reduce_kernel", 108, 400, 50),
    ("staticmoe_down_gemm", 109, 450, 50),
    ("gemm_x", 999, 500, 50),
    ("vectorized_kernel", 301, 650, 200),
)


def whole_run(age: str, iterations: int = 4, slower: float = 1.0) -> NsysFile:
    """A capture, then iterations of 1000 us: a step of 900 us that launches a replay of 700 us in two parts.

    `slower` stretches the last kernel.
    """
    file = NsysFile(age)
    file.domain()
    file.range("iteration", 0, 2000)
    file.range("capture", 100, 900)
    file.range("forward", 200, 400)
    file.range("up", 220, 260)
    file.range("backward", 400, 600)
    file.range("dact", 450, 470, tid=AUTOGRAD)
    file.range("clip", 600, 620)
    file.range("optimizer", 620, 650)
    # Another library's range inside ours says nothing.
    file.range("optimizer", 315, 325, domain=0)
    created = ((1, 230, MAIN), (2, 300, MAIN), (3, 310, MAIN), (4, 320, MAIN), (5, 460, AUTOGRAD), (6, 500, AUTOGRAD))
    for number, time, tid in (*created, (7, 510, AUTOGRAD), (8, 605, MAIN), (9, 300, MAIN)):
        file.node(number, time, tid=tid)
        file.node(100 + number, 850, number)
    file.node(201, 880, 101)
    file.node(301, 885, 302)
    file.node(302, 630, 301)
    file.kernel("warm_up", 910, 1900, 1)
    file.call("cudaLaunchKernel_v7000", 905, 910, 1)
    for number in range(iterations):
        start, launch = 2000 + 1000 * number, 1000 + number
        file.range("iteration", start, start + 900)
        file.call("cudaGraphLaunch_v10000", start + 10, start + 30, launch)
        for name, node, offset, length in KERNELS:
            end = start + offset + length * (slower if offset == 650 else 1.0)
            file.kernel(name, start + offset, end, launch, graphNodeId=node)
        # A second stream beside the first one, in the same phase.
        file.kernel("staticmoe_down_gemm", start + 475, start + 525, launch, graphNodeId=109, streamId=8)
    return file


@pytest.fixture(params=[OLD, NEW])
def age(request: pytest.FixtureRequest) -> str:
    """Both ages of the schema."""
    return str(request.param)


@pytest.fixture
def build() -> Callable[[str], NsysFile]:
    """Age -> an empty file."""
    return NsysFile


@pytest.fixture
def golden() -> Callable[..., NsysFile]:
    """Age, iterations, stretch of the last kernel -> a whole run."""
    return whole_run
