"""A result goes through its file into table and plot with the numbers it had."""

from __future__ import annotations

import importlib.util
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from staticmoe.bench import plot, provenance
from staticmoe.bench.blocks import absent
from staticmoe.bench.result import source_commit, write_result
from staticmoe.cli.bench_report import BenchReport

# 6·8192·8·2048·768 operations in 1 ms.
FORWARD_TFLOPS = 618.5


def shown(result: dict[str, Any], width: int = 80, terminal: bool = False) -> list[str]:
    """Lines as they come out; rich takes 80 columns for a pipe."""
    screen = io.StringIO()
    BenchReport(Console(file=screen, width=width, force_terminal=terminal, color_system=None)).show(result)
    return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in screen.getvalue().splitlines()]


def reread(result: dict[str, Any], folder: Path) -> dict[str, Any]:
    write_result(result, folder / "deep" / "bench.json")
    return json.loads((folder / "deep" / "bench.json").read_text())


def test_the_table_has_the_numbers_of_the_file(made_up: dict[str, Any], tmp_path: Path) -> None:
    assert reread(made_up, tmp_path) == made_up
    lines = shown(reread(made_up, tmp_path))
    assert lines == shown(made_up)
    table = [line.split() for line in lines]
    (ours, again) = [cells[1:] for cells in table if cells[:1] == ["staticmoe"]]
    assert ours == ["1.000", "618", "3.000", "2.700-3.600", "618", "77.3%", "2.00", "0.19", "1.75"] == again
    (compiled,) = [cells for cells in table if cells[:2] == ["grouped_mm,", "compiled"]]
    assert compiled[2:8] == ["1.600", "387", "4.800", "4.320-5.760", "387", "48.3%"] and compiled[8] == "1.25"
    text = "\n".join(lines)
    assert "8192 tokens, natural" in text and "8192 tokens, one-hot" in text
    assert "ceiling: 790 TFLOP/s before, 810 after" in text and "copy 4.27 TB/s" in text
    assert lines[-1] == "absent: SonicMoE (not installed); Liger (not installed)"
    assert "left out: grouped_mm, compiled: x" in lines


def test_the_table_is_plain_and_fits_a_hundred_columns(made_up: dict[str, Any]) -> None:
    for block in made_up["cases"][0]["blocks"].values():
        block["both"] |= {"ms": 1234.567, "ms_range": [1234.567, 1334.567]}
    lines = shown(made_up)
    table = lines[: next(number for number, line in enumerate(lines) if line.startswith("ceiling:"))]
    assert max(len(line) for line in table) <= 100 and re.search(r"[^\n\x20-\x7e]", "\n".join(lines)) is None
    assert all(any(name in line for line in table) for name in made_up["cases"][0]["blocks"])
    assert any("1234.6-1334.6" in line for line in table)


def test_a_narrow_terminal_goes_without_the_range_and_then_without_memory(made_up: dict[str, Any]) -> None:
    for width, headers, ours in (
        (200, ["range", "GiB", "GiB"], ["2.700-3.600", "618", "77.3%", "2.00", "0.19", "1.75"]),
        (90, ["GiB", "GiB"], ["618", "77.3%", "2.00", "0.19", "1.75"]),
        (80, [], ["618", "77.3%", "2.00"]),
    ):
        lines = shown(made_up, width, terminal=True)
        table = lines[: next(number for number, line in enumerate(lines) if line.startswith("ceiling:"))]
        assert max(len(line) for line in table) <= min(width, 100)
        assert [word for word in table[1].split() if word in ("range", "GiB")] == headers
        (found, _) = [line.split() for line in table if line.split()[:1] == ["staticmoe"]]
        assert found == ["staticmoe", "1.000", "618", "3.000", *ours]


def test_without_the_captured_peer_there_is_no_ratio(made_up: dict[str, Any]) -> None:
    for row in made_up["cases"]:
        del row["blocks"]["grouped_mm"]
    ours = [line.split() for line in shown(made_up) if line.split()[:1] == ["staticmoe"]]
    assert [cells[7] for cells in ours] == ["-", "-"]


def test_shares_are_of_the_mean_ceiling(made_up: dict[str, Any]) -> None:
    entry = made_up["cases"][0]["blocks"]["staticmoe"]["forward"]
    assert entry["tflops"] == pytest.approx(FORWARD_TFLOPS, abs=0.1)
    assert entry["share"] == pytest.approx(FORWARD_TFLOPS / 800, abs=1e-3)


def test_bars_are_the_rates_of_both_passes(made_up: dict[str, Any]) -> None:
    heights = plot.bars(made_up)
    assert heights["staticmoe"] == pytest.approx([FORWARD_TFLOPS] * 2, abs=0.1)
    assert heights["grouped_mm, compiled"] == [pytest.approx(FORWARD_TFLOPS / 1.6, abs=0.1), None]
    assert plot.title(made_up) == "MoE block 2048 x 768, 128 experts, top 8, bf16, Made-up GPU"


def test_the_plot_is_drawn(made_up: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib (extra `report`) is not installed")
    path = tmp_path / "deep" / "bench.png"
    plot.write_plot(reread(made_up, tmp_path), path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n") and len(data) > 10_000
    assert plot.why_no_plot() is None


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'staticmoe[report]'" in (plot.why_no_plot() or "")
    assert absent() == dict.fromkeys(("SonicMoE", "ScatterMoE", "FBGEMM-GenAI", "Liger"), "not installed")
    assert absent(compile_peer=False)["grouped_mm compiled"] == "not asked for: --compiled"


def test_provenance_says_with_what() -> None:
    found = provenance(torch.device("cpu"), source_commit(), ["A"])
    assert found["torch"] == torch.__version__ and found["absent_peers"] == ["A"]
    assert re.fullmatch(r"[0-9a-f]{7,}|staticmoe \S+|unknown", found["commit"])
