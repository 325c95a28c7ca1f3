"""Custom op `staticmoe::experts`: the whole expert block; shape contract and autograd rule.

Saved for the backward: x, the pre-activation, the routing weights, the plan and the parameters, nothing else. Of fp32
parameters beside a narrower x their casts are saved; their gradients come in fp32, never rounded to the dtype of x.

Dimensions: T tokens, K top_k, E experts, H hidden, I intermediate, R capacity rows. Where an activation has no
gate, read I for 2I.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from staticmoe import reference
from staticmoe.ops.precision import as_given

_PLAN = "Tensor expert_offsets, Tensor row_assignment, Tensor assignment_row"
_WEIGHTS = "Tensor gate_up, Tensor down, Tensor? gate_up_bias, Tensor? down_bias"


@dataclasses.dataclass(frozen=True)
class MainGrads:
    """Buffers that take the weight gradients, instead of autograd; the first micro-batch stores, later ones add.

    Autograd sees `seen` in the shape of the weight, zeros without memory, so that a weight that the loss does not
    reach still has no gradient at all, and so that what else depends on the weight is added to `seen`.

    Attributes:
        gate_up, down: of the weights' shapes; fp32, or fp64 for fp64.
        seen: 0-dim zero of the weights' dtype.
        add: add to what the buffers hold; a constant of the capture.
    """

    gate_up: Tensor
    down: Tensor
    seen: Tensor
    add: bool


@torch.library.custom_op(
    "staticmoe::experts",
    mutates_args=(),
    schema=(
        f"(Tensor x, Tensor topk_weights, {_WEIGHTS}, {_PLAN}, str activation, "
        "Tensor? main_gate_up=None, Tensor? main_down=None, Tensor? seen=None, bool add=False) "
        "-> (Tensor, Tensor, Tensor, Tensor)"
    ),
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
    main_gate_up: Tensor | None = None,
    main_down: Tensor | None = None,
    seen: Tensor | None = None,
    add: bool = False,
) -> tuple[Tensor, ...]:
    """Return the output [T,H], the pre-activation [R,2I], and the weights in the dtype of x (empty where they are so).

    See `staticmoe.reference.experts_forward`; the last four are `MainGrads`, for the backward alone.

    Shapes:
        x [T,H]; topk_weights [T,K]; gate_up [E,2I,H]; down [E,H,I]; gate_up_bias [E,2I]; down_bias [E,H];
        expert_offsets [E+1]; row_assignment [R]; assignment_row [T,K].
    Graph-safe: yes.
    """
    plan = (expert_offsets, row_assignment, assignment_row)
    casts = _casts(x, gate_up, down)
    gate_up, down = _of_dtype(x, gate_up, down, casts)
    rows, row_bias = _as_rows(gate_up, gate_up_bias)
    return *reference.experts_forward(x, topk_weights, rows, down, row_bias, down_bias, *plan, activation), *casts


def _casts(x: Tensor, *weights: Tensor) -> list[Tensor]:
    """Each weight in the dtype of x; empty where it has that dtype, because an op may not return what it was given."""
    return [x.new_empty(0) if weight.dtype == x.dtype else weight.to(x.dtype) for weight in weights]


def _of_dtype(x: Tensor, gate_up: Tensor, down: Tensor, casts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Both weights in the dtype of x."""
    return (
        gate_up if gate_up.dtype == x.dtype else casts[0],
        down if down.dtype == x.dtype else casts[1],
    )


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
    main_gate_up: Tensor | None = None,
    main_down: Tensor | None = None,
    seen: Tensor | None = None,
    add: bool = False,
) -> tuple[Tensor, ...]:
    # Here, because a machine without a GPU need not have triton.
    from staticmoe.ops.launch import experts as launch
    from staticmoe.ops.launch.operands import serves

    plan = (expert_offsets, row_assignment, assignment_row)
    if not serves(x.dtype, *down.shape):
        operands = (x, topk_weights, gate_up, down, gate_up_bias, down_bias)
        return experts._init_fn(*operands, *plan, activation)
    casts = _casts(x, gate_up, down)
    weights = (*_of_dtype(x, gate_up, down, casts), gate_up_bias, down_bias)
    return *launch.experts_forward(x, topk_weights, *weights, *plan, activation), *casts


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
    main_gate_up: Tensor | None = None,
    main_down: Tensor | None = None,
    seen: Tensor | None = None,
    add: bool = False,
) -> tuple[Tensor, ...]:
    pre = x.new_empty(row_assignment.shape[0], gate_up.shape[1:-1].numel())
    return x.new_empty(x.shape), pre, *_casts(x, gate_up, down)


