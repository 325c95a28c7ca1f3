"""The gradient of the pre-activation and what comes with it, against fp64: every activation, tails, poison, in place.

Letters: E experts, T tokens, K top_k, R rows, H hidden, I intermediate, G halves of the pre-activation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from staticmoe import reference
from staticmoe.kernels.dact import dact, reduce_weight_grad, weight_parts
from staticmoe.kernels.hopper import dact as hopper
from staticmoe.kernels.tiles import Tile
from staticmoe.ops.launch.operands import takes_hopper_kernels

TILE = Tile(rows=16, columns=16, depth=16, warps=4, stages=2, group=2)
# Two slices of the accumulator.
WIDE = dataclasses.replace(TILE, columns=64)
COUNTS = [5, 0, 17, 1, 0, 9]
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 5e-3}
BASE = 11


@dataclasses.dataclass(frozen=True)
class Way:
    """A launcher, the rows of its tiles, the columns of its parts for a width, and the dtype of its operands."""

    launch: Callable[..., None]
    tile_rows: int
    weight_parts: Callable[[int], int]
    dtype: torch.dtype

    @property
    def tolerance(self) -> float:
        """Of every output."""
        return TOLERANCE[self.dtype]


def triton_way(tile: Tile, dtype: torch.dtype = torch.float32) -> Way:
    """The Triton launcher."""
    return Way(functools.partial(dact, tile=tile), tile.rows, functools.partial(weight_parts, tile=tile), dtype)


def hopper_ways() -> list[Any]:
    """The parameters of the Hopper launcher; they run on a GPU alone, where Gluon is compiled."""
    on_hopper = torch.cuda.is_available() and takes_hopper_kernels(torch.device("cuda"))
    why = "the Hopper kernel is Gluon, which needs a GPU of compute capability 9.0 and Triton 3.6"
    mark = pytest.mark.skipif(not on_hopper, reason=why)
    return [
        pytest.param(("hopper", dtype), marks=mark, id=f"hopper {name}")
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))
    ]


NARROW = [("triton", torch.float16), *hopper_ways()]


@pytest.fixture(params=[("triton", torch.float32), *NARROW])
def way(request: pytest.FixtureRequest) -> Way:
    """Every launcher that runs here, in every dtype that it is tested with."""
    name, dtype = request.param
    if name == "triton":
        return triton_way(WIDE if dtype == torch.float16 else TILE, dtype)
    return Way(hopper.dact, hopper.ROWS, hopper.weight_parts, dtype)


@dataclasses.dataclass
class Case:
    """Inputs and outputs of one launch; every row that no one may read or write holds NaN.

    Attributes:
        pre: [S,G*I], rows in use from row BASE on.
    """

    way: Way
    problem: object
    grad: Tensor
    down: Tensor
    pre: Tensor
    d_pre: Tensor
    act: Tensor
    parts: Tensor
    activation: str

    def launch(self, *, programs: int = 3, d_pre: Tensor | None = None, gather: bool = True) -> None:
        """Fill the outputs; without `gather` from rows that were copied before."""
        p = self.problem
        grad = self.grad if gather else p.unwritten(p.plan.capacity_rows, self.grad.shape[1], dtype=self.way.dtype)
        if not gather:
            grad[: p.used] = self.grad[p.plan.row_assignment[: p.used].long() // p.plan.top_k]
        self.way.launch(
            grad, p.plan.row_assignment, self.down, self.pre, p.weights,
            self.d_pre if d_pre is None else d_pre, self.act, self.parts, *p.schedule(self.way.tile_rows, BASE),
            top_k=p.plan.top_k if gather else None, activation=self.activation, programs=programs,
        )  # fmt: skip

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """The outputs' rows in use: d_pre, act, parts."""
        used = self.problem.used
        return self.d_pre[BASE : BASE + used], self.act[:used], self.parts[:used]


def make_case(problem, way: Way, activation: str = "swiglu", *, hidden=40, inner=24) -> Case:
    """Random inputs around which everything is poisoned: also the tokens without a row, and what lies beside each."""
    used, capacity, width = (
        problem.used,
        problem.plan.capacity_rows,
        inner * (2 if reference.is_gated(activation) else 1),
    )
    tokens, experts, dtype = problem.weights.shape[0], problem.plan.num_experts, way.dtype
    grad = problem.unwritten(tokens, hidden + 8, dtype=dtype)[:, :hidden]
    grad.copy_(problem.draw(tokens, hidden, dtype=dtype))
    grad[(problem.plan.assignment_row < 0).all(1)] = float("nan")
    problem.weights[problem.plan.assignment_row < 0] = float("nan")
    pre = problem.unwritten(BASE + capacity + 5, width, dtype=dtype)
    pre[BASE : BASE + used] = problem.draw(used, width, dtype=dtype, scale=2.0)
    return Case(
        way=way, problem=problem, grad=grad, down=problem.draw(experts, hidden, inner, dtype=dtype, scale=0.2), pre=pre,
        d_pre=problem.unwritten(*pre.shape, dtype=dtype), act=problem.unwritten(capacity, inner, dtype=dtype),
        parts=problem.unwritten(capacity, way.weight_parts(inner), dtype=torch.float32), activation=activation,
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


def assert_right(case: Case, error: Callable) -> None:
    """Outputs as in fp64, and every other row as it was: NaN."""
    used, tolerance = case.problem.used, case.way.tolerance
    d_pre, act, products, _ = expected(case)
    got_d_pre, got_act, got_parts = case.rows()
    assert error(got_d_pre, d_pre) < tolerance
    assert error(got_act, act) < tolerance
    assert error(got_parts.double().sum(1), products) < tolerance
    assert case.d_pre[:BASE].isnan().all()
    assert case.d_pre[BASE + used :].isnan().all()
    assert case.act[used:].isnan().all()
    assert case.parts[used:].isnan().all()


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "gpt_oss", "relu2"])
def test_every_activation(problem: Callable, error: Callable, way: Way, activation: str) -> None:
    case = make_case(problem(COUNTS, top_k=3), way, activation)
    case.launch()
    assert_right(case, error)


