"""Time candidate tiles of every grouped GEMM on this GPU, and write its lines of the tile table.

    python profiles/tune_tiles.py --output profiles/results/h200/tile_tuning.json
    python profiles/tune_tiles.py --kernels dact up --shapes qwen3 olmoe --dry-run

Compiling takes most of the time, some seconds for each candidate: `--kernels` cuts the work into parts.

Every candidate is first held against the fp64 reference on a small problem of uneven experts; one that is wrong or does
not fit is reported and not timed. A line of the table serves a range of rows per expert; of the candidates the one wins
whose times, each as a multiple of the best time of its case, have the smallest geometric mean over the cases in that
range. Other GPUs and fp32 keep their lines.

Dimensions: T tokens, K top_k, E experts, H hidden, I intermediate, R rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from staticmoe import functional, reference
from staticmoe.bench import SHAPES, TOLERANCE, Problem, Shape, make_problem, provenance, timing
from staticmoe.kernels.tile_table import KERNELS, TABLE, tile_for
from staticmoe.kernels.tiles import Tile
from staticmoe.reference.grouped import gather_rows, gather_weights, grouped_mm
from staticmoe.reference.schedule import tile_schedule

# Rows an expert, exclusive upper ends of the ranges that get a line each.
BOUNDS = (48.0, 192.0, math.inf)
CHECKED = (509, Shape(640, 384, 128, 4))
# A candidate's: they follow each other closely, so that the clock has settled.
_TRIAL_S = 0.05


def candidates(kernel: str) -> list[Tile]:
    """What is worth timing; what does not fit the GPU falls out by itself."""
    grouped = kernel in ("up", "grouped_gemm")
    sizes: list[tuple[int, int, int, int, int]]  # rows, columns, depth, warps, stages
    if kernel.startswith("weight_grad"):
        sizes = [(256, 128, 64, 8, 3), (128, 256, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 4, 3)]
    elif grouped:
        sizes = [(128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (64, 128, 64, 4, 3), (64, 128, 64, 4, 4)]
        sizes += [(128, 64, 64, 8, 4), (64, 128, 128, 4, 2)]
    else:
        sizes = [(128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 128, 64, 8, 4), (64, 256, 64, 4, 3)]
        sizes += [(64, 256, 64, 4, 4), (64, 128, 64, 4, 4), (128, 256, 128, 8, 2)]
    made = [
        Tile(rows=rows, columns=columns, depth=depth, warps=warps, stages=stages)
        for rows, columns, depth, warps, stages in sizes
    ]
    # The order in L2 is tried with the first size alone: each candidate is a kernel to compile.
    return made + [dataclasses.replace(made[0], group=group) for group in (4, 16)]


class Launches:
    """Every launcher of the block with data of one problem; a later one reads what an earlier one wrote."""

    def __init__(self, p: Problem, device: torch.device) -> None:
        with torch.no_grad():
            self.plan = functional.make_plan(p.ids, p.weights, num_experts=p.down.shape[0])
        self.p, self.device = p, device
        on_gpu = device.type == "cuda"
        self.programs = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 3
        experts, hidden, inner = p.down.shape
        rows, dtype = self.plan.capacity_rows, p.x.dtype

        def empty(*shape: int, like: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=like, device=device)

        self.x, self.grad, self.weights = p.x.detach(), p.grad, p.weights.detach()
        self.gate_up, self.down = p.gate_up.detach(), p.down.detach()
        self.pre, self.act, self.rows = empty(rows, 2 * inner), empty(rows, inner), empty(rows, hidden)
        self.d_pre, self.act_weighted = empty(rows, 2 * inner), empty(rows, inner)
        self.tokens, self.grouped = empty(*p.x.shape), empty(rows, 2 * inner)
        self.d_down, self.d_gate_up = empty(experts, hidden, inner), empty(experts, 2, inner, hidden)
        # For the narrowest columns; a launch takes as many columns of it as it has tiles.
        self.parts = torch.zeros(rows, -(-inner // 32), dtype=torch.float32, device=device)
        self._schedules: dict[int, tuple[Tensor, Tensor]] = {}

    def schedule(self, block_rows: int) -> tuple[Tensor, Tensor]:
        """Tiles of so many rows."""
        if block_rows not in self._schedules:
            rows, experts = self.plan.capacity_rows, self.plan.num_experts
            most = (rows + min(experts, rows) * (block_rows - 1)) // block_rows
            made = tile_schedule(self.plan.expert_offsets, block_rows, most)
            self._schedules[block_rows] = (made[0].contiguous(), made[1])
        return self._schedules[block_rows]

    def up(self, tile: Tile) -> list[Tensor]:
        """Tokens to pre-activation and activation."""
        from staticmoe.kernels.up import up

        up(
            self.x, self.plan.row_assignment, self.gate_up.unflatten(1, (2, -1)), None, self.pre, self.act,
            *self.schedule(tile.rows), top_k=self.plan.top_k, activation="swiglu", tile=tile, programs=self.programs,
        )  # fmt: skip
        return [self.pre, self.act]

    def _grouped(self, rows: Tensor, weight: Tensor, out: Tensor, tile: Tile, **options: Any) -> list[Tensor]:
        from staticmoe.kernels.grouped_gemm import grouped_gemm

        schedule = self.schedule(tile.rows)
        grouped_gemm(rows, weight, None, out, *schedule, tile=tile, programs=self.programs, **options)
        return [out]

    def down_rows(self, tile: Tile) -> list[Tensor]:
        """Activation to rows of the output."""
        return self._grouped(self.act, self.down, self.rows, tile, transposed=False, saved_rows=False)

    def token_grad(self, tile: Tile) -> list[Tensor]:
        """Gradient of the pre-activation to rows of the token gradient."""
        weight = self.gate_up.unflatten(1, (2, -1))
        return self._grouped(self.d_pre, weight, self.rows, tile, transposed=True, saved_rows=True)

    def grouped_linear(self, tile: Tile) -> list[Tensor]:
        """Gathered tokens times a weight, nothing in the epilogue."""
        return self._grouped(
            self.x, self.gate_up, self.grouped, tile, transposed=False, saved_rows=False,
            row_assignment=self.plan.row_assignment, top_k=self.plan.top_k,
        )  # fmt: skip

    def dact(self, tile: Tile) -> list[Tensor]:
        """Gradient of the output to that of the pre-activation; the last column holds the sums of the parts."""
        from staticmoe.kernels.dact import dact

        parts = self.parts.flatten()[: self.parts.shape[0] * -(-self.act.shape[1] // tile.columns)]
        parts = parts.view(self.parts.shape[0], -1)
        outputs = (self.d_pre, self.act_weighted, parts)
        dact(
            self.grad, self.plan.row_assignment, self.down, self.pre, self.weights, *outputs,
            *self.schedule(tile.rows), top_k=self.plan.top_k, activation="swiglu", tile=tile, programs=self.programs,
        )  # fmt: skip
        return [*outputs]

    def _weight_grad(self, left: Tensor, right: Tensor, out: Tensor, gather: str, tile: Tile) -> list[Tensor]:
        from staticmoe.kernels.weight_grad import weight_grad

        weight_grad(
            left, right, self.plan.expert_offsets, self.plan.row_assignment, out, gather=gather, saved=None,
            base_row=None, top_k=self.plan.top_k, accumulate=False, tile=tile, programs=self.programs,
        )  # fmt: skip
        return [out]

    def weight_grad_down(self, tile: Tile) -> list[Tensor]:
        """Gathered gradient of the output times the weighted activation."""
        return self._weight_grad(self.grad, self.act_weighted, self.d_down, "left", tile)

    def weight_grad_up(self, tile: Tile) -> list[Tensor]:
        """Gradient of the pre-activation times the gathered tokens."""
        return self._weight_grad(self.d_pre, self.x, self.d_gate_up, "right", tile)

    def calls(self) -> dict[str, Callable[[Tile], list[Tensor]]]:
        """By name in the table, in an order in which inputs are there."""
        return {
            "up": self.up,
            "down": self.down_rows,
            "dact": self.dact,
            "token_grad": self.token_grad,
            "weight_grad_down": self.weight_grad_down,
            "weight_grad_up": self.weight_grad_up,
            "grouped_gemm": self.grouped_linear,
        }

    def as_launched(self) -> dict[str, Callable[[], Any]]:
        """By name in the table: with its tile, or by the kernel of this GPU that the ops take instead.

        The copies of tokens to rows are made here, as the ops make them, and are not part of a call.
        """
        from staticmoe.ops.launch.experts import d_activation, rows_of_tokens, tokens_of_weight_grad_up
        from staticmoe.ops.launch.products import Products

        calls = {name: functools.partial(call, self.table_tile(name)) for name, call in self.calls().items()}
        for name in ("up", "dact"):
            # What the calls below read; the d-activation that the ops launch has memory of its own.
            calls[name]()
        plan, inner = self.plan, self.down.shape[2]
        on = Products(self.x.dtype, plan.expert_offsets, plan.row_assignment, plan.assignment_row)
        grad, top_k = rows_of_tokens(on, self.grad, inner)
        rest = self.pre, self.d_pre, self.weights, self.down, "swiglu"
        calls["dact"] = functools.partial(d_activation, on, grad, top_k, *rest)
        tokens, side = tokens_of_weight_grad_up(on, self.d_pre, self.x, self.d_gate_up, inner)
        down, up = (grad, self.act_weighted, self.d_down), (self.d_pre, tokens, self.d_gate_up)
        left = None if top_k is None else "left"
        calls["weight_grad_down"] = functools.partial(on.weight_grad, "weight_grad_down", *down, gather=left)
        calls["weight_grad_up"] = functools.partial(on.weight_grad, "weight_grad_up", *up, gather=side)
        return calls

    def flops(self, kernel: str) -> int:
        """Of one launch."""
        halves = 1 if kernel in ("down", "dact", "weight_grad_down") else 2
        return 2 * halves * self.p.ids.numel() * self.p.x.shape[1] * self.p.down.shape[2]

    def table_tile(self, kernel: str) -> Tile:
        """What the table says today."""
        load = self.p.ids.numel() / self.plan.num_experts
        capability = torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else (9, 0)
        return tile_for(kernel, dtype=self.x.dtype, rows_per_expert=load, capability=capability)


def wanted(launches: Launches) -> dict[str, list[Tensor]]:
    """What each launch must write, in fp64, by the reference."""
    plan, top_k = launches.plan, launches.plan.top_k
    x, grad, weights, gate_up, down = (
        t.double() for t in (launches.x, launches.grad, launches.weights, launches.gate_up, launches.down)
    )
    pre = reference.up(x, gate_up, None, plan.expert_offsets, plan.row_assignment, top_k)
    act = reference.activate(pre, "swiglu")
    row_weights = gather_weights(weights, plan.row_assignment)
    grad_rows, x_rows = (gather_rows(t, plan.row_assignment, top_k) for t in (grad, x))
    d_act = grouped_mm(grad_rows, down.transpose(1, 2), plan.expert_offsets)
    d_pre = reference.activation_backward(pre, row_weights * d_act, "swiglu")
    d_gate_up = reference.grouped_weight_grad(d_pre, x_rows, plan.expert_offsets)
    return {
        "up": [pre, act],
        "down": [reference.down(act, down, None, plan.expert_offsets)],
        "dact": [d_pre, row_weights * act, (d_act * act).sum(1, keepdim=True)],
        "token_grad": [grouped_mm(d_pre, gate_up.transpose(1, 2), plan.expert_offsets)],
        "weight_grad_down": [reference.grouped_weight_grad(grad_rows, row_weights * act, plan.expert_offsets)],
        "weight_grad_up": [d_gate_up.unflatten(1, (2, -1))],
        "grouped_gemm": [pre],
    }


def errors_of(kernel: str, got: list[Tensor], want: list[Tensor]) -> list[float]:
    """Norm of each difference over the norm; parts of a sum are summed first."""
    if kernel == "dact":
        got = [*got[:2], got[2].double().sum(1, keepdim=True)]
    return [
        float(torch.linalg.vector_norm(one.double() - other) / torch.linalg.vector_norm(other))
        for one, other in zip(got, want, strict=True)
    ]


class Checker:
    """Holds candidates against the reference on a small problem."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        tokens, shape = CHECKED
        self.launches = Launches(make_problem(shape, tokens, "zipf", dtype, device), device)
        self.want, self.tolerance = wanted(self.launches), TOLERANCE[dtype]
        for kernel, call in self.launches.calls().items():
            call(self.launches.table_tile(kernel))

    def fault(self, kernel: str, tile: Tile) -> str | None:
        """What is wrong with a candidate, or None."""
        outputs: list[Tensor] = []
        try:
            timing.poison(self.launches.device)
            outputs = self.launches.calls()[kernel](tile)
            errors = errors_of(kernel, outputs, self.want[kernel])
        except Exception as error:  # a tile that does not compile or fit is a finding
            return f"{type(error).__name__}: {error}"[:300]
        finally:
            # What others read is again what the table's tile wrote.
            self.launches.calls()[kernel](self.launches.table_tile(kernel))
        return None if max(errors) <= self.tolerance else f"relative errors {errors}, allowed {self.tolerance}"


