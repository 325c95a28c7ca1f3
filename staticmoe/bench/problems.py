"""What is timed and checked: widths, routings, random inputs.

Dimensions: T tokens, K top_k, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from staticmoe import functional
from staticmoe.errors import ConfigError

ROUTINGS = ("natural", "zipf", "one-hot")
# 16 bytes of bf16 or fp16: what TMA and torch's grouped product want of a row.
WIDTH_MULTIPLE = 8


@dataclasses.dataclass(frozen=True)
class Shape:
    """Widths and experts of a block.

    Raises:
        ConfigError: a width that is no multiple of 8, a size below 1, more experts a token than there are.
    """

    hidden: int
    intermediate: int
    experts: int
    top_k: int

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate"):
            width = getattr(self, name)
            if width < 1 or width % WIDTH_MULTIPLE:
                below = width - width % WIDTH_MULTIPLE
                near = [str(value) for value in (below, below + WIDTH_MULTIPLE) if value > 0]
                raise ConfigError(
                    f"{name}: expected a multiple of {WIDTH_MULTIPLE}, 16 bytes of bf16 or fp16; got {width}: "
                    f"take {' or '.join(near)}"
                )
        if self.experts < 1:
            raise ConfigError(f"experts: expected at least 1; got {self.experts}")
        if not 1 <= self.top_k <= self.experts:
            raise ConfigError(
                f"top_k: expected 1 to experts = {self.experts}; got {self.top_k}: lower top_k or raise experts"
            )

    @property
    def weights(self) -> int:
        """Elements of gate, up and down of all experts."""
        return 3 * self.experts * self.hidden * self.intermediate

    def __str__(self) -> str:
        return f"H {self.hidden}, I {self.intermediate}, E {self.experts}, K {self.top_k}"


SHAPES = {
    "mixtral": Shape(4096, 14336, 8, 2),
    "deepseek": Shape(7168, 2048, 64, 8),  # DeepSeek-V3, the 64 experts of one of four ranks
    "olmoe": Shape(2048, 1024, 64, 8),
    "qwen3": Shape(2048, 768, 128, 8),
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """Inputs of a block and the gradient of its output; all but the ids require a gradient.

    Shapes: x, grad [T,H]; ids [T,K] int32; weights [T,K] fp32; gate_up [E,2I,H]; down [E,H,I].
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor
    grad: Tensor

    def inputs(self) -> tuple[Tensor, ...]:
        """What gradients are taken of: x, weights, gate_up, down."""
        return self.x, self.weights, self.gate_up, self.down


def logits_of(routing: str, tokens: int, experts: int, generator: torch.Generator) -> Tensor:
    """Router logits [T,E]: alike for all experts; popularity falling as 1/rank; the same experts for every token."""
    noise = torch.randn(tokens, experts, device=generator.device, generator=generator)
    rank = torch.randperm(experts, device=generator.device, generator=generator) + 1.0
    if routing == "zipf":
        # Gumbel noise: the first choice then falls on an expert in proportion to exp(logit).
        uniform = torch.rand(tokens, experts, device=generator.device, generator=generator)
        return -torch.log(-torch.log(uniform.clamp(1e-7, 1 - 1e-7))) - torch.log(rank)
    return noise if routing == "natural" else noise * 1e-2 - rank


def make_problem(shape: Shape, tokens: int, routing: str, dtype: torch.dtype, device: torch.device) -> Problem:
    """Normal random numbers, scaled so that activations stay near 1."""
    generator = torch.Generator(device).manual_seed(5)

    def draw(*size: int, scale: float = 1.0) -> Tensor:
        made = torch.empty(size, dtype=dtype, device=device)
        return made.normal_(std=scale, generator=generator).requires_grad_()

    logits = logits_of(routing, tokens, shape.experts, generator)
    ids, weights = functional.route(logits, top_k=shape.top_k)
    return Problem(
        x=draw(tokens, shape.hidden),
        ids=ids,
        weights=weights.detach().requires_grad_(),
        gate_up=draw(shape.experts, 2 * shape.intermediate, shape.hidden, scale=shape.hidden**-0.5),
        down=draw(shape.experts, shape.hidden, shape.intermediate, scale=shape.intermediate**-0.5),
        grad=draw(tokens, shape.hidden).detach(),
    )
