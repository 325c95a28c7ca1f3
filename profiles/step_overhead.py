"""What a step costs beside its kernels: eager loop, `capture="off"` and the captured graph, by model size.

The eager loop and the graph also with torch.compile: the whole model, and `compile="blocks"`.

    python profiles/step_overhead.py --output profiles/results/h200/step_overhead.json

Checks first that captured steps are bitwise the uncaptured ones with deterministic attention, and times nothing where
they are not. Every mode trains the reference model on random bytes with a Zipf distribution, bf16
autocast, fused AdamW, clipping. Host syncs and GPU idle share come from torch.profiler over steps of the steady
state; the ceiling is an 8192^3 bf16 product in the same run.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import functools
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# cuBLAS repeats its bits only with this; it must be set before the first product.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.utils.deterministic
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from staticmoe import RunnerConfig, StaticMoERunner
from staticmoe.bench.timing import ceiling
from staticmoe.demo.model import DemoLM, ModelConfig
from staticmoe.observe.nvml import gpu_facts

WARMUP, TIMED, REPEATS, PROFILED, CHECKED = 5, 10, 5, 10, 20
SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


@dataclasses.dataclass(frozen=True)
class Size:
    """A model and its batch: B sequences of S bytes."""

    name: str
    config: ModelConfig
    batch: int
    sequence: int


def sizes() -> list[Size]:
    """The model of `staticmoe train --depth 4 --batch-size 32 --seq-len 256`, then host-bound, between, GPU-bound."""

    def lm(depth: int, hidden: int, heads: int, experts: int, inner: int, sequence: int) -> ModelConfig:
        return ModelConfig(
            depth=depth, hidden_size=hidden, num_heads=heads, num_experts=experts, top_k=2,
            intermediate_size=inner, max_seq_len=sequence,
        )  # fmt: skip

    return [
        Size("train", ModelConfig.from_depth(4, 256), 32, 256),
        Size("small", lm(4, 256, 4, 8, 256, 256), 4, 256),
        Size("medium", lm(8, 1024, 8, 16, 1024, 1024), 4, 1024),
        Size("large", lm(8, 2048, 16, 32, 1024, 2048), 8, 2048),
    ]


def batches(size: Size, count: int, device: torch.device) -> list[dict[str, Tensor]]:
    """Pinned host batches of Zipf-distributed bytes."""
    generator = torch.Generator().manual_seed(7)
    weights = 1.0 / torch.arange(1, 257, dtype=torch.float64)
    made = []
    for _ in range(count):
        text = torch.multinomial(weights, size.batch * (size.sequence + 1), replacement=True, generator=generator)
        text = text.view(size.batch, size.sequence + 1)
        made.append({"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()})
    pin = device.type == "cuda"
    return [{k: v.pin_memory() if pin else v for k, v in batch.items()} for batch in made]


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross entropy in nats."""
    loss = model(**batch).loss
    assert loss is not None
    return loss


@functools.lru_cache(maxsize=1)
def _drawn(config: ModelConfig) -> DemoLM:
    """On the host: drawing a billion numbers takes longer than everything else."""
    return DemoLM(config, seed=1)


def build(size: Size, device: torch.device) -> tuple[DemoLM, torch.optim.Optimizer]:
    """The same model for the same size."""
    model = copy.deepcopy(_drawn(size.config)).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")


class Eager:
    """The loop that a user would write: autocast, backward, clip, step; no value is read."""

    def __init__(self, size: Size, device: torch.device, *, compiled: bool = False) -> None:
        self.model, self.optimizer = build(size, device)
        if compiled:
            self.model.compile()
        self.device = device

    def step(self, batch: dict[str, Tensor]) -> None:
        """One update."""
        moved = {key: value.to(self.device, non_blocking=True) for key, value in batch.items()}
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = loss_fn(self.model, moved)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def finish(self) -> None:
        """Nothing is outstanding on the host."""

    def close(self) -> None:
        """Nothing to close."""


