"""The gradient of the pre-activation and what comes with it, against fp64: every activation, tails, poison, in place.

Letters: E experts, T tokens, K top_k, R rows, H hidden, I intermediate, G halves of the pre-activation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from staticmoe import reference
from staticmoe.kernels.dact import dact, reduce_weight_grad, weight_parts
from staticmoe.kernels.tiles import Tile

TILE = Tile(rows=16, columns=16, depth=16, warps=4, stages=2, group=2)
# Two slices of the accumulator.
WIDE = dataclasses.replace(TILE, columns=64)
COUNTS = [5, 0, 17, 1, 0, 9]
DTYPES = [torch.float32, torch.float16]
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3}
BASE = 11


@dataclasses.dataclass
class Case:
    """Inputs and outputs of one launch; every row that no one may read or write holds NaN.

    Attributes:
        pre: [S,G*I], rows in use from row BASE on.
    """

    problem: object
    grad: Tensor
    down: Tensor
    pre: Tensor
    d_pre: Tensor
    act: Tensor
    parts: Tensor
    activation: str

    def launch(self, *, programs: int = 3, tile: Tile = TILE, d_pre: Tensor | None = None) -> None:
        """Fill the outputs."""
        p = self.problem
        schedule, tile_count = p.schedule(tile.rows, BASE)
        dact(
            self.grad, p.plan.row_assignment, self.down, self.pre, p.weights,
            self.d_pre if d_pre is None else d_pre, self.act, self.parts, schedule, tile_count,
            top_k=p.plan.top_k, activation=self.activation, tile=tile, programs=programs,
        )  # fmt: skip

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """The outputs' rows in use: d_pre, act, parts."""
        used = self.problem.used
        return self.d_pre[BASE : BASE + used], self.act[:used], self.parts[:used]


def make_case(problem, activation: str, dtype: torch.dtype, *, hidden=40, inner=24, tile=TILE) -> Case:
    """Random inputs around which everything is poisoned: also the tokens without a row."""
    used, capacity, width = (
        problem.used,
        problem.plan.capacity_rows,
        inner * (2 if reference.is_gated(activation) else 1),
    )
    tokens, experts = problem.weights.shape[0], problem.plan.num_experts
    grad = problem.draw(tokens, hidden, dtype=dtype)
    grad[(problem.plan.assignment_row < 0).all(1)] = float("nan")
    problem.weights[problem.plan.assignment_row < 0] = float("nan")
    pre = problem.unwritten(BASE + capacity + 5, width, dtype=dtype)
    pre[BASE : BASE + used] = problem.draw(used, width, dtype=dtype, scale=2.0)
    return Case(
        problem=problem, grad=grad, down=problem.draw(experts, hidden, inner, dtype=dtype, scale=0.2), pre=pre,
        d_pre=problem.unwritten(*pre.shape, dtype=dtype), act=problem.unwritten(capacity, inner, dtype=dtype),
        parts=problem.unwritten(capacity, weight_parts(inner, tile), dtype=torch.float32), activation=activation,
    )  # fmt: skip


def expected(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """d_pre, act_weighted [used,*] and the row sums of dA' a [used] in fp64; a as the forward rounded it; and dA'."""
    p = case.problem
    assignment = p.plan.row_assignment[: p.used].long()
    bounds = p.plan.expert_offsets.tolist()
    grad = case.grad[assignment // p.plan.top_k].double()
    d_act = torch.cat(
        [grad[a:b] @ case.down[e].double() for e, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False))]
    )
    pre = case.pre[BASE : BASE + p.used]
    act = reference.activate(pre, case.activation).double()
    weight = p.weights.reshape(-1)[assignment].double()[:, None]
    d_pre = reference.activation_backward(pre.double(), weight * d_act, case.activation)
    return d_pre, weight * act, (d_act * act).sum(1), d_act


