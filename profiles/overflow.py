"""What an overflow costs, and that it loses nothing: 200 steps under skew against the wide variant, then times.

    python profiles/overflow.py --output profiles/results/h200/overflow.json
    python profiles/overflow.py --parts equality --steps 40

Every seventh batch, the first, the last and four in a row are one byte over and over, which sends every token to the
same experts. The reference model has dropout, a learning-rate schedule, a balancing bias and an auxiliary loss. Each
case must be bitwise, in losses, norms, loads and parameters, what the dropless variant alone gives; attention is
deterministic.

Memory, on a GPU: the forecast beside what was held. Times, on a GPU: a step with a bound that nothing exceeds, by
policy, beside a dropless step; and what one overflow adds, in steps, beside the bound of 1 + max_in_flight narrow steps
and the wider one.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import step_overhead  # first: cuBLAS reads its setting at the first product
import torch
from rich.console import Console
from rich.table import Table
from step_overhead import Size, loss_fn
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from staticmoe import CapacityError, MicroBatches, NonFiniteError, RunnerConfig, StaticMoERunner
from staticmoe.bench.result import source_commit, write_result
from staticmoe.demo.model import DemoLM, ModelConfig

NARROW = {"capacity_factor": 2.0, "capacity_scope": "expert"}
# Options, and how the loop goes: micro-batches, state dicts taken and loaded every so many steps, masks.
CASES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "one in flight": (NARROW | {"max_in_flight": 1}, {}),
    "two in flight": (NARROW, {}),
    "four in flight": (NARROW | {"max_in_flight": 4}, {}),
    "accumulation, 2 micro-batches": (NARROW, {"micro": 2}),
    "state dicts every 5 steps": (NARROW, {"every": 5}),
    "ladder 2.2, 2.6, 3.2": (NARROW | {"capacity_ladder": (2.2, 2.6, 3.2)}, {}),
    "ladder, forecast": (NARROW | {"capacity_ladder": (2.2, 2.6, 3.2), "capacity_forecast": True}, {}),
    "masked tokens, rank 0.8": ({"capacity_factor": 0.8, "capacity_scope": "rank"}, {"masked": 1}),
}
BURST = range(90, 94)
PARTS = ("equality", "messages", "memory", "costs")
# Sizes of the reference model: host-bound, and not.
TIMED = ("train", "medium")


def skewed(step: int, steps: int) -> bool:
    """The first step, the last, every seventh, and four in a row."""
    return step in (0, steps - 1, *BURST) or step % 7 == 3


def tiny() -> Size:
    """Two layers of eight experts, 64 tokens."""
    config = ModelConfig(
        depth=2, hidden_size=64, num_heads=2, num_experts=8, top_k=2, intermediate_size=64, max_seq_len=32, dropout=0.1,
        balancing_bias_rate=1e-3, router_aux_loss_coef=0.01,
    )  # fmt: skip
    return Size("tiny", config, 2, 32)


def batch(size: Size, step: int, skew: bool, masked: bool = False) -> dict[str, Tensor]:
    """Zipf-distributed bytes, or one byte; where `masked`, a quarter of the tokens are padding, none where skewed."""
    generator = torch.Generator().manual_seed(step)
    weights = 1.0 / torch.arange(1, 257, dtype=torch.float64)
    count = size.batch * (size.sequence + 1)
    text = torch.multinomial(weights, count, replacement=True, generator=generator)
    text = (torch.full_like(text, step % 256) if skew else text).view(size.batch, size.sequence + 1)
    made = {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}
    if masked:
        made["mask"] = (torch.rand(size.batch, size.sequence, generator=generator) > 0.25) | skew
    return made


def loss_of(model: torch.nn.Module, given: dict[str, Tensor]) -> Tensor:
    """Mean cross entropy in nats; the mask is the runner's."""
    return loss_fn(model, {name: tensor for name, tensor in given.items() if name != "mask"})


