"""The oracle of every op in plain PyTorch: what the kernels must compute, and what runs where there is none.

Written to be read and to be right in every floating dtype, fp64 included; static shapes, no host sync.
"""

from __future__ import annotations

from staticmoe.reference.activation import ACTIVATIONS, activate, activation_backward, is_gated
from staticmoe.reference.adamw import adamw_update
from staticmoe.reference.experts import combine, combine_backward, down, experts_backward, experts_forward, up
from staticmoe.reference.grouped import gather_rows, gather_to_tokens, grouped_mm, grouped_weight_grad
from staticmoe.reference.plan import RoutingPlan, make_plan
from staticmoe.reference.routing import SCORE_FUNCTIONS, repeats, route, route_backward, weigh
from staticmoe.reference.schedule import tile_schedule

__all__ = [
    "ACTIVATIONS",
    "SCORE_FUNCTIONS",
    "RoutingPlan",
    "activate",
    "activation_backward",
    "adamw_update",
    "combine",
    "combine_backward",
    "down",
    "experts_backward",
    "experts_forward",
    "gather_rows",
    "gather_to_tokens",
    "grouped_mm",
    "grouped_weight_grad",
    "is_gated",
    "make_plan",
    "repeats",
    "route",
    "route_backward",
    "tile_schedule",
    "up",
    "weigh",
]
