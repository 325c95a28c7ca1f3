"""The kernels under compute-sanitizer: memcheck on a small run of each, racecheck on those of the plan.

    python profiles/sanitize.py --output profiles/results/h200/sanitize.json

Runs tests of `tests/kernels` and `tests/ops` under the tool, with torch's allocator turned off so that every tensor is
an allocation of its own, whose bounds the tool knows. Only our kernels are instrumented. Exit code 1 where the tool
found anything, a test failed, or none ran.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Test file -> which of its tests; together they launch every kernel, with tails and empty experts.
MEMCHECK = {
    "tests/kernels/test_up.py": "tails or one_token or base_row",
    "tests/kernels/test_grouped_gemm.py": "counts or ways",
    "tests/kernels/test_dact.py": "fill_no_tile or dropped or parts_are",
    "tests/kernels/test_weight_grad.py": "down_gradient or up_gradient or accumulate",
    "tests/kernels/test_combine.py": "sum_of_rows or gradients or without_weights",
    "tests/kernels/test_grouped_sum.py": "the_sum_of or count_with or accumulate",
    "tests/kernels/test_plan.py": "victims or skewed or drops_are or no_tokens",
    "tests/kernels/test_routing.py": "strided or ties or tiny or two_bytes or not_finite",
    "tests/kernels/test_weigh.py": "weighed_as or no_memory",
    "tests/kernels/test_schedule.py": "equal_the_oracle or too_few",
    "tests/kernels/test_adamw.py": "updated_from_its_own",
    "tests/ops/test_launch.py": "every_gradient or fp32_stored or doomed",
}
RACECHECK = {
    "tests/kernels/test_plan.py": "victims or skewed or drops_are or several_blocks or overload",
    "tests/kernels/test_schedule.py": "equal_the_oracle",
}
_SUMMARY = re.compile(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (.*)")
_TESTS = re.compile(r"(\d+) passed.*")


def check(tool: str, file: str, tests: str, limit: float) -> dict[str, Any]:
    """Run some tests of a file under a tool of compute-sanitizer."""
    command = [
        "compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--kernel-name", "kernel_substring=staticmoe",
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", file, "-k", tests,
    ]  # fmt: skip
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
        output, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        output, code = f"{error.stdout!r}", -1
    summary, passed = _SUMMARY.findall(output), _TESTS.search(output)
    result = {
        "tool": tool,
        "tests": f"{file} -k '{tests}'",
        "exit_code": code,
        "passed": int(passed[1]) if passed else 0,
        "summary": summary[-1] if summary else "none",
        "seconds": round(time.perf_counter() - start, 1),
    }
    clean = code == 0 and passed is not None and bool(summary) and summary[-1].startswith("0 ")
    if not clean:
        print(output[-6000:], flush=True)
    return {**result, "clean": clean}


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--jobs", type=int, default=6, help="runs at a time")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds of one run")
    parser.add_argument("--commit", default=None, help="of the code; default: git's")
    arguments = parser.parse_args()
    import torch
    import triton

    from staticmoe.observe.nvml import gpu_facts

    version = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True, check=True).stdout
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = arguments.commit or subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    work = [
        (tool, *entry) for tool, table in (("memcheck", MEMCHECK), ("racecheck", RACECHECK)) for entry in table.items()
    ]
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        found = list(pool.map(lambda job: check(*job, arguments.limit), work))
    for run in found:
        print(
            f"{'clean' if run['clean'] else 'NOT CLEAN':9} {run['tool']:9} {run['passed']:3} tests "
            f"{run['seconds']:6.1f} s  {run['summary']}  {run['tests']}"
        )
    if arguments.output:
        provenance = {
            "gpu": gpu_facts(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "compute_sanitizer": version.strip().splitlines()[-1],
            "commit": commit,
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps({"provenance": provenance, "runs": found}, indent=1) + "\n")
    sys.exit(0 if all(run["clean"] for run in found) else 1)


if __name__ == "__main__":
    main()
