"""What `staticmoe bench` shows: a line for what it is doing, and the table at the end, at most 100 columns wide."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from staticmoe.bench.blocks import PEER

WIDTH = 100
# What a narrower screen goes without, first the range: header -> least width at which it is shown.
LEAST_WIDTH = {"fwd+bwd\nrange": WIDTH, "saved\nGiB": 86, "peak\nGiB": 86}


class BenchReport:
    """Writes to the console.

    Args:
        console: where to write.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._start = time.perf_counter()

    def say(self, text: str) -> None:
        """Write a line after the seconds since the start: no markup, no wrapping."""
        seconds = time.perf_counter() - self._start
        self.console.print(f"{seconds:6.1f} s  {text}", markup=False, highlight=False, soft_wrap=True)

    def errors(self, found: Mapping[str, float], allowed: float) -> None:
        """Relative errors of a block beside what is allowed."""
        listed = ", ".join(f"{name} {error:.1e}" for name, error in found.items())
        self.say(f"       {listed}; allowed {allowed:.1e}")

    def show(self, result: dict[str, Any]) -> None:
        """The table, and below it what is absent and what was left out."""
        if not self.console.is_terminal:
            self.console.width = WIDTH
        self.console.print(table_of(result, min(self.console.width, WIDTH)))
        for line in notes(result):
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def table_of(result: dict[str, Any], width: int = WIDTH) -> Table:
    """A heading for each case, a line for each block, in at most so many columns."""
    # No box: its lines are no ASCII, and a log is read without them.
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    headers: list[str] = []
    for row in result["cases"]:
        base = row["blocks"].get(PEER, {}).get("both", {}).get("ms")
        lines = [cells_of(name, found, base) for name, found in row["blocks"].items()]
        if not headers:
            headers = [header for header in lines[0] if width >= LEAST_WIDTH.get(header, 0)]
            for header in headers:
                # Folding, where a screen is narrower still: a number is never cut short.
                table.add_column(header, justify="left" if header == "block" else "right", overflow="fold")
        table.add_row(f"{row['tokens']} tokens, {row['routing']}", style="bold")
        for line in lines:
            table.add_row(*(line[header] for header in headers))
    return table


def cells_of(name: str, found: dict[str, Any], base: float | None) -> dict[str, str]:
    """Header -> what stands below it for a block; `base`: ms of the peer for both passes."""
    forward, both = found["forward"], found["both"]
    return {
        "block": f"  {name}",
        "fwd\nms": in_ms(forward["ms"]),
        "fwd\nTFLOP/s": f"{forward['tflops']:.0f}",
        "fwd+bwd\nms": in_ms(both["ms"]),
        "fwd+bwd\nrange": "-".join(in_ms(ms) for ms in both["ms_range"]),
        "fwd+bwd\nTFLOP/s": f"{both['tflops']:.0f}",
        "of\nceiling": f"{both['share']:.1%}",
        f"x\n{PEER}": f"{base / both['ms']:.2f}" if base else "-",
        "saved\nGiB": f"{found['saved_gib']:.2f}",
        "peak\nGiB": f"{found['peak_gib']:.2f}",
    }


def in_ms(ms: float) -> str:
    """Milliseconds to about four digits."""
    return f"{ms:.{3 if ms < 10 else 2 if ms < 100 else 1}f}"


def notes(result: dict[str, Any]) -> list[str]:
    """The ceiling, the copy, what was left out of a case, and the absent peers in one line."""
    before, after = result["cases"][0]["ceiling_tflops"]
    lines = [
        f"ceiling: {before:.0f} TFLOP/s before, {after:.0f} after (8192^3 bf16 product); "
        f"copy {result['copy_tb_per_s']:.2f} TB/s",
        "calls are captured, but for those called eager; medians and ranges",
    ]
    lines += [f"{name}: {note}" for name, note in result.get("peers", {}).items()]
    left_out = dict(result["left_out"])
    for row in result["cases"]:
        left_out |= row.get("left_out", {})
    lines += [f"left out: {name}: {reason}" for name, reason in left_out.items()]
    lines.append("absent: " + "; ".join(f"{name} ({reason})" for name, reason in result["absent"].items()))
    return lines
