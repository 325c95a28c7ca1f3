"""The script that runs tests on a GPU: what it enters of a run, and of one that was cut off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "profiles" / "gpu_tests.py"
# The last two: the time is over while a test runs, and a test that is not reached.
TESTS = """
import os, signal, time
import pytest

@pytest.fixture
def broken():
    raise OSError("no such fixture")

def test_that_passes(): pass
def test_that_fails(): assert 1 == 2, "one is not two"
def test_that_errs(broken): pass
@pytest.mark.skip
def test_that_is_skipped(): pass
def test_that_hangs():
    os.kill(os.getpid(), signal.SIGALRM)
    while True:
        time.sleep(0.01)
def test_that_is_not_reached(): pass
"""


def test_a_run_is_entered_with_its_failures_and_one_that_is_cut_off_too(tmp_path: Path) -> None:
    """Counts, names and first lines of errors; a second run is appended; what is there already stays."""
    (tmp_path / "test_some.py").write_text(TESTS)
    output = tmp_path / "out" / "tests.json"

    def call(*options: str) -> tuple[int, str]:
        command = [sys.executable, str(SCRIPT), "--output", str(output), "--", str(tmp_path / "test_some.py"), *options]
        environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1])}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        return done.returncode, done.stdout

    code, printed = call()
    assert code == 2 and "failed: " in printed
    first = json.loads(output.read_text())
    (row,) = first["runs"]
    assert [row[key] for key in ("passed", "skipped", "failed", "errors", "cut_off")] == [1, 1, 1, 1, True]
    assert [failure.split("::")[1] for failure in row["failures"]] == [
        "test_that_fails: AssertionError: one is not two",
        "test_that_errs: OSError: no such fixture",
    ]
    assert first["provenance"]["torch"] and "test_some.py" in row["command"]
    code, _ = call("-k", "passes or skipped")
    second = json.loads(output.read_text())
    assert code == 0 and second["runs"][0] == row and second["provenance"] == first["provenance"]
    assert [second["runs"][1][key] for key in ("passed", "skipped", "failed", "cut_off")] == [1, 1, 0, False]
