"""Every kernel, compiled offline by the Triton of the H200: no spills, matrix instructions, shared memory that fits.

Triton 3.6.0 lies in a folder of its own, because other versions give other figures:

    pip install --no-deps --target <folder> triton==3.6.0
    STATICMOE_TRITON_36=<folder> python -m pytest tests/kernels/test_compile.py
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "kernels" / "offline" / "compile.py"
TABLE = ROOT / "profiles" / "results" / "sm_90" / "kernel_resources.json"
VERSION = "3.6.0"

FOLDER = os.environ.get("STATICMOE_TRITON_36", "")
needs_triton = pytest.mark.skipif(
    not FOLDER,
    reason=f"set STATICMOE_TRITON_36=<folder> after: pip install --no-deps --target <folder> triton=={VERSION}",
)

# What one block may have of shared memory, in bytes.
SHARED = {(8, 0): 163 << 10, (8, 9): 99 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10}

# (kernel, case): the most stack bytes, and why they do no harm.
_EPILOGUE = (
    "a few registers of the epilogue, outside of the loop over H; the tiles that compile without were measured slower, "
    "see profiles/results/h200/tile_sweep.json"
)
_FASTEST = "the fastest of those timed, with and without spills: profiles/results/h200/tile_tuning.json"
STACK: dict[tuple[str, str], tuple[int, str]] = {
    ("staticmoe_dact_gemm", "dact"): (8, _EPILOGUE),
    ("staticmoe_dact_gemm", "dact, geglu"): (40, _EPILOGUE),
    ("staticmoe_dact_gemm", "dact, few rows"): (88, _FASTEST),
    ("staticmoe_dact_gemm", "dact, fewest rows"): (88, _FASTEST),
}

Entry = dict[str, Any]


@pytest.fixture(scope="module")
def entries() -> list[Entry]:
    """What the script says of every case, on every target."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([FOLDER, str(ROOT)])}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    assert result["triton"] == VERSION, f"{FOLDER} holds Triton {result['triton']}"
    assert len(result["entries"]) > 0
    return result["entries"]


def label(entry: Entry) -> str:
    """Kernel, case, target, dtype and tile."""
    tile = entry["tile"] or {}
    size = "x".join(str(tile[name]) for name in ("rows", "columns", "depth")) if tile else "no tile"
    target = ".".join(str(part) for part in entry["capability"])
    return f"{entry.get('kernel', '?')} ({entry['case']}, {target}, {entry['dtype']}, {size})"


def on_hopper(entries: list[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry["capability"] == [9, 0] and "error" not in entry]


def broken(entries: list[Entry]) -> list[str]:
    return [f"{label(entry)}: {entry['error']}" for entry in entries if "error" in entry]


def spilling(entries: list[Entry]) -> list[str]:
    return [
        f"{label(entry)}: {entry['stack']} bytes of stack, {entry['registers']} registers"
        for entry in on_hopper(entries)
        if entry["stack"] > STACK.get((entry["kernel"], entry["case"]), (0, ""))[0]
    ]


def without_matrix_instructions(entries: list[Entry]) -> list[str]:
    """On Hopper those of a warp group in the machine code, elsewhere any in the PTX."""
    return [
        label(entry)
        for entry in entries
        if entry["matrix"] and "error" not in entry and not entry.get("HGMMA", entry["matrix_ptx"])
    ]


def too_large(entries: list[Entry]) -> list[str]:
    return [
        f"{label(entry)}: {entry['shared']} bytes of shared memory, {SHARED[tuple(entry['capability'])]} there are"
        for entry in entries
        if entry.get("shared", 0) > SHARED[tuple(entry["capability"])]
    ]


@needs_triton
def test_every_kernel_compiles_for_every_target(entries: list[Entry]) -> None:
    assert broken(entries) == []
    assert {tuple(entry["capability"]) for entry in entries} == set(SHARED)


@needs_triton
def test_no_kernel_spills_on_hopper(entries: list[Entry]) -> None:
    assert spilling(entries) == []


@needs_triton
def test_an_exception_is_needed(entries: list[Entry]) -> None:
    """One that no kernel uses any more goes out of the list."""
    used = {(entry["kernel"], entry["case"]) for entry in on_hopper(entries) if entry["stack"]}
    assert STACK.keys() - used == set()
    assert all(reason for _, reason in STACK.values())


@needs_triton
def test_grouped_products_use_the_matrix_units(entries: list[Entry]) -> None:
    assert without_matrix_instructions(entries) == []


@needs_triton
def test_shared_memory_fits(entries: list[Entry]) -> None:
    assert too_large(entries) == []


def named_kernels(capability: tuple[int, int]) -> set[str]:
    """The kernels for a GPU: jit functions whose name starts as every kernel's must. A subfolder is Hopper's alone."""
    folder = ROOT / "kernels"
    return {
        node.name
        for path in (folder.rglob("*.py") if capability == (9, 0) else folder.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("staticmoe_")
    }


@needs_triton
@pytest.mark.parametrize("capability", SHARED)
def test_no_kernel_is_left_out(entries: list[Entry], capability: tuple[int, int]) -> None:
    compiled = {entry.get("kernel") for entry in entries if tuple(entry["capability"]) == capability}
    assert named_kernels(capability) - compiled == set()


@needs_triton
def test_the_committed_table_is_what_compiles(entries: list[Entry]) -> None:
    """Else: python tests/kernels/offline/compile.py --write profiles/results/sm_90/kernel_resources.json"""
    table = json.loads(TABLE.read_text())
    assert table["provenance"]["triton"] == VERSION
    compiled = [{k: v for k, v in entry.items() if k != "seconds"} for entry in on_hopper(entries)]
    assert [label(entry) for entry in table["entries"]] == [label(entry) for entry in compiled]
    assert [label(a) for a, b in zip(table["entries"], compiled, strict=True) if a != b] == []


GOOD: Entry = {
    "case": "c", "kernel": "k", "capability": [9, 0], "dtype": "bfloat16", "tile": None, "matrix": True,
    "shared": 227 << 10, "registers": 255, "stack": 0, "matrix_ptx": 4, "HGMMA": 4,
}  # fmt: skip


def test_the_checks_bite() -> None:
    """Each finds what it is for, and nothing in a good entry."""
    checks = (broken, spilling, without_matrix_instructions, too_large)
    assert [check([GOOD]) for check in checks] == [[], [], [], []]
    assert len(broken([{**GOOD, "error": "CompilationError"}])) == 1
    assert len(spilling([{**GOOD, "stack": 8}])) == 1
    assert len(without_matrix_instructions([{**GOOD, "HGMMA": 0}])) == 1
    assert len(without_matrix_instructions([{k: v for k, v in GOOD.items() if k != "HGMMA"} | {"matrix_ptx": 0}])) == 1
    assert len(too_large([{**GOOD, "shared": (227 << 10) + 1}])) == 1
    assert len(too_large([{**GOOD, "capability": [8, 9], "shared": 100 << 10}])) == 1
