"""Two ranks as one step: first that nothing is lost or drifts apart, then what a step costs beside one rank's alone.

    torchrun --nproc-per-node 2 profiles/two_ranks.py --output profiles/results/h200/two_ranks.json
    torchrun --nproc-per-node 2 profiles/two_ranks.py --device cpu --steps 20

Rank 0 has the skewed batches of profiles/overflow.py and rank 1 never has one. Each case must run both ranks again in
the same steps, be bitwise the dropless run of the two in losses, norms, loads and parameters, and leave bitwise the
same parameters on both.

Times: a step of the two, beside a step of each alone at the same time, by turns; and the sum of as many gradient bytes
with nothing beside it, which is what the difference cannot be less than while gradients travel behind the backward.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import os
import statistics
from pathlib import Path
from typing import Any

import overflow  # first: cuBLAS reads its setting at the first product
import step_overhead
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

from staticmoe import MicroBatches, RunnerConfig, StaticMoERunner
from staticmoe.bench.result import source_commit, write_result
from staticmoe.demo.model import DemoLM

# Between what text needs and what one byte over and over does, which is 4.
NARROW = {"capacity_factor": 3.0, "capacity_scope": "expert"}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "two in flight": (NARROW, 1),
    "one in flight": (NARROW | {"max_in_flight": 1}, 1),
    "four in flight": (NARROW | {"max_in_flight": 4}, 1),
    "accumulation, 2 micro-batches": (NARROW, 2),
    "ladder, forecast": (NARROW | {"capacity_ladder": (3.2, 3.6), "capacity_forecast": True}, 1),
}
TIMED = ("train", "medium")


def train(device: torch.device, steps: int, options: dict[str, Any], micro: int) -> dict[str, Any]:
    """Losses, norms, loads, attempts and a digest of parameters and optimizer state."""
    rank, size = dist.get_rank(), overflow.tiny()
    model = DemoLM(size.config, seed=1).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=device.type == "cuda")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.05 * step))

    def given(step: int) -> Any:
        skew = rank == 0 and overflow.skewed(step, steps)
        numbers = [dist.get_world_size() * (micro * step + part) + rank for part in range(micro)]
        parts = [overflow.batch(size, number, skew) for number in numbers]
        return parts[0] if micro == 1 else MicroBatches(parts)

    config = RunnerConfig(max_grad_norm=1.0, gradient_accumulation_steps=micro, max_rerun_fraction=1.0, **options)
    torch.manual_seed(3 + rank)
    with StaticMoERunner(
        model, optimizer, example_batch=given(1), loss_fn=overflow.loss_fn, config=config,
        process_group=dist.group.WORLD,
    ) as runner:  # fmt: skip
        results = []
        for step in range(steps):
            results.append(runner.step(given(step)))
            schedule.step()
        states = [t for state in optimizer.state.values() for t in state.values()]
        return {
            "losses": [(result.loss, result.grad_norm) for result in results],
            "loads": [[(load.routed, load.kept) for load in result.moe.values()] for result in results],
            "parameters": digest([*model.state_dict().values(), *states]),
            "attempts": [result.attempt for result in results],
        }


def digest(tensors: list[torch.Tensor]) -> str:
    """Of every bit of them."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def from_all(mine: Any) -> list[Any]:
    """What each rank has, in rank order."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def equality(device: torch.device, steps: int) -> dict[str, dict[str, Any]]:
    """Every case against the dropless run of the same ranks, and the ranks against each other."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    found = {}
    with sdpa_kernel(SDPBackend.MATH):
        for name, (options, micro) in CASES.items():
            narrow, wide = train(device, steps, options, micro), train(device, steps, {}, micro)
            own = {f"{key} as dropless": narrow[key] == wide[key] for key in ("losses", "loads", "parameters")}
            ranks = from_all(narrow)
            joint = {
                f"{key} on all ranks": all(r[key] == ranks[0][key] for r in ranks) for key in narrow if key != "loads"
            }
            checks = {**own, **joint, "batches differ": any(r["loads"] != ranks[0]["loads"] for r in ranks[1:])}
            found[name] = {
                "steps": steps,
                "run_again": sum(attempt > 0 for attempt in narrow["attempts"]),
                "lost": sum(sum(routed) - sum(kept) for r in ranks for step in r["loads"] for routed, kept in step),
                "holds": {key: all(everywhere[key] for everywhere in from_all(checks)) for key in checks},
            }
    torch.use_deterministic_algorithms(False)
    return found


