"""The check lets right blocks pass, and names what is wrong in a wrong one."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from staticmoe.bench import blocks, check
from staticmoe.bench.problems import Problem, Shape, make_problem
from staticmoe.errors import SelfCheckError

CPU = torch.device("cpu")
ODD = (7, Shape(16, 24, 6, 3))  # an intermediate wider than hidden: the peer weighs the other rows


class _Spoil(torch.autograd.Function):
    """The tensor as it is; its gradient times a factor, plus a constant."""

    @staticmethod
    def forward(ctx: object, tensor: Tensor, factor: float, added: float) -> Tensor:
        ctx.spoil = factor, added  # type: ignore[attr-defined]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        factor, added = ctx.spoil  # type: ignore[attr-defined]
        return grad * factor + added, None, None


def spoiled(name: str, factor: float, added: float = 0.0) -> blocks.Block:
    """Ours, with the gradient of one input not what it is."""

    def block(p: Problem) -> Tensor:
        values = {field: getattr(p, field) for field in ("x", "ids", "weights", "gate_up", "down", "grad")}
        values[name] = _Spoil.apply(values[name], factor, added)
        return blocks.staticmoe_block(Problem(**values))

    return block


@pytest.mark.parametrize("case", [None, ODD])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["staticmoe", "grouped_mm", "staticmoe, main_grad"])
def test_every_block_agrees_with_fp64(name: str, dtype: torch.dtype, case: tuple[int, Shape] | None) -> None:
    (candidate,) = [one for one in blocks.candidates(main_grad=True) if one.name == name]
    errors = check.check(candidate.make, dtype, CPU, case)
    assert list(errors) == list(check.NAMES)
    # No error of 16 bits is zero, which a comparison of a thing with itself would show.
    assert all(0 < error < check.TOLERANCE[dtype] for error in errors.values())


def test_the_compiled_peer_is_one_graph_and_agrees_with_fp64() -> None:
    block = blocks.compiled("aot_eager")
    for case in (None, ODD):
        errors = check.check(lambda _: block, torch.bfloat16, CPU, case)
        assert all(0 < error < check.TOLERANCE[torch.bfloat16] for error in errors.values())


@pytest.mark.parametrize(
    ("field", "wrong"), [("x", "d_x"), ("weights", "d_topk_weights"), ("gate_up", "d_gate_up"), ("down", "d_down")]
)
def test_a_scaled_gradient_is_refused_by_name(field: str, wrong: str) -> None:
    with pytest.raises(SelfCheckError, match=rf"natural: {wrong} is off by 0\.0[45]\d* of its norm, allowed 0\.012"):
        check.check(lambda _: spoiled(field, 1.05), torch.bfloat16, CPU, ODD)
    check.check(lambda _: spoiled(field, 1.0), torch.bfloat16, CPU, ODD)


def test_an_output_with_nan_is_refused() -> None:
    with pytest.raises(SelfCheckError, match="natural: y is off by nan"):
        check.check(lambda _: lambda p: blocks.staticmoe_block(p) * float("nan"), torch.float32, CPU, ODD)


def test_a_gradient_of_an_idle_expert_is_refused() -> None:
    """Far below the tolerance of the norm: only the comparison with zero sees it."""
    with pytest.raises(SelfCheckError, match="natural: an expert without tokens has a weight gradient other than zero"):
        check.check(lambda _: spoiled("down", 1.0, 1e-7), torch.float32, CPU, (61, Shape(16, 24, 64, 4)))


def test_as_many_experts_as_a_token_takes_leave_none_idle() -> None:
    errors = check.check(lambda _: blocks.staticmoe_block, torch.float32, CPU, (5, Shape(16, 8, 2, 2)))
    assert 0 < max(errors.values()) < check.TOLERANCE[torch.float32]


def test_calls_that_differ_in_one_bit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check.check_repeat(ODD[1], ODD[0], torch.bfloat16, CPU) == 40
    calls = itertools.count()

    def drifting(p: Problem) -> Tensor:
        y = blocks.staticmoe_block(p)
        raised = torch.nextafter(y.detach(), y.detach() + 1)
        return y if next(calls) < 3 else y + (raised - y.detach())

    monkeypatch.setattr(check, "staticmoe_block", drifting)
    with pytest.raises(SelfCheckError, match="call 2: y has other bits than the first call"):
        check.check_repeat(ODD[1], ODD[0], torch.float32, CPU)


def test_a_users_shape_is_cut_to_what_the_check_needs() -> None:
    cuda = torch.device("cuda")
    # 8192·8/128 = 512 rows an expert, and so have 16 experts of 1024 tokens.
    assert check.reduced(Shape(2048, 768, 128, 8), 8192, cuda) == (1024, Shape(2048, 768, 16, 8))
    assert check.reduced(Shape(2048, 768, 128, 8), 1001, cuda) == (126, Shape(2048, 768, 16, 8))
    assert check.reduced(Shape(4096, 14336, 8, 2), 32768, cuda) == (1024, Shape(4096, 14336, 4, 2))
    assert check.reduced(Shape(4096, 64, 8, 8), 3, CPU) == (3, Shape(128, 64, 8, 8))


def test_main_grad_adds_to_its_buffers() -> None:
    p = make_problem(ODD[1], ODD[0], "natural", torch.bfloat16, CPU)
    block = blocks.MainGradBlock(p)
    check.forward_backward(block, p)
    once = [buffer.clone() for buffer in block.gradients()]
    check.forward_backward(block, p)
    assert all(buffer.dtype == torch.float32 for buffer in once)
    assert all(torch.equal(buffer, 2 * first) for buffer, first in zip(block.gradients(), once, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures and times: needs a GPU")
def test_a_small_case_is_measured() -> None:
    from staticmoe.bench.measure import measure

    device = torch.device("cuda")
    p = make_problem(Shape(256, 128, 8, 2), 512, "natural", torch.bfloat16, device)
    found = measure(blocks.staticmoe_block, p, device)
    flops = 6 * 512 * 2 * 256 * 128
    assert found["forward"]["tflops"] == pytest.approx(flops / found["forward"]["ms"] / 1e9)
    assert found["both"]["tflops"] == pytest.approx(3 * flops / found["both"]["ms"] / 1e9)
    # The pre-activation at least is saved: R·2I of bf16.
    assert found["saved_gib"] * 2**30 >= 512 * 2 * 256 * 2 and found["peak_gib"] > 0