@pytest.mark.parametrize("way", NARROW, indirect=True)
def test_the_activation_is_the_rounded_one_of_the_forward(problem: Callable, way: Way) -> None:
    """s * round(a) differs from round(s * a) in a third of all elements; a last bit of a itself may differ in few."""
    case = make_case(problem([64]), way)
    case.launch()
    weight = case.problem.weights.reshape(-1)[case.problem.plan.row_assignment[:64].long()][:, None]
    act = reference.activate(case.pre[BASE : BASE + 64], "swiglu").float()
    assert (case.act[:64] == (weight * act).to(way.dtype)).float().mean() > 0.98
    products = (expected(case)[3] * act.double()).sum(1)
    assert (case.parts[:64].double().sum(1) - products).abs().median() < 2e-6 * products.abs().max()


@pytest.mark.parametrize(
    ("counts", "top_k", "hidden", "inner"),
    [([1], 1, 16, 16), ([0, 0, 37], 2, 24, 40), ([16, 16], 1, 32, 32), (COUNTS, 2, 24, 72)],
)
def test_shapes_that_fill_no_tile(
    problem: Callable, error: Callable, way: Way, counts: list[int], top_k: int, hidden: int, inner: int
) -> None:
    case = make_case(problem(counts, top_k=top_k), way, hidden=hidden, inner=inner)
    case.launch()
    assert_right(case, error)


@pytest.mark.parametrize("tile", [WIDE, dataclasses.replace(TILE, columns=128, group=8, flatten=False)])
def test_tiles_that_fill_no_shape(problem: Callable, error: Callable, tile: Tile) -> None:
    case = make_case(problem(COUNTS, top_k=4), triton_way(tile), hidden=16, inner=56)
    case.launch()
    assert_right(case, error)


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("way", NARROW, indirect=True)
def test_in_place_is_bitwise_out_of_place(problem: Callable, way: Way, activation: str, gather: bool) -> None:
    """And so it is with rows that were copied before."""
    case = make_case(problem(COUNTS, top_k=2), way, activation, inner=72)
    case.launch()
    outside = [rows.clone() for rows in case.rows()]
    untouched = case.pre.clone()
    case.launch(d_pre=case.pre, gather=gather)
    used = case.problem.used
    assert torch.equal(case.pre[BASE : BASE + used], outside[0])
    assert torch.equal(case.act[:used], outside[1])
    assert torch.equal(case.parts[:used], outside[2])
    assert case.pre[:BASE].isnan().all()
    assert case.pre[BASE + used :].isnan().all()
    assert not torch.equal(untouched[BASE : BASE + used], outside[0])


def test_a_poisoned_expert_spoils_no_other(problem: Callable, error: Callable, way: Way) -> None:
    """The last tile of an expert covers the next one's rows: they are neither read into it nor written by it."""
    case = make_case(problem([5, 3, 9]), way)
    d_pre, act, products, _ = expected(case)
    case.pre[BASE + 5 : BASE + 8] = float("nan")
    case.grad[case.problem.plan.row_assignment[5:8].long()] = float("nan")
    case.launch()
    kept = [*range(5), *range(8, 17)]
    got_d_pre, got_act, got_parts = case.rows()
    assert error(got_d_pre[kept], d_pre[kept]) < way.tolerance
    assert error(got_act[kept], act[kept]) < way.tolerance
    assert error(got_parts[kept].double().sum(1), products[kept]) < way.tolerance
    assert got_d_pre[5:8].isnan().all()


def test_programs_and_empty_rows_change_no_bit(problem: Callable, way: Way) -> None:
    def run(spare: int, programs: int) -> list[Tensor]:
        torch.manual_seed(1)
        case = make_case(problem(COUNTS, top_k=2, spare=spare), way)
        case.launch(programs=programs)
        return [rows.clone() for rows in case.rows()]

    first = run(3, 3)
    for spare, programs in [(3, 1), (3, 1000), (90, 3), (0, 2)]:
        for got, want in zip(run(spare, programs), first, strict=True):
            assert torch.equal(got, want)
    assert not any(rows.isnan().any() for rows in first)


