"""The MoE block, forward and forward + backward, captured, beside torch's `grouped_mm` and the ceiling of the device.

    python profiles/moe_block.py --output profiles/results/h200/moe_block.json
    python profiles/moe_block.py --shapes qwen3 --tokens 8192 --routing natural --per-kernel
    python profiles/moe_block.py --check --device cpu

A block goes from tokens, expert ids and routing weights to the output: laying out rows, both products, activation,
weighting, combine. First every block is held against an fp64 loop over experts, outputs and all gradients, and 40 calls
of ours must give the same bits, eager and replayed; on red nothing is timed. TFLOP/s count 6·T·K·H·I for the forward
and 18·T·K·H·I for both. The ceiling is an 8192^3 bf16 product of cuBLAS, measured before and after each shape.

Dimensions: T tokens, K top_k, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from timing import REPLAYS, WARMUP, capture, ceiling, clean, copy_rate, milliseconds, poison, spread
from torch import Tensor

from staticmoe import functional
from staticmoe.observe.nvml import gpu_facts

REPEATED = 40
# Of one result, against fp64: the norm of the difference over the norm. bf16 keeps 8 bits, and what lies between the
# inputs and a weight gradient is rounded four times.
TOLERANCE = {torch.bfloat16: 1.2e-2, torch.float16: 2e-3, torch.float32: 1e-5}
NAMES = ("y", "d_x", "d_topk_weights", "d_gate_up", "d_down")
RATES = {"tflops": 0, "tb_per_s": 2}  # of a kernel, with digits to show
ROUTINGS = ("natural", "zipf", "one-hot")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Widths and experts of a block."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int


SHAPES = {
    "mixtral": Shape(4096, 14336, 8, 2),
    "deepseek": Shape(7168, 2048, 64, 8),  # DeepSeek-V3, the 64 experts of one of four ranks
    "olmoe": Shape(2048, 1024, 64, 8),
    "qwen3": Shape(2048, 768, 128, 8),
}
# Widths that no tile divides.
CHECKED = {"cuda": (509, Shape(520, 392, 16, 4)), "cpu": (61, Shape(40, 24, 8, 2))}


@dataclasses.dataclass(frozen=True)
class Problem:
    """Inputs of a block and the gradient of its output; all but the ids require a gradient.

    Shapes: x, grad [T,H]; ids [T,K] int32; weights [T,K] fp32; gate_up [E,2I,H]; down [E,H,I].
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor
    grad: Tensor

    def inputs(self) -> tuple[Tensor, ...]:
        """What gradients are taken of, in the order of `NAMES`."""
        return self.x, self.weights, self.gate_up, self.down


Block = Callable[[Problem], Tensor]


def logits_of(routing: str, tokens: int, experts: int, generator: torch.Generator) -> Tensor:
    """Router logits [T,E]: alike for all experts; popularity falling as 1/rank; the same experts for every token."""
    noise = torch.randn(tokens, experts, device=generator.device, generator=generator)
    rank = torch.randperm(experts, device=generator.device, generator=generator) + 1.0
    if routing == "zipf":
        # Gumbel noise: the first choice then falls on an expert in proportion to exp(logit).
        uniform = torch.rand(tokens, experts, device=generator.device, generator=generator)
        return -torch.log(-torch.log(uniform.clamp(1e-7, 1 - 1e-7))) - torch.log(rank)
    return noise if routing == "natural" else noise * 1e-2 - rank


def make_problem(shape: Shape, tokens: int, routing: str, dtype: torch.dtype, device: torch.device) -> Problem:
    """Normal random numbers, scaled so that activations stay near 1."""
    generator = torch.Generator(device).manual_seed(5)

    def draw(*size: int, scale: float = 1.0) -> Tensor:
        made = torch.empty(size, dtype=dtype, device=device)
        return made.normal_(std=scale, generator=generator).requires_grad_()

    logits = logits_of(routing, tokens, shape.experts, generator)
    ids, weights = functional.route(logits, top_k=shape.top_k)
    return Problem(
        x=draw(tokens, shape.hidden),
        ids=ids,
        weights=weights.detach().requires_grad_(),
        gate_up=draw(shape.experts, 2 * shape.intermediate, shape.hidden, scale=shape.hidden**-0.5),
        down=draw(shape.experts, shape.hidden, shape.intermediate, scale=shape.intermediate**-0.5),
        grad=draw(tokens, shape.hidden).detach(),
    )


def staticmoe_block(p: Problem) -> Tensor:
    """Ours."""
    plan = functional.make_plan(p.ids, p.weights, num_experts=p.down.shape[0])
    return functional.experts(p.x, p.weights, plan, p.gate_up, p.down, activation="swiglu")


class _ToRows(torch.autograd.Function):
    """Tokens to rows by gather; back by gather and sum, which needs no atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token_of_row: Tensor, row_of_assignment: Tensor) -> Tensor:
        ctx.save_for_backward(row_of_assignment)
        return x.index_select(0, token_of_row)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (row_of_assignment,) = ctx.saved_tensors
        return sum_of_rows(grads[0], row_of_assignment), None, None


class _ToTokens(torch.autograd.Function):
    """The other way round."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token_of_row: Tensor, row_of_assignment: Tensor) -> Tensor:
        ctx.save_for_backward(token_of_row)
        return sum_of_rows(rows, row_of_assignment)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (token_of_row,) = ctx.saved_tensors
        return grads[0].index_select(0, token_of_row), None, None