def assert_right(case: Case, error: Callable, dtype: torch.dtype) -> None:
    """Outputs as in fp64, and every other row as it was: NaN."""
    used = case.problem.used
    d_pre, act, products, _ = expected(case)
    got_d_pre, got_act, got_parts = case.rows()
    assert error(got_d_pre, d_pre) < TOLERANCE[dtype]
    assert error(got_act, act) < TOLERANCE[dtype]
    assert error(got_parts.double().sum(1), products) < TOLERANCE[dtype]
    assert case.d_pre[:BASE].isnan().all()
    assert case.d_pre[BASE + used :].isnan().all()
    assert case.act[used:].isnan().all()
    assert case.parts[used:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "gpt_oss", "relu2"])
def test_every_activation(problem: Callable, error: Callable, activation: str, dtype: torch.dtype) -> None:
    case = make_case(problem(COUNTS, top_k=3), activation, dtype)
    case.launch()
    assert_right(case, error, dtype)


def test_the_activation_is_the_rounded_one_of_the_forward(problem: Callable) -> None:
    """s * round(a) differs from round(s * a) in a third of all elements; a last bit of a itself may differ in few."""
    case = make_case(problem([64]), "swiglu", torch.float16)
    case.launch()
    weight = case.problem.weights.reshape(-1)[case.problem.plan.row_assignment[:64].long()][:, None]
    act = reference.activate(case.pre[BASE : BASE + 64], "swiglu").float()
    assert (case.act[:64] == (weight * act).half()).float().mean() > 0.98
    products = (expected(case)[3] * act.double()).sum(1)
    assert (case.parts[:64].double().sum(1) - products).abs().median() < 2e-6 * products.abs().max()


@pytest.mark.parametrize(
    ("counts", "top_k", "hidden", "inner", "tile"),
    [
        ([1], 1, 16, 16, TILE),
        ([0, 0, 37], 2, 24, 40, TILE),
        ([16, 16], 1, 32, 32, TILE),
        (COUNTS, 2, 24, 72, WIDE),
        (COUNTS, 4, 16, 56, dataclasses.replace(TILE, columns=128, group=8, flatten=False)),
    ],
)
def test_shapes_that_fill_no_tile(
    problem: Callable, error: Callable, counts: list[int], top_k: int, hidden: int, inner: int, tile: Tile
) -> None:
    case = make_case(problem(counts, top_k=top_k), "swiglu", torch.float32, hidden=hidden, inner=inner, tile=tile)
    case.launch(tile=tile)
    assert_right(case, error, torch.float32)


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_in_place_is_bitwise_out_of_place(problem: Callable, activation: str) -> None:
    case = make_case(problem(COUNTS, top_k=2), activation, torch.float16, inner=72, tile=WIDE)
    case.launch(tile=WIDE)
    outside = [rows.clone() for rows in case.rows()]
    untouched = case.pre.clone()
    case.launch(tile=WIDE, d_pre=case.pre)
    used = case.problem.used
    assert torch.equal(case.pre[BASE : BASE + used], outside[0])
    assert torch.equal(case.act[:used], outside[1])
    assert torch.equal(case.parts[:used], outside[2])
    assert case.pre[:BASE].isnan().all()
    assert case.pre[BASE + used :].isnan().all()
    assert not torch.equal(untouched[BASE : BASE + used], outside[0])


def test_a_poisoned_expert_spoils_no_other(problem: Callable, error: Callable) -> None:
    """The last tile of an expert covers the next one's rows: they are neither read into it nor written by it."""
    case = make_case(problem([5, 3, 9]), "swiglu", torch.float32)
    d_pre, act, products, _ = expected(case)
    case.pre[BASE + 5 : BASE + 8] = float("nan")
    case.grad[case.problem.plan.row_assignment[5:8].long()] = float("nan")
    case.launch()
    kept = [*range(5), *range(8, 17)]
    got_d_pre, got_act, got_parts = case.rows()
    assert error(got_d_pre[kept], d_pre[kept]) < 3e-6
    assert error(got_act[kept], act[kept]) < 3e-6
    assert error(got_parts[kept].double().sum(1), products[kept]) < 3e-6
    assert got_d_pre[5:8].isnan().all()


def test_programs_and_empty_rows_change_no_bit(problem: Callable) -> None:
    def run(spare: int, programs: int) -> list[Tensor]:
        torch.manual_seed(1)
        case = make_case(problem(COUNTS, top_k=2, spare=spare), "swiglu", torch.float32)
        case.launch(programs=programs)
        return [rows.clone() for rows in case.rows()]

    first = run(3, 3)
    for spare, programs in [(3, 1), (3, 1000), (90, 3), (0, 2)]:
        for got, want in zip(run(spare, programs), first, strict=True):
            assert torch.equal(got, want)
    assert not any(rows.isnan().any() for rows in first)


