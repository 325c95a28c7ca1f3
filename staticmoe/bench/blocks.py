"""The blocks that are compared, each from tokens, expert ids and routing weights to the output.

Ours, ours with fp32 weight gradients added to buffers, and the peers: torch's `grouped_mm`, as it is and compiled, and
the packages in `peers`.

Dimensions: T tokens, K top_k, R = T·K rows, H hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from staticmoe import functional
from staticmoe.bench.peers.registry import PEERS, Found, find
from staticmoe.bench.problems import Problem

Block = Callable[[Problem], Tensor]


def staticmoe_block(p: Problem) -> Tensor:
    """Ours."""
    plan = functional.make_plan(p.ids, p.weights, num_experts=p.down.shape[0])
    return functional.experts(p.x, p.weights, plan, p.gate_up, p.down, activation="swiglu")


class _ToRows(torch.autograd.Function):
    """Tokens to rows by gather; back by gather and sum, which needs no atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token_of_row: Tensor, row_of_assignment: Tensor) -> Tensor:
        ctx.save_for_backward(row_of_assignment)
        return x.index_select(0, token_of_row)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (row_of_assignment,) = ctx.saved_tensors
        return sum_of_rows(grads[0], row_of_assignment), None, None


class _ToTokens(torch.autograd.Function):
    """The other way round."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token_of_row: Tensor, row_of_assignment: Tensor) -> Tensor:
        ctx.save_for_backward(token_of_row)
        return sum_of_rows(rows, row_of_assignment)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (token_of_row,) = ctx.saved_tensors
        return grads[0].index_select(0, token_of_row), None, None


def sum_of_rows(rows: Tensor, row_of_assignment: Tensor) -> Tensor:
    """Rows [R,H] to tokens [T,H]."""
    gathered = rows.index_select(0, row_of_assignment.flatten())
    return gathered.view(*row_of_assignment.shape, -1).sum(1)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Rows in the order of their experts.

    Shapes: token_of_row [R]; row_of_assignment [T,K]; weight [R,1], of the rows' dtype; ends [E] int32, inclusive.
    """

    token_of_row: Tensor
    row_of_assignment: Tensor
    weight: Tensor
    ends: Tensor


def lay_out(ids: Tensor, weights: Tensor, experts: int, dtype: torch.dtype) -> Layout:
    """One sort, no host read."""
    tokens, top_k = ids.shape
    sorted_ids, order = torch.sort(ids.flatten(), stable=True)
    ends = torch.searchsorted(sorted_ids, torch.arange(experts, device=order.device), right=True).to(torch.int32)
    place = torch.arange(order.shape[0], device=order.device)
    return Layout(
        token_of_row=order // top_k,
        row_of_assignment=torch.empty_like(order).scatter_(0, order, place).view(tokens, top_k),
        weight=weights.flatten().gather(0, order).to(dtype)[:, None],
        ends=ends,
    )


