"""The weight gradients against sums in fp64: odd counts, empty experts, poisoned neighbours, adding, both gate orders.

Letters: E experts, T tokens, K top_k, R rows, A and B widths, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from staticmoe.kernels.tiles import Tile
from staticmoe.kernels.weight_grad import weight_grad

TILE = Tile(rows=16, columns=32, depth=16, warps=4, stages=2, group=2)
DTYPES = [torch.float32, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}
COUNTS = [5, 0, 17, 1, 0, 23, 0, 0]


def expected(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """Sum over each expert's rows of left (x) right in fp64; only rows of segments are looked at."""
    bounds = offsets.tolist()
    return torch.stack([left[a:b].double().t() @ right[a:b].double() for a, b in zip(bounds, bounds[1:], strict=False)])


def placed(rows: Tensor, used: int, before: int, after: int) -> Tensor:
    """The first `used` rows in a buffer that holds NaN everywhere else."""
    buffer = torch.full((before + used + after, rows.shape[1]), float("nan"), dtype=rows.dtype, device=rows.device)
    buffer[before : before + used] = rows[:used]
    return buffer


def down_gradient(
    problem, grad: Tensor, act: Tensor, out: Tensor, *, accumulate=False, programs=3, tile=TILE
) -> Tensor:
    """The launch for the down projection: gathered gradients on the left."""
    weight_grad(
        grad, act, problem.plan.expert_offsets, problem.plan.row_assignment, out,
        gather="left", saved=None, base_row=None, top_k=problem.plan.top_k, accumulate=accumulate, tile=tile,
        programs=programs,
    )  # fmt: skip
    return out


