"""Slices of one tensor for all layers: off the boundaries of 16 bytes, strided, and what is made of them."""

from __future__ import annotations

import torch
from torch import nn

from staticmoe import functional

LAYERS, TOP_K = 4, 6


@torch.compile(backend="eager")
def flattened(ids):
    return ids.reshape(-1, TOP_K), ids + 1


class Aliased(nn.Module):
    """A compiled function flattens each layer's ids: those of layers 1 and 3 begin 24 and 72 bytes in."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ids", torch.arange(4 * LAYERS * TOP_K).int().view(2, 2, LAYERS, TOP_K))

    def layer(self, number):
        return self.ids[:, :, number]

    def forward(self, x):
        for number in range(LAYERS):
            flat, _ = flattened(self.layer(number))  # <- SM607 Aliased
            x = x + flat.sum()
        return x


class Aliased_mended(Aliased):
    def layer(self, number):
        return self.ids[:, :, number].contiguous()


class Replayed(nn.Module):
    """A plan is made of one layer's slice of the routing of all layers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ids", torch.rand(4, LAYERS, 8).argsort(-1)[..., :TOP_K].int())
        self.register_buffer("weights", torch.full((4, TOP_K), 1 / TOP_K))

    def slice(self, layer):
        return self.ids[:, layer]

    def forward(self, x):
        plan = functional.make_plan(self.slice(1), self.weights, num_experts=8)  # <- SM504 Replayed
        return x * plan.tokens_per_expert


class Replayed_mended(Replayed):
    def __init__(self):
        super().__init__()
        self.ids = self.ids.transpose(0, 1).contiguous()

    def slice(self, layer):
        return self.ids[layer]
