"""What `staticmoe profile` shows: progress, tables of at most 100 columns, the verdict of a comparison."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from staticmoe.profiling.compare import Comparison
from staticmoe.profiling.result import Analysis

WIDTH = 100
TOP_KERNELS = 12
TOP_GAPS = 5
# The name of a kernel takes at most so many columns.
NAME = 42
Row = tuple[str, Analysis, Analysis | None]


class ProfileReport:
    """Writes to the console.

    Args:
        console: where to write.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._start = time.perf_counter()
        if not console.is_terminal:
            console.width = WIDTH

    def say(self, text: str) -> None:
        """Write a line after the seconds since the start: no markup, no wrapping."""
        self.echo(f"{time.perf_counter() - self._start:6.1f} s  {text}")

    def echo(self, text: str) -> None:
        """Write a line as it is."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, found: Analysis, timing: Analysis | None = None) -> None:
        """Everything about a process; `timing`: the same at graph level, for undisturbed times."""
        self.echo("")
        for line in head(found, timing):
            self.echo(line)
        for table in (phases(found), kernels(found), gaps(found)):
            if table.row_count:
                self.echo("")
                self._table(table)
        self.echo("")
        for line in tail(found):
            self.echo(line)

    def ranks(self, rows: Sequence[Row]) -> None:
        """Several processes beside each other."""
        self.echo("")
        self._table(rank_table(rows))

    def comparison(self, found: Comparison, tolerance: float) -> None:
        """Both profiles beside each other, and the verdict."""
        self._table(comparison_table(found))
        for note in found.notes:
            self.echo(note)
        names = ", ".join(one.what for one in found.regressed)
        rule = f"more than {tolerance:.1%} and more than the spread"
        self.echo(f"slower by {rule}: {names}" if names else f"nothing grew by {rule}")

    def _table(self, table: Table) -> None:
        self.console.print(table, width=min(self.console.width, WIDTH))


def _table_of(*headers: str) -> Table:
    """A table whose first column is text; no box, for its lines are no ASCII."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for number, header in enumerate(headers):
        table.add_column(header, justify="right" if number else "left", overflow="fold")
    return table


def ms(ns: float) -> str:
    """Milliseconds with three decimals."""
    return f"{ns / 1e6:.3f}"


def us(ns: float) -> str:
    """Microseconds with one decimal."""
    return f"{ns / 1e3:.1f}"


def cut(name: str) -> str:
    """A name of at most `NAME` columns, plain ASCII."""
    plain = name.encode("ascii", "replace").decode()
    return plain if len(plain) <= NAME else f"{plain[: NAME - 3]}..."


def head(found: Analysis, timing: Analysis | None) -> list[str]:
    """Where it comes from, time of an iteration, idle share, host waits."""
    lines = [
        f"{found.source} ({found.tool}, {found.level} level), process {found.pid}",
        f"window: {found.window}, {ms(found.window_ns)} ms",
        _clock(found),
    ]
    if timing is not None:
        lines.append(f"undisturbed, at {timing.level} level: {_clock(timing)}")
    waits = [wait for wait in found.waits if wait.where == "in step"]
    listed = ", ".join(f"{wait.call} {wait.count:.2f} ({us(wait.ns)} us)" for wait in waits)
    lines.append(f"host waits in a step: {found.waits_in_step:.2f}" + (f": {listed}" if listed else ""))
    lines += [
        f"host waits, {wait.where}: {wait.call} {wait.count:.2f} an iteration ({us(wait.ns)} us)"
        for wait in found.waits
        if wait.where != "in step"
    ]
    return lines


def _clock(found: Analysis) -> str:
    """Time of an iteration and idle share of each device."""
    bound = ", a lower bound" if found.level == "graph" else ""
    idle = "; ".join(f"GPU {one.device} idle {one.idle_share:.2%}{bound}" for one in found.devices)
    return f"iteration {ms(found.iteration_ns)} ms (spread {ms(found.iteration_spread_ns)} ms); {idle}"


def phases(found: Analysis) -> Table:
    """Kernel time by phase, an iteration."""
    table = _table_of("phase", "kernels", "ms", "union ms", "share")
    for one in found.phases:
        table.add_row(one.phase, f"{one.kernels:.1f}", ms(one.ns), ms(one.union_ns), f"{one.share:.1%}")
    return table


def kernels(found: Analysis) -> Table:
    """The kernels that take most, over the window; rates beside the ceilings where work was given."""
    shown = found.kernels[:TOP_KERNELS]
    rated = any(one.tflops is not None or one.gb_per_s is not None for one in shown)
    table = _table_of("kernel", "phase", "count", "ms", "mean us", "share", *(["TFLOP/s", "GB/s"] if rated else []))
    for one in shown:
        rates = [
            _rate(one.tflops, found.ceilings.get("tflops")),
            _rate(one.gb_per_s, found.ceilings.get("gb_per_s")),
        ]
        table.add_row(
            cut(one.name), one.phase, str(one.count), ms(one.ns), us(one.mean_ns), f"{one.share:.1%}",
            *(rates if rated else []),
        )  # fmt: skip
    return table


def _rate(rate: float | None, ceiling: float | None) -> str:
    """A rate, and its share of the ceiling where there is one."""
    if rate is None:
        return "-"
    return f"{rate:.0f}" + (f" ({rate / ceiling:.0%})" if ceiling else "")


def gaps(found: Analysis) -> Table:
    """Gaps by what went on in them, over the window."""
    table = _table_of("gaps over 5 us, during", "count", "ms in sum", "longest us")
    for kind in found.gap_kinds[:TOP_GAPS]:
        table.add_row(kind.during, str(kind.count), ms(kind.ns), us(kind.longest_ns))
    return table


def tail(found: Analysis) -> list[str]:
    """What could not be told, launches, copies, notes."""
    told = ", ".join(f"{rule} {share:.1%}" for rule, share in found.rules.items() if rule != "none")
    lines = [f"unattributed: {found.unattributed_share:.2%} of kernel time" + (f" (told by {told})" if told else "")]
    lines += [f"launch: {one.call} {one.count:.1f} an iteration, {us(one.ns)} us" for one in found.launches]
    lines += [
        f"copies of the {one.origin}: {one.count}, {one.bytes / 2**20:.2f} MiB, {ms(one.ns)} ms, "
        f"{one.overlap:.1%} under kernels"
        for one in found.copies
    ]
    return lines + [f"note: {note}" for note in found.notes]


def rank_table(rows: Sequence[Row]) -> Table:
    """A line for each process; times from the undisturbed run where there is one."""
    table = _table_of("rank", "iteration ms", "kernels ms", "exchange ms", "idle", "waits", "unattributed")
    for name, found, timing in rows:
        clock = timing or found
        exchange = sum(one.ns for one in found.phases if one.phase.startswith("exchange"))
        table.add_row(
            name, ms(clock.iteration_ns), ms(sum(one.ns for one in found.phases)), ms(exchange),
            " ".join(f"{one.idle_share:.2%}" for one in clock.devices), f"{found.waits_in_step:.2f}",
            f"{found.unattributed_share:.2%}",
        )  # fmt: skip
    return table


def comparison_table(found: Comparison) -> Table:
    """A line for the iteration and each phase."""
    table = _table_of("an iteration", "before ms", "after ms", "growth", "spread ms", "")
    for one in found.differences:
        growth = "new" if one.growth is None else f"{one.growth:+.1%}"
        table.add_row(
            one.what, ms(one.before_ns), ms(one.after_ns), growth, ms(one.spread_ns), "slower" if one.regressed else ""
        )
    return table
