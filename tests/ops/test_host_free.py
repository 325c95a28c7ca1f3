"""What the ops dispatch: torch ops on tensors alone, none of which asks the device for a value or a size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from staticmoe import ops

OPS = [
    ops.routing.route,
    ops.routing.route_backward,
    ops.weigh.weigh,
    ops.plan.make_plan,
    ops.experts.experts,
    ops.experts.experts_backward,
    ops.grouped_linear.grouped_linear,
    ops.grouped_linear.grouped_linear_backward,
    ops.combine.combine,
    ops.combine.combine_backward,
]


def arguments(case: Callable[..., Any], dtype: torch.dtype, hidden: int) -> dict[str, tuple[Any, ...]]:
    c = case(9, 2, 4, hidden, 8, device=torch.device("cpu"), dtype=dtype, rows=11, bias=True, requires_grad=False)
    plan = (c.plan.expert_offsets, c.plan.row_assignment, c.plan.assignment_row)
    logits, mask = torch.randn(9, 4), torch.rand(9) > 0.3
    pre = torch.randn(11, 16).to(dtype)
    rows = torch.randn(11, hidden).to(dtype)
    block = (c.x, c.weights, c.gate_up, c.down, c.gate_up_bias, c.down_bias, *plan, "swiglu")
    linear = (c.x, c.gate_up, *plan, True)
    return {
        "route": (logits, torch.randn(4), mask, 2, "softmax", False, 1.0, 2, 1),
        "route_backward": (torch.rand(9, 2), logits, c.ids, "sigmoid", True, 1.0),
        "weigh": (logits, c.ids, mask, "softmax", False, 1.0, 2),
        "make_plan": (c.ids, c.weights, 4, 11, 3),
        "experts": block,
        "experts_backward": (rows[:9], pre, *block, [True] * 6, None, None, None, None, False),
        "grouped_linear": linear,
        "grouped_linear_backward": (pre, *linear, [True, True]),
        "combine": (rows, c.weights, *plan),
        "combine_backward": (rows[:9], rows, c.weights, *plan),
    }


@pytest.mark.parametrize("op", OPS, ids=lambda op: op._name)
@pytest.mark.parametrize(("dtype", "hidden"), [(torch.float32, 16), (torch.float32, 9), (torch.float64, 16)])
def test_no_op_asks_the_host(
    op: Any, dtype: torch.dtype, hidden: int, case: Callable[..., Any], dispatched: type[Any]
) -> None:
    """O10: a hidden wait in the step. Recorded through the op's own Python, as a recording of a step does."""
    args = arguments(case, dtype, hidden)[op._name]
    with dispatched() as mode:
        through = op._init_fn(*args)
    assert mode.names and not mode.asking
    assert not any(name.startswith("staticmoe") for name in mode.names)
    whole = op(*args)
    pairs = zip(through, whole, strict=True) if isinstance(whole, tuple) else [(through, whole)]
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_mode_sees_what_it_is_for(dispatched: type[Any]) -> None:
    """The instrument itself: a boolean mask and a read value are noticed."""
    x = torch.randn(4)
    with dispatched() as mode:
        x[x > 0]
        float(x[0])
    assert mode.asking == {"index.Tensor.bool", "_local_scalar_dense"}
