"""The AdamW update of one parameter: reference against torch, veto, op, and kernel against reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from staticmoe import ops, reference

STATE = {torch.float64: torch.float64, torch.float32: torch.float32, torch.float16: torch.float32}


def row_of(lr: float, beta1: float, beta2: float, eps: float, decay: float, **where: Any) -> Tensor:
    return torch.tensor([lr, 1 - beta1, 1 - beta2, eps, decay], **where)


def operands(size: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """Parameter, gradient and two moments of a run that is under way."""
    p, g, m = (torch.randn(size, dtype=torch.float64) for _ in range(3))
    v = torch.rand(size, dtype=torch.float64)
    return [t.to(device, d) for t, d in zip((p, g, m, v), (dtype, dtype, STATE[dtype], STATE[dtype]), strict=True)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 2e-6)])
@pytest.mark.parametrize("options", [(0.9, 0.999, 1e-8, 0.1), (0.0, 0.5, 1e-3, 0.0), (0.5, 0.0, 0.1, 1.0)])
def test_twenty_steps_are_torchs(
    dtype: torch.dtype, tolerance: float, options: tuple[float, ...], error: Callable[[Tensor, Tensor], float]
) -> None:
    """Parameter and both moments, with a rate that moves."""
    beta1, beta2, eps, decay = options
    p = torch.randn(7, 5, dtype=dtype)
    theirs = torch.nn.Parameter(p.clone())
    plain = torch.optim.AdamW([theirs], betas=(beta1, beta2), eps=eps, weight_decay=decay)
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for number in range(1, 21):
        lr = 0.1 / number
        theirs.grad = torch.randn_like(p) * 10.0 ** (number % 3)
        plain.param_groups[0]["lr"] = lr
        plain.step()
        row = row_of(lr, beta1, beta2, eps, decay, dtype=dtype)
        p, m, v = reference.adamw_update(p, theirs.grad, m, v, torch.tensor(float(number)), row, torch.zeros(()))
        state = plain.state[theirs]
        for mine, other in ((p, theirs.detach()), (m, state["exp_avg"]), (v, state["exp_avg_sq"])):
            assert error(mine, other) < tolerance


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_rounds_once(dtype: torch.dtype) -> None:
    """The arithmetic is the one of fp32; the parameter is rounded at the end, the moments are not."""
    p, g = torch.randn(99).to(dtype), torch.randn(99).to(dtype)
    m, v = torch.randn(99), torch.rand(99)
    rest = (m, v, torch.tensor(3.0), row_of(1e-2, 0.9, 0.99, 1e-8, 0.1), torch.zeros(()))
    low, wide = reference.adamw_update(p, g, *rest), reference.adamw_update(p.float(), g.float(), *rest)
    assert torch.equal(low[0], wide[0].to(dtype)) and low[0].dtype == dtype
    assert torch.equal(low[1], wide[1]) and torch.equal(low[2], wide[2])


def poisoned(kind: str) -> tuple[list[Tensor], Tensor, Tensor]:
    """Operands, step and row of an update whose outcome is not finite."""
    tensors, step, row = operands(33, torch.float32), torch.tensor(5.0), row_of(1e-2, 0.9, 0.99, 1e-8, 0.1)
    if kind == "first step":
        step = torch.tensor(0.0)
    elif kind == "rate":
        row[0] = float("nan")
    elif kind == "overflow":
        tensors[1].fill_(1e30)
    else:
        tensors[1].fill_(float(kind))
    return tensors, step, row


@pytest.mark.parametrize("kind", ["nan", "inf", "-inf", "overflow", "rate", "first step"])
def test_a_veto_leaves_not_one_bit(kind: str) -> None:
    """Whatever the update would have been; also the NaN that a parameter already holds keeps its bits."""
    (p, g, m, v), step, row = poisoned(kind)
    p[0] = float("nan")
    p.view(torch.int32)[0] += 5
    before = [t.clone().view(torch.int32) for t in (p, m, v)]
    ops.adamw.adamw_([p], [g], [m], [v], [step], [row], torch.ones(()))
    assert all(torch.equal(old, new.view(torch.int32)) for old, new in zip(before, (p, m, v), strict=True))
    ops.adamw.adamw_([p], [g], [m], [v], [step], [row], torch.zeros(()))
    assert not torch.equal(before[0], p.view(torch.int32))
    assert not torch.isfinite(p).all() or kind == "first step"


def test_the_op_is_the_reference_in_place() -> None:
    """Two parameters at once: values, memory and version counters; gradient, step and row stay."""
    both = [operands(17, torch.float32), operands(5, torch.float32)]
    steps = [torch.tensor(2.0), torch.tensor(7.0)]
    rows = [row_of(1e-2, 0.9, 0.99, 1e-8, 0.1), row_of(1e-3, 0.5, 0.9, 1e-8, 0.0)]
    veto = torch.zeros(())
    want = [reference.adamw_update(*t, s, r, veto) for t, s, r in zip(both, steps, rows, strict=True)]
    columns = [list(column) for column in zip(*both, strict=True)]
    flat = [tensor for tensors in both for tensor in tensors]
    gradients = [tensors[1].clone() for tensors in both]
    versions, places = [t._version for t in flat], [t.data_ptr() for t in flat]
    ops.adamw.adamw_(*columns, steps, rows, veto)
    for (p, g, m, v), wanted, gradient in zip(both, want, gradients, strict=True):
        assert all(torch.equal(a, b) for a, b in zip((p, m, v), wanted, strict=True))
        assert torch.equal(g, gradient)
    assert places == [t.data_ptr() for t in flat]
    assert [t._version > old for t, old in zip(flat, versions, strict=True)] == [True, False, True, True] * 2
    arguments = (*columns, steps, rows, veto)
    torch.library.opcheck(ops.adamw.adamw_, arguments, test_utils=("test_schema", "test_faketensor"))
