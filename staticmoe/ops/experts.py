"""Custom op `staticmoe::experts`: the whole expert block; shape contract and autograd rule.

Saved for the backward: x, the pre-activation, the routing weights, the plan and the parameters, nothing else.

Dimensions: T tokens, K top_k, E experts, H hidden, I intermediate, R capacity rows. Where an activation has no
gate, read I for 2I.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from staticmoe import reference
from staticmoe.ops.precision import as_given

_PLAN = "Tensor expert_offsets, Tensor row_assignment, Tensor assignment_row"
_WEIGHTS = "Tensor gate_up, Tensor down, Tensor? gate_up_bias, Tensor? down_bias"


@torch.library.custom_op(
    "staticmoe::experts",
    mutates_args=(),
    schema=f"(Tensor x, Tensor topk_weights, {_WEIGHTS}, {_PLAN}, str activation) -> (Tensor, Tensor)",
)
@as_given
def experts(
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
    """Return the output [T,H] and the pre-activation [R,2I]; see `staticmoe.reference.experts_forward`.

    Shapes:
        x [T,H]; topk_weights [T,K]; gate_up [E,2I,H]; down [E,H,I]; gate_up_bias [E,2I]; down_bias [E,H];
        expert_offsets [E+1]; row_assignment [R]; assignment_row [T,K].
    Graph-safe: yes.
    """
    plan = (expert_offsets, row_assignment, assignment_row)
    rows, row_bias = _as_rows(gate_up, gate_up_bias)
    return reference.experts_forward(x, topk_weights, rows, down, row_bias, down_bias, *plan, activation)


def _as_rows(gate_up: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """[E,2,I,H] and [E,2,I] as [E,2I,H] and [E,2I], the gate first; copies where the halves do not lie so."""
    return (
        gate_up if gate_up.dim() == 3 else gate_up.flatten(1, 2),
        bias if bias is None or bias.dim() == 2 else bias.flatten(1, 2),
    )


@experts.register_kernel("cuda")
@as_given
def _(
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
    # Here, because a machine without a GPU need not have triton.
    from staticmoe.ops.launch import experts as launch
    from staticmoe.ops.launch.operands import serves

    operands = (x, topk_weights, gate_up, down, gate_up_bias, down_bias, expert_offsets, row_assignment, assignment_row)
    run = launch.experts_forward if serves(x.dtype, *down.shape) else experts._init_fn
    return run(*operands, activation)


@experts.register_fake
def _(
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
    return x.new_empty(x.shape), x.new_empty(row_assignment.shape[0], gate_up.shape[1:-1].numel())


@torch.library.custom_op(
    "staticmoe::experts_backward",
    mutates_args=(),
    schema=(
        f"(Tensor grad, Tensor pre, Tensor x, Tensor topk_weights, {_WEIGHTS}, {_PLAN}, str activation, bool[] needs) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)
@as_given
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
) -> tuple[Tensor, ...]:
    """Return the gradients of x, topk_weights, gate_up, down and the biases; an empty tensor where not needed.

    Shapes:
        grad [T,H]; pre [R,2I]; the rest as in the forward; needs [6] in the order of what is returned.
    Graph-safe: yes.
    """
    plan = (expert_offsets, row_assignment, assignment_row)
    rows, _ = _as_rows(gate_up, None)
    grads = reference.experts_backward(grad, x, pre, topk_weights, rows, down, down_bias, *plan, activation, needs)
    inputs = (x, topk_weights, gate_up, down, gate_up_bias, down_bias)
    return _filled(x, [g if g is None or t is None else g.view(t.shape) for g, t in zip(grads, inputs, strict=True)])


def _filled(like: Tensor, grads: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """`grads` with an empty tensor for each that is None."""
    return tuple(like.new_zeros(0) if grad is None else grad for grad in grads)


@experts_backward.register_kernel("cuda")
@as_given
def _(
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
) -> tuple[Tensor, ...]:
    from staticmoe.ops.launch import experts as launch
    from staticmoe.ops.launch.operands import serves

    plan = (expert_offsets, row_assignment, assignment_row)
    operands = (x, topk_weights, gate_up, down, gate_up_bias, down_bias)
    if not serves(x.dtype, *down.shape):
        return experts_backward._init_fn(grad, pre, *operands, *plan, activation, needs)
    return _filled(x, launch.experts_backward(grad, pre, *operands, *plan, activation, needs))


@experts_backward.register_fake
def _(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    def like(need: bool, tensor: Tensor | None) -> Tensor:
        return x.new_empty(0) if not need or tensor is None else tensor.new_empty(tensor.shape)

    return (
        like(needs[0], x),
        like(needs[1], topk_weights),
        like(needs[2], gate_up),
        like(needs[3], down),
        like(needs[4], gate_up_bias),
        like(needs[5], down_bias),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.activation = inputs
    pre = output[1]
    # The pre-activation leaves the op only to be saved; nothing may differentiate through it.
    ctx.mark_non_differentiable(pre)
    ctx.save_for_backward(pre, *tensors)


def _backward(ctx: Any, grad: Tensor, grad_pre: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:6])
    grads = experts_backward(grad, *ctx.saved_tensors, ctx.activation, needs)
    return (*(g if need else None for g, need in zip(grads, needs, strict=True)), None, None, None, None)


experts.register_autograd(_backward, setup_context=_setup_context)
