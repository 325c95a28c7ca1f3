"""Files of both ages say the same; what is no export of nsys is refused with the file, the reason and the fix."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from staticmoe.profiling.errors import ProfileError
from staticmoe.profiling.nsys import read_nsys
from staticmoe.profiling.read import read_profile
from staticmoe.profiling.timeline import FOR_EVER, Copy, GraphLaunch, HostCall, Kernel, NodeOrigin, Range

OLD, NEW = "2023.4", "2025.3"
# Threads have numbers of more than 16 bits.
PID, MAIN, AUTOGRAD = 77, 100, 0x123456
Build = Callable[..., Any]


def test_every_kind_of_row(age: str, build: Build, tmp_path: Path) -> None:
    file = build(age)
    file.domain()
    file.kernel("gemm", 10, 20, 5, full="void gemm<float>(int)", graphNodeId=9, streamId=13, deviceId=1)
    file.copy(2, 30, 31, 6, srcKind=2, dstKind=0, bytes=4096)
    file.copy(1, 32, 33, 7, srcKind=1, dstKind=2)
    file.memset(34, 35, 8, graphNodeId=4)
    file.replay(36, 40, 9)
    file.call("cudaMemcpyAsync_v3020", 29, 30, 6, tid=AUTOGRAD)
    file.call("cuLaunchKernelEx_ptsz", 41, 42, 10)
    file.range("replay", 1, None)
    file.range("theirs", 2, 3, domain=0)
    file.range("up", 4, 5, domain=8)
    file.node(9, 0.5, 2)
    found = read_nsys(file.write(tmp_path / "x.sqlite"))
    assert found.kernels == (Kernel(10_000, 20_000, 1, 13, PID, 5, "gemm", "void gemm<float>(int)", 9),)
    assert found.copies == (
        Copy(30_000, 31_000, 0, 7, PID, 6, "DtoH", 4096, True),
        Copy(32_000, 33_000, 0, 7, PID, 7, "HtoD", 64, False),
        Copy(34_000, 35_000, 0, 7, PID, 8, "memset", 8, False, 4),
    )
    assert found.launches == (GraphLaunch(36_000, 40_000, 0, 7, PID, 9),)
    assert found.calls == (
        HostCall(29_000, 30_000, PID, AUTOGRAD, 6, "cudaMemcpyAsync"),
        HostCall(41_000, 42_000, PID, MAIN, 10, "cuLaunchKernelEx"),
    )
    assert found.ranges == (
        Range(1_000, FOR_EVER, PID, MAIN, "replay", "staticmoe"),
        Range(2_000, 3_000, PID, MAIN, "theirs", ""),
        Range(4_000, 5_000, PID, MAIN, "up", None),
    )
    # By its domain, never by its name alone, and by its name where the domain has none.
    assert [one.ours for one in found.ranges] == [True, False, True]
    assert found.origins == (NodeOrigin(500, PID, MAIN, 9, 2),)


def test_both_ages_say_the_same(golden: Build, tmp_path: Path) -> None:
    """The order of rows does not matter, nor in which table the nodes are."""
    old, new = (read_nsys(golden(age).write(tmp_path / age)) for age in (OLD, NEW))
    # Of nodes that were created at one time the order is free.
    assert set(old.origins) == set(new.origins) and len(old.origins) == 21
    for name in ("calls", "ranges", "copies", "launches"):
        assert getattr(old, name) == getattr(new, name)
    assert old.kernels == new.kernels and len(old.kernels) == 1 + 4 * 12
    assert [one.start for one in new.kernels] == sorted(one.start for one in new.kernels)


def test_columns_that_a_file_lacks_are_not_asked_for(build: Build, tmp_path: Path) -> None:
    """Without graphs an old file has no column for nodes."""
    path = build(OLD).write(tmp_path / "x.sqlite")
    with sqlite3.connect(path) as connection:
        connection.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL "
            "(start, end, deviceId, streamId, correlationId, globalPid, shortName)"
        )
        connection.execute("INSERT INTO StringIds VALUES (1, 'gemm')")
        connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1, 2, 0, 7, 3, ?, 1)", [PID << 24])
    connection.close()
    (kernel,) = read_nsys(path).kernels
    assert dataclasses.astuple(kernel) == (1, 2, 0, 7, PID, 3, "gemm", "gemm", None)


def test_a_needed_column_is_named(build: Build, tmp_path: Path) -> None:
    path = build(OLD).write(tmp_path / "x.sqlite")
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId)")
    connection.close()
    with pytest.raises(ProfileError, match="streamId, globalPid, correlationId, shortName is missing"):
        read_nsys(path)


def test_what_is_no_export_is_refused(golden: Build, tmp_path: Path) -> None:
    whole = golden(NEW).write(tmp_path / "whole.sqlite").read_bytes()
    foreign = sqlite3.connect(tmp_path / "foreign.sqlite")
    foreign.execute("CREATE TABLE songs (title)")
    foreign.commit()
    foreign.close()
    (tmp_path / "empty.sqlite").touch()
    (tmp_path / "text.sqlite").write_text("no database at all, but a long enough text " * 9)
    (tmp_path / "torn.sqlite").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "zeros").write_bytes(bytes(99))
    (tmp_path / "x.nsys-rep").write_bytes(b"x")
    said = {
        "missing.sqlite": "there is none: check the path",
        "empty.sqlite": "it is empty: export the report again: nsys export --type sqlite --lazy=false",
        "foreign.sqlite": "expected an nsys export with the table StringIds; got songs",
        "text.sqlite": "got file is not a database: export",
        "torn.sqlite": "got database disk image is malformed: export",
        "zeros": "it begins with b'",
        "x.nsys-rep": "nsys export --type sqlite --lazy=false",
    }
    for name, message in said.items():
        with pytest.raises(ProfileError) as error:
            read_profile(tmp_path / name)
        assert str(error.value).startswith(f"{tmp_path / name}: expected") and message in str(error.value), name
