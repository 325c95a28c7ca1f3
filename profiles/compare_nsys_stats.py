"""What `nsys stats` says of a profile beside what this package reads from it: kernel time, in sum and by kernel.

    staticmoe profile --output profile -- python train.py
    python profiles/compare_nsys_stats.py profile/profile.nsys-rep
    python profiles/compare_nsys_stats.py profile/profile.sqlite --json profiles/results/h200/nsys_stats.json

nsys sums up everything that was recorded, so that both are compared over the whole file; of it the window of the
analysis, whole iterations, is a part, which is shown too. The last column is ours over nsys's, minus 1. Ends with exit
code 3 where the sums, or one of the kernels shown, differ by more than --tolerance.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

from staticmoe.errors import StaticMoEError
from staticmoe.profiling.collect import TOOL_TIMEOUT_S, export_report
from staticmoe.profiling.errors import ProfileError
from staticmoe.profiling.metrics import analyse_processes
from staticmoe.profiling.read import read_profile
from staticmoe.profiling.result import write_file
from staticmoe.profiling.tools import NSYS, find_nsys, library_environment, run_tool

DIFFERENT = 3
# Sums by short names, as kernels are called in an analysis.
REPORT = "cuda_gpu_kern_sum:base"
TIME, COUNT, NAME = "Total Time (ns)", "Instances", "Name"


@dataclasses.dataclass(frozen=True)
class Row:
    """A kernel, or all of them: ns and launches as nsys counts them and as we do, and our ns within the window."""

    name: str
    nsys_ns: int
    nsys_count: int
    ns: int
    count: int
    window_ns: int

    @property
    def difference(self) -> float:
        """Ours over nsys's, minus 1."""
        return self.ns / self.nsys_ns - 1 if self.nsys_ns else float(self.ns > 0)


def nsys_kernels(nsys: Path, sqlite: Path) -> dict[str, tuple[int, int]]:
    """Kernel -> ns and launches, by `nsys stats`.

    Raises:
        ProfileError: it failed, or wrote no such table.
    """
    lines: list[str] = []
    command = [str(nsys), "stats", "--report", REPORT, "--format", "csv", "--output", "-", str(sqlite)]
    environment = library_environment(nsys.resolve().parent)
    done = run_tool(command, timeout_s=TOOL_TIMEOUT_S, say=lines.append, environment=environment)
    # What it says of itself comes before the table, and other tables or remarks after an empty line.
    start = next((number for number, line in enumerate(lines) if TIME in line and NAME in line), None)
    if done.code or start is None:
        raise done.failed(f"nsys stats of {sqlite}", f"use the nsys that wrote the file: name it by {NSYS}")
    end = next((number for number, line in enumerate(lines) if number > start and not line.strip()), len(lines))
    found: dict[str, tuple[int, int]] = {}
    for row in csv.DictReader(lines[start:end]):
        ns, count = found.get(row[NAME], (0, 0))
        found[row[NAME]] = ns + int(row[TIME]), count + int(row[COUNT])
    return found


def compare(nsys: Path, sqlite: Path) -> list[Row]:
    """All kernels together, then each, the longest first.

    Raises:
        ProfileError: the file or the tool fails.
    """
    theirs = nsys_kernels(nsys, sqlite)
    timeline = read_profile(sqlite)
    ns: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for kernel in timeline.kernels:
        ns[kernel.name] += kernel.end - kernel.start
        counts[kernel.name] += 1
    within: Counter[str] = Counter()
    for analysis in analyse_processes(timeline):
        for one in analysis.kernels:
            within[one.name] += one.ns
    names = sorted(ns.keys() | theirs.keys(), key=lambda name: (-max(ns[name], theirs.get(name, (0, 0))[0]), name))
    rows = [Row(name, *theirs.get(name, (0, 0)), ns[name], counts[name], within[name]) for name in names]
    total = [sum(column) for column in zip(*(dataclasses.astuple(row)[1:] for row in rows), strict=True)]
    return [Row("all kernels", *total), *rows]


def shown(rows: list[Row]) -> list[str]:
    """A table of at most 100 columns."""
    head = f"{'kernel':<44}{'nsys ms':>11}{'ours ms':>11}{'launches':>17}{'window':>8}{'differ':>9}"
    lines = [head]
    for row in rows:
        launches = f"{row.nsys_count} / {row.count}"
        share = f"{row.window_ns / max(row.ns, 1):.1%}"
        lines.append(
            f"{row.name[:43]:<44}{row.nsys_ns / 1e6:>11.3f}{row.ns / 1e6:>11.3f}{launches:>17}{share:>8}"
            f"{row.difference:>+9.3%}"
        )
    return lines


def main() -> None:
    """Compare, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path, help=".sqlite or .nsys-rep, of node level")
    parser.add_argument("--top", type=int, default=10, help="kernels to show")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="difference that is allowed, a fraction")
    parser.add_argument("--json", type=Path, default=None, help="JSON file to write")
    arguments = parser.parse_args()
    nsys = find_nsys()
    if nsys is None:
        raise ProfileError(f"expected nsys; it was not found on PATH or below /opt/nvidia: name it by {NSYS}")
    with tempfile.TemporaryDirectory() as folder:
        sqlite = arguments.profile
        if sqlite.suffix == ".nsys-rep":
            # Beside the report nsys would leave a file that is not whole while it is written.
            sqlite = export_report(nsys, sqlite, lambda text: print(text, flush=True), Path(folder))
        rows = compare(nsys, sqlite)[: arguments.top + 1]
    print("\n".join(shown(rows)))
    if arguments.json is not None:
        found = {"nsys": str(nsys), "profile": str(arguments.profile), "report": REPORT}
        table = [{**dataclasses.asdict(row), "difference": row.difference} for row in rows]
        write_file(arguments.json, (json.dumps({**found, "rows": table}, indent=1) + "\n").encode())
    apart = [row.name for row in rows if abs(row.difference) > arguments.tolerance or row.count != row.nsys_count]
    print(f"differ by more than {arguments.tolerance:.2%}: {', '.join(apart) or 'none'}")
    if apart:
        raise SystemExit(DIFFERENT)


if __name__ == "__main__":
    try:
        main()
    except StaticMoEError as error:
        print(f"compare_nsys_stats: {error}", file=sys.stderr)
        raise SystemExit(1) from error
