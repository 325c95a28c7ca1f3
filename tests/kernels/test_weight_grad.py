"""The weight gradients against sums in fp64: odd counts, empty experts, poisoned neighbours, adding, both gate orders.

Letters: E experts, T tokens, K top_k, R rows, A and B widths, H hidden, I intermediate.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from staticmoe.kernels.hopper import weight_grad as hopper
from staticmoe.kernels.tiles import Tile
from staticmoe.kernels.weight_grad import weight_grad
from staticmoe.ops.launch.operands import takes_hopper_kernels

TILE = Tile(rows=16, columns=32, depth=16, warps=4, stages=2, group=2)
# Of a result rounded once to this dtype, and of sums in fp32 of operands in 16 bits.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
FP32_SUMS = 4e-6
COUNTS = [5, 0, 17, 1, 0, 23, 0, 0]
PIPELINES = {"short": hopper.SHORT, "long": hopper.LONG}


@dataclasses.dataclass(frozen=True)
class Way:
    """A launcher with its tile or its pipeline, and the dtype of its operands."""

    launch: Callable[..., None]
    dtype: torch.dtype

    @property
    def tolerance(self) -> float:
        """Of an output of the same dtype."""
        return TOLERANCE[self.dtype]


def hopper_ways() -> list[Any]:
    """The parameters of the Hopper launcher; they run on a GPU alone, where Gluon is compiled."""
    on_hopper = torch.cuda.is_available() and takes_hopper_kernels(torch.device("cuda"))
    why = "the Hopper kernel is Gluon, which needs a GPU of compute capability 9.0 and Triton 3.6"
    mark = pytest.mark.skipif(not on_hopper, reason=why)
    # Not every pair: each is some twenty kernels to compile.
    ways = [("short", torch.bfloat16), ("long", torch.float16)]
    return [pytest.param(way, marks=mark, id=f"hopper {way[0]}") for way in ways]


@pytest.fixture(params=[("triton", torch.float32), ("triton", torch.float16), *hopper_ways()])
def way(request: pytest.FixtureRequest) -> Way:
    """Every launcher that runs here, in every dtype that it is tested with."""
    name, dtype = request.param
    if name == "triton":
        return Way(functools.partial(weight_grad, tile=TILE), dtype)
    return Way(functools.partial(hopper.weight_grad, pipeline=PIPELINES[name]), dtype)


def triton_way(tile: Tile) -> Way:
    """The Triton launcher with another tile, in fp32."""
    return Way(functools.partial(weight_grad, tile=tile), torch.float32)


def expected(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """Sum over each expert's rows of left (x) right in fp64; only rows of segments are looked at."""
    bounds = offsets.tolist()
    return torch.stack([left[a:b].double().t() @ right[a:b].double() for a, b in zip(bounds, bounds[1:], strict=False)])


def placed(rows: Tensor, used: int, before: int, after: int) -> Tensor:
    """The first `used` rows in a buffer that holds NaN everywhere else."""
    buffer = torch.full((before + used + after, rows.shape[1]), float("nan"), dtype=rows.dtype, device=rows.device)
    buffer[before : before + used] = rows[:used]
    return buffer


def down_gradient(way: Way, problem, grad: Tensor, act: Tensor, out: Tensor, *, accumulate=False, programs=3) -> Tensor:
    """The launch for the down projection: gathered gradients on the left."""
    way.launch(
        grad, act, problem.plan.expert_offsets, problem.plan.row_assignment, out,
        gather="left", saved=None, base_row=None, top_k=problem.plan.top_k, accumulate=accumulate, programs=programs,
    )  # fmt: skip
    return out