def all_reduce_ms(device: torch.device, elements: int, repeats: int = 20) -> float:
    """Median time of the sum of so many fp32 numbers over the ranks, on an idle device."""
    buffer = torch.zeros(elements, device=device)
    times = []
    for number in range(repeats + 3):
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        dist.all_reduce(buffer)
        end.record()
        end.synchronize()
        if number >= 3:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def costs(device: torch.device, size: step_overhead.Size, counted: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of a step, by turns; the slowest rank counts."""
    rank, alone = dist.get_rank(), dist.new_subgroups(1)[0]
    batches = [overflow.batch(size, 100 * rank + step, False) for step in range(counted)]
    autocast = torch.bfloat16 if device.type == "cuda" else None
    runners, trained = {}, 0
    for name, group in (("alone", alone), ("together", dist.group.WORLD)):
        model, optimizer = step_overhead.build(size, device)
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        config = RunnerConfig(max_grad_norm=1.0, autocast=autocast)
        runners[name] = StaticMoERunner(
            model,
            optimizer,
            example_batch=batches[0],
            loss_fn=step_overhead.loss_fn,
            config=config,
            process_group=group,
        )
    times: dict[str, list[float]] = {name: [] for name in runners}
    for number in range(repeats + 1):
        for name, runner in runners.items():
            dist.barrier()
            taken = 1e3 * max(from_all(overflow.seconds(runner, batches))) / counted
            if number:  # the first round warms up
                times[name].append(taken)
    for runner in runners.values():
        runner.close()
    step = {name: statistics.median(values) for name, values in times.items()}
    return {
        "size": size.name,
        "tokens_per_rank": size.batch * size.sequence,
        "trained_parameters": trained,
        "step_ms": step,
        "step_ms_spread": {name: [min(values), max(values)] for name, values in times.items()},
        "together_over_alone": step["together"] / step["alone"],
        "all_reduce_ms": all_reduce_ms(device, trained) if device.type == "cuda" else None,
    }


def print_tables(result: dict[str, Any]) -> None:
    """What was found, for people."""
    console = Console()
    table = Table("case", "steps", "run again", "lost", "holds", title="skew on rank 0 alone")
    for name, row in result["equality"].items():
        wrong = ", ".join(f"NOT {key}" for key, holds in row["holds"].items() if not holds)
        table.add_row(name, str(row["steps"]), str(row["run_again"]), str(row["lost"]), wrong or "all")
    console.print(table)
    if result.get("costs"):
        table = Table("size", "tokens", "alone ms", "together ms", "ratio", "gradients' sum ms", title="a step")
        for row in result["costs"]:
            bare = "-" if row["all_reduce_ms"] is None else f"{row['all_reduce_ms']:.3f}"
            step, ratio = row["step_ms"], f"{row['together_over_alone']:.3f}"
            tokens = str(row["tokens_per_rank"])
            table.add_row(row["size"], tokens, f"{step['alone']:.3f}", f"{step['together']:.3f}", ratio, bare)
        console.print(table)


def wrong_in(found: dict[str, dict[str, Any]]) -> list[str]:
    """Cases that are not what they must be; without an overflow one shows nothing."""
    return [
        name for name, row in found.items() if row["lost"] or not all(row["holds"].values()) or not row["run_again"]
    ]


def main() -> None:
    """Compare, and where that holds time; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--commit", default=None, help="of the code; default: git's")
    arguments = parser.parse_args()
    device, timeout = torch.device("cpu"), datetime.timedelta(minutes=5)
    if arguments.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, timeout=timeout)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    result: dict[str, Any] = {"provenance": step_overhead.provenance(device, arguments.commit or source_commit())}
    result["ranks"] = dist.get_world_size()
    result["equality"] = equality(device, arguments.steps)
    wrong = wrong_in(result["equality"])
    if not wrong:
        sizes = [size for size in step_overhead.sizes() if size.name in TIMED]
        counted, repeats = (20, 7) if device.type == "cuda" else (5, 3)
        timed = sizes if device.type == "cuda" else [overflow.tiny()]
        result["costs"] = [costs(device, size, counted, repeats) for size in timed]
    if dist.get_rank() == 0:
        if arguments.output:
            write_result(result, arguments.output)
        print_tables(result)
    dist.destroy_process_group()
    if wrong:
        raise SystemExit(f"not what the dropless run gives: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
