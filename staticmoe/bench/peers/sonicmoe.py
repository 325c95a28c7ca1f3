"""SonicMoE: CuTe kernels for Hopper, with gate and up interleaved.

Its own tuner compiles and times dozens of configurations, which takes minutes for each width. Here each of its products
has one. Written for 0.1.2.post1 with QuACK 0.3.11: its two autograd functions are called with a given routing, as its
layer does after its own router.

Dimensions: T tokens, K top_k, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from staticmoe.bench.peers.layout import Converted
from staticmoe.bench.peers.registry import Adapter
from staticmoe.bench.problems import Problem

CLUSTER = {"cluster_m": 2, "cluster_n": 1, "swap_ab": False, "is_dynamic_persistent": False}
WIDE = {"tile_m": 128, "tile_n": 256, "pingpong": False}
# The gradient of the activation holds more in registers.
NARROW = {"tile_m": 128, "tile_n": 128, "pingpong": True}
FIXED = {"gemm_tuned": WIDE, "gemm_gated_tuned": WIDE, "gemm_dgated_tuned": NARROW}
NOTE = (
    "one fixed configuration: 128x256 cooperative, 128x128 ping-pong for the gradient of the activation, cluster 2x1; "
    "gate and up interleaved"
)


def load() -> Adapter:
    """Import it, with one configuration for each product."""
    functional, enums = (importlib.import_module(f"sonicmoe.{name}") for name in ("functional", "enums"))
    products = importlib.import_module("quack.gemm_interface")
    config, tuner = importlib.import_module("quack.gemm_config"), importlib.import_module("quack.autotuner")
    for name, tile in FIXED.items():
        # A list of one is taken as it is: no compiling in worker processes, no timing.
        getattr(products, name).configs = [tuner.AutotuneConfig(config=config.GemmConfig(**tile, **CLUSTER))]
    return Adapter(lambda p: _Block(functional, enums.ActivationType.SWIGLU, p), NOTE)


class _Block(Converted):
    def __init__(self, functional: ModuleType, swiglu: Any, p: Problem) -> None:
        super().__init__(p)
        self._functional, self._swiglu = functional, swiglu

    def __call__(self, p: Problem) -> Tensor:
        (tokens, top_k), experts = p.ids.shape, p.down.shape[0]
        rows = tokens * top_k

        def empty(size: int) -> Tensor:
            return torch.empty(size, dtype=torch.int32, device=p.ids.device)

        counts, offsets = empty(experts), empty(experts + 1)
        token_of_row, assignment_of_row, row_of_assignment = (empty(rows) for _ in range(3))
        self._functional.TC_topk_router_metadata_triton(
            p.ids, experts, counts, offsets, token_of_row, assignment_of_row, row_of_assignment
        )
        maps = (token_of_row, assignment_of_row, row_of_assignment)
        # Every token has K experts: no offsets of tokens.
        same_for_all = (None, False)
        gate_up = self.standing_for(p.gate_up).permute(1, 2, 0)
        act, pre = self._functional._UpProjection.apply(
            p.x, gate_up, None, offsets, rows, top_k, *maps, *same_for_all, self._swiglu, False, False
        )
        y: Tensor = self._functional._DownProjection.apply(
            act, pre, p.down.permute(1, 2, 0), None, p.weights, offsets, tokens, top_k, *maps, *same_for_all,
            self._swiglu,
        )  # fmt: skip
        return y