def tokens_of(problem, tokens: Tensor) -> Tensor:
    """The token of each row in use."""
    return tokens[problem.plan.row_assignment[: problem.used].long() // problem.plan.top_k]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("counts", "top_k"), [(COUNTS, 3), ([0, 0, 37], 2), ([1], 1), ([16, 16], 1)])
def test_the_down_gradient_is_the_sum_over_the_experts_rows(
    problem: Callable, error: Callable, dtype: torch.dtype, counts: list[int], top_k: int
) -> None:
    p = problem(counts, top_k=top_k)
    grad = p.draw(p.weights.shape[0], 24, dtype=dtype)
    act = placed(p.draw(p.used, 40, dtype=dtype), p.used, 0, 3)
    out = down_gradient(p, grad, act, p.unwritten(len(counts), 24, 40, dtype=dtype))
    assert error(out, expected(tokens_of(p, grad), act, p.plan.expert_offsets)) < TOLERANCE[dtype]
    for e, count in enumerate(counts):
        assert (count > 0) == bool(out[e].count_nonzero())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_up_gradient_reads_saved_rows_at_the_base_row_and_writes_either_gate_order(
    problem: Callable, error: Callable, dtype: torch.dtype, interleaved: bool
) -> None:
    hidden, intermediate = 40, 24
    p = problem(COUNTS, top_k=2)
    d_pre = p.draw(p.used, 2 * intermediate, dtype=dtype)
    x = p.draw(p.weights.shape[0], hidden, dtype=dtype)
    storage = p.unwritten(len(COUNTS) + 2, 2 * intermediate * hidden, dtype=dtype)
    weight = storage[1:-1]
    out = (
        weight.view(-1, intermediate, 2, hidden).transpose(1, 2)
        if interleaved
        else weight.view(-1, 2, intermediate, hidden)
    )
    base_row = torch.tensor([11], dtype=torch.int64, device=p.device)
    weight_grad(
        placed(d_pre, p.used, 11, 20), x, p.plan.expert_offsets, p.plan.row_assignment, out,
        gather="right", saved="left", base_row=base_row, top_k=2, accumulate=False, tile=TILE, programs=3,
    )  # fmt: skip
    want = expected(d_pre, tokens_of(p, x), p.plan.expert_offsets)
    assert error(out, want.view(-1, 2, intermediate, hidden)) < TOLERANCE[dtype]
    assert storage[0].isnan().all()
    assert storage[-1].isnan().all()


@pytest.mark.parametrize("saved", [None, "left", "right"])
def test_two_packed_operands_need_no_gather(problem: Callable, error: Callable, saved: str | None) -> None:
    p = problem(COUNTS)
    left, right = p.draw(p.used, 16, dtype=torch.float32), p.draw(p.used, 32, dtype=torch.float32)
    out = p.unwritten(len(COUNTS), 16, 32, dtype=torch.float32)
    weight_grad(
        placed(left, p.used, 7 if saved == "left" else 0, 3),
        placed(right, p.used, 7 if saved == "right" else 0, 3),
        p.plan.expert_offsets, p.plan.row_assignment, out, gather=None, saved=saved,
        base_row=None if saved is None else torch.tensor(7, device=p.device), top_k=1, accumulate=False, tile=TILE,
        programs=3,
    )  # fmt: skip
    assert error(out, expected(left, right, p.plan.expert_offsets)) < 2e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_poisoned_expert_spoils_no_other(problem: Callable, error: Callable, dtype: torch.dtype) -> None:
    """A tile's last step reaches into the next expert's rows, of both operands: they must add nothing, NaN or not."""
    p = problem([5, 3, 9])
    grad, act = p.draw(17, 16, dtype=dtype), placed(p.draw(17, 32, dtype=dtype), 17, 0, 3)
    want = expected(tokens_of(p, grad), act, p.plan.expert_offsets)
    act[5:8] = float("nan")
    grad[p.plan.row_assignment[5:8].long()] = float("nan")
    out = down_gradient(p, grad, act, p.unwritten(3, 16, 32, dtype=dtype))
    assert out[1].isnan().all()
    assert error(out[[0, 2]], want[[0, 2]]) < TOLERANCE[dtype]


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_doomed_layer_gives_zeros_and_adds_nothing(problem: Callable, accumulate: bool) -> None:
    p = problem([0, 0, 0], tokens=4)
    held = torch.full((3, 16, 32), -0.0, device=p.device)
    out = held.clone() if accumulate else p.unwritten(3, 16, 32, dtype=torch.float32)
    grad = p.unwritten(4, 16, dtype=torch.float32)
    down_gradient(p, grad, p.unwritten(3, 32, dtype=torch.float32), out, accumulate=accumulate)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(out.signbit(), held.signbit() if accumulate else torch.zeros_like(out, dtype=torch.bool))


@pytest.mark.parametrize(("dtype", "out_dtype"), [(torch.float16, torch.float32), (torch.float16, torch.float16)])
def test_accumulate_adds_in_fp32_to_what_is_there(
    problem: Callable, error: Callable, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    p = problem(COUNTS, top_k=2)
    grad = p.draw(p.weights.shape[0], 24, dtype=dtype)
    act = placed(p.draw(p.used, 40, dtype=dtype), p.used, 0, 3)
    held = p.draw(len(COUNTS), 24, 40, dtype=out_dtype)
    out = down_gradient(p, grad, act, held.clone(), accumulate=True)
    product = expected(tokens_of(p, grad), act, p.plan.expert_offsets)
    assert error(out, held.double() + product) < (1e-6 if out_dtype == torch.float32 else 5e-4)
    empty = [e for e, count in enumerate(COUNTS) if count == 0]
    assert torch.equal(out[empty], held[empty])
    twice = down_gradient(p, grad, act, out.clone(), accumulate=True)
    assert error(twice, held.double() + 2 * product) < (1e-6 if out_dtype == torch.float32 else 1e-3)


def test_programs_and_empty_rows_change_no_bit(problem: Callable) -> None:
    def run(spare: int, programs: int) -> Tensor:
        torch.manual_seed(1)
        p = problem(COUNTS, top_k=2, spare=spare)
        grad, act = p.draw(p.weights.shape[0], 48, dtype=torch.float32), p.draw(p.used, 40, dtype=torch.float32)
        out = p.unwritten(len(COUNTS), 48, 40, dtype=torch.float32)
        return down_gradient(p, grad, placed(act, p.used, 0, spare), out, programs=programs)

    first = run(3, 3)
    for spare, programs in [(3, 1), (3, 1000), (100, 3), (0, 7)]:
        assert torch.equal(run(spare, programs), first)


def test_the_group_of_tiles_changes_no_bit(problem: Callable) -> None:
    p = problem([20, 3])
    grad, act = p.draw(23, 88, dtype=torch.float32), placed(p.draw(23, 72, dtype=torch.float32), 23, 0, 3)
    outs = [
        down_gradient(
            p, grad, act, p.unwritten(2, 88, 72, dtype=torch.float32),
            tile=Tile(rows=16, columns=32, depth=16, warps=4, stages=2, group=group),
        )
        for group in (1, 4, 8)
    ]  # fmt: skip
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert not outs[0].isnan().any()


def test_o22_experts_without_tokens_have_a_zero_gradient(problem: Callable, error: Callable) -> None:
    counts = [5, 0, 17, 1, 0, 41, 0, 0]
    tile = Tile(rows=32, columns=64, depth=16, warps=4, stages=2)
    p = problem(counts)
    grad, act = p.draw(64, 64, dtype=torch.float32), placed(p.draw(64, 96, dtype=torch.float32), 64, 0, 3)
    out = down_gradient(p, grad, act, p.unwritten(8, 64, 96, dtype=torch.float32), tile=tile)
    assert torch.equal(out[[1, 4, 6, 7]], torch.zeros(4, 64, 96, device=p.device))
    assert error(out, expected(tokens_of(p, grad), act, p.plan.expert_offsets)) < 2e-6


def test_o19_three_calls_among_poison_are_equal(problem: Callable, error: Callable) -> None:
    tile = Tile(rows=32, columns=64, depth=16, warps=4, stages=2)
    p = problem([40, 0, 3, 0, 0, 0, 0, 21], spare=0)
    grad, act = p.draw(64, 64, dtype=torch.float32), p.draw(64, 128, dtype=torch.float32)
    outs = [
        down_gradient(p, grad, placed(act, 64, 0, after), p.unwritten(8, 64, 128, dtype=torch.float32), tile=tile)
        for after in (0, 17, 64)
    ]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    assert error(outs[0], expected(tokens_of(p, grad), act, p.plan.expert_offsets)) < 2e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"saved": "left", "base_row": torch.tensor(0)}, "no base row"),
        ({"saved": "right"}, "go together"),
        ({"right": torch.zeros(8, 24)}, r"\(8, 24\)"),
    ],
)
def test_what_does_not_belong_together_is_refused(change: dict, message: str) -> None:
    arguments = {
        "left": torch.zeros(8, 16), "right": torch.zeros(8, 32),
        "expert_offsets": torch.zeros(3, dtype=torch.int32), "row_assignment": torch.zeros(8, dtype=torch.int32),
        "out": torch.zeros(2, 16, 32), "gather": "left", "saved": None, "base_row": None, "top_k": 1,
        "accumulate": False, "tile": TILE, "programs": 1,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        weight_grad(**{**arguments, **change})
