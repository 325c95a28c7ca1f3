"""What the layer tests share: a layer written as a loop over tokens, forced routing, constant experts, a binding.

Letters: T tokens, K top_k, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from staticmoe.config import CapacityPolicy
from staticmoe.moe import StaticMoE
from staticmoe.runner.participants import StepBinding


@dataclasses.dataclass
class LoopResult:
    """What the plain layer computed: output, counts, both losses (all differentiable but the counts)."""

    y: Tensor
    routed: list[int]
    kept: list[int]
    aux: Tensor
    z: Tensor


def route_one(layer: StaticMoE, logits: Tensor) -> tuple[list[int], Tensor]:
    """Ids and weights of one token."""
    router = layer.router
    scores = logits.softmax(0) if router.score_function == "softmax" else logits.sigmoid()
    key = scores + router.balancing_bias.to(scores.dtype) if router.balancing_bias_rate > 0 else scores
    ids = sorted(range(layer.num_experts), key=lambda e: (-float(key[e].detach()), e))[: layer.top_k]
    weights = torch.stack([scores[e] for e in ids])
    if router.norm_topk_prob:
        weights = weights / weights.sum()
    return ids, weights * router.routed_scaling_factor


def expert_by_hand(layer: StaticMoE, e: int, x: Tensor) -> Tensor:
    experts = layer.experts
    pre = experts.gate_up_proj[e] @ x
    if experts.gate_up_proj_bias is not None:
        pre = pre + experts.gate_up_proj_bias[e]
    gate, up = pre[: layer.intermediate_size], pre[layer.intermediate_size :]
    y = experts.down_proj[e] @ (F.silu(gate) * up)
    return y if experts.down_proj_bias is None else y + experts.down_proj_bias[e]


def layer_by_loop(
    layer: StaticMoE, x: Tensor, mask: Tensor | None = None, *, rows: int | None = None, expert_rows: int | None = None
) -> LoopResult:
    """The whole SwiGLU layer token by token over x [T,H], with the documented drop rule."""
    real = [t for t in range(x.shape[0]) if mask is None or bool(mask[t])]
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    logits = {t: layer.router.weight.to(dtype) @ x[t].to(dtype) for t in real}
    chosen = {t: route_one(layer, logits[t]) for t in real}
    # (weight, assignment, expert), best first: the tail loses.
    queue = sorted(
        (-float(chosen[t][1][k].detach()), t * layer.top_k + k, chosen[t][0][k])
        for t in real
        for k in range(layer.top_k)
    )
    routed, kept = [0] * layer.num_experts, [0] * layer.num_experts
    alive: set[int] = set()
    for _, assignment, e in queue:
        routed[e] += 1
        if (expert_rows is None or kept[e] < expert_rows) and (rows is None or len(alive) < rows):
            kept[e] += 1
            alive.add(assignment)
    y = []
    for t in range(x.shape[0]):
        total = torch.zeros_like(x[t])
        if t in chosen:
            for k, e in enumerate(chosen[t][0]):
                if t * layer.top_k + k in alive:
                    total = total + (chosen[t][1][k] * expert_by_hand(layer, e, x[t]).to(dtype)).to(x.dtype)
            if layer.shared_expert is not None:
                shared = layer.shared_expert
                gate, up = shared.gate_proj.weight @ x[t], shared.up_proj.weight @ x[t]
                total = total + shared.down_proj.weight @ (F.silu(gate) * up)
        y.append(total)
    shares = []
    for t in real:
        scores = logits[t].softmax(0) if layer.router.score_function == "softmax" else logits[t].sigmoid()
        shares.append(scores / scores.sum())
    load = torch.tensor(routed, dtype=dtype, device=x.device) / max(sum(routed), 1)
    aux = layer.num_experts * (load * torch.stack(shares).mean(0)).sum()
    z = torch.stack([torch.logsumexp(logits[t], 0) ** 2 for t in real]).mean()
    return LoopResult(torch.stack(y), routed, kept, aux, z)


def force_routing(layer: StaticMoE, choices: Sequence[Sequence[int]]) -> Tensor:
    """Set the router so that token t takes the experts `choices[t]`, first ahead of second; return x [T,H].

    Row e of the router is 8 at channel e; x[t] is 2 at its first expert's channel, 1 at its second's.
    """
    with torch.no_grad():
        weight = layer.router.weight
        weight.zero_()
        weight[range(layer.num_experts), range(layer.num_experts)] = 8.0
    x = torch.zeros(len(choices), layer.hidden_size, dtype=layer.experts.down_proj.dtype, device=weight.device)
    for t, experts in enumerate(choices):
        for rank, e in enumerate(experts):
            x[t, e] = 2.0 - rank
    return x


def make_constant(layer: StaticMoE, x: Tensor, constants: Sequence[float]) -> Tensor:
    """Set expert e to output constants[e] in every channel; return x with the channel that drives it."""
    channel = layer.num_experts
    with torch.no_grad():
        layer.experts.gate_up_proj.zero_()
        layer.experts.down_proj.zero_()
        layer.experts.gate_up_proj[:, 0, channel] = 16.0
        layer.experts.gate_up_proj[:, layer.intermediate_size, channel] = 1.0
        layer.experts.down_proj[:, :, 0] = torch.tensor(constants, device=x.device)[:, None] / 16
    x = x.clone()
    x[:, channel] = 1.0
    return x


def bind_layer(layer: StaticMoE, **capacity: Any) -> StepBinding:
    """Bind a layer as a runner does: zeroed fields, the capacity in force."""
    device = layer.router.weight.device
    fields = {name: torch.zeros(shape, dtype=torch.int64, device=device) for name, shape in layer.step_fields().items()}
    reasons, doomed = torch.zeros((), dtype=torch.int64, device=device), torch.zeros((), device=device)
    binding = StepBinding(fields, reasons, doomed, CapacityPolicy(**capacity))
    layer.bind_step(binding)
    return binding


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest difference over the largest wanted value; NaN anywhere is infinitely wrong."""
    got, want = got.detach().double(), want.detach().double()
    assert got.shape == want.shape, (got.shape, want.shape)
    scale = want.abs().max().clamp(min=1e-30)
    return float(torch.nan_to_num((got - want).abs().max() / scale, nan=float("inf")))


@pytest.fixture
def loop() -> Callable[..., LoopResult]:
    """The layer as a loop over tokens."""
    return layer_by_loop


@pytest.fixture
def force() -> Callable[..., Tensor]:
    """F-ROUTE: routing forced through the input."""
    return force_routing


@pytest.fixture
def constant() -> Callable[..., Tensor]:
    """F-CONST: experts that output a constant."""
    return make_constant


@pytest.fixture
def bind() -> Callable[..., StepBinding]:
    """A binding as a runner lends it."""
    return bind_layer


@pytest.fixture
def error() -> Callable[[Tensor, Tensor], float]:
    """Relative error against the largest wanted value."""
    return relative_error
