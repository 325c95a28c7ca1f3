"""Our sums beside those of `nsys stats`, with an nsys made of shell and a table made by SQL from the same file."""

from __future__ import annotations

import importlib
import json
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from staticmoe.profiling.errors import ProfileError

FOLDER = Path(__file__).resolve().parents[2] / "profiles"
HEAD = '"Time (%)","Total Time (ns)","Instances","Avg (ns)","Med (ns)","Name"'
NSYS = """#!/bin/sh
echo "$* [$LD_LIBRARY_PATH]" >> "$LOG"
case $1 in
stats) echo "Processing [$8] with [cuda_gpu_kern_sum.py]..."; echo; cat "$TABLE"; exit ${CODE:-0} ;;
export) cp "$SQLITE" "$6" ;;
esac
"""


@pytest.fixture
def stats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Arguments after the profile -> exit code and output; the tool's table is in table.csv, the file is p.sqlite."""
    sqlite, table = golden("2025.3").write(tmp_path / "p.sqlite"), tmp_path / "table.csv"
    with sqlite3.connect(sqlite) as connection:
        rows = connection.execute(
            "SELECT 0, SUM(end - start) AS ns, COUNT(*), 0, 0, value FROM CUPTI_ACTIVITY_KIND_KERNEL "
            "JOIN StringIds ON shortName = id GROUP BY value ORDER BY ns DESC"
        ).fetchall()
    connection.close()
    lines = [",".join(f'"{cell}"' if isinstance(cell, str) else str(cell) for cell in row) for row in rows]
    table.write_text("\n".join([HEAD, *lines, "", "a remark, after the table"]) + "\n")
    tool = tmp_path / "bin" / "nsys"
    tool.parent.mkdir()
    tool.write_text(NSYS)
    tool.chmod(0o755)
    names = {"STATICMOE_NSYS": tool, "LOG": tmp_path / "log", "TABLE": table, "SQLITE": sqlite}
    for name, value in {**names, "STATICMOE_NSYS_LIBS": "/libs"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.syspath_prepend(FOLDER)

    def run(profile: str = "p.sqlite", *arguments: str) -> tuple[int, str]:
        module = importlib.import_module("compare_nsys_stats")
        monkeypatch.setattr(sys, "argv", ["compare_nsys_stats", str(tmp_path / profile), *arguments])
        try:
            module.main()
        except SystemExit as end:
            return int(end.code or 0), capsys.readouterr().out
        return 0, capsys.readouterr().out

    return run


def test_what_nsys_sums_up_is_what_we_read(stats: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    """49 kernels: a warm-up of 990 us, and four replays of 750 us, 50 of them on a second stream."""
    out = tmp_path / "deep" / "found.json"
    code, said = stats("p.sqlite", "--top", "3", "--json", str(out))
    lines = said.splitlines()
    assert code == 0 and lines[-1].endswith("none") and len(lines) == 1 + 4 + 1 and max(map(len, lines)) <= 100
    assert lines[1].split() == ["all", "kernels", "3.990", "3.990", "49", "/", "49", "75.2%", "+0.000%"]
    assert [line.split()[0] for line in lines[2:5]] == ["warm_up", "vectorized_kernel", "gemm_x"]
    found = json.loads(out.read_text())["rows"]
    assert [(row["nsys_ns"], row["ns"], row["window_ns"]) for row in found[:2]] == [
        (3_990_000, 3_990_000, 3_000_000), (990_000, 990_000, 0)
    ]  # fmt: skip
    called = (tmp_path / "log").read_text()
    assert "stats --report cuda_gpu_kern_sum:base --format csv --output - " in called
    assert called.rstrip().endswith(f"[{tmp_path / 'bin'}:/libs]") or ":/libs:" in called


def test_a_report_is_exported_elsewhere_first(stats: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    (tmp_path / "r.nsys-rep").write_text("raw")
    before = sorted(path.name for path in tmp_path.iterdir())
    code, said = stats("r.nsys-rep")
    assert code == 0 and "exporting r.nsys-rep" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, "log"])


@pytest.mark.parametrize("change", ["a longer time", "a launch more", "a kernel that we do not see"])
def test_a_difference_is_told(change: str, stats: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    text, row = table.read_text(), '0,990000,1,0,0,"warm_up"'
    assert row in text
    other = {"a longer time": '0,995000,1,0,0,"warm_up"', "a launch more": '0,990000,2,0,0,"warm_up"'}
    table.write_text(text.replace(row, other.get(change, row + '\n0,880000,1,0,0,"unseen"')))
    code, said = stats()
    assert code == 3
    expected = {"a launch more": "all kernels, warm_up", "a longer time": "all kernels, warm_up"}
    assert said.splitlines()[-1].endswith(expected.get(change, "all kernels, unseen"))
    if change == "a longer time":
        assert stats("p.sqlite", "--tolerance", "0.01")[0] == 0


def test_a_tool_that_fails_or_says_something_else(
    stats: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CODE", "4")
    with pytest.raises(ProfileError, match="nsys stats of .*got exit code 4"):
        stats()
    monkeypatch.delenv("CODE")
    (tmp_path / "table.csv").write_text("SKIPPED: no data\n")
    with pytest.raises(ProfileError, match="SKIPPED: no data\n.*STATICMOE_NSYS"):
        stats()
