"""Weights that a peer wants in an order of its own: converted once, before anything is timed.

Dimensions: E experts, I intermediate, H hidden.
"""

from __future__ import annotations

import abc
from typing import Any

import torch
from torch import Tensor

from staticmoe.bench.problems import Problem


class _Stand(torch.autograd.Function):
    """The converted tensor in place of ours. Its gradient is ours, in the order of the converted one: no work."""

    @staticmethod
    def forward(ctx: Any, ours: Tensor, converted: Tensor) -> Tensor:
        return converted.view_as(converted)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


class Converted(abc.ABC):
    """A block with gate and up [E,2I,H] interleaved: g0, u0, g1, u1, ... The gradient of gate_up has that order too."""

    def __init__(self, p: Problem) -> None:
        self.gate_up = interleaved(p.gate_up.detach())

    @abc.abstractmethod
    def __call__(self, p: Problem) -> Tensor:
        """From tokens to the output."""

    def standing_for(self, gate_up: Tensor) -> Tensor:
        """The converted weights, with a gradient wherever `gate_up` has one."""
        stood: Tensor = _Stand.apply(gate_up, self.gate_up)
        return stood


def interleaved(gate_up: Tensor) -> Tensor:
    """[gate; up] to rows that alternate."""
    experts, both, hidden = gate_up.shape
    return gate_up.view(experts, 2, both // 2, hidden).transpose(1, 2).reshape(experts, both, hidden)


def concatenated(gate_up: Tensor) -> Tensor:
    """Rows that alternate to [gate; up]."""
    experts, both, hidden = gate_up.shape
    return gate_up.view(experts, both // 2, 2, hidden).transpose(1, 2).reshape(experts, both, hidden)
