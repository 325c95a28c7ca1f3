"""What a person building a model touches: the layer, and its losses as functions."""

from __future__ import annotations

from staticmoe.moe.experts import Experts, SharedExpert
from staticmoe.moe.layer import StaticMoE
from staticmoe.moe.losses import load_balancing_loss, router_z_loss
from staticmoe.moe.router import Router, RouterOutput

__all__ = [
    "Experts",
    "Router",
    "RouterOutput",
    "SharedExpert",
    "StaticMoE",
    "load_balancing_loss",
    "router_z_loss",
]
