"""ScatterMoE: Triton products that gather and scatter rows themselves; the activation lies between them.

It counts rows with an op that waits for the device. Offsets made on the device take its place, so that it can be
captured. Written for 0.3.0.

Dimensions: T tokens, K top_k, E experts.
"""

from __future__ import annotations

import importlib

import torch
import torch.nn.functional as F
from torch import Tensor

from staticmoe.bench.peers.registry import Adapter
from staticmoe.bench.problems import Problem

NOTE = "expert offsets made on the device: its own count waits for the host"


def load() -> Adapter:
    """Import it."""
    linear = importlib.import_module("scattermoe.parallel_experts").parallel_linear

    def block(p: Problem) -> Tensor:
        sorted_ids, order = torch.sort(p.ids.flatten())
        experts = torch.arange(p.down.shape[0], device=order.device, dtype=sorted_ids.dtype)
        maps = (sorted_ids, order, torch.searchsorted(sorted_ids, experts, right=True))
        both = linear(p.x, p.gate_up.transpose(1, 2), p.ids.shape[1], *maps, grouped_out=True)
        gate, up = both.chunk(2, dim=-1)
        # Its weighted sum is a product of two tensors of one dtype.
        weights = p.weights.to(p.x.dtype)
        y: Tensor = linear(F.silu(gate) * up, p.down.transpose(1, 2), 1, *maps, grouped_in=True, gates=weights)
        return y

    return Adapter(lambda _: block, NOTE)
