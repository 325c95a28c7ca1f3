"""What watching a run costs: step time without files, with them at the defaults, with all of them, and with sinks.

    python profiles/record_cost.py --output profiles/results/h200/record_cost.json
    python profiles/record_cost.py --device cpu --sizes tiny --rounds 3 --steps 5

All ways run in one process, each with a model of its own, by turns in every round; a share is over the way without
files. "publish" is the time that the thread that trains spends on handing a record on. On a GPU a step's copies from
device to host are counted, and steps run under `torch.cuda.set_sync_debug_mode("error")`.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import step_overhead  # first: cuBLAS reads its setting at the first product
import torch

from staticmoe import RunnerConfig, StaticMoERunner
from staticmoe.bench.result import provenance, source_commit, write_result
from staticmoe.demo.model import ModelConfig
from staticmoe.observe.sinks import PrometheusSink, TensorBoardSink

NONE, DEFAULTS, LAYERS, EXPERTS, SINKS = "no files", "defaults", "layers_every=1", "experts_every=1", "with sinks"
OPTIONS: dict[str, dict[str, int]] = {
    NONE: {}, DEFAULTS: {}, LAYERS: {"layers_every": 1}, EXPERTS: {"experts_every": 1}, SINKS: {}
}  # fmt: skip
WARM_UP = 5


def sizes() -> list[step_overhead.Size]:
    """Those of step_overhead.py, one with as many experts and layers as large models have, and one for a CPU."""
    many = ModelConfig(
        depth=24, hidden_size=512, num_heads=8, num_experts=128, top_k=8, intermediate_size=128, max_seq_len=1024
    )
    tiny = ModelConfig(
        depth=2, hidden_size=32, num_heads=2, num_experts=8, top_k=2, intermediate_size=16, max_seq_len=16
    )
    more = [step_overhead.Size("many", many, 4, 1024), step_overhead.Size("tiny", tiny, 2, 16)]
    return [*step_overhead.sizes(), *more]


class Way:
    """A runner that is watched in one way; `publish` has the seconds of each record."""

    def __init__(self, name: str, size: step_overhead.Size, device: torch.device, folder: Path) -> None:
        model, optimizer = step_overhead.build(size, device)
        config = RunnerConfig(
            capture="cuda" if device.type == "cuda" else "emulate",
            max_grad_norm=1.0,
            autocast=torch.bfloat16,
            run_dir=None if name == NONE else folder / name,
            **OPTIONS[name],
        )
        example = step_overhead.batches(size, 1, device)[0]
        self.runner = StaticMoERunner(
            model, optimizer, example_batch=example, loss_fn=step_overhead.loss_fn, config=config
        )
        self._sinks = [TensorBoardSink(folder / "events"), PrometheusSink(port=0)] if name == SINKS else []
        for sink in self._sinks:
            self.runner.subscribe(sink)
        self.publish: list[float] = []
        publisher = self.runner._publisher
        inner = publisher.publish

        def timed(arrival: Any) -> None:
            start = time.perf_counter()
            inner(arrival)
            self.publish.append(time.perf_counter() - start)

        publisher.publish = timed  # type: ignore[method-assign]

    def close(self) -> None:
        """The runner, then its sinks."""
        self.runner.close()
        for sink in self._sinks:
            sink.close()


def block(way: Way, data: list[dict[str, torch.Tensor]], steps: int, device: torch.device) -> float:
    """Seconds of a step, over so many in a row."""
    step_overhead.wait(device)
    start = time.perf_counter()
    for number in range(steps):
        way.runner.step(data[number % len(data)])
    way.runner.flush()
    step_overhead.wait(device)
    return (time.perf_counter() - start) / steps


def proofs(way: Way, data: list[dict[str, torch.Tensor]], device: torch.device) -> dict[str, Any]:
    """On a GPU: copies to the host a step, and that nothing waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in data:
            way.runner.step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    way.runner.flush()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as recorded:
        for batch in data:
            way.runner.step(batch)
        way.runner.flush()
        step_overhead.wait(device)
    names = collections.Counter(event.name for event in recorded.events() if event.name.startswith("Memcpy DtoH"))
    return {"passes_sync_debug_error": True, "copies_to_host_a_step": sum(names.values()) / len(data)}


def measure(
    size: step_overhead.Size, device: torch.device, folder: Path, rounds: int, steps: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """All ways of one size, by turns."""
    data = step_overhead.batches(size, 8, device)
    ways = {name: Way(name, size, device, folder) for name in OPTIONS}
    try:
        for way in ways.values():
            block(way, data, WARM_UP, device)
            way.publish.clear()
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds):
            say(f"{size.name}: round {number + 1} of {rounds}")
            # By turns, and the other way round in every second round: what drifts meets all alike.
            for name in list(ways)[:: 1 if number % 2 == 0 else -1]:
                times[name].append(block(ways[name], data, steps, device))
        plain = statistics.median(times[NONE])
        found: dict[str, Any] = {"model": dataclasses.asdict(size.config), "tokens": size.batch * size.sequence}
        found["ways"] = {
            name: {
                "step_ms": 1e3 * statistics.median(times[name]),
                "step_ms_range": [1e3 * min(times[name]), 1e3 * max(times[name])],
                # Each round beside the same round without files.
                "share": statistics.median(a / b - 1 for a, b in zip(times[name], times[NONE], strict=True)),
                "publish_us": 1e6 * statistics.median(way.publish),
                "publish_share": statistics.mean(way.publish) / plain,
                **(proofs(way, data, device) if device.type == "cuda" else {}),
            }
            for name, way in ways.items()
        }
    finally:
        for way in ways.values():
            way.close()
    return found


def main() -> None:
    """Measure, print a table, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", nargs="*", default=["train", "medium", "many"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=50, help="in a row of one way")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--commit", default=None, help="of the code; default: git's")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    result: dict[str, Any] = {"provenance": provenance(device, arguments.commit or source_commit(), ()), "sizes": {}}
    result["protocol"] = f"{arguments.rounds} rounds of {arguments.steps} steps of each way, by turns; medians"
    for size in (one for one in sizes() if one.name in arguments.sizes):
        with tempfile.TemporaryDirectory() as folder:
            rounds, steps = arguments.rounds, arguments.steps
            found = measure(size, device, Path(folder), rounds, steps, lambda text: print(text, flush=True))
        result["sizes"][size.name] = found
        for name, way in found["ways"].items():
            print(f"{size.name:8}{name:18}{json.dumps(way)}", flush=True)
        if arguments.output:
            write_result(result, arguments.output)


if __name__ == "__main__":
    main()