class Runner:
    """The runner with one capture mode."""

    def __init__(self, size: Size, device: torch.device, capture: str, *, compiled: bool = False) -> None:
        self.model, self.optimizer = build(size, device)
        config = RunnerConfig(
            capture=capture,
            compile="blocks" if compiled else "off",
            max_grad_norm=1.0,
            autocast=torch.bfloat16,
            max_in_flight=TIMED + 2,
        )
        example = batches(size, 1, device)[0]
        self.runner = StaticMoERunner(self.model, self.optimizer, example_batch=example, loss_fn=loss_fn, config=config)
        self.step: Callable[[dict[str, Tensor]], Any] = self.runner.step
        self.finish: Callable[[], None] = self.runner.flush
        self.close: Callable[[], None] = self.runner.close


def trajectory(size: Size, device: torch.device, capture: str, steps: int) -> tuple[list[float], list[Tensor]]:
    """Losses and final parameters of `steps` steps."""
    mode = Runner(size, device, capture)
    results = [mode.step(batch) for batch in batches(size, steps, device)]
    losses = [result.loss for result in results]
    parameters = [parameter.detach().clone() for parameter in mode.model.parameters()]
    mode.close()
    return losses, parameters


def gap(one: tuple[list[float], list[Tensor]], other: tuple[list[float], list[Tensor]]) -> float:
    """Largest difference of a parameter; 0 only where losses and parameters agree bitwise."""
    worst = max(float((a - b).abs().max()) for a, b in zip(one[1], other[1], strict=True))
    return worst if worst or one[0] == other[0] else float("nan")


def check(size: Size, device: torch.device, captured: str) -> dict[str, Any]:
    """Refuse to time what is not right: captured steps against uncaptured ones, bitwise with deterministic attention.

    Without determinism the attention backward adds with atomics; the gap between two uncaptured runs is its noise.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    with sdpa_kernel(SDPBackend.MATH):
        exact = gap(trajectory(size, device, captured, CHECKED), trajectory(size, device, "off", CHECKED))
    torch.use_deterministic_algorithms(False)
    if exact != 0.0:
        raise SystemExit(f"{size.name}: {CHECKED} captured steps differ from uncaptured ones by {exact}; not timed")
    plain = trajectory(size, device, "off", CHECKED)
    found = {
        "steps": CHECKED,
        "deterministic_gap": exact,
        "gap_without_determinism": gap(trajectory(size, device, captured, CHECKED), plain),
        "noise_floor_of_two_uncaptured_runs": gap(trajectory(size, device, "off", CHECKED), plain),
    }
    print(size.name, "check", json.dumps(found), flush=True)
    return found


def wait(device: torch.device) -> None:
    """Until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(mode: Any, data: list[dict[str, Tensor]], device: torch.device) -> dict[str, Any]:
    """Median host and wall time of a step, peak memory, syncs and idle share."""
    for number in range(WARMUP):
        mode.step(data[number % len(data)])
    mode.finish()
    wait(device)
    allocations = torch.cuda.memory_stats(device).get("num_device_alloc", 0) if device.type == "cuda" else 0
    host, wall = [], []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for number in range(TIMED):
            mode.step(data[number % len(data)])
        launched = time.perf_counter()
        wait(device)
        wall.append((time.perf_counter() - start) / TIMED)
        host.append((launched - start) / TIMED)
        mode.finish()
    alone = []
    for batch in data:
        start = time.perf_counter()
        mode.step(batch)
        alone.append(time.perf_counter() - start)
        wait(device)
    mode.finish()
    found: dict[str, Any] = {
        "host_us": 1e6 * statistics.median(host),
        "host_us_of_a_lone_step": 1e6 * statistics.median(alone),
        "step_ms": 1e3 * statistics.median(wall),
        "step_ms_spread": [1e3 * min(wall), 1e3 * max(wall)],
    }
    if device.type == "cuda":
        found["peak_mib"] = torch.cuda.max_memory_allocated(device) / 2**20
        found["device_allocations_in_steady_state"] = (
            torch.cuda.memory_stats(device).get("num_device_alloc", 0) - allocations
        )
        found.update(profile(mode, data, device))
    return found