def time_call(call: Callable[[], Any], seconds: float = timing.SETTLE_S) -> list[float]:
    """Sorted ms of one launch: replays of a graph that holds five, so that the host is out of the way.

    They run for `seconds` to settle, and as long again to be timed.
    """

    def five() -> None:
        for _ in range(5):
            call()

    recorded = timing.capture(five)
    return [ms / 5 for ms in timing.milliseconds(recorded.replay, settle_s=seconds, timed_s=seconds)]


def time_kernels(p: Problem, device: torch.device) -> dict[str, dict[str, float]]:
    """Every launcher alone, as the ops launch it: ms, and TFLOP/s or TB/s."""
    launches, found = Launches(p, device), {}
    for kernel, call in launches.as_launched().items():
        ms = statistics.median(time_call(call))
        found[kernel] = {"ms": ms, "tflops": launches.flops(kernel) / ms / 1e9}
    for kernel, (run, size) in small_calls(launches).items():
        ms = statistics.median(time_call(run))
        found[kernel] = {"ms": ms, "tb_per_s": size / ms / 1e9}
    return found


def small_calls(launches: Launches) -> dict[str, tuple[Callable[[], Any], int]]:
    """The launchers without a product, and the bytes that they must move."""
    from staticmoe.kernels.combine import combine
    from staticmoe.kernels.schedule import tile_schedule as launch_schedule

    plan, (schedule, count) = launches.plan, launches.schedule(128)
    moved = launches.rows.nbytes + launches.tokens.nbytes
    rows, assignment_row = launches.rows, plan.assignment_row
    ids, weights, experts = launches.p.ids, launches.weights, plan.num_experts
    return {
        "combine": (lambda: combine(rows, launches.weights, assignment_row, launches.tokens), moved),
        "token_grad_combine": (lambda: combine(rows, None, assignment_row, launches.tokens), moved),
        "schedule": (
            lambda: launch_schedule(plan.expert_offsets, schedule, count, block_rows=128),
            schedule.nbytes,
        ),
        "plan op": (
            lambda: functional.make_plan(ids, weights, num_experts=experts),
            ids.nbytes + weights.nbytes + plan.row_assignment.nbytes + assignment_row.nbytes,
        ),
    }


