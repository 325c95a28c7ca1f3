"""What the watch costs a step: the comparison of what the recording read with what there is, on the host.

    python profiles/watch_cost.py --output profiles/results/cpu/watch_cost.json

A model of so many modules, as a decoder has them: in each block attention of four products, two norms, and a dense or
a mixture block. Its forward runs once under the eye that a capture has, then the watch looks again and again:

    watch                  nothing has changed: the cost of every step
    of_it_tensors          the part for parameters and buffers: which they are, their memory, whether they are trained
    of_it_hooks            the part for hooks
    watch_every_attribute  without knowing which code ran
    second_look            something is a new object and as good: once, then it is known

What the watch finds is tested in tests/runner/test_watch.py.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from staticmoe import StaticMoE
from staticmoe.capture.ran import RanCode
from staticmoe.runner.watch import HostState, _Hooks, _Tensors

LOOKS = 2000
H = 16


class Attention(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.heads, self.scaling, self.dropout = number, 2, 0.5, 0.0
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(H, H, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self.heads, H // self.heads)
        q, k, v = (proj(x).view(shape).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=self.scaling, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(x.shape))


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(H, H), nn.Linear(H, H), nn.Linear(H, H)
        self.act, self.drop = nn.SiLU(), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(self.act(self.gate(x)) * self.up(x)))


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.first, self.attention, self.second = nn.LayerNorm(H), Attention(number), nn.LayerNorm(H)
        self.mlp = Dense() if number % 2 else StaticMoE(H, H, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Model(nn.Module):
    def __init__(self, modules: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        while sum(1 for _ in self.modules()) < modules:
            self.blocks.append(Block(len(self.blocks)))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)


def median_us(look: Callable[[], Any], looks: int = LOOKS) -> dict[str, float]:
    """Median and 10th percentile of a call, in microseconds of this thread on a processor: others may be at work."""
    times = []
    for _ in range(looks):
        start = time.thread_time_ns()
        look()
        times.append((time.thread_time_ns() - start) / 1e3)
    times.sort()
    return {"median_us": round(statistics.median(times), 2), "p10_us": round(times[len(times) // 10], 2)}


def measure(modules: int, looks: int) -> dict[str, Any]:
    """The costs at one size."""
    model, ran = Model(modules), RanCode()
    # As a capture does: what is imported on the first run is no part of the iteration.
    loss_fn(model, torch.randn(1, 4, H)).backward()
    with ran.watch():
        loss_fn(model, torch.randn(1, 4, H)).backward()
    narrow, wide = HostState(model, (loss_fn,), ran=ran), HostState(model, (loss_fn,))
    assert narrow.changes() == [] and wide.changes() == []
    pairs = list(model.named_modules())
    tensors, hooks = _Tensors(pairs), _Hooks(pairs)

    def renewed() -> None:
        model.blocks[0].attention.scaling = float("0.5")
        assert narrow.changes() == []

    return {
        "modules": len(pairs),
        "tensors": len(list(model.parameters())) + len(list(model.buffers())),
        "reads": len(narrow.reads),
        "all_attributes": len(wide.reads),
        "watch": median_us(narrow.changes, looks),
        "of_it_tensors": median_us(tensors.is_untouched, looks),
        "of_it_hooks": median_us(hooks.is_untouched, looks),
        "watch_every_attribute": median_us(wide.changes, looks),
        "second_look": median_us(renewed, max(looks // 20, 10)),
    }


def main() -> None:
    """Measure, print a table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--modules", type=int, nargs="*", default=[50, 265, 500, 1000])
    parser.add_argument("--looks", type=int, default=LOOKS)
    arguments = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    columns = ("watch", "of_it_tensors", "of_it_hooks", "watch_every_attribute", "second_look")
    # One lookup of an attribute in a dict, to compare machines by.
    unit = [vars(nn.Linear(1, 1)) for _ in range(1000)]
    lookup = median_us(lambda: [one["training"] for one in unit], arguments.looks)["median_us"]
    rows = [measure(modules, arguments.looks) for modules in arguments.modules]
    print(f"{'modules':>8}{'tensors':>8}{'reads':>7}" + "".join(f"{name:>23}" for name in columns) + "  (median us)")
    for row in rows:
        times = "".join(f"{row[name]['median_us']:23.1f}" for name in columns)
        print(f"{row['modules']:8}{row['tensors']:8}{row['reads']:7}{times}")
    print(f"a lookup in a dict: {lookup:.0f} ns")
    if arguments.output:
        provenance = {
            "host": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "commit": commit.stdout.strip(),
            "protocol": f"median of {arguments.looks} looks",
            "dict_lookup_ns": lookup,
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps({"provenance": provenance, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
