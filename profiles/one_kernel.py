"""One kernel of the MoE block alone, launched a few times, for a tool that looks into kernels.

    python profiles/one_kernel.py --kernel up --shape qwen3 --tokens 8192
    ncu --nvtx --nvtx-include "one kernel/" --launch-count 1 --set full -o up python profiles/one_kernel.py --kernel up
    ncu --kernel-name regex:staticmoe_up --launch-skip 3 --launch-count 1 --set full python profiles/one_kernel.py \
        --kernel up

Inputs are made first, by the kernels that come before in a step; then it warms up, and the launches to look at lie in
the NVTX range "one kernel" (package nvtx). As the ops launch it: with its tile of the table, or by the kernel of this
GPU that they take instead.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from typing import Any

import torch
import tune_tiles

from staticmoe.bench import SHAPES, make_problem
from staticmoe.bench.problems import ROUTINGS

RANGE = "one kernel"
WARM_UP = 3
KERNELS = (
    "up", "down", "dact", "token_grad", "weight_grad_down", "weight_grad_up", "grouped_gemm", "combine",
    "token_grad_combine", "schedule", "plan op",
)  # fmt: skip


def calls_of(launches: tune_tiles.Launches) -> dict[str, Callable[[], Any]]:
    """Every launcher by name; what each reads was written by those before it."""
    small = {name: call for name, (call, _) in tune_tiles.small_calls(launches).items()}
    return {**launches.as_launched(), **small}


def seen() -> contextlib.AbstractContextManager[Any]:
    """The range around the launches to look at; none where nvtx is not installed, which is said."""
    try:
        import nvtx
    except ImportError:
        print(f"nvtx is not installed: there is no range {RANGE!r}; choose launches by --kernel-name", flush=True)
        return contextlib.nullcontext()
    return nvtx.annotate(RANGE)


def main() -> None:
    """Launch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", choices=KERNELS, required=True)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--routing", choices=ROUTINGS, default="natural")
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument(
        "--device", default="cuda", help="cpu: by Triton's interpreter, where TRITON_INTERPRET=1 is set"
    )
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("one_kernel: expected a GPU; there is none: --device cpu interprets, at small --tokens")
    shape = SHAPES[arguments.shape]
    problem = make_problem(shape, arguments.tokens, arguments.routing, torch.bfloat16, device)
    with torch.no_grad():
        calls = calls_of(tune_tiles.Launches(problem, device))
        for name, call in calls.items():
            if name == arguments.kernel:
                break
            call()
        for _ in range(WARM_UP):
            calls[arguments.kernel]()
        if device.type == "cuda":
            torch.cuda.synchronize()
        with seen():
            for _ in range(arguments.launches):
                calls[arguments.kernel]()
            if device.type == "cuda":
                torch.cuda.synchronize()
    print(f"{arguments.kernel}: {WARM_UP} + {arguments.launches} launches, {shape}, {arguments.tokens} tokens")


if __name__ == "__main__":
    main()