def train(
    device: torch.device, steps: int, options: dict[str, Any], *, micro: int = 1, every: int = 0, masked: int = 0
) -> dict[str, Any]:
    """Losses, norms, loads, parameters and attempts of `steps` steps."""
    size = tiny()
    model = DemoLM(size.config, seed=1).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=device.type == "cuda")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.05 * step))

    def given(step: int) -> Any:
        parts = [batch(size, micro * step + part, skewed(step, steps), bool(masked)) for part in range(micro)]
        return parts[0] if micro == 1 else MicroBatches(parts)

    config = RunnerConfig(max_grad_norm=1.0, gradient_accumulation_steps=micro, max_rerun_fraction=1.0, **options)
    mask = "mask" if masked else None
    torch.manual_seed(3)
    with StaticMoERunner(
        model, optimizer, example_batch=given(1), loss_fn=loss_of, token_mask=mask, config=config
    ) as runner:
        results = []
        for step in range(steps):
            results.append(runner.step(given(step)))
            schedule.step()
            if every and step % every == 0:
                model.load_state_dict(copy.deepcopy(model.state_dict()))
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return {
            "losses": [(result.loss, result.grad_norm) for result in results],
            "loads": [[(load.routed, load.kept) for load in result.moe.values()] for result in results],
            "parameters": [tensor.detach().clone() for tensor in model.state_dict().values()],
            "attempts": [result.attempt for result in results],
        }


def equality(device: torch.device, steps: int) -> dict[str, dict[str, Any]]:
    """Every case against the dropless variant alone."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    found = {}
    with sdpa_kernel(SDPBackend.MATH):
        for name, (options, how) in CASES.items():
            start = time.perf_counter()
            narrow, wide = train(device, steps, options, **how), train(device, steps, {}, **how)
            attempts = collections.Counter(narrow["attempts"])
            same = {key: narrow[key] == wide[key] for key in ("losses", "loads")}
            pairs = zip(narrow["parameters"], wide["parameters"], strict=True)
            same["parameters"] = all(torch.equal(one, other) for one, other in pairs)
            found[name] = {
                "steps": steps,
                "bitwise": same,
                "run_again": steps - attempts[0],
                "twice_or_more": sum(count for attempt, count in attempts.items() if attempt > 1),
                "lost": sum(sum(routed) - sum(kept) for step in narrow["loads"] for routed, kept in step),
            }
            print(f"{name}: {json.dumps(found[name])} in {time.perf_counter() - start:.1f} s", flush=True)
    torch.use_deterministic_algorithms(False)
    return found


def seconds(runner: StaticMoERunner, given: list[dict[str, Tensor]]) -> float:
    """Wall time of these steps, from an idle device to an idle device."""
    runner.flush()
    start = time.perf_counter()
    for one in given:
        runner.step(one)
    runner.flush()
    return time.perf_counter() - start


def costs(device: torch.device, size: Size, counted: int = 20, repeats: int = 7) -> dict[str, Any]:
    """Milliseconds of a step by policy where nothing overflows, by turns; and what one overflow adds."""
    bound = {"capacity_factor": 6.0, "capacity_scope": "expert"}
    policies: dict[str, dict[str, Any]] = {
        "dropless": {},
        "rerun": bound,
        "drop": bound | {"overflow": "drop"},
        "rerun, one in flight": bound | {"max_in_flight": 1},
    }
    even = [batch(size, step, False) for step in range(counted)]
    broken = [batch(size, counted // 2, True) if step == counted // 2 else one for step, one in enumerate(even)]
    runners = {}
    for name, options in policies.items():
        model, optimizer = step_overhead.build(size, device)
        for group in optimizer.param_groups:
            group["lr"] = 0.0  # routing stays what it is
        config = RunnerConfig(max_grad_norm=1.0, autocast=torch.bfloat16, max_rerun_fraction=1.0, **options)
        runners[name] = StaticMoERunner(model, optimizer, example_batch=even[0], loss_fn=loss_fn, config=config)
    times: dict[str, list[float]] = collections.defaultdict(list)
    for number in range(repeats + 1):
        for name, runner in runners.items():
            again = runner.telemetry()["reruns"]
            plain = seconds(runner, even)
            assert runner.telemetry()["reruns"] == again, f"{name}: natural routing exceeds the bound"
            with_one = seconds(runner, broken)
            if number:  # the first round warms up
                times[name].append(plain)
                times[f"{name}, one overflow"].append(with_one)
            if name.startswith("rerun"):
                assert runner.telemetry()["reruns"] == again + 1, f"{name}: the skewed batch fits"
    for runner in runners.values():
        runner.close()
    step = {name: 1e3 * statistics.median(times[name]) / counted for name in policies}
    found: dict[str, Any] = {"size": size.name, "tokens": size.batch * size.sequence, "step_ms": step}
    found["step_ms_spread"] = {n: [1e3 * min(times[n]) / counted, 1e3 * max(times[n]) / counted] for n in policies}
    found["over_dropless"] = {name: step[name] / step["dropless"] - 1 for name in policies}
    for name, in_flight in (("rerun", RunnerConfig().max_in_flight), ("rerun, one in flight", 1)):
        pairs = zip(times[f"{name}, one overflow"], times[name], strict=True)
        added = 1e3 * statistics.median(one - other for one, other in pairs)
        found[f"one overflow, {name}"] = {
            "added_steps": added / step[name], "allowed_steps": 1 + in_flight + 1, "added_ms": added,
        }  # fmt: skip
    return found


def memory(device: torch.device, size: Size) -> dict[str, Any]:
    """Bytes: the forecast by part beside what torch has held at most while the runner was built and three steps ran."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    model, optimizer = step_overhead.build(size, device)
    given = [batch(size, step, False) for step in range(3)]
    config = RunnerConfig(max_grad_norm=1.0, autocast=torch.bfloat16)
    with StaticMoERunner(model, optimizer, example_batch=given[0], loss_fn=loss_fn, config=config) as runner:
        for one in given:
            runner.step(one)
        runner.flush()
        found = runner.memory()
        assert found.forecast is not None, "the reference model can be rehearsed"
        print("\n".join(found.forecast.lines(torch.cuda.max_memory_reserved(device))), flush=True)
        return {
            "size": size.name,
            "forecast": dataclasses.asdict(found.forecast) | {"total": found.forecast.total},
            "reserved": torch.cuda.max_memory_reserved(device),
            "allocated": torch.cuda.max_memory_allocated(device),
            "graphs": found.graphs,
        }