def test_a_doomed_layer_writes_nothing(problem: Callable, way: Way) -> None:
    case = make_case(problem([0, 0, 0], tokens=4), way)
    case.launch()
    for out in (case.d_pre, case.act, case.parts):
        assert out.isnan().all()
    d_weights = case.problem.unwritten(4, 1, dtype=torch.float32)
    reduce_weight_grad(case.parts, case.problem.plan.assignment_row, d_weights)
    assert torch.equal(d_weights, torch.zeros_like(d_weights))


@pytest.mark.parametrize("biased", [False, True])
def test_the_routing_weights_gradient_is_zero_where_dropped(
    problem: Callable, error: Callable, way: Way, biased: bool
) -> None:
    """21 of 39 assignments have a row; with a bias its product with the token's gradient comes on top."""
    p = problem([5, 0, 12, 1, 0, 3], top_k=3, tokens=13)
    case = make_case(p, way, hidden=136)
    case.launch()
    bias = p.draw(6, 136, dtype=way.dtype)
    d_weights = p.unwritten(13, 3, dtype=torch.float32)
    extra = {"grad": case.grad, "down_bias": bias, "expert_offsets": p.plan.expert_offsets} if biased else {}
    reduce_weight_grad(case.parts, p.plan.assignment_row, d_weights, **extra)

    assignment = p.plan.row_assignment[: p.used].long()
    want = expected(case)[2]
    if biased:
        owner = torch.repeat_interleave(torch.arange(6), p.plan.tokens_per_expert.cpu()).to(p.device)
        want = want + (case.grad[assignment // 3].double() * bias[owner].double()).sum(1)
    full = torch.zeros(39, dtype=torch.float64, device=p.device).scatter(0, assignment, want).view(13, 3)
    assert error(d_weights, full) < way.tolerance
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


def test_o22_and_o19_counts_agree_with_the_reference_and_repeat(problem: Callable, error: Callable, way: Way) -> None:
    """Counts of the field reports, through the whole of `reference.experts_backward`'s d_pre-dependent gradients."""
    for counts in ([5, 0, 17, 1, 0, 41, 0, 0], [40, 0, 3, 0, 0, 0, 0, 21]):
        case = make_case(problem(counts, spare=0), way, hidden=64, inner=96)
        case.launch()
        assert_right(case, error)
        first = [rows.clone() for rows in case.rows()]
        case.launch()
        for got, want in zip(case.rows(), first, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("way", hopper_ways(), indirect=True)
def test_the_hopper_kernel_hands_its_buffers_from_tile_to_tile(
    problem: Callable, error: Callable, way: Way, gather: bool
) -> None:
    """Many tiles a program, an odd number of steps over H, every number of rows; in place, and by any grid."""
    case = make_case(problem([1, 127, 0, 129, 300, 128], top_k=4), way, hidden=520, inner=392)
    pre = case.pre.clone()
    found = []
    for programs in (1, 2, 7, 1000):
        case.pre.copy_(pre)
        case.launch(programs=programs, gather=gather)
        assert_right(case, error)
        found.append([rows.clone() for rows in case.rows()])
        case.launch(programs=programs, gather=gather, d_pre=case.pre)
        used = case.problem.used
        found.append([case.pre[BASE : BASE + used].clone(), *(rows.clone() for rows in case.rows()[1:])])
    for other in found[1:]:
        assert all(torch.equal(got, want) for got, want in zip(other, found[0], strict=True))


def test_what_the_hopper_kernel_serves() -> None:
    def served(*tensors: Tensor, rows: float = 192.0, activation: str = "swiglu") -> bool:
        return hopper.serves(*tensors, activation=activation, rows_per_expert=rows)

    narrow, half, wide = (torch.zeros(8, 64, dtype=dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32))
    assert served(narrow, narrow) and served(half) and served(narrow[1:, 8:])
    assert not served(wide) and not served(narrow, half)
    # Fewer rows than that are for tiles of 64.
    assert not served(narrow, rows=191.9)
    # Epilogues that are too long for it.
    assert served(narrow, activation="relu2")
    assert not served(narrow, activation="geglu") and not served(narrow, activation="gpt_oss")
    # What TMA cannot read.
    assert not served(narrow, narrow[:, 1:]) and not served(narrow, narrow.t())
    assert not served(torch.zeros(8, 36, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "refusing",
    [triton_way(TILE), Way(hopper.dact, hopper.ROWS, hopper.weight_parts, torch.float32)],
    ids=["triton", "hopper"],
)
def test_what_does_not_belong_together_is_refused(problem: Callable, refusing: Way) -> None:
    case = make_case(problem([3]), refusing, inner=136)
    wanted = case.parts.shape[1]
    assert wanted > 1
    case.parts = case.parts[:, :1]
    with pytest.raises(ValueError, match=rf"\[R,{wanted}\]"):
        case.launch()


def test_the_bias_comes_with_what_it_needs(problem: Callable) -> None:
    case = make_case(problem([3]), triton_way(TILE))
    with pytest.raises(ValueError, match="go together"):
        reduce_weight_grad(
            case.parts, case.problem.plan.assignment_row, case.problem.weights, grad=case.grad, down_bias=None
        )
