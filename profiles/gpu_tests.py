"""Tests on a GPU, with what failed named at once, and entered in the file of such runs.

    python profiles/gpu_tests.py --output profiles/results/h200/tests.json -- -n 14 tests/runner tests/capture -k cuda

What follows `--` goes to pytest. A failure is printed as soon as it is known. After `--limit` seconds the run ends and
what is known of it is entered, marked as cut off. A run is appended to those that the file has. The exit code is
pytest's; 2 for a run that was cut off.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from staticmoe.bench.result import provenance, source_commit, write_result

ROOT = Path(__file__).resolve().parents[1]
# Seconds that pytest has to end its workers once the time is over, and how many of the slowest tests are kept.
GRACE_S, SLOWEST = 20.0, 10


class Outcomes:
    """A pytest plugin: counts, names and times of the tests so far. With workers it sits beside them, not in them."""

    def __init__(self) -> None:
        self.counts = {"passed": 0, "skipped": 0, "failed": 0, "errors": 0}
        self.failures: list[str] = []
        self.seconds: dict[str, float] = {}
        self.was_cut_off = False
        self._start = time.monotonic()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be collected."""
        if report.failed:
            self._fail("errors", report.nodeid, _error_of(report.longrepr))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A phase of a test: what fails in its set-up or tear-down is an error."""
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            what = "failed" if report.when == "call" else "errors"
            self._fail(what, report.nodeid, _error_of(report.longrepr))
        elif report.skipped:
            self.counts["skipped"] += 1
        elif report.when == "call":
            self.counts["passed"] += 1

    def _fail(self, what: str, test: str, why: str) -> None:
        self.counts[what] += 1
        self.failures.append(f"{test}: {why}")
        print(f"\n{what}: {self.failures[-1]}", flush=True)

    def cut_off(self, number: int, frame: FrameType | None) -> None:
        """End the run: the first time by asking pytest, then at once."""
        if self.was_cut_off:
            raise SystemExit(2)
        self.was_cut_off = True
        signal.setitimer(signal.ITIMER_REAL, GRACE_S)
        raise KeyboardInterrupt

    def row(self, command: str, commit: str) -> dict[str, Any]:
        """What the file holds of a run."""
        slowest = sorted(self.seconds.items(), key=lambda one: -one[1])[:SLOWEST]
        return {
            "commit": commit,
            "command": command,
            **self.counts,
            "seconds": round(time.monotonic() - self._start, 1),
            "cut_off": self.was_cut_off,
            "failures": self.failures,
            "slowest": {test: round(seconds, 2) for test, seconds in slowest},
        }


def _error_of(representation: Any) -> str:
    """The error itself, of a report's traceback, or the last line of what is none."""
    crash = getattr(representation, "reprcrash", None)
    lines = str(crash.message if crash else representation).strip().splitlines()
    return (lines[0] if crash else lines[-1])[:300] if lines else ""


def enter(row: dict[str, Any], path: Path) -> None:
    """Append a run to the file, which is made where there is none."""
    found = json.loads(path.read_text()) if path.exists() else None
    if found is None:
        kept = ("gpu", "torch", "triton", "python")
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        known = provenance(device, row["commit"])
        found = {"provenance": {**{key: known[key] for key in kept}, "commit": "of each run: see there"}, "runs": []}
    found["runs"].append(row)
    write_result(found, path)


def run(arguments: Sequence[str], limit_s: float, output: Path | None, commit: str) -> int:
    """Run pytest on these arguments; enter what came of it."""
    outcomes = Outcomes()
    previous = signal.signal(signal.SIGALRM, outcomes.cut_off)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        code = int(pytest.main(["-q", "-p", "no:cacheprovider", *arguments], plugins=[outcomes]))
    except (KeyboardInterrupt, SystemExit):
        code = 2
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)
    row = outcomes.row(f"python -m pytest {shlex.join(arguments)}", commit)
    if output is not None:
        enter(row, output)
    print(json.dumps({key: value for key, value in row.items() if key != "slowest"}, indent=1), flush=True)
    return 2 if outcomes.was_cut_off else code


def main() -> None:
    """Run, print, write; workers that do not end keep nobody waiting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to append to")
    parser.add_argument("--limit", type=float, default=500.0, help="seconds after which the run is cut off")
    parser.add_argument("--commit", default=None, help="of the code; default: git's")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    arguments = parser.parse_args()
    output = arguments.output.resolve() if arguments.output else None
    os.chdir(ROOT)
    code = run(arguments.pytest, arguments.limit, output, arguments.commit or source_commit())
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
