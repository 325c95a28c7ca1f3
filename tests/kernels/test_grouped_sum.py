"""The bias gradients against sums in fp64: empty experts, poisoned neighbours, weights, adding, strided outputs.

Letters: E experts, T tokens, K top_k, R rows, W width.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from staticmoe.kernels.grouped_sum import grouped_sum

# One expert takes more than one step of 64 rows.
COUNTS = [5, 0, 67, 1, 0, 9]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def expected(rows: Tensor, offsets: Tensor) -> Tensor:
    """The sum of each expert's rows in fp64."""
    bounds = offsets.tolist()
    return torch.stack([rows[a:b].double().sum(0) for a, b in zip(bounds, bounds[1:], strict=False)])


def poisoned(problem, width: int, dtype: torch.dtype, base: int = 0, spare: int = 4) -> tuple[Tensor, Tensor]:
    """A buffer of NaN with random rows in use from `base` on, and those rows."""
    rows = problem.draw(problem.used, width, dtype=dtype)
    buffer = problem.unwritten(base + problem.used + spare, width, dtype=dtype)
    buffer[base : base + problem.used] = rows
    return buffer, rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("base", [None, 13])
def test_the_sum_of_each_experts_rows(problem: Callable, error: Callable, dtype: torch.dtype, base: int | None) -> None:
    p = problem(COUNTS)
    buffer, rows = poisoned(p, 72, dtype, base or 0)
    out = p.unwritten(len(COUNTS) + 2, 72, dtype=dtype)
    base_row = None if base is None else torch.tensor(base, dtype=torch.int64, device=p.device)
    grouped_sum(buffer, p.plan.expert_offsets, out[1:-1], base_row=base_row)
    assert error(out[1:-1], expected(rows, p.plan.expert_offsets)) < TOLERANCE[dtype]
    assert torch.equal(out[1:-1][[1, 4]], torch.zeros(2, 72, dtype=dtype, device=p.device))
    assert out[[0, -1]].isnan().all()


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_gathered_tokens_count_with_their_weight(
    problem: Callable, error: Callable, top_k: int, weighted: bool
) -> None:
    p = problem(COUNTS, top_k=top_k, tokens=90)
    grad = p.draw(90, 40, dtype=torch.float16)
    grad[(p.plan.assignment_row < 0).all(1)] = float("nan")
    p.weights[p.plan.assignment_row < 0] = float("nan")
    out = p.unwritten(len(COUNTS), 40, dtype=torch.float32)
    grouped_sum(
        grad, p.plan.expert_offsets, out, row_assignment=p.plan.row_assignment,
        topk_weights=p.weights if weighted else None, top_k=top_k,
    )  # fmt: skip
    assignment = p.plan.row_assignment[: p.used].long()
    rows = grad[assignment // top_k].double()
    if weighted:
        rows = rows * p.weights.reshape(-1)[assignment].double()[:, None]
    assert error(out, expected(rows, p.plan.expert_offsets)) < 1e-6


def test_either_gate_order(problem: Callable, error: Callable) -> None:
    p = problem(COUNTS)
    buffer, rows = poisoned(p, 48, torch.float32)
    out = p.unwritten(len(COUNTS), 24, 2, dtype=torch.float32)
    grouped_sum(buffer, p.plan.expert_offsets, out.transpose(1, 2))
    want = expected(rows, p.plan.expert_offsets).view(-1, 2, 24).transpose(1, 2)
    assert error(out, want) < 1e-6


def test_accumulate_adds_and_leaves_empty_experts_alone(problem: Callable, error: Callable) -> None:
    p = problem(COUNTS)
    buffer, rows = poisoned(p, 24, torch.float16)
    held = p.draw(len(COUNTS), 24, dtype=torch.float32)
    held[1] = -0.0
    out = held.clone()
    grouped_sum(buffer, p.plan.expert_offsets, out, accumulate=True)
    assert error(out, held.double() + expected(rows, p.plan.expert_offsets)) < 1e-6
    assert torch.equal(out[[1, 4]].view(torch.int32), held[[1, 4]].view(torch.int32))


def test_a_doomed_layer_gives_zeros(problem: Callable) -> None:
    p = problem([0, 0, 0], tokens=4)
    out = p.unwritten(3, 24, dtype=torch.float32)
    grouped_sum(p.unwritten(3, 24, dtype=torch.float32), p.plan.expert_offsets, out)
    assert torch.equal(out, torch.zeros_like(out))


def test_a_poisoned_expert_spoils_no_other(problem: Callable, error: Callable) -> None:
    p = problem([5, 3, 9])
    buffer, rows = poisoned(p, 24, torch.float32)
    buffer[5:8] = float("nan")
    out = p.unwritten(3, 24, dtype=torch.float32)
    grouped_sum(buffer, p.plan.expert_offsets, out)
    assert out[1].isnan().all()
    assert error(out[[0, 2]], expected(rows, p.plan.expert_offsets)[[0, 2]]) < 1e-6


def test_empty_rows_and_the_base_row_change_no_bit(problem: Callable) -> None:
    p = problem(COUNTS)
    rows = p.draw(p.used, 24, dtype=torch.float32)
    outs = []
    for base, spare in [(0, 0), (0, 70), (9, 3)]:
        buffer = p.unwritten(base + p.used + spare, 24, dtype=torch.float32)
        buffer[base : base + p.used] = rows
        out = p.unwritten(len(COUNTS), 24, dtype=torch.float32)
        grouped_sum(buffer, p.plan.expert_offsets, out, base_row=torch.tensor([base], device=p.device))
        outs.append(out)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    assert not outs[0].isnan().any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk_weights": torch.ones(8, 1)}, "row_assignment is None"),
        ({"base_row": torch.tensor(0), "row_assignment": torch.zeros(8, dtype=torch.int32)}, "no base row"),
        ({"out": torch.zeros(2, 24)}, r"\(2, 24\)"),
    ],
)
def test_what_does_not_belong_together_is_refused(change: dict, message: str) -> None:
    arguments = {
        "rows": torch.zeros(8, 16), "expert_offsets": torch.zeros(3, dtype=torch.int32), "out": torch.zeros(2, 16)
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        grouped_sum(**{**arguments, **change})
