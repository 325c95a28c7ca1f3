"""Launches of `staticmoe::experts` and its backward.

Dimensions: T tokens, K top_k, E experts, H hidden, I intermediate, G halves of the up projection (2: gate and up),
R capacity rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from staticmoe.kernels.combine import combine, gather_weighted
from staticmoe.kernels.dact import dact, reduce_weight_grad, weight_parts
from staticmoe.kernels.grouped_sum import grouped_sum
from staticmoe.kernels.up import up
from staticmoe.kernels.weight_grad import Side
from staticmoe.ops.launch.operands import aligned, laid_out_like, whole_rows
from staticmoe.ops.launch.products import Products
from staticmoe.reference import is_gated

# From this I on the tokens are copied to rows first. The copy moves 4·R·H bytes; products of R·H·I terms then read rows
# by TMA instead of address by address, and win that back (profiles/results/h200/tile_sweep.json).
_COPY_FROM = 2048
# Programs that copy: enough for the memory's rate, whatever the capacity.
_COPY_PROGRAMS = 4096


def rows_of_tokens(on: Products, tokens: Tensor, intermediate: int) -> tuple[Tensor, int | None]:
    """What the grouped products read: tokens and K, or rows and None. By I alone, so that capacities agree bitwise."""
    if intermediate < _COPY_FROM:
        return tokens, on.top_k
    rows = tokens.new_empty(on.row_assignment.shape[0], tokens.shape[1])
    gather_weighted(tokens, None, on.row_assignment, on.offsets, rows, top_k=on.top_k, programs=_COPY_PROGRAMS)
    return rows, None


def tokens_of_weight_grad_up(
    on: Products, d_pre: Tensor, x: Tensor, out: Tensor, intermediate: int
) -> tuple[Tensor, Side]:
    """The right operand of the up projection's gradient: tokens for the kernel of Hopper, else as `rows_of_tokens`.

    That kernel loses nothing by gathering: 5.97 ms against 5.98 (mixtral, T = 8192, H200), so the copy is saved.
    """
    if on.takes_hopper_weight_grad(d_pre, x, out, gather="right"):
        return x, "right"
    tokens, top_k = rows_of_tokens(on, x, intermediate)
    return tokens, None if top_k is None else "right"


def _halves(tensor: Tensor, halves: int, dims: int) -> Tensor:
    """[E,G*I,...] as [E,G,I,...] of `dims` dimensions, the gate in front; what has them stays as it is."""
    return tensor if tensor.dim() == dims else tensor.unflatten(1, (halves, tensor.shape[1] // halves))


def experts_forward(
    x: Tensor,
    topk_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    expert_offsets: Tensor,
    row_assignment: Tensor,
    assignment_row: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """Return the block's output [T,H] and the pre-activation [R,G*I], its empty rows unwritten.

    Shapes: as `staticmoe.reference.experts_forward`.
    """
    on = Products(x.dtype, expert_offsets, row_assignment, assignment_row)
    rows, (hidden, intermediate) = row_assignment.shape[0], down.shape[1:]
    halves = 2 if is_gated(activation) else 1
    x, gate_up, down = whole_rows(x), aligned(gate_up), aligned(down)
    pre, act = x.new_empty(rows, halves * intermediate), x.new_empty(rows, intermediate)
    tile = on.tile("up")
    tokens, top_k = rows_of_tokens(on, x, intermediate)
    up(
        tokens,
        row_assignment,
        _halves(gate_up, halves, 4),
        None if gate_up_bias is None else _halves(gate_up_bias, halves, 3),
        pre,
        act,
        *on.schedule(tile.rows),
        top_k=top_k,
        activation=activation,
        tile=tile,
        programs=on.programs,
        allow_tf32=on.allow_tf32,
    )
    del tokens
    products = on.product("down", act, down, down_bias, x.new_empty(rows, hidden), transposed=False)
    y = torch.empty_like(x)
    combine(products, topk_weights.float().contiguous(), assignment_row, y)
    return y, pre


@dataclasses.dataclass
class DActivation:
    """What the d-activation kernel leaves for the gradients.

    Attributes:
        d_pre: [R,G*I], gradient of the pre-activation.
        weighted: [R,I], routing weight times activation.
        parts: [R,N] fp32, parts of the routing weights' gradient.
    """

    d_pre: Tensor
    weighted: Tensor
    parts: Tensor


def d_activation(
    on: Products,
    tokens: Tensor,
    top_k: int | None,
    pre: Tensor,
    d_pre: Tensor | None,
    weights: Tensor,
    down: Tensor,
    activation: str,
) -> DActivation:
    """Launch the d-activation kernel: that of Hopper where it serves, else the one with the tile of the table.

    `tokens` and `top_k` are the output's gradient as `rows_of_tokens` has it; `weights` the routing weights, fp32.
    The choice is by the mean load and never by the capacity: variants agree bitwise.
    """
    rows, intermediate = on.row_assignment.shape[0], down.shape[2]
    common: dict[str, Any] = {"top_k": top_k, "activation": activation, "programs": on.programs}
    if on.on_hopper:
        # Imported here: nobody else has a use for Gluon.
        from staticmoe.kernels.hopper import dact as hopper

        given = pre if d_pre is None else d_pre
        if hopper.serves(tokens, down, pre, given, activation=activation, rows_per_expert=on.load):
            made = DActivation(
                d_pre=torch.empty_like(pre) if d_pre is None else d_pre,
                weighted=tokens.new_empty(rows, intermediate),
                parts=weights.new_empty(rows, hopper.weight_parts(intermediate)),
            )
            outputs = made.d_pre, made.weighted, made.parts, *on.schedule(hopper.ROWS)
            hopper.dact(tokens, on.row_assignment, down, pre, weights, *outputs, **common)
            return made
    tile = on.tile("dact")
    if d_pre is None or d_pre.data_ptr() == pre.data_ptr():
        # In place this kernel is slower, on an H200 0.92 ms against 0.54 (qwen3, T = 8192); that of Hopper is not.
        d_pre = torch.empty_like(pre)
    made = DActivation(
        d_pre=d_pre,
        weighted=tokens.new_empty(rows, intermediate),
        parts=weights.new_empty(rows, weight_parts(intermediate, tile)),
    )
    outputs = made.d_pre, made.weighted, made.parts, *on.schedule(tile.rows)
    common.update(tile=tile, allow_tf32=on.allow_tf32)
    dact(tokens, on.row_assignment, down, pre, weights, *outputs, **common)
    return made


def experts_backward(
    grad: Tensor,
    pre: Tensor,
    x: Tensor,
    topk_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    expert_offsets: Tensor,
    row_assignment: Tensor,
    assignment_row: Tensor,
    activation: str,
    needs: Sequence[bool],
    weight_grad_dtype: torch.dtype | None = None,
    d_pre: Tensor | None = None,
    main_gate_up: Tensor | None = None,
    main_down: Tensor | None = None,
    add: bool = False,
) -> tuple[Tensor | None, ...]:
    """Return the gradients in the order of `staticmoe.reference.experts_backward`; None where not needed.

    Those of the weights have `weight_grad_dtype` (default: theirs); with buffers they are stored there, or added, and
    not returned. `d_pre` is memory for the gradient of the pre-activation, and may be `pre`; whether it is used is for
    the kernel to say. Each buffer of rows is let go of before the next is asked for, so that both can be one.
    """
    need_x, need_weights, need_gate_up, need_down, need_gate_up_bias, need_down_bias = needs
    on = Products(x.dtype, expert_offsets, row_assignment, assignment_row)
    halves = 2 if is_gated(activation) else 1
    given_gate_up, given_down = gate_up, down
    grad, x, gate_up, down = whole_rows(grad), whole_rows(x), aligned(gate_up), aligned(down)
    weights = topk_weights.float().contiguous()
    d_x = d_weights = d_gate_up = d_down = d_gate_up_bias = d_down_bias = None
    rows, top_k = rows_of_tokens(on, grad, down.shape[2])
    made = d_activation(on, rows, top_k, pre, d_pre, weights, down, activation)
    if need_weights:
        d_weights = torch.empty_like(weights)
        bias = {} if down_bias is None else {"grad": grad, "down_bias": down_bias, "expert_offsets": on.offsets}
        reduce_weight_grad(made.parts, assignment_row, d_weights, **bias)
        d_weights = d_weights.to(topk_weights.dtype)
    if need_down:
        gather: Side = None if top_k is None else "left"
        out = main_down
        if out is None:
            out = d_down = down.new_empty(down.shape, dtype=weight_grad_dtype)
        on.weight_grad("weight_grad_down", rows, made.weighted, out, gather=gather, add=add)
        if d_down is not None:
            d_down = laid_out_like(given_down, d_down)
    d_pre = made.d_pre
    del made, rows
    if need_x:
        d_x = _token_gradient(on, d_pre, _halves(gate_up, halves, 4), torch.empty_like(x))
    if need_down_bias and down_bias is not None:
        d_down_bias = torch.empty_like(down_bias)
        grouped_sum(grad, on.offsets, d_down_bias, row_assignment=row_assignment, topk_weights=weights, top_k=on.top_k)
    if need_gate_up:
        out = main_gate_up
        if out is None:
            # Laid out as the weight, so that the gradient of a view is one too.
            out = d_gate_up = torch.empty_like(gate_up, dtype=weight_grad_dtype)
        out = _halves(out, halves, 4)
        tokens, gather = tokens_of_weight_grad_up(on, d_pre, x, out, down.shape[2])
        on.weight_grad("weight_grad_up", d_pre, tokens, out, gather=gather, add=add)
        if d_gate_up is not None:
            d_gate_up = laid_out_like(given_gate_up, d_gate_up)
    if need_gate_up_bias and gate_up_bias is not None:
        d_gate_up_bias = torch.empty_like(gate_up_bias)
        grouped_sum(d_pre, on.offsets, d_gate_up_bias)
    return d_x, d_weights, d_gate_up, d_down, d_gate_up_bias, d_down_bias


def _token_gradient(on: Products, d_pre: Tensor, gate_up: Tensor, out: Tensor) -> Tensor:
    """Write the gradient of the tokens [T,H] from that of the pre-activation; returns `out`."""
    d_rows = out.new_empty(on.row_assignment.shape[0], out.shape[1])
    on.product("token_grad", d_pre, gate_up, None, d_rows, transposed=True)
    combine(d_rows, None, on.assignment_row, out)
    return out
