"""The MoE block, forward and forward + backward, captured, beside torch's `grouped_mm` and the ceiling of the device.

    python profiles/moe_block.py --output profiles/results/h200/moe_block.json
    python profiles/moe_block.py --shapes qwen3 --tokens 8192 --routing natural --per-kernel
    python profiles/moe_block.py --shapes olmoe --peers sonicmoe,liger
    python profiles/moe_block.py --check --device cpu

A block goes from tokens, expert ids and routing weights to the output: laying out rows, both products, activation,
weighting, combine. First every block is held against an fp64 loop over experts, outputs and all gradients, and 40 calls
of ours must give the same bits, eager and replayed; on red nothing is timed. Other packages, where they are installed,
are held against it on the widths of each shape before that is timed; one that is wrong or fails is named. TFLOP/s count
6·T·K·H·I for the forward and 18·T·K·H·I for both. The ceiling is an 8192^3 bf16 product of cuBLAS, measured before and
after each shape.

Dimensions: T tokens, K top_k, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from staticmoe.bench import SHAPES, Problem, needs, provenance
from staticmoe.bench.blocks import BLOCKS, absent, candidates, peer_candidates
from staticmoe.bench.check import CHECKED, TOLERANCE, check, check_repeat, reduced
from staticmoe.bench.measure import Sweep, measure_sweep
from staticmoe.bench.peers import held, registry
from staticmoe.bench.problems import ROUTINGS
from staticmoe.bench.result import source_commit, write_result
from staticmoe.bench.timing import copy_rate
from staticmoe.errors import ConfigError, SelfCheckError

RATES = {"tflops": 0, "tb_per_s": 2}  # of a kernel, with digits to show


def run(arguments: argparse.Namespace, found: registry.Found, device: torch.device, result: dict[str, Any]) -> None:
    """Measure every case, and write the result after each shape."""
    blocks = candidates(main_grad=arguments.main_grad, eager=arguments.eager, compile_peer=arguments.compiled)

    def after(p: Problem, row: dict[str, Any]) -> None:
        if arguments.per_kernel:
            import tune_tiles

            row["kernels"] = tune_tiles.time_kernels(p, device)
        print(json.dumps(row), flush=True)

    for shape_name in arguments.shapes:
        tokens, shape = reduced(SHAPES[shape_name], max(arguments.tokens), device)
        shape = needs.checkable(shape, tokens, torch.bfloat16.itemsize, torch.cuda.mem_get_info(device)[0])
        peers = peer_candidates(found)
        errors, left_out = held.hold_all(peers, torch.bfloat16, device, (tokens, shape), say=say)
        result["check"]["peers"][shape_name], result["left_out"][shape_name] = errors, left_out
        sweep = Sweep(
            name=shape_name,
            shape=SHAPES[shape_name],
            tokens=arguments.tokens,
            routings=arguments.routing,
            dtype=torch.bfloat16,
            candidates=[*blocks, *(one for one in peers if one.package not in left_out)],
        )
        result["cases"] += measure_sweep(sweep, device, after=after)
        if arguments.output:
            write_result(result, arguments.output)


def say(text: str) -> None:
    """A line of what is being done."""
    print(text, flush=True)


def print_tables(result: dict[str, Any]) -> None:
    """What was measured, for people."""
    console = Console(width=None if sys.stdout.isatty() else 170)
    table = Table(title=f"MoE block, bf16, captured; copy {result['copy_tb_per_s']:.2f} TB/s")
    for name in ("shape", "tokens", "routing", "block", "forward ms", "TFLOP/s", "share"):
        table.add_column(name, justify="left" if name in ("shape", "routing", "block") else "right")
    for name in ("fwd+bwd ms", "range", "TFLOP/s", "share", "saved GiB", "peak GiB"):
        table.add_column(name, justify="right")
    kernels = Table(title="kernels alone")
    for name in ("shape", "tokens", "routing", "kernel", "us", "TFLOP/s", "TB/s"):
        kernels.add_column(name, justify="left" if name in ("shape", "routing", "kernel") else "right")
    for row in result["cases"]:
        case = (row["shape"], str(row["tokens"]), row["routing"])
        for name, found in row["blocks"].items():
            forward, both = found["forward"], found["both"]
            table.add_row(
                *case, name, f"{forward['ms']:.3f}", f"{forward['tflops']:.0f}", f"{forward['share']:.1%}",
                f"{both['ms']:.3f}", "{:.3f}-{:.3f}".format(*both["ms_range"]), f"{both['tflops']:.0f}",
                f"{both['share']:.1%}", f"{found['saved_gib']:.2f}", f"{found['peak_gib']:.2f}",
            )  # fmt: skip
        for name, found in row.get("kernels", {}).items():
            rates = {rate: f"{found[rate]:.{digits}f}" for rate, digits in RATES.items() if rate in found}
            kernels.add_row(*case, name, f"{1e3 * found['ms']:.1f}", *(rates.get(rate, "-") for rate in RATES))
    console.print(table)
    for name, note in result["peers"].items():
        console.print(f"{name}: {note}", markup=False, highlight=False)
    for shape, reasons in result["left_out"].items():
        for name, why in reasons.items():
            console.print(f"left out of {shape}: {name}: {why}", markup=False, highlight=False)
    for name, why in result["absent"].items():
        console.print(f"absent: {name}: {why}", markup=False, highlight=False)
    if kernels.row_count:
        console.print(kernels)


def main() -> None:
    """Check, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--tokens", nargs="*", type=int, default=[8192, 32768])
    parser.add_argument("--routing", nargs="*", default=list(ROUTINGS), choices=ROUTINGS)
    parser.add_argument("--per-kernel", action="store_true", help="time every launcher alone as well")
    parser.add_argument("--main-grad", action="store_true", help="a row with fp32 weight gradients added to buffers")
    parser.add_argument("--eager", action="store_true", help="a row with grouped_mm uncaptured")
    parser.add_argument("--compiled", action="store_true", help="a row with grouped_mm by torch.compile")
    parser.add_argument(
        "--peers", help=f"some of {','.join(registry.PEERS)}, or {registry.NOBODY}; default: those that import"
    )
    parser.add_argument("--check", action="store_true", help="check, and time nothing")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--commit", default=None, help="of the code; default: git's")
    arguments = parser.parse_args()
    try:
        found = registry.find(registry.asked_for(arguments.peers))
    except ConfigError as error:
        raise SystemExit(str(error)) from error
    device = torch.device(arguments.device)
    if device.type == "cpu":
        # The products of the check are so small that a second thread mostly waits.
        torch.set_num_threads(1)
    # On a CPU the ops are plain PyTorch in every dtype.
    dtypes = [torch.bfloat16] if device.type == "cuda" else [torch.bfloat16, torch.float32]
    try:
        checked = {
            f"{name}, {dtype}".replace("torch.", ""): check(lambda _, block=block: block, dtype, device)
            for dtype in dtypes
            for name, block in BLOCKS.items()
        }
        tokens, shape = CHECKED["cpu"] if device.type == "cpu" else (8192, SHAPES["qwen3"])
        checks = {"relative_errors": checked, "bitwise_equal_calls": check_repeat(shape, tokens, dtypes[0], device)}
    except SelfCheckError as error:
        raise SystemExit(str(error)) from error
    print("check", json.dumps(checks), flush=True)
    if arguments.check:
        return
    if device.type != "cuda":
        raise SystemExit("speeds are measured on a GPU; on a CPU there is --check")
    missing = absent(arguments.compiled, found.absent)
    allowed = {"blocks": TOLERANCE[torch.bfloat16], "peers": held.PEER_TOLERANCE[torch.bfloat16]}
    result: dict[str, Any] = {
        "provenance": provenance(device, arguments.commit or source_commit(), list(missing)),
        "absent": missing,
        "left_out": {},
        "peers": found.notes,
        "check": {**checks, "allowed": allowed, "peers": {}},
        "copy_tb_per_s": copy_rate(device),
        "cases": [],
    }
    run(arguments, found, device, result)
    print_tables(result)


if __name__ == "__main__":
    main()
