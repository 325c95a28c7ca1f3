"""Experts that lie in a `ModuleList`, as one bank of weights: `Experts` and back, with their states.

    from staticmoe.integrations import modulelist

    block.experts = modulelist.from_modulelist(block.experts)           # one parameter [E,2I,H], one [E,H,I]
    layer = modulelist.layer_from(block.experts, block.gate.weight, top_k=2)     # or a whole StaticMoE
    state = modulelist.to_banks(torch.load(path), modulelist.bank_paths(model))  # a checkpoint of before
    modulelist.check(old_block, block, x)                               # outputs and every gradient are the same
    experts = modulelist.to_modulelist(block.experts, like=old_block.experts[0])

A bank that is stacked in every forward costs a copy of all weights; one that is cached goes stale in a graph (SM401 to
SM404 of the audit). Kept as one parameter from the start it does neither.
"""

from __future__ import annotations

from staticmoe.integrations.modulelist.check import BlockCheck, check
from staticmoe.integrations.modulelist.convert import bank_paths, from_modulelist, layer_from, to_modulelist
from staticmoe.integrations.modulelist.names import Names
from staticmoe.integrations.modulelist.optimizer import optimizer_to_banks, optimizer_to_experts
from staticmoe.integrations.modulelist.states import to_banks, to_experts

__all__ = [
    "BlockCheck", "Names", "bank_paths", "check", "from_modulelist", "layer_from", "optimizer_to_banks",
    "optimizer_to_experts", "to_banks", "to_experts", "to_modulelist",
]  # fmt: skip