def sum_of_rows(rows: Tensor, row_of_assignment: Tensor) -> Tensor:
    """Rows [R,H] to tokens [T,H]."""
    gathered = rows.index_select(0, row_of_assignment.flatten())
    return gathered.view(*row_of_assignment.shape, -1).sum(1)


def grouped_mm_block(p: Problem) -> Tensor:
    """The peer: torch's grouped product, as well as it can be put together without a kernel of one's own.

    One sort, no atomics, no host read; weights multiply the narrower of activation and output rows.
    """
    tokens, top_k = p.ids.shape
    experts, hidden, intermediate = p.down.shape
    sorted_ids, order = torch.sort(p.ids.flatten(), stable=True)
    ends = torch.searchsorted(sorted_ids, torch.arange(experts, device=order.device), right=True).to(torch.int32)
    place = torch.arange(order.shape[0], device=order.device)
    row_of_assignment = torch.empty_like(order).scatter_(0, order, place).view(tokens, top_k)
    token_of_row = order // top_k
    weight = p.weights.flatten().gather(0, order).to(p.x.dtype)[:, None]

    rows = _ToRows.apply(p.x, token_of_row, row_of_assignment)
    gate, up = F.grouped_mm(rows, p.gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    act = F.silu(gate) * up
    if intermediate <= hidden:
        act = act * weight
    out = F.grouped_mm(act, p.down.transpose(1, 2), offs=ends)
    if intermediate > hidden:
        out = out * weight
    return _ToTokens.apply(out, token_of_row, row_of_assignment)


class MainGradBlock:
    """Ours, the weight gradients added in fp32 to what buffers hold, as in every micro-batch but the first.

    The buffers count as parameters, not as memory of the block.
    """

    def __init__(self, p: Problem) -> None:
        gate_up, down = (torch.zeros_like(w, dtype=torch.float32, requires_grad=False) for w in (p.gate_up, p.down))
        self._main = functional.MainGrads(gate_up, down, torch.zeros((), dtype=p.x.dtype, device=p.x.device), add=True)

    def __call__(self, p: Problem) -> Tensor:
        plan = functional.make_plan(p.ids, p.weights, num_experts=p.down.shape[0])
        weights = (p.gate_up, p.down)
        return functional.experts(p.x, p.weights, plan, *weights, activation="swiglu", main_grads=self._main)


BLOCKS: dict[str, Block] = {"staticmoe": staticmoe_block, "grouped_mm": grouped_mm_block}
MAIN_GRAD = "staticmoe, main_grad"
# Named in the result, so that nobody takes their absence for a comparison.
ABSENT = ("SonicMoE", "ScatterMoE", "FBGEMM-GenAI", "Liger", "grouped_mm compiled")


def forward_backward(block: Block, p: Problem) -> tuple[Tensor, ...]:
    """The output and every gradient, in the order of `NAMES`."""
    y = block(p)
    return y.detach(), *torch.autograd.grad(y, p.inputs(), p.grad)


def oracle(p: Problem) -> tuple[Tensor, ...]:
    """The same in fp64 by a loop over experts that knows no plan."""
    x, weights, gate_up, down = (t.detach().double().requires_grad_() for t in p.inputs())
    y = torch.zeros_like(x)
    for expert in range(down.shape[0]):
        token, slot = torch.where(p.ids == expert)
        gate, up = (x[token] @ gate_up[expert].T).chunk(2, dim=-1)
        y = y.index_add(0, token, (F.silu(gate) * up) @ down[expert].T * weights[token, slot, None])
    return y.detach(), *torch.autograd.grad(y, (x, weights, gate_up, down), p.grad.double())


def check(block: Block, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Hold a block against fp64 with every routing; return the largest error of each result.

    Raises: SystemExit where one is too large, or an expert without tokens has a weight gradient other than zero.
    """
    tokens, shape = CHECKED[device.type]
    worst = dict.fromkeys(NAMES, 0.0)
    for routing in ROUTINGS:
        p = make_problem(shape, tokens, routing, dtype, device)
        poison(device)
        got, want = forward_backward(block, p), oracle(p)
        for name, one, other in zip(NAMES, got, want, strict=True):
            error = float(torch.linalg.vector_norm(one.double() - other) / torch.linalg.vector_norm(other))
            worst[name] = max(worst[name], error)
            if not error <= TOLERANCE[dtype]:
                raise SystemExit(f"{routing}: {name} is off by {error:.3g}, allowed {TOLERANCE[dtype]}; nothing timed")
        idle = [expert for expert in range(shape.experts) if not bool((p.ids == expert).any())]
        if routing == "one-hot" and not idle:
            raise SystemExit("one-hot: every expert has tokens; the check of idle experts would prove nothing")
        if any(bool(gradient[expert].any()) for gradient in got[3:] for expert in idle):
            raise SystemExit(f"{routing}: an expert without tokens has a weight gradient; nothing timed")
    return worst


def check_repeat(shape: Shape, tokens: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return how many calls of ours gave the same bits: eager, and on a GPU every second one replayed.

    Raises: SystemExit at the first that differs.
    """
    p = make_problem(shape, tokens, "zipf", dtype, device)
    first = forward_backward(staticmoe_block, p)
    recorded = capture(lambda: forward_backward(staticmoe_block, p)) if device.type == "cuda" else None
    for number in range(REPEATED):
        poison(device)
        if recorded and number % 2:
            recorded.replay()
            again = recorded.results
        else:
            again = forward_backward(staticmoe_block, p)
        for name, one, other in zip(NAMES, first, again, strict=True):
            if not torch.equal(one, other):
                raise SystemExit(f"call {number}: {name} has other bits than the first call; nothing timed")
    return REPEATED


def memory(block: Block, p: Problem, device: torch.device) -> dict[str, float]:
    """GiB saved for the backward beside the inputs, and the peak above inputs and weights, gradients included."""
    mine = {t.untyped_storage().data_ptr() for t in (*p.inputs(), p.ids)}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in mine:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = block(p)
    del y
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    results = forward_backward(block, p)
    peak = torch.cuda.max_memory_allocated(device) - before
    del results
    return {"saved_gib": sum(saved.values()) / 2**30, "peak_gib": peak / 2**30}


def measure(block: Block, p: Problem, device: torch.device) -> dict[str, Any]:
    """Times of both passes captured, and memory."""
    flops = 6 * p.ids.numel() * p.x.shape[1] * p.down.shape[2]
    found: dict[str, Any] = memory(block, p, device)
    passes = {"forward": (lambda: block(p), flops), "both": (lambda: forward_backward(block, p), 3 * flops)}
    for name, (call, work) in passes.items():
        recorded = capture(call)
        found[name] = spread(milliseconds(recorded.replay))
        found[name]["tflops"] = work / found[name]["ms"] / 1e9
        del recorded
    return found


def provenance(device: torch.device, commit: str) -> dict[str, Any]:
    """Where and with what this was measured."""
    import triton

    return {
        "gpu": gpu_facts() or torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": commit,
        "data": "normal; natural: normal logits; zipf: expert popularity 1/rank; one-hot: K experts take all tokens",
        "protocol": f"CUDA graphs, {WARMUP} warm-up calls and replays, median of {REPLAYS} replays",
        "absent_peers": list(ABSENT),
    }


def run(arguments: argparse.Namespace, device: torch.device, result: dict[str, Any]) -> None:
    """Measure every case, and write the result after each."""
    for shape_name in arguments.shapes:
        shape, rows = SHAPES[shape_name], []
        before = ceiling(device)
        for tokens in arguments.tokens:
            for routing in arguments.routing:
                p = make_problem(shape, tokens, routing, torch.bfloat16, device)
                row: dict[str, Any] = {"shape": shape_name, "tokens": tokens, "routing": routing, "blocks": {}}
                for name, block in BLOCKS.items():
                    clean(device)
                    row["blocks"][name] = measure(block, p, device)
                if arguments.main_grad:
                    clean(device)
                    row["blocks"][MAIN_GRAD] = measure(MainGradBlock(p), p, device)
                if arguments.per_kernel:
                    import tune_tiles

                    row["kernels"] = tune_tiles.time_kernels(p, device)
                del p
                clean(device)
                rows.append(row)
                print(json.dumps(row), flush=True)
        ceilings = [before, ceiling(device)]
        for row in rows:
            row["ceiling_tflops"] = ceilings
            for entry in (found[which] for found in row["blocks"].values() for which in ("forward", "both")):
                entry["share"] = entry["tflops"] / statistics.mean(ceilings)
        result["cases"] += rows
        if arguments.output:
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            arguments.output.write_text(json.dumps(result, indent=1) + "\n")


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
    parser.add_argument("--check", action="store_true", help="check, and time nothing")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--commit", default=None, help="of the code; default: git's")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    # On a CPU the ops are plain PyTorch in every dtype.
    dtypes = [torch.bfloat16] if device.type == "cuda" else [torch.bfloat16, torch.float32]
    checked = {
        f"{name}, {dtype}".replace("torch.", ""): check(block, dtype, device)
        for dtype in dtypes
        for name, block in BLOCKS.items()
    }
    tokens, shape = CHECKED["cpu"] if device.type == "cpu" else (8192, SHAPES["qwen3"])
    checks = {"relative_errors": checked, "bitwise_equal_calls": check_repeat(shape, tokens, dtypes[0], device)}
    print("check", json.dumps(checks), flush=True)
    if arguments.check:
        return
    if device.type != "cuda":
        raise SystemExit("speeds are measured on a GPU; on a CPU there is --check")
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = arguments.commit or subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    result: dict[str, Any] = {
        "provenance": provenance(device, commit),
        "check": checks,
        "copy_tb_per_s": copy_rate(device),
        "cases": [],
    }
    run(arguments, device, result)
    print_tables(result)


if __name__ == "__main__":
    main()