def profile(mode: Any, data: list[dict[str, Tensor]], device: torch.device) -> dict[str, Any]:
    """Host syncs a step by name and the GPU's idle share, from torch.profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]

    def syncs_of(recorded: torch.profiler.profile) -> collections.Counter[str]:
        return collections.Counter(event.name for event in recorded.events() if event.name in SYNCS)

    with torch.profiler.profile(activities=activities) as empty:
        wait(device)
    with torch.profiler.profile(activities=activities) as recorded:
        for number in range(PROFILED):
            mode.step(data[number % len(data)])
        wait(device)
    mode.finish()
    # Less those of the profiler and of the wait, which a profile without steps shows.
    syncs = syncs_of(recorded) - syncs_of(empty)
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in recorded.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    busy, last = 0.0, float("-inf")
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    window = max(end for _, end in spans) - min(start for start, _ in spans)
    return {
        "host_syncs_per_step": {name: count / PROFILED for name, count in syncs.items() if count > 0},
        "gpu_idle_share": 1.0 - busy / window,
    }


def sync_proof(size: Size, device: torch.device) -> bool:
    """Whether steps pass under torch's sync debug mode "error": it raises at a call that waits for the device."""
    mode = Runner(size, device, "cuda")
    data = batches(size, 3, device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in data:
            mode.step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    mode.close()
    return True


def provenance(device: torch.device, commit: str) -> dict[str, Any]:
    """Where and with what this was measured."""
    return {
        "gpu": gpu_facts() or (torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": commit,
        "data": "bytes, Zipf over 256 values, new batch each step",
        "protocol": f"{WARMUP} warm-up steps, median of {REPEATS} x {TIMED} steps, {PROFILED} profiled",
    }


def main() -> None:
    """Measure, print a table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--sizes", nargs="*", default=["train", "small", "medium", "large"])
    parser.add_argument("--commit", default=None, help="of the code; default: git's")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    captured = "cuda" if device.type == "cuda" else "emulate"
    commit = (
        arguments.commit
        or subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
    )
    result: dict[str, Any] = {"provenance": provenance(device, commit), "sizes": {}}
    if device.type == "cuda":
        result["ceiling_tflops"] = ceiling(device)
    for size in (one for one in sizes() if one.name in arguments.sizes):
        checked = check(size, device, captured)
        data = batches(size, 8, device)
        rows: dict[str, Any] = {}
        modes: dict[str, Callable[[], Any]] = {
            "eager": functools.partial(Eager, size, device),
            "eager, compiled": functools.partial(Eager, size, device, compiled=True),
            "off": functools.partial(Runner, size, device, "off"),
            captured: functools.partial(Runner, size, device, captured),
            f"{captured}, compiled": functools.partial(Runner, size, device, captured, compiled=True),
        }
        for name, make in modes.items():
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
            mode = make()
            rows[name] = measure(mode, data, device)
            mode.close()
            del mode
            print(size.name, name, json.dumps(rows[name]), flush=True)
        entry = {
            "model": dataclasses.asdict(size.config),
            "tokens": size.batch * size.sequence,
            "check": checked,
            "modes": rows,
        }
        if device.type == "cuda":
            entry["passes_sync_debug_error"] = sync_proof(size, device)
        result["sizes"][size.name] = entry
        if arguments.output:
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{'size':8}{'mode':17}{'step ms':>10}{'host us':>10}{'idle':>8}{'peak MiB':>10}  syncs/step")
    for name, entry in result["sizes"].items():
        for mode_name, row in entry["modes"].items():
            syncs = sum(row.get("host_syncs_per_step", {}).values())
            idle, peak = row.get("gpu_idle_share", float("nan")), row.get("peak_mib", float("nan"))
            times = f"{row['step_ms']:10.2f}{row['host_us']:10.0f}"
            print(f"{name:8}{mode_name:17}{times}{idle:8.1%}{peak:10.0f}  {syncs:.1f}")


if __name__ == "__main__":
    main()
