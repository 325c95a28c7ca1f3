"""What is timed is right first: outputs and gradients against an fp64 loop, and the same bits in every call of ours.

Dimensions: T tokens, K top_k, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from staticmoe.bench.blocks import Block, MainGradBlock, staticmoe_block
from staticmoe.bench.problems import ROUTINGS, Problem, Shape, make_problem
from staticmoe.bench.timing import capture, poison
from staticmoe.errors import SelfCheckError

REPEATED = 40
# Of one result, against fp64: the norm of the difference over the norm. bf16 keeps 8 bits, and what lies between the
# inputs and a weight gradient is rounded four times.
TOLERANCE = {torch.bfloat16: 1.2e-2, torch.float16: 2e-3, torch.float32: 1e-5}
NAMES = ("y", "d_x", "d_topk_weights", "d_gate_up", "d_down")
# Widths that no tile divides.
CHECKED = {"cuda": (509, Shape(520, 392, 16, 4)), "cpu": (61, Shape(40, 24, 8, 2))}
# Of a check on a user's own widths: most tokens, and most of a width. On a CPU the ops are plain PyTorch, to which no
# width is special.
MOST_TOKENS = {"cuda": 1024, "cpu": 61}
MOST_WIDTH = {"cuda": 1 << 30, "cpu": 128}


def forward_backward(block: Block, p: Problem) -> tuple[Tensor, ...]:
    """The output and every gradient, in the order of `NAMES`."""
    y = block(p)
    return y.detach(), *torch.autograd.grad(y, p.inputs(), p.grad)


def results(block: Block, p: Problem) -> tuple[Tensor, ...]:
    """The same, the weights' gradients from where a block keeps them."""
    got = forward_backward(block, p)
    return (*got[:3], *block.gradients()) if isinstance(block, MainGradBlock) else got


def oracle(p: Problem) -> tuple[Tensor, ...]:
    """The same in fp64 by a loop over experts that knows no plan."""
    x, weights, gate_up, down = (t.detach().double().requires_grad_() for t in p.inputs())
    y = torch.zeros_like(x)
    for expert in range(down.shape[0]):
        token, slot = torch.where(p.ids == expert)
        gate, up = (x[token] @ gate_up[expert].T).chunk(2, dim=-1)
        y = y.index_add(0, token, (F.silu(gate) * up) @ down[expert].T * weights[token, slot, None])
    return y.detach(), *torch.autograd.grad(y, (x, weights, gate_up, down), p.grad.double())


def reduced(shape: Shape, tokens: int, device: torch.device) -> tuple[int, Shape]:
    """Tokens and shape of a check on a user's widths: top_k stays, and so do the rows of an expert where they are few.

    Twice as many experts as a token takes leave half of them idle when all tokens agree.
    """
    most = MOST_WIDTH[device.type]
    experts = min(shape.experts, 2 * shape.top_k)
    made = Shape(min(shape.hidden, most), min(shape.intermediate, most), experts, shape.top_k)
    return min(MOST_TOKENS[device.type], -(-tokens * experts // shape.experts)), made


def check(
    make: Callable[[Problem], Block],
    dtype: torch.dtype,
    device: torch.device,
    case: tuple[int, Shape] | None = None,
    *,
    results: Callable[[Block, Problem], tuple[Tensor, ...]] = results,
    tolerance: Mapping[torch.dtype, float] = TOLERANCE,
    words: tuple[str, str] = ("allowed", "nothing timed"),
) -> dict[str, float]:
    """Hold a block against fp64 with every routing; return the largest error of each result.

    `case`: tokens and shape; default: widths that no tile divides. `words`: of an error, for the limit and the outcome.

    Raises:
        SelfCheckError: one is too large, or an expert without tokens has a weight gradient other than zero.
    """
    tokens, shape = case or CHECKED[device.type]
    worst = dict.fromkeys(NAMES, 0.0)
    for routing in ROUTINGS:
        p = make_problem(shape, tokens, routing, dtype, device)
        poison(device)
        got, want = results(make(p), p), oracle(p)
        for name, one, other in zip(NAMES, got, want, strict=True):
            error = float(torch.linalg.vector_norm(one.double() - other) / torch.linalg.vector_norm(other))
            worst[name] = max(worst[name], error)
            if not error <= tolerance[dtype]:
                raise SelfCheckError(
                    f"{shape}, {tokens} tokens, {routing}: {name} is off by {error:.3g} of its norm, {words[0]} "
                    f"{tolerance[dtype]}; {words[1]}"
                )
        idle = [expert for expert in range(shape.experts) if not bool((p.ids == expert).any())]
        if routing == "one-hot" and not idle and shape.top_k < shape.experts:
            raise SelfCheckError("one-hot: every expert has tokens; the check of idle experts would prove nothing")
        if any(bool(gradient[expert].any()) for gradient in got[3:] for expert in idle):
            raise SelfCheckError(
                f"{shape}, {tokens} tokens, {routing}: an expert without tokens has a weight gradient other than "
                f"zero; {words[1]}"
            )
    return worst


def check_repeat(shape: Shape, tokens: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return how many calls of ours gave the same bits: eager, and on a GPU every second one replayed.

    Raises:
        SelfCheckError: at the first that differs.
    """
    p = make_problem(shape, tokens, "zipf", dtype, device)
    first = forward_backward(staticmoe_block, p)
    recorded = capture(lambda: forward_backward(staticmoe_block, p)) if device.type == "cuda" else None
    for number in range(REPEATED):
        poison(device)
        if recorded and number % 2:
            recorded.replay()
            again = recorded.results
        else:
            again = forward_backward(staticmoe_block, p)
        for name, one, other in zip(NAMES, first, again, strict=True):
            if not torch.equal(one, other):
                raise SelfCheckError(f"call {number}: {name} has other bits than the first call; nothing timed")
    return REPEATED