def measure(arguments: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Time every sound candidate of every kernel in every case."""
    checker = Checker(torch.bfloat16, device)
    sound: dict[str, list[Tile]] = {}
    for kernel in arguments.kernels:
        faults = {tile: checker.fault(kernel, tile) for tile in candidates(kernel)}
        sound[kernel] = [tile for tile, fault in faults.items() if fault is None]
        for tile, fault in faults.items():
            if fault is not None:
                print(f"{kernel}: {tile} is out: {fault}", flush=True)
    cases = []
    for name in arguments.shapes:
        for tokens in arguments.tokens:
            timing.clean(device)
            p = make_problem(SHAPES[name], tokens, "natural", torch.bfloat16, device)
            launches = Launches(p, device)
            for kernel, call in launches.calls().items():
                # In this order each kernel finds the inputs that the ones before it wrote.
                call(launches.table_tile(kernel))
                timed = []
                for tile in sound.get(kernel, []):
                    ms = statistics.median(time_call(lambda call=call, tile=tile: call(tile), _TRIAL_S))
                    case = {"kernel": kernel, "shape": name, "tokens": tokens, "tile": dataclasses.asdict(tile)}
                    load = p.ids.numel() / launches.plan.num_experts
                    rate = launches.flops(kernel) / ms / 1e9
                    timed.append({**case, "rows_per_expert": load, "ms": ms, "tflops": rate})
                if timed:
                    print(json.dumps(min(timed, key=lambda one: one["ms"])), flush=True)
                cases += timed
            del launches, p
    return cases


def winners(cases: list[dict[str, Any]], kernel: str, low: float, high: float) -> list[tuple[float, dict[str, Any]]]:
    """Tiles by the geometric mean of their times, each over the best of its case, for loads in [low, high)."""
    mine = [c for c in cases if c["kernel"] == kernel and low <= c["rows_per_expert"] < high]
    best: dict[tuple[str, int], float] = {}
    for case in mine:
        key = (case["shape"], case["tokens"])
        best[key] = min(best.get(key, math.inf), case["ms"])
    tiles = {json.dumps(case["tile"]) for case in mine}
    ranked = []
    for tile in tiles:
        times = [c["ms"] / best[c["shape"], c["tokens"]] for c in mine if json.dumps(c["tile"]) == tile]
        # One that could not run everywhere is no choice for the range.
        if len(times) == len(best):
            ranked.append((statistics.geometric_mean(times), json.loads(tile)))
    return sorted(ranked, key=lambda pair: (pair[0], json.dumps(pair[1])))


def new_rules(cases: list[dict[str, Any]], kernels: list[str], capability: tuple[int, int]) -> list[dict[str, Any]]:
    """The lines of this GPU for what was timed."""
    made = []
    for kernel in kernels:
        low = 0.0
        for high in BOUNDS:
            ranked = winners(cases, kernel, low, high)
            if ranked:
                line: dict[str, Any] = {"kernels": [kernel], "dtypes": ["bfloat16", "float16"]}
                line["capabilities"] = [list(capability)]
                if high != math.inf:
                    line["rows_below"] = high
                made.append({**line, "tile": ranked[0][1]})
            low = high
    return made


def merged(table: dict[str, Any], made: list[dict[str, Any]], provenance: dict[str, Any]) -> dict[str, Any]:
    """The table with the new lines in front of the old ones, which lose what the new ones say."""
    replaced = {
        (k, tuple(c), line.get("rows_below")) for line in made for k in line["kernels"] for c in line["capabilities"]
    }
    kept = []
    for line in table["rules"]:
        for kernel in line["kernels"] if "float32" not in line["dtypes"] else []:
            capabilities = [
                c for c in line["capabilities"] if (kernel, tuple(c), line.get("rows_below")) not in replaced
            ]
            if capabilities:
                kept.append({**line, "kernels": [kernel], "capabilities": capabilities})
    kept += [line for line in table["rules"] if "float32" in line["dtypes"]]
    # Lines with a bound come before the one without: the first that fits decides.
    rules = sorted([*made, *kept], key=lambda line: line.get("rows_below", math.inf))
    return {"provenance": {**table["provenance"], **provenance}, "rules": rules}


def write_table(table: dict[str, Any], path: Path = TABLE) -> None:
    """One line a rule."""
    lines = ",\n  ".join(json.dumps(line) for line in table["rules"])
    path.write_text(f'{{\n "provenance": {json.dumps(table["provenance"])},\n "rules": [\n  {lines}\n ]\n}}\n')


def main() -> None:
    """Check, time, choose, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="*", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--tokens", nargs="*", type=int, default=[1024, 8192, 32768])
    parser.add_argument("--dry-run", action="store_true", help="leave the table as it is")
    parser.add_argument("--output", type=Path, help="JSON file for every time")
    parser.add_argument("--commit", default=None, help="of the code; default: git's")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("tiles are timed on a GPU, and there is none")
    device = torch.device("cuda")
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = arguments.commit or subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    origin = provenance(device, commit)
    before = timing.ceiling(device)
    cases = measure(arguments, device)
    result = {"provenance": origin, "ceiling_tflops": [before, timing.ceiling(device)], "cases": cases}
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    capability = torch.cuda.get_device_capability(device)
    rules = new_rules(cases, arguments.kernels, capability)
    for rule in rules:
        print(json.dumps(rule))
    if not arguments.dry_run:
        timed = {"{}.{}".format(*capability): {key: origin[key] for key in ("gpu", "torch", "triton", "commit")}}
        write_table(merged(json.loads(TABLE.read_text()), rules, timed))


if __name__ == "__main__":
    main()
