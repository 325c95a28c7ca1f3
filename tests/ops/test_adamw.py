"""The AdamW update of one parameter: reference against torch, veto, op, and kernel against reference."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
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
    ops.adamw.adamw_(p, g, m, v, step, row, torch.ones(()))
    assert all(torch.equal(old, new.view(torch.int32)) for old, new in zip(before, (p, m, v), strict=True))
    ops.adamw.adamw_(p, g, m, v, step, row, torch.zeros(()))
    assert not torch.equal(before[0], p.view(torch.int32))
    assert not torch.isfinite(p).all() or kind == "first step"


def test_the_op_is_the_reference_in_place() -> None:
    """Values, memory and version counters; gradient, step and row stay."""
    tensors = operands(17, torch.float32)
    rest = (torch.tensor(2.0), row_of(1e-2, 0.9, 0.99, 1e-8, 0.1), torch.zeros(()))
    want = reference.adamw_update(*tensors, *rest)
    gradient, versions, places = tensors[1].clone(), [t._version for t in tensors], [t.data_ptr() for t in tensors]
    ops.adamw.adamw_(*tensors, *rest)
    p, g, m, v = tensors
    assert all(torch.equal(a, b) for a, b in zip((p, m, v), want, strict=True))
    assert torch.equal(g, gradient) and places == [t.data_ptr() for t in tensors]
    assert [t._version > old for t, old in zip(tensors, versions, strict=True)] == [True, False, True, True]
    torch.library.opcheck(ops.adamw.adamw_, (*tensors, *rest), test_utils=("test_schema", "test_faketensor"))


KERNEL = """
import itertools, json, torch
from staticmoe import reference
from staticmoe.kernels import adamw as kernel

found = []
for size, dtype, veto in itertools.product((1, 3, 1025, 4099), ("float32", "float16", "float64"), (0.0, 1.0)):
    torch.manual_seed(size)
    state = torch.float64 if dtype == "float64" else torch.float32
    # Guard elements behind the end: the kernel must not touch them.
    whole = [torch.randn(size + 8).to(getattr(torch, dtype)) for _ in range(2)]
    whole += [torch.randn(size + 8, dtype=state), torch.rand(size + 8, dtype=state)]
    tensors = [t[:size] for t in whole]
    if veto:
        tensors[1].fill_(float("nan"))
    before = [t.clone() for t in whole]
    rest = (torch.tensor(1.0), torch.tensor([1e-2, 1 - 0.9, 1 - 0.999, 1e-8, 0.1]), torch.tensor(veto))
    want = reference.adamw_update(*tensors, *rest)
    kernel.adamw_(*tensors, *rest)
    got = [tensors[0], tensors[2], tensors[3]]
    worst = max(float((g.double() - w.double()).abs().max() / w.double().abs().max()) for g, w in zip(got, want))
    bitwise = all(torch.equal(g, w) for g, w in zip(got, want))
    guards = all(torch.equal(t[size:], b[size:]) for t, b in zip(whole, before))
    found.append([size, dtype, veto, worst, bitwise, guards])
print(json.dumps(found))
"""
TOLERANCES = {"float64": 1e-14, "float32": 5e-7, "float16": 1e-3}


def test_the_interpreted_kernel_is_the_reference() -> None:
    """Odd sizes, one block and several, each dtype. In a process of its own: triton reads the variable on import."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", KERNEL]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if "oneMKL FATAL ERROR: Cannot load" in run.stderr:
        # Seen once in some thirty starts: torch's MKL could not open its own library, before any code of ours ran.
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert len(found) == 24
    for size, dtype, veto, worst, bitwise, guards in found:
        assert worst < TOLERANCES[dtype] and guards, (size, dtype, veto, worst, guards)
        assert bitwise or not veto, (size, dtype)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the compiled kernel needs a GPU")
@pytest.mark.parametrize("size", [1, 3, 1025, 100_003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_the_compiled_kernel_is_the_reference(
    size: int, dtype: torch.dtype, error: Callable[[Tensor, Tensor], float]
) -> None:
    """On the GPU, captured in a graph, with hyper-parameters, step and veto that change between replays."""
    tensors = operands(size, dtype, "cuda")
    row, step, veto = torch.zeros(5, device="cuda"), torch.ones((), device="cuda"), torch.ones((), device="cuda")
    before = [t.clone() for t in tensors]
    ops.adamw.adamw_(*tensors, step, row, veto)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.adamw.adamw_(*tensors, step, row, veto)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    p, g, m, v = (t.clone() for t in tensors)
    for number in range(1, 6):
        row.copy_(row_of(1e-2 * number, 0.9 / number, 0.999, 1e-8, 0.1 * number))
        step.fill_(number)
        veto.fill_(number == 3)
        want = reference.adamw_update(p, g, m, v, step, row, veto)
        graph.replay()
        for mine, other in zip((tensors[0], tensors[2], tensors[3]), want, strict=True):
            assert error(mine, other) < TOLERANCES[str(dtype).split(".")[1]]
        if number == 3:
            assert all(torch.equal(a, b) for a, b in zip((tensors[0], *tensors[2:]), (p, m, v), strict=True))
        p, g, m, v = (t.clone() for t in copy.copy(tensors))