def tokens_of(problem, tokens: Tensor) -> Tensor:
    """The token of each row in use."""
    return tokens[problem.plan.row_assignment[: problem.used].long() // problem.plan.top_k]


@pytest.mark.parametrize(("counts", "top_k"), [(COUNTS, 3), ([0, 0, 37], 2), ([1], 1), ([16, 16], 1)])
def test_the_down_gradient_is_the_sum_over_the_experts_rows(
    problem: Callable, error: Callable, way: Way, counts: list[int], top_k: int
) -> None:
    p = problem(counts, top_k=top_k)
    grad = p.draw(p.weights.shape[0], 24, dtype=way.dtype)
    act = placed(p.draw(p.used, 40, dtype=way.dtype), p.used, 0, 3)
    out = down_gradient(way, p, grad, act, p.unwritten(len(counts), 24, 40, dtype=way.dtype))
    assert error(out, expected(tokens_of(p, grad), act, p.plan.expert_offsets)) < way.tolerance
    for e, count in enumerate(counts):
        assert (count > 0) == bool(out[e].count_nonzero())


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_up_gradient_reads_saved_rows_at_the_base_row_and_writes_either_gate_order(
    problem: Callable, error: Callable, way: Way, interleaved: bool
) -> None:
    hidden, intermediate = 40, 24
    p = problem(COUNTS, top_k=2)
    d_pre = p.draw(p.used, 2 * intermediate, dtype=way.dtype)
    x = p.draw(p.weights.shape[0], hidden, dtype=way.dtype)
    storage = p.unwritten(len(COUNTS) + 2, 2 * intermediate * hidden, dtype=way.dtype)
    weight = storage[1:-1]
    out = (
        weight.view(-1, intermediate, 2, hidden).transpose(1, 2)
        if interleaved
        else weight.view(-1, 2, intermediate, hidden)
    )
    base_row = torch.tensor([11], dtype=torch.int64, device=p.device)
    way.launch(
        placed(d_pre, p.used, 11, 20), x, p.plan.expert_offsets, p.plan.row_assignment, out,
        gather="right", saved="left", base_row=base_row, top_k=2, accumulate=False, programs=3,
    )  # fmt: skip
    want = expected(d_pre, tokens_of(p, x), p.plan.expert_offsets)
    assert error(out, want.view(-1, 2, intermediate, hidden)) < way.tolerance
    assert storage[0].isnan().all()
    assert storage[-1].isnan().all()


@pytest.mark.parametrize("saved", [None, "left", "right"])
@pytest.mark.parametrize("groups", [1, 2])
def test_two_packed_operands_need_no_gather(
    problem: Callable, error: Callable, way: Way, saved: str | None, groups: int
) -> None:
    p = problem(COUNTS)
    left, right = p.draw(p.used, groups * 16, dtype=way.dtype), p.draw(p.used, 32, dtype=way.dtype)
    out = p.unwritten(len(COUNTS), groups, 16, 32, dtype=way.dtype)
    way.launch(
        placed(left, p.used, 7 if saved == "left" else 0, 3),
        placed(right, p.used, 7 if saved == "right" else 0, 3),
        p.plan.expert_offsets, p.plan.row_assignment, out, gather=None, saved=saved,
        base_row=None if saved is None else torch.tensor(7, device=p.device), top_k=1, accumulate=False, programs=3,
    )  # fmt: skip
    want = expected(left, right, p.plan.expert_offsets)
    assert error(out, want.view(-1, groups, 16, 32)) < way.tolerance


def test_one_group_may_have_its_right_operand_gathered(problem: Callable, error: Callable, way: Way) -> None:
    """The weight of `functional.grouped_linear`."""
    p = problem(COUNTS, top_k=2)
    left = placed(p.draw(p.used, 24, dtype=way.dtype), p.used, 0, 3)
    tokens = p.draw(p.weights.shape[0], 40, dtype=way.dtype)
    out = p.unwritten(len(COUNTS), 24, 40, dtype=way.dtype)
    way.launch(
        left, tokens, p.plan.expert_offsets, p.plan.row_assignment, out,
        gather="right", saved=None, base_row=None, top_k=2, accumulate=False, programs=3,
    )  # fmt: skip
    assert error(out, expected(left, tokens_of(p, tokens), p.plan.expert_offsets)) < way.tolerance


def test_a_poisoned_expert_spoils_no_other(problem: Callable, error: Callable, way: Way) -> None:
    """A tile's last step reaches into the next expert's rows, of both operands: they must add nothing, NaN or not."""
    p = problem([5, 3, 9])
    grad, act = p.draw(17, 16, dtype=way.dtype), placed(p.draw(17, 32, dtype=way.dtype), 17, 0, 3)
    want = expected(tokens_of(p, grad), act, p.plan.expert_offsets)
    act[5:8] = float("nan")
    grad[p.plan.row_assignment[5:8].long()] = float("nan")
    out = down_gradient(way, p, grad, act, p.unwritten(3, 16, 32, dtype=way.dtype))
    assert out[1].isnan().all()
    assert error(out[[0, 2]], want[[0, 2]]) < way.tolerance


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_doomed_layer_gives_zeros_and_adds_nothing(problem: Callable, way: Way, accumulate: bool) -> None:
    p = problem([0, 0, 0], tokens=4)
    held = torch.full((3, 16, 32), -0.0, device=p.device)
    out = held.clone() if accumulate else p.unwritten(3, 16, 32, dtype=torch.float32)
    grad = p.unwritten(4, 16, dtype=way.dtype)
    down_gradient(way, p, grad, p.unwritten(3, 32, dtype=way.dtype), out, accumulate=accumulate)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(out.signbit(), held.signbit() if accumulate else torch.zeros_like(out, dtype=torch.bool))


@pytest.mark.parametrize("wide", [True, False])
def test_accumulate_adds_in_fp32_to_what_is_there(problem: Callable, error: Callable, way: Way, wide: bool) -> None:
    p = problem(COUNTS, top_k=2)
    out_dtype = torch.float32 if wide else way.dtype
    tolerance = FP32_SUMS if out_dtype == torch.float32 else way.tolerance
    grad = p.draw(p.weights.shape[0], 24, dtype=way.dtype)
    act = placed(p.draw(p.used, 40, dtype=way.dtype), p.used, 0, 3)
    held = p.draw(len(COUNTS), 24, 40, dtype=out_dtype)
    out = down_gradient(way, p, grad, act, held.clone(), accumulate=True)
    product = expected(tokens_of(p, grad), act, p.plan.expert_offsets)
    assert error(out, held.double() + product) < tolerance
    empty = [e for e, count in enumerate(COUNTS) if count == 0]
    assert torch.equal(out[empty], held[empty])
    twice = down_gradient(way, p, grad, act, out.clone(), accumulate=True)
    assert error(twice, held.double() + 2 * product) < 2 * tolerance


def test_programs_and_empty_rows_change_no_bit(problem: Callable, way: Way) -> None:
    def run(spare: int, programs: int) -> Tensor:
        torch.manual_seed(1)
        p = problem(COUNTS, top_k=2, spare=spare)
        grad, act = p.draw(p.weights.shape[0], 48, dtype=way.dtype), p.draw(p.used, 40, dtype=way.dtype)
        out = p.unwritten(len(COUNTS), 48, 40, dtype=way.dtype)
        return down_gradient(way, p, grad, placed(act, p.used, 0, spare), out, programs=programs)

    first = run(3, 3)
    for spare, programs in [(3, 1), (3, 1000), (100, 3), (0, 7)]:
        assert torch.equal(run(spare, programs), first)


def test_the_group_of_tiles_changes_no_bit(problem: Callable) -> None:
    p = problem([20, 3])
    grad, act = p.draw(23, 88, dtype=torch.float32), placed(p.draw(23, 72, dtype=torch.float32), 23, 0, 3)
    outs = [
        down_gradient(
            triton_way(dataclasses.replace(TILE, group=group)), p, grad, act,
            p.unwritten(2, 88, 72, dtype=torch.float32),
        )
        for group in (1, 4, 8)
    ]  # fmt: skip
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert not outs[0].isnan().any()


def test_o22_experts_without_tokens_have_a_zero_gradient(problem: Callable, error: Callable) -> None:
    counts = [5, 0, 17, 1, 0, 41, 0, 0]
    way = triton_way(Tile(rows=32, columns=64, depth=16, warps=4, stages=2))
    p = problem(counts)
    grad, act = p.draw(64, 64, dtype=torch.float32), placed(p.draw(64, 96, dtype=torch.float32), 64, 0, 3)
    out = down_gradient(way, p, grad, act, p.unwritten(8, 64, 96, dtype=torch.float32))
    assert torch.equal(out[[1, 4, 6, 7]], torch.zeros(4, 64, 96, device=p.device))
    assert error(out, expected(tokens_of(p, grad), act, p.plan.expert_offsets)) < 2e-6


def test_o19_three_calls_among_poison_are_equal(problem: Callable, error: Callable) -> None:
    way = triton_way(Tile(rows=32, columns=64, depth=16, warps=4, stages=2))
    p = problem([40, 0, 3, 0, 0, 0, 0, 21], spare=0)
    grad, act = p.draw(64, 64, dtype=torch.float32), p.draw(64, 128, dtype=torch.float32)
    outs = [
        down_gradient(way, p, grad, placed(act, 64, 0, after), p.unwritten(8, 64, 128, dtype=torch.float32))
        for after in (0, 17, 64)
    ]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    assert error(outs[0], expected(tokens_of(p, grad), act, p.plan.expert_offsets)) < 2e-6


@pytest.fixture(params=hopper_ways())
def hopper_way(request: pytest.FixtureRequest) -> Way:
    """The Hopper launcher alone, for sizes that the interpreter would take minutes for."""
    name, dtype = request.param
    return Way(functools.partial(hopper.weight_grad, pipeline=PIPELINES[name]), dtype)


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize(("wide", "accumulate"), [(False, False), (True, False), (True, True), (False, True)])
@pytest.mark.parametrize("up", [False, True])
def test_hopper_goes_through_many_tiles_and_steps(
    problem: Callable, error: Callable, hopper_way: Way, up: bool, wide: bool, accumulate: bool, gather: bool
) -> None:
    """Several tiles of both sides, with tails, and every stage in many phases; grids change no bit, guards hold."""
    counts, hidden, inner, groups = [1, 127, 0, 129, 300, 64], 520, 392, 2 if up else 1
    dtype, out_dtype = hopper_way.dtype, torch.float32 if wide else hopper_way.dtype
    p = problem(counts, top_k=2, spare=77)
    tokens = p.draw(p.weights.shape[0], hidden, dtype=dtype)
    packed = placed(p.draw(p.used, groups * inner, dtype=dtype), p.used, 0, 77)
    rows = tokens_of(p, tokens)
    read = tokens if gather else placed(rows, p.used, 0, 77)
    left, right, shape = (packed, read, (inner, hidden)) if up else (read, packed, (hidden, inner))
    want = (
        expected(packed[: p.used], rows, p.plan.expert_offsets) if up else expected(rows, packed, p.plan.expert_offsets)
    )
    want = want.view(len(counts), groups, *shape)
    held = p.draw(*want.shape, dtype=out_dtype) if accumulate else torch.zeros_like(want, dtype=out_dtype)
    outs = []
    for programs in (3, 132, 1):
        storage = p.unwritten(want.numel() + 2 * 4096, dtype=out_dtype)
        out = storage[4096:-4096].view(want.shape)
        if accumulate:
            out.copy_(held)
        hopper_way.launch(
            left, right, p.plan.expert_offsets, p.plan.row_assignment, out,
            gather=("right" if up else "left") if gather else None, saved=None, base_row=None, top_k=2,
            accumulate=accumulate, programs=programs,
        )  # fmt: skip
        assert storage[:4096].isnan().all() and storage[-4096:].isnan().all()
        outs.append(out)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    assert torch.equal(outs[0][2], held[2])
    assert error(outs[0], held.double() + want) < (2e-5 if wide else hopper_way.tolerance)


def test_what_the_hopper_kernel_serves() -> None:
    def served(out: Tensor, dtype: torch.dtype = torch.bfloat16, other: torch.dtype = torch.bfloat16) -> bool:
        left, right = torch.empty(8, 16, dtype=dtype), torch.empty(8, 32, dtype=other)
        return hopper.serves(left, right, out, gather="right")

    def memory(*shape: int) -> Tensor:
        return torch.empty(shape, device="meta")

    assert served(memory(3, 16, 32)) and served(memory(3, 2, 16, 32))
    assert served(memory(3, 16, 32), torch.float16, torch.float16)
    assert not served(memory(3, 16, 32), torch.float32, torch.float32)
    assert not served(memory(3, 16, 32), torch.float16, torch.bfloat16)
    assert not served(memory(3, 3, 16, 32))
    # 200 x 200 tiles: more than are counted without error.
    assert not served(memory(1, 256 * 200, 128 * 200))
    # 2^32 elements from the first row to the last.
    assert not served(torch.empty_strided((1, 1024, 64), (1 << 32, 1 << 22, 1), device="meta"))


def test_the_hopper_pipeline_follows_the_load() -> None:
    assert [hopper.pipeline_for(load) for load in (0.5, 1023.9, 1024.0)] == [hopper.SHORT, hopper.SHORT, hopper.LONG]


@pytest.mark.parametrize(
    "launch",
    [functools.partial(weight_grad, tile=TILE), functools.partial(hopper.weight_grad, pipeline=hopper.SHORT)],
    ids=["triton", "hopper"],
)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"saved": "left", "base_row": torch.tensor(0)}, "no base row"),
        ({"saved": "right"}, "go together"),
        ({"right": torch.zeros(8, 24)}, r"\(8, 24\)"),
        ({"out": torch.zeros(2, 2, 8, 32)}, "one group"),
    ],
)
def test_what_does_not_belong_together_is_refused(launch: Callable[..., None], change: dict, message: str) -> None:
    arguments = {
        "left": torch.zeros(8, 16), "right": torch.zeros(8, 32),
        "expert_offsets": torch.zeros(3, dtype=torch.int32), "row_assignment": torch.zeros(8, dtype=torch.int32),
        "out": torch.zeros(2, 16, 32), "gather": "left", "saved": None, "base_row": None, "top_k": 1,
        "accumulate": False, "programs": 1,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        launch(**{**arguments, **change})
