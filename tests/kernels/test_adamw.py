"""The AdamW kernel against its reference: many parameters in a launch, odd sizes, every dtype, veto, captured."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from staticmoe import ops, reference
from staticmoe.kernels import adamw as kernel

TOLERANCES = {torch.float64: 1e-14, torch.float32: 5e-7, torch.float16: 1e-3}
# One parameter of several blocks among small ones; more of them than one launch takes.
SIZES = [1, 4099, 3, 1025, *range(2, 20), 0, 8192]
GUARD = 8


def row_of(device: torch.device, lr: float, beta1: float, beta2: float, eps: float, decay: float) -> Tensor:
    return torch.tensor([lr, 1 - beta1, 1 - beta2, eps, decay], device=device)


def operands(sizes: list[int], dtype: torch.dtype, device: torch.device) -> list[list[Tensor]]:
    """Parameters, gradients and two moments of each size, with guard elements behind every end."""
    state = torch.float64 if dtype == torch.float64 else torch.float32

    def draw(size: int, as_dtype: torch.dtype, positive: bool = False) -> Tensor:
        whole = torch.rand(size + GUARD) if positive else torch.randn(size + GUARD)
        return whole.to(device, as_dtype)[:size]

    made = [[draw(n, dtype), draw(n, dtype), draw(n, state), draw(n, state, positive=True)] for n in sizes]
    return [list(column) for column in zip(*made, strict=True)]


def whole(tensor: Tensor) -> Tensor:
    """The tensor and the guard behind it."""
    return tensor.as_strided((tensor.numel() + GUARD,), (1,))


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("veto", [0.0, 1.0])
def test_every_parameter_is_updated_from_its_own(
    dtype: torch.dtype, veto: float, error: Callable[[Tensor, Tensor], float], kernel_device: torch.device
) -> None:
    """Each has its own step count and hyper-parameters; under a veto not one bit moves, NaN gradients or not."""
    columns = operands(SIZES, dtype, kernel_device)
    if veto:
        for gradient in columns[1]:
            gradient.fill_(float("nan"))
    before = [[whole(t).clone() for t in column] for column in columns]
    steps = [torch.tensor(float(1 + n % 5), device=kernel_device) for n in range(len(SIZES))]
    rows = [row_of(kernel_device, 1e-2 * (1 + n % 3), 0.9, 0.999, 1e-8, 0.1 * (n % 2)) for n in range(len(SIZES))]
    flag = torch.tensor(veto, device=kernel_device)
    want = [
        reference.adamw_update(*(t.clone() for t in one), step, row, flag)
        for *one, step, row in zip(*columns, steps, rows, strict=True)
    ]
    kernel.adamw_(*columns, steps, rows, flag)
    for number, (p, g, m, v) in enumerate(zip(*columns, strict=True)):
        for got, wanted in zip((p, m, v), want[number], strict=True):
            assert error(got, wanted) < TOLERANCES[dtype], SIZES[number]
            assert not veto or torch.equal(got, wanted)
        for place, tensor in enumerate((p, g, m, v)):
            assert torch.equal(whole(tensor)[SIZES[number] :], before[place][number][SIZES[number] :])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a graph needs a GPU")
@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_a_graph_follows_what_changes_on_the_device(
    dtype: torch.dtype, error: Callable[[Tensor, Tensor], float], kernel_device: torch.device
) -> None:
    """Hyper-parameters, step and veto change between replays."""
    columns = operands([3, 100_003, 1025], dtype, kernel_device)
    rows = [torch.zeros(5, device="cuda") for _ in range(3)]
    steps, veto = [torch.ones((), device="cuda") for _ in range(3)], torch.ones((), device="cuda")
    ops.adamw.adamw_(*columns, steps, rows, veto)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.adamw.adamw_(*columns, steps, rows, veto)
    for number in range(1, 6):
        for n, (row, step) in enumerate(zip(rows, steps, strict=True)):
            row.copy_(row_of(kernel_device, 1e-2 * number, 0.9 / number, 0.999, 1e-8, 0.1 * n))
            step.fill_(number + n)
        veto.fill_(number == 3)
        held = [[t.clone() for t in one] for one in zip(*columns, strict=True)]
        graph.replay()
        for one, now, step, row in zip(held, zip(*columns, strict=True), steps, rows, strict=True):
            want = reference.adamw_update(*one, step, row, veto)
            for mine, other in zip((now[0], *now[2:]), want, strict=True):
                assert error(mine, other) < TOLERANCES[dtype]
                assert number != 3 or torch.equal(mine, other)
