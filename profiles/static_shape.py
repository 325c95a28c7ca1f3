"""What static shape costs a block: routing and plan, room that nobody uses, and many experts with one token.

    python profiles/static_shape.py --output profiles/results/h200/static_shape.json

Captured, bf16, the shape of Qwen3-30B-A3B, natural routing. Room: buffers of four times the rows that there are, beside
as many as there are, by turns. Many experts: 1024 of them and a batch of one token, beside the bytes that it reads.

Dimensions: T tokens, K top_k, E experts.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from staticmoe import functional
from staticmoe.bench import SHAPES, Problem, Shape, make_problem, provenance
from staticmoe.bench.check import forward_backward
from staticmoe.bench.result import source_commit, write_result
from staticmoe.bench.timing import capture, copy_rate, milliseconds, spread

ROUNDS = 5


def with_room(p: Problem, rows: int) -> Tensor:
    """The block with buffers of so many rows."""
    plan = functional.make_plan(p.ids, p.weights, num_experts=p.down.shape[0], capacity_rows=rows)
    return functional.experts(p.x, p.weights, plan, p.gate_up, p.down, activation="swiglu")


def by_turns(calls: dict[str, Callable[[], Any]]) -> dict[str, dict[str, Any]]:
    """Times of captured calls, all of them in every round."""
    recorded = {name: capture(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, one in recorded.items():
            times[name] += milliseconds(one.replay)
    return {name: spread(sorted(found)) for name, found in times.items()}


def routing_and_plan(device: torch.device, tokens: int, shape: Shape) -> dict[str, Any]:
    """Top-k with its softmax, and the layout of rows: apart and together."""
    logits = torch.randn(tokens, shape.experts, device=device)

    def route() -> tuple[Tensor, Tensor]:
        return functional.route(logits, top_k=shape.top_k)

    ids, weights = route()

    def plan() -> Any:
        return functional.make_plan(ids, weights, num_experts=shape.experts)

    def both() -> Any:
        return functional.make_plan(*route(), num_experts=shape.experts)

    with torch.no_grad():
        return by_turns({"routing": route, "plan": plan, "both": both})


def room(p: Problem) -> dict[str, Any]:
    """Forward and backward with all rows in use, and with a quarter of them."""
    rows = p.ids.numel()
    found: dict[str, Any] = dict(
        by_turns({
            "as many": lambda: forward_backward(lambda q: with_room(q, rows), p),
            "four times as many": lambda: forward_backward(lambda q: with_room(q, 4 * rows), p),
        })
    )  # fmt: skip
    found["slower by"] = found["four times as many"]["ms"] / found["as many"]["ms"] - 1
    return found


def many_experts(device: torch.device) -> dict[str, Any]:
    """1024 experts, one token: time, and what reading its experts' weights alone would take."""
    shape = Shape(2048, 768, 1024, 8)
    p = make_problem(shape, 1, "natural", torch.bfloat16, device)
    found: dict[str, Any] = dict(
        by_turns({
            "forward": lambda: with_room(p, p.ids.numel()),
            "forward and backward": lambda: forward_backward(lambda q: with_room(q, q.ids.numel()), p),
        })
    )  # fmt: skip
    read = 3 * shape.top_k * shape.hidden * shape.intermediate * 2
    rate = copy_rate(device)
    found["weights read, ms"] = 1e3 * read / (rate * 1e12)
    found["weight gradients written, ms"] = 1e3 * 2 * shape.weights / (rate * 1e12)
    in_a_row = []
    recorded = capture(lambda: with_room(p, p.ids.numel()))
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(50):
            recorded.replay()
        end.record()
        torch.cuda.synchronize()
        in_a_row.append(start.elapsed_time(end) / 50)
    found["forward, back to back, ms"] = statistics.median(in_a_row)
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--commit", default=None, help="of the code; default: git's")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("static_shape: times are of a GPU, and there is none")
    device, shape = torch.device("cuda"), SHAPES["qwen3"]
    result: dict[str, Any] = {
        "provenance": provenance(device, arguments.commit or source_commit(), absent=()),
        "tokens": arguments.tokens,
        "routing and plan": routing_and_plan(device, arguments.tokens, shape),
        "room": room(make_problem(shape, arguments.tokens, "natural", torch.bfloat16, device)),
        "1024 experts, one token": many_experts(device),
    }
    if arguments.output:
        write_result(result, arguments.output)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
