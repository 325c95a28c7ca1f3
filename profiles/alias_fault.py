"""Whether a compiled function hands out wrong aliases of a view that is not aligned to 16 bytes: a fault of torch 2.13.

    python profiles/alias_fault.py                                  # on the GPU, if there is one, by Inductor
    python profiles/alias_fault.py --device cpu --backend cloning   # what Inductor does to such inputs, on any machine

One tensor of expert ids [B,S,L,K] int32 is handed out layer by layer, as the view `ids[:, :, layer]`, to a compiled
function that returns the ids flattened, an alias of its input. Where K is no multiple of 4 some layers' views start at
an address that is no multiple of 16, and the compiler works on a copy. Once shapes are dynamic, from the second step
on, the runtime rebuilds the alias from what it knows of the copy, at offset 0 of the user's tensor: those layers read
the ids of layer 0. Seen with torch 2.13.0: with K = 6 and K = 2 layers 1 and 3 of 4, with K = 8 none. A copy of its own
for each layer, which is what router replay hands out, removes it.

Exit code: 0 nothing was misread; 3 views were misread and own copies were not (the fault is there, the remedy holds);
1 own copies were misread too; 2 wrong arguments, or no such device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from staticmoe.integrations.router_replay.ids import own_slice

LAYERS = 4
# The second step has another length, which makes the shapes dynamic.
LENGTHS = (5, 7, 9)


def clone_misaligned(graph: Any, inputs: Any) -> Callable[[list[Any]], Any]:
    """A compiler that runs the graph on copies of inputs that are not aligned, strides kept, as Inductor does."""

    def run(args: list[Any]) -> Any:
        taken = [_aligned(value) if isinstance(value, Tensor) else value for value in args]
        args.clear()
        return graph(*taken)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _aligned(value: Tensor) -> Tensor:
    if value.data_ptr() % 16 == 0:
        return value
    copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return copy.copy_(value)


cloning = aot_autograd(fw_compiler=clone_misaligned, bw_compiler=clone_misaligned)


def flattened(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Something to compute, and an alias of the ids."""
    return 2 * x, ids.reshape(-1, ids.shape[-1])


def misread(top_k: int, backend: Any, device: torch.device, take: Callable[[Tensor, int], Tensor]) -> list[list[int]]:
    """For each step the layers whose ids came out as others."""
    torch._dynamo.reset()
    compiled = torch.compile(flattened, backend=backend)
    found = []
    for length in LENGTHS:
        ids = torch.arange(2 * length * LAYERS * top_k, dtype=torch.int32, device=device).view(2, length, LAYERS, top_k)
        wrong = []
        for layer in range(LAYERS):
            x = torch.randn(2, length, 3, device=device, requires_grad=True)
            _, got = compiled(x, take(ids, layer))
            if not torch.equal(got, ids[:, :, layer].reshape(-1, top_k)):
                wrong.append(layer)
        found.append(wrong)
    return found


def main() -> int:
    """Look at views and at own copies, for each K."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", choices=("inductor", "cloning"), default="inductor")
    parser.add_argument("--top-k", type=int, nargs="+", default=[2, 6, 8])
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device: expected one that is there; got cuda on a machine without: pass --device cpu")
    backend = cloning if arguments.backend == "cloning" else "inductor"
    print(f"torch {torch.__version__}, {arguments.backend} on {device}; layers misread in each of {len(LENGTHS)} steps")
    views: list[list[int]] = []
    copies: list[list[int]] = []
    for top_k in arguments.top_k:
        of_views = misread(top_k, backend, device, lambda ids, layer: ids[:, :, layer])
        of_copies = misread(top_k, backend, device, lambda ids, layer: own_slice(ids, layer, torch.int32))
        print(f"K = {top_k}: views {of_views}, own copies {of_copies}")
        views, copies = views + of_views, copies + of_copies
    if any(copies):
        return 1
    return 3 if any(views) else 0


if __name__ == "__main__":
    sys.exit(main())
