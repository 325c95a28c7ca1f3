"""The custom ops, one file each: schema, fake and autograd rule. What they compute is in `staticmoe.reference`.

The Python implementation of every op consists of torch ops on tensors alone, so a recording may go through it.
"""

from __future__ import annotations

from staticmoe.ops import adamw, combine, experts, grouped_linear, plan, routing, weigh

__all__ = ["adamw", "combine", "experts", "grouped_linear", "plan", "routing", "weigh"]