def messages(device: torch.device) -> dict[str, str]:
    """What each policy says."""
    size, said = tiny(), {}
    for name, options in {
        "raise": NARROW | {"overflow": "raise"},
        "skip": NARROW | {"overflow": "skip", "max_consecutive_skips": 2},
        "rerun": NARROW | {"max_rerun_fraction": 0.1},
        "non-finite": {"nonfinite": "raise"},
    }.items():
        model = DemoLM(dataclasses.replace(size.config, dropout=0.0), seed=1).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=float("inf") if name == "non-finite" else 0.0)
        config = RunnerConfig(**options)
        with StaticMoERunner(
            model, optimizer, example_batch=batch(size, 1, False), loss_fn=loss_fn, config=config
        ) as runner:
            try:
                for step in range(60):
                    runner.step(batch(size, step, name != "non-finite"))
                runner.flush()
            except (CapacityError, NonFiniteError) as error:
                said[name] = f"{type(error).__name__}: {error}"
    return said


def print_tables(result: dict[str, Any]) -> None:
    """What was found, for people."""
    console = Console()
    table = Table(title="against the dropless variant alone")
    for column in ("case", "steps", "run again", "twice", "lost", "bitwise"):
        table.add_column(column)
    for name, row in result.get("equality", {}).items():
        numbers = (str(row[key]) for key in ("steps", "run_again", "twice_or_more", "lost"))
        table.add_row(name, *numbers, "yes" if all(row["bitwise"].values()) else str(row["bitwise"]))
    if table.row_count:
        console.print(table)
    for name, text in result.get("messages", {}).items():
        console.print(f"[bold]{name}[/bold]: {text}", highlight=False)
    for row in result.get("costs", []):
        console.print_json(json.dumps(row))


def main() -> None:
    """Compare, time, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS, help="the last two need a GPU")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--commit", default=None, help="of the code; default: git's")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    provenance = step_overhead.provenance(device, arguments.commit or source_commit())
    result: dict[str, Any] = {"provenance": provenance}
    parts = [part for part in arguments.parts if device.type == "cuda" or part in ("equality", "messages")]
    if "equality" in parts:
        result["equality"] = equality(device, arguments.steps)
    if "messages" in parts:
        result["messages"] = messages(device)
    if "memory" in parts:
        result["memory"] = [memory(device, size) for size in step_overhead.sizes()]
    if "costs" in parts:
        result["costs"] = []
        for size in step_overhead.sizes():
            if size.name in TIMED:
                result["costs"].append(costs(device, size))
                print(json.dumps(result["costs"][-1]), flush=True)
                if arguments.output:
                    write_result(result, arguments.output)
    if arguments.output:
        write_result(result, arguments.output)
    print_tables(result)
    found = result.get("equality", {})
    wrong = [name for name, row in found.items() if not all(row["bitwise"].values()) or row["lost"]]
    if wrong:
        raise SystemExit(f"not what the wide variant gives: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