# No defaults: torch 2.11 drops trailing ones from a call, and then misses the arguments that it thinks are mutated.
@torch.library.custom_op(
    "staticmoe::experts_backward",
    mutates_args=("d_pre", "main_gate_up", "main_down"),
    schema=(
        f"(Tensor grad, Tensor pre, Tensor x, Tensor topk_weights, {_WEIGHTS}, {_PLAN}, str activation, "
        "bool[] needs, ScalarType? weight_grad_dtype, Tensor(a!)? d_pre, "
        "Tensor(b!)? main_gate_up, Tensor(c!)? main_down, bool add) "
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
    weight_grad_dtype: torch.dtype | None,
    d_pre: Tensor | None,
    main_gate_up: Tensor | None,
    main_down: Tensor | None,
    add: bool,
) -> tuple[Tensor, ...]:
    """Return the gradients of x, topk_weights, gate_up, down and the biases; an empty tensor where not needed.

    With the buffers of `MainGrads` the weight gradients go there (added with `add`) and are not returned; else they
    have `weight_grad_dtype`, by default that of the weights.
    `d_pre` is memory for the gradient of the pre-activation, and may be `pre`: what it holds afterwards is nobody's.

    Shapes:
        grad [T,H]; pre [R,2I]; weights in the dtype of x, the rest as in the forward; needs [6] in the order of what
        is returned.
    Graph-safe: yes.
    """
    plan = (expert_offsets, row_assignment, assignment_row)
    rows, _ = _as_rows(gate_up, None)
    wide = weight_grad_dtype if main_gate_up is None else main_gate_up.dtype
    grads = reference.experts_backward(
        grad, x, pre, topk_weights, rows, down, down_bias, *plan, activation, needs, weight_grad_dtype=wide
    )
    inputs = (x, topk_weights, gate_up, down, gate_up_bias, down_bias)
    shaped = [g if g is None or t is None else g.view(t.shape) for g, t in zip(grads, inputs, strict=True)]
    for number, buffer in ((2, main_gate_up), (3, main_down)):
        gradient = shaped[number]
        if buffer is not None and gradient is not None:
            buffer.add_(gradient) if add else buffer.copy_(gradient)
            shaped[number] = None
    return _filled(x, shaped)


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
    weight_grad_dtype: torch.dtype | None,
    d_pre: Tensor | None,
    main_gate_up: Tensor | None,
    main_down: Tensor | None,
    add: bool,
) -> tuple[Tensor, ...]:
    from staticmoe.ops.launch import experts as launch
    from staticmoe.ops.launch.operands import serves

    plan = (expert_offsets, row_assignment, assignment_row)
    operands = (grad, pre, x, topk_weights, gate_up, down, gate_up_bias, down_bias)
    run = launch.experts_backward if serves(x.dtype, *down.shape) else experts_backward._init_fn
    rest: tuple[Any, ...] = (activation, needs, weight_grad_dtype, d_pre, main_gate_up, main_down, add)
    return _filled(x, run(*operands, *plan, *rest))


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
    weight_grad_dtype: torch.dtype | None,
    d_pre: Tensor | None,
    main_gate_up: Tensor | None,
    main_down: Tensor | None,
    add: bool,
) -> tuple[Tensor, ...]:
    def like(need: bool, tensor: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        return x.new_empty(0) if not need or tensor is None else tensor.new_empty(tensor.shape, dtype=dtype)

    return (
        like(needs[0], x),
        like(needs[1], topk_weights),
        like(needs[2] and main_gate_up is None, gate_up, weight_grad_dtype),
        like(needs[3] and main_down is None, down, weight_grad_dtype),
        like(needs[4], gate_up_bias),
        like(needs[5], down_bias),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, topk_weights, gate_up, down, *rest, ctx.activation, main_gate_up, main_down, ctx.seen, add = inputs
    ctx.main = (main_gate_up, main_down, add)
    _, pre, *casts = output
    ctx.weight_dtype, ctx.weight_shapes = gate_up.dtype, (gate_up.shape, down.shape)
    # They leave the op only to be saved; nothing may differentiate through them.
    ctx.mark_non_differentiable(pre, *casts)
    # Else autograd fills a gradient of zeros for each of them.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(pre, x, topk_weights, *_of_dtype(x, gate_up, down, casts), *rest)


def _backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 14
    pre, *tensors = ctx.saved_tensors
    # Its gradient may take its place, unless another backward through this graph may follow, or this one is traced.
    last = not torch._C._autograd._get_current_graph_task_keep_graph()
    d_pre = pre if last and type(pre) is Tensor else None
    needs = list(ctx.needs_input_grad[:6])
    grads = list(experts_backward(grad, pre, *tensors, ctx.activation, needs, ctx.weight_dtype, d_pre, *ctx.main))
    if ctx.seen is not None:
        grads[2:4] = [ctx.seen.expand(shape) for shape in ctx.weight_shapes]
    # Nothing for the plan, the activation and `MainGrads`.
    return (*(g if need else None for g, need in zip(grads, needs, strict=True)), *[None] * 8)


experts.register_autograd(_backward, setup_context=_setup_context)
