"""What the op tests share: a plain per-assignment block, a plain plan, and one way to compare.

Letters: T tokens, K top_k, E experts, H hidden, I intermediate, R capacity rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from staticmoe import functional
from staticmoe.functional import RoutingPlan


def activation_of_one(pre: Tensor, name: str) -> Tensor:
    """The activation of one pre-activation vector, written with torch's own functions."""
    if name == "relu2":
        return F.relu(pre) ** 2
    half = pre.shape[0] // 2
    gate, up = pre[:half], pre[half:]
    if name == "swiglu":
        return F.silu(gate) * up
    if name == "geglu":
        return F.gelu(gate) * up
    gate, up = gate.clamp(max=7), up.clamp(min=-7, max=7)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def block_by_loop(
    x: Tensor,
    weights: Tensor,
    ids: list[list[int]],
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "swiglu",
) -> Tensor:
    """The expert block as a loop over tokens and slots; an id of -1 adds nothing."""
    out = []
    for t, row in enumerate(ids):
        y = torch.zeros_like(x[t])
        for k, e in enumerate(row):
            if e < 0:
                continue
            pre = gate_up[e] @ x[t]
            if gate_up_bias is not None:
                pre = pre + gate_up_bias[e]
            term = down[e] @ activation_of_one(pre, activation)
            if down_bias is not None:
                term = term + down_bias[e]
            y = y + weights[t, k] * term
        out.append(y)
    return torch.stack(out)


@dataclasses.dataclass
class PlainPlan:
    """What a plan must say, as Python lists."""

    routed: list[int]
    kept: list[int]
    offsets: list[int]
    row_assignment: list[int]
    assignment_row: list[list[int]]

    @classmethod
    def of(cls, plan: RoutingPlan) -> PlainPlan:
        return cls(
            plan.routed_per_expert.tolist(),
            plan.tokens_per_expert.tolist(),
            plan.expert_offsets.tolist(),
            plan.row_assignment.tolist(),
            plan.assignment_row.tolist(),
        )


def plan_by_loop(
    ids: list[list[int]], weights: list[list[float]], num_experts: int, rows: int, expert_capacity: int | None = None
) -> PlainPlan:
    """The plan by Python sorting: lowest weight out first, among equals the highest assignment."""
    top_k = len(ids[0])
    flat_weights = [w if w == w else float("-inf") for row in weights for w in row]
    flat = list(zip([e for row in ids for e in row], flat_weights, strict=True))
    alive = [a for a, (e, _) in enumerate(flat) if 0 <= e < num_experts]
    routed = [sum(flat[a][0] == e for a in alive) for e in range(num_experts)]

    def best(candidates: list[int], limit: int) -> list[int]:
        return sorted(sorted(candidates, key=lambda a: (-flat[a][1], a))[:limit])

    if expert_capacity is not None:
        chosen = [best([a for a in alive if flat[a][0] == e], expert_capacity) for e in range(num_experts)]
        alive = sorted(sum(chosen, []))
    alive = best(alive, rows)
    order = sorted(alive, key=lambda a: (flat[a][0], a))
    kept = [sum(flat[a][0] == e for a in alive) for e in range(num_experts)]
    place = {a: r for r, a in enumerate(order)}
    return PlainPlan(
        routed,
        kept,
        [sum(kept[:e]) for e in range(num_experts + 1)],
        order + [-1] * (rows - len(order)),
        [[place.get(t * top_k + k, -1) for k in range(top_k)] for t in range(len(ids))],
    )


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest difference over the largest wanted value; NaN anywhere is infinitely wrong."""
    assert got.shape == want.shape and got.dtype == want.dtype, (got.shape, want.shape, got.dtype, want.dtype)
    difference = (got.detach().double() - want.detach().double()).abs().max() if got.numel() else torch.zeros(())
    scale = want.detach().double().abs().max().clamp(min=1e-30) if got.numel() else torch.ones(())
    return float(torch.nan_to_num(difference / scale, nan=float("inf")))


@dataclasses.dataclass
class Case:
    """Operands of one block and the plan of their routing."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    activation: str
    plan: RoutingPlan

    def floats(self) -> dict[str, Tensor]:
        """The operands that have gradients, by name."""
        named = {n: getattr(self, n) for n in ("x", "weights", "gate_up", "down", "gate_up_bias", "down_bias")}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def kept_ids(self) -> list[list[int]]:
        """The routing without what the plan dropped."""
        return torch.where(self.plan.assignment_row >= 0, self.ids, -1).tolist()

    def run(self) -> Tensor:
        return functional.experts(
            self.x,
            self.weights,
            self.plan,
            self.gate_up,
            self.down,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
            activation=self.activation,
        )

    def loop(self) -> Tensor:
        """The same by the plain loop."""
        biases = (self.gate_up_bias, self.down_bias)
        return block_by_loop(
            self.x, self.weights, self.kept_ids(), self.gate_up, self.down, *biases, activation=self.activation
        )


def make_case(
    tokens: int,
    top_k: int,
    num_experts: int,
    hidden: int,
    intermediate: int,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float64,
    ids: Tensor | None = None,
    rows: int | None = None,
    expert_capacity: int | None = None,
    activation: str = "swiglu",
    bias: bool = False,
    requires_grad: bool = True,
) -> Case:
    """Random operands; random distinct experts for each token unless ids are given."""
    if ids is None:
        ids = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(tokens)])
    width = intermediate if activation == "relu2" else 2 * intermediate
    weight_dtype = torch.float64 if dtype == torch.float64 else torch.float32

    def draw(*shape: int, as_dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(device, as_dtype).requires_grad_(requires_grad)

    weights = torch.rand(tokens, top_k, dtype=torch.float64).to(device, weight_dtype).requires_grad_(requires_grad)
    ids = ids.to(device, torch.int32)
    plan = functional.make_plan(
        ids, weights, num_experts=num_experts, capacity_rows=rows, expert_capacity=expert_capacity
    )
    return Case(
        x=draw(tokens, hidden),
        ids=ids,
        weights=weights,
        gate_up=draw(num_experts, width, hidden),
        down=draw(num_experts, hidden, intermediate),
        gate_up_bias=draw(num_experts, width) if bias else None,
        down_bias=draw(num_experts, hidden) if bias else None,
        activation=activation,
        plan=plan,
    )


@pytest.fixture
def case() -> Callable[..., Case]:
    """Builds operands: case(T, K, E, H, I, device=..., ...)."""
    return make_case


@pytest.fixture
def plain_plan() -> Callable[..., PlainPlan]:
    """The plan by Python sorting."""
    return plan_by_loop


@pytest.fixture
def plain() -> Callable[[RoutingPlan], PlainPlan]:
    """A plan's tensors as Python lists."""
    return PlainPlan.of


@pytest.fixture
def error() -> Callable[[Tensor, Tensor], float]:
    """Relative error against the largest wanted value."""
    return relative_error
