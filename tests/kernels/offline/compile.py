"""Compile every kernel for GPUs that are not here, exactly as its launcher calls it, and say what each one takes.

    pip install --no-deps --target /some/folder triton==3.6.0
    PYTHONPATH=/some/folder:. python tests/kernels/offline/compile.py
    ... --write profiles/results/sm_90/kernel_resources.json

The launchers run on CPU tensors that nobody reads; where one would start a kernel, the kernel is compiled for the
target instead. Signature, constants, alignment and options are therefore those of a real launch. For sm_90 the machine
code is taken apart; for other targets the compiler stops at PTX, where shared memory is already decided.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Cases are compiled side by side, and a tensor is never computed with here.
os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("OMP_NUM_THREADS", "1")

import cases
import triton
from triton import knobs
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

TOOLS = Path(nvidia.__file__).parent / "bin"
MATRIX = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b")
INSTRUCTIONS = ("HGMMA", "HMMA", "FFMA", "LDGSTS", "UTMALDG", "UTMASTG", "LDG", "STG", "LDL", "STL")


class Absent:
    """Stands for a GPU of one compute capability that is not there."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return self.target

    def get_current_device(self) -> int:
        """A number of its own for each target: a kernel remembers by it what it was compiled for."""
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        """The default stream."""
        return 0


@contextlib.contextmanager
def compiling(capability: tuple[int, int]) -> Iterator[list[tuple[str, Any]]]:
    """Within, a launch compiles and launches nothing; yields the list of (kernel name, compiled kernel)."""
    compiled: list[tuple[str, Any]] = []
    run, folder = JITFunction.run, knobs.cache.dir

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append((self.__name__, kernel))
        return kernel

    def stop_at_ptx(backend: Any, stages: dict[str, Any], *_: Any) -> None:
        stages["cubin"] = lambda source, metadata: b""

    JITFunction.run = compile_only
    driver.set_active(Absent(capability))
    if capability != (9, 0):
        # Its own cache: a kernel that ends at PTX must not be found by someone who wants to run it.
        knobs.cache.dir = str(Path(folder) / "ptx")
        knobs.runtime.add_stages_inspection_hook = stop_at_ptx
    try:
        yield compiled
    finally:
        JITFunction.run, knobs.cache.dir, knobs.runtime.add_stages_inspection_hook = run, folder, None


def resources(kernel: Any, disassemble: bool) -> dict[str, Any]:
    """Registers and stack bytes of a compiled kernel, and instruction counts, which take a second."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = tool("cuobjdump", "-res-usage", file.name)
        code = tool("nvdisasm", "-c", file.name) if disassemble else ""
    ((registers, stack),) = re.findall(r"REG:(\d+) STACK:(\d+)", usage)
    counts = {name: len(re.findall(rf"\b{name}\b", code)) for name in INSTRUCTIONS} if disassemble else {}
    return {"registers": int(registers), "stack": int(stack), **counts}


def tool(name: str, *arguments: str) -> str:
    """What a tool that comes with Triton prints."""
    return subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True).stdout


def compile_case(case: cases.Case) -> list[dict[str, Any]]:
    """Compile what one call of a launcher starts: one entry for each kernel, or one that says why not."""
    start = time.perf_counter()
    entry = {
        "case": case.name,
        "capability": list(case.capability),
        "dtype": str(case.dtype).removeprefix("torch."),
        "tile": dataclasses.asdict(case.tile) if case.tile else None,
        "matrix": case.matrix,
    }
    try:
        with compiling(case.capability) as compiled:
            case.launch(dtype=case.dtype, tile=case.tile, **case.options)
    except Exception as error:  # whatever the compiler throws is the finding
        return [{**entry, "error": f"{type(error).__name__}: {error}"[-2000:]}]
    if not compiled:
        return [{**entry, "error": "the launcher started no kernel"}]
    seconds = round(time.perf_counter() - start, 1)
    entries = []
    # A launcher may start one kernel more than once.
    for name, kernel in {kernel.hash: (name, kernel) for name, kernel in compiled}.values():
        metadata = kernel.metadata
        if metadata.target.arch != 10 * case.capability[0] + case.capability[1]:
            raise RuntimeError(f"{name} was compiled for {metadata.target}, not for {case.capability}")
        found = {"kernel": name, "warps": metadata.num_warps, "stages": metadata.num_stages, "shared": metadata.shared}
        found["matrix_ptx"] = len(MATRIX.findall(kernel.asm["ptx"]))
        if case.capability == (9, 0):
            found.update(resources(kernel, disassemble=case.matrix or case.tile is not None))
        entries.append({**entry, **found, "seconds": seconds})
    return entries


def compile_all(chosen: list[cases.Case], jobs: int) -> list[dict[str, Any]]:
    """Compile cases in `jobs` processes; the order of the result is that of the cases."""
    # Forked: a process that is started anew would import torch again. No thread runs yet.
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        return [entry for entries in pool.map(compile_case, chosen) for entry in entries]


def label_of(entry: dict[str, Any]) -> str:
    """Case, target, dtype, tile and kernel in one word each."""
    tile = entry["tile"]
    shape = f"{tile['rows']}x{tile['columns']}x{tile['depth']}" if tile else "-"
    target = "sm_{}{}".format(*entry["capability"])
    return (
        f"{target:7}{entry['dtype']:9}{shape:11} {entry['case']}: {entry.get('kernel', '').removeprefix('staticmoe_')}"
    )


def print_table(entries: list[dict[str, Any]]) -> None:
    """For people."""
    head = ("registers", "stack", "shared", "matrix_ptx", "HGMMA", "HMMA", "LDGSTS", "UTMALDG", "UTMASTG", "seconds")
    width = max(len(label_of(entry)) for entry in entries) + 2
    print(" " * width + "".join(f"{name:>11}" for name in head), file=sys.stderr)
    for entry in entries:
        label = label_of(entry)
        values = "".join(f"{entry.get(name, '-'):>11}" for name in head)
        print(f"{label:{width}}" + (f"  {entry['error']}" if "error" in entry else values), file=sys.stderr)


def main() -> None:
    """Print JSON, or write the committed table of sm_90."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="words that a case's name must contain, all of them")
    parser.add_argument("--capability", nargs="*", default=[], help="such as 9.0; default: all")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--write", type=Path, help="file for the resources on sm_90")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout, no table")
    arguments = parser.parse_args()
    wanted = [tuple(int(part) for part in text.split(".")) for text in arguments.capability]
    wanted = [(9, 0)] if arguments.write else wanted
    chosen = [
        case
        for case in cases.cases()
        if all(word in case.name for word in arguments.only) and (not wanted or case.capability in wanted)
    ]
    entries = compile_all(chosen, arguments.jobs)
    result = {"triton": triton.__version__, "entries": entries}
    if arguments.json:
        json.dump(result, sys.stdout)
    else:
        print_table(entries)
    failed = sum("error" in entry for entry in entries)
    if arguments.write and failed:
        raise SystemExit(f"{failed} cases do not compile; {arguments.write} is as it was")
    if arguments.write:
        write(arguments.write, result)


def write(path: Path, result: dict[str, Any]) -> None:
    """One line an entry, without what changes from run to run."""
    lines = [json.dumps({k: v for k, v in entry.items() if k != "seconds"}) for entry in result["entries"]]
    head = {"triton": result["triton"], "target": "sm_90a", "made_by": "tests/kernels/offline/compile.py --write"}
    body = ",\n  ".join(lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{\n "provenance": {json.dumps(head)},\n "entries": [\n  {body}\n ]\n}}\n')


if __name__ == "__main__":
    main()