def swiglu_rows(
    x: Tensor, layout: Layout, gate_up: Tensor, down: Tensor, product: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """The block around a product of rows [R,K] with weights [E,N,K]; weights multiply the narrower rows."""
    hidden, intermediate = down.shape[1:]
    rows = _ToRows.apply(x, layout.token_of_row, layout.row_of_assignment)
    gate, up = product(rows, gate_up).chunk(2, dim=-1)
    act = F.silu(gate) * up
    if intermediate <= hidden:
        act = act * layout.weight
    out = product(act, down)
    if intermediate > hidden:
        out = out * layout.weight
    return _ToTokens.apply(out, layout.token_of_row, layout.row_of_assignment)


def _grouped_mm(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    layout = lay_out(ids, weights, down.shape[0], x.dtype)

    def product(rows: Tensor, weight: Tensor) -> Tensor:
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=layout.ends)

    return swiglu_rows(x, layout, gate_up, down, product)


def grouped_mm_block(p: Problem) -> Tensor:
    """The peer: torch's grouped product, as well as it can be put together without a kernel of one's own.

    One sort, no atomics, no host read; weights multiply the narrower of activation and output rows.
    """
    return _grouped_mm(p.x, p.ids, p.weights, p.gate_up, p.down)


def compiled(backend: str = "inductor") -> Block:
    """The peer by `torch.compile`, one graph or an error; every shape is compiled for itself.

    torch traces its grouped product in bf16 alone: in another dtype the first call raises.
    """
    call = torch.compile(_grouped_mm, fullgraph=True, dynamic=False, backend=backend)

    def block(p: Problem) -> Tensor:
        # The limit is one of torch against endless recompiling; here every shape is asked for.
        with torch._dynamo.config.patch(recompile_limit=64):
            return call(p.x, p.ids, p.weights, p.gate_up, p.down)

    return block


class MainGradBlock:
    """Ours, the weight gradients added in fp32 to what buffers hold, as in every micro-batch but the first.

    The buffers count as parameters, not as memory of the block.
    """

    def __init__(self, p: Problem) -> None:
        gate_up, down = (torch.zeros_like(w, dtype=torch.float32, requires_grad=False) for w in (p.gate_up, p.down))
        self._main = functional.MainGrads(gate_up, down, torch.zeros((), dtype=p.x.dtype, device=p.x.device), add=True)

    def __call__(self, p: Problem) -> Tensor:
        plan = functional.make_plan(p.ids, p.weights, num_experts=p.down.shape[0])
        weights = (p.gate_up, p.down)
        return functional.experts(p.x, p.weights, plan, *weights, activation="swiglu", main_grads=self._main)

    def gradients(self) -> tuple[Tensor, Tensor]:
        """What the buffers hold: of gate_up and of down."""
        return self._main.gate_up, self._main.down


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A row of the result.

    Args:
        name: as it is shown.
        make: gives its block for a problem.
        captured: whether its calls are captured in a CUDA graph.
        package: the package that computes it; "" for ours and torch's.
        devices: where it runs.
    """

    name: str
    make: Callable[[Problem], Block]
    captured: bool = True
    package: str = ""
    devices: tuple[str, ...] = ("cpu", "cuda")


OURS, PEER, MAIN_GRAD = "staticmoe", "grouped_mm", "staticmoe, main_grad"
EAGER, COMPILED = "grouped_mm, eager", "grouped_mm, compiled"
BLOCKS: dict[str, Block] = {OURS: staticmoe_block, PEER: grouped_mm_block}
# Named in the result, so that nobody takes their absence for a comparison.
ABSENT = (*(peer.name for peer in PEERS.values()), "grouped_mm compiled")


def candidates(*, main_grad: bool = False, eager: bool = False, compile_peer: bool = False) -> list[Candidate]:
    """Ours and the peer, captured; on request ours with fp32 buffers, the peer uncaptured, the peer compiled."""
    made = [Candidate(OURS, lambda _: staticmoe_block), Candidate(PEER, lambda _: grouped_mm_block)]
    if eager:
        made.append(Candidate(EAGER, lambda _: grouped_mm_block, captured=False))
    if compile_peer:
        block = compiled()
        made.append(Candidate(COMPILED, lambda _: block))
    if main_grad:
        made.append(Candidate(MAIN_GRAD, MainGradBlock))
    return made


def peer_candidates(found: Found) -> list[Candidate]:
    """Every package that was imported, captured where it can be, and uncaptured."""
    made = []
    for key, adapter in found.adapters.items():
        peer = PEERS[key]
        ways = {peer.name: True, f"{peer.name}, eager": False} if peer.captured else {f"{peer.name}, eager": False}
        made += [
            Candidate(name, adapter.make, captured, package=peer.name, devices=peer.devices)
            for name, captured in ways.items()
        ]
    return made


def absent(compile_peer: bool = True, peers: Mapping[str, str] | None = None) -> dict[str, str]:
    """Peers that are not measured, and why; `peers`: the packages among them, looked for by default."""
    found = dict(find().absent if peers is None else peers)
    return found if compile_peer else {**found, "grouped_mm compiled": "not asked for: --compiled"}
