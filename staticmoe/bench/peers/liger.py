"""Liger: a fused MoE in Triton. It reads the number of its tiles on the host, so no call of it can be captured.

Its tuner times dozens of configurations for each width, unless it is told otherwise before it is imported.
Written for 0.8.5.
"""

from __future__ import annotations

import importlib
import os

from torch import Tensor

from staticmoe.bench.peers.registry import Adapter
from staticmoe.bench.problems import Problem

TUNING = "LIGER_FUSED_MOE_AUTOTUNE"
EAGER = "uncaptured: it reads a count of tiles on the host"


def load() -> Adapter:
    """Import it, with one configuration for each kernel where the environment does not ask for its tuner."""
    os.environ.setdefault(TUNING, "0")
    function = importlib.import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction
    tuned = not importlib.import_module("liger_kernel.ops.fused_moe_kernels")._AUTOTUNE_DISABLED

    def block(p: Problem) -> Tensor:
        y: Tensor = function.apply(p.x, p.gate_up, p.down, p.ids, p.weights)
        return y

    how = "tuned by itself" if tuned else f"one fixed configuration: its own of {TUNING}=0"
    return Adapter(lambda _: block, f"{how}; {EAGER}")