def test_a_doomed_layer_writes_nothing(problem: Callable) -> None:
    case = make_case(problem([0, 0, 0], tokens=4), "swiglu", torch.float32)
    case.launch()
    for out in (case.d_pre, case.act, case.parts):
        assert out.isnan().all()
    d_weights = case.problem.unwritten(4, 1, dtype=torch.float32)
    reduce_weight_grad(case.parts, case.problem.plan.assignment_row, d_weights)
    assert torch.equal(d_weights, torch.zeros_like(d_weights))


@pytest.mark.parametrize("biased", [False, True])
def test_the_routing_weights_gradient_is_zero_where_dropped(problem: Callable, error: Callable, biased: bool) -> None:
    """21 of 39 assignments have a row; with a bias its product with the token's gradient comes on top."""
    p = problem([5, 0, 12, 1, 0, 3], top_k=3, tokens=13)
    case = make_case(p, "swiglu", torch.float32, hidden=136)
    case.launch()
    bias = p.draw(6, 136, dtype=torch.float32)
    d_weights = p.unwritten(13, 3, dtype=torch.float32)
    extra = {"grad": case.grad, "down_bias": bias, "expert_offsets": p.plan.expert_offsets} if biased else {}
    reduce_weight_grad(case.parts, p.plan.assignment_row, d_weights, **extra)

    assignment = p.plan.row_assignment[: p.used].long()
    want = expected(case)[2]
    if biased:
        owner = torch.repeat_interleave(torch.arange(6), p.plan.tokens_per_expert.cpu()).to(p.device)
        want = want + (case.grad[assignment // 3].double() * bias[owner].double()).sum(1)
    full = torch.zeros(39, dtype=torch.float64, device=p.device).scatter(0, assignment, want).view(13, 3)
    assert error(d_weights, full) < 3e-6
    dropped = p.plan.assignment_row < 0
    assert dropped.sum() == 18
    assert torch.equal(d_weights[dropped], torch.zeros(18, device=p.device))
    assert d_weights[~dropped].count_nonzero() == 21


def test_parts_are_summed_in_column_order(problem: Callable) -> None:
    """1e8 + 1 - 1e8 is 0 from left to right in fp32 and 1 in other orders."""
    p = problem([2])
    parts = torch.tensor([[1e8, 1.0, -1e8], [1e8, -1e8, 1.0], [float("nan")] * 3], device=p.device)
    d_weights = p.unwritten(2, 1, dtype=torch.float32)
    reduce_weight_grad(parts, p.plan.assignment_row, d_weights)
    assert d_weights[p.plan.row_assignment[:2].long(), 0].tolist() == [0.0, 1.0]


def test_o22_and_o19_counts_agree_with_the_reference_and_repeat(problem: Callable, error: Callable) -> None:
    """Counts of the field reports, through the whole of `reference.experts_backward`'s d_pre-dependent gradients."""
    for counts in ([5, 0, 17, 1, 0, 41, 0, 0], [40, 0, 3, 0, 0, 0, 0, 21]):
        case = make_case(problem(counts, spare=0), "swiglu", torch.float32, hidden=64, inner=96, tile=WIDE)
        case.launch(tile=WIDE)
        assert_right(case, error, torch.float32)
        first = [rows.clone() for rows in case.rows()]
        case.launch(tile=WIDE)
        for got, want in zip(case.rows(), first, strict=True):
            assert torch.equal(got, want)


def test_what_does_not_belong_together_is_refused(problem: Callable) -> None:
    case = make_case(problem([3]), "swiglu", torch.float32)
    case.parts = case.parts[:, :1]
    with pytest.raises(ValueError, match=r"\[R,2\]"):
        case.launch()
    with pytest.raises(ValueError, match="go together"):
        reduce_weight_grad(
            case.parts, case.problem.plan.assignment_row, case.problem.weights, grad=case.grad, down_bias=None
        )
