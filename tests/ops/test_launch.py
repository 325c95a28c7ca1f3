"""The ops' launches against the reference: the whole block as a GPU runs it, interpreted where there is none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from staticmoe import ops, reference
from staticmoe.reference import ACTIVATIONS

pytest.importorskip("triton")

from staticmoe.kernels.dact import dact  # noqa: E402
from staticmoe.kernels.hopper import dact as hopper_dact  # noqa: E402
from staticmoe.kernels.hopper import weight_grad as hopper  # noqa: E402
from staticmoe.kernels.tile_table import tile_for  # noqa: E402
from staticmoe.kernels.tiles import Tile  # noqa: E402
from staticmoe.kernels.weight_grad import weight_grad  # noqa: E402
from staticmoe.ops.launch import combine as combine_launch  # noqa: E402
from staticmoe.ops.launch import experts as experts_launch  # noqa: E402
from staticmoe.ops.launch import grouped_linear as linear_launch  # noqa: E402
from staticmoe.ops.launch import plan as plan_launch  # noqa: E402
from staticmoe.ops.launch import products  # noqa: E402
from staticmoe.ops.launch import routing as routing_launch  # noqa: E402
from staticmoe.ops.launch.operands import aligned, serves, takes_hopper_kernels, wants_tf32  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter multiplies bf16 wrongly.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
NAMES = ("x", "weights", "gate_up", "down", "gate_up_bias", "down_bias")


def block(c: Any, dtype: torch.dtype) -> list[Any]:
    """Operands of the block in `dtype`, or all in fp64, from a case of small numbers."""
    wide = dtype == torch.float64
    floats = [c.x, c.weights if not wide else c.weights.double(), c.gate_up, c.down, c.gate_up_bias, c.down_bias]
    floats = [t if t is None or (n == 1 and not wide) else t.detach().to(dtype) for n, t in enumerate(floats)]
    return [*floats, c.plan.expert_offsets, c.plan.row_assignment, c.plan.assignment_row]


def small_case(case: Callable[..., Any], dtype: torch.dtype, **options: Any) -> Any:
    c = case(21, 3, 5, 40, 24, device=DEVICE, dtype=dtype, requires_grad=False, **options)
    for weight in (c.gate_up, c.down):
        weight.div_(weight.shape[2] ** 0.5)
    return c


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize(("bias", "rows"), [(False, None), (True, 40)])
def test_the_block_and_every_gradient(
    dtype: torch.dtype,
    activation: str,
    bias: bool,
    rows: int | None,
    case: Callable[..., Any],
    error: Callable[[Tensor, Tensor], float],
) -> None:
    """Against the reference in fp64; with dropped assignments, an empty expert, and biases."""
    ids = torch.stack([torch.randperm(4)[:3] for _ in range(21)])
    c = small_case(case, dtype, activation=activation, bias=bias, rows=rows, ids=ids)
    y, pre = experts_launch.experts_forward(*block(c, dtype), activation)
    want, want_pre = reference.experts_forward(*block(c, torch.float64), activation)
    used = int(c.plan.expert_offsets[-1])
    assert error(y.double(), want) < TOLERANCES[dtype]
    assert error(pre[:used].double(), want_pre[:used]) < TOLERANCES[dtype]
    grad = torch.randn_like(want)
    # The derivative belongs to the pre-activation that was rounded.
    operands, wide = block(c, dtype), block(c, torch.float64)
    got = experts_launch.experts_backward(grad.to(dtype), pre, *operands, activation, [True] * 6)
    wants = reference.experts_backward(
        grad.to(dtype).double(), wide[0], pre.double(), *wide[1:4], wide[5], *wide[6:], activation, [True] * 6
    )
    for name, mine, theirs in zip(NAMES, got, wants, strict=True):
        if name.endswith("bias") and not bias:
            continue
        assert mine is not None and theirs is not None
        assert error(mine.double(), theirs) < TOLERANCES[dtype], name
    empty = 4
    for weight in got[2:4]:
        assert weight is not None and not weight[empty].any()


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_copied_rows_give_the_same_bits(
    dtype: torch.dtype, activation: str, case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wide experts copy tokens to rows first: not one bit of the output or of a gradient may depend on that."""
    c = small_case(case, dtype, rows=40, activation=activation, bias=True)
    operands = block(c, dtype)
    grad = torch.randn_like(operands[0])
    found = []
    for copy_from in (1 << 30, 0):
        monkeypatch.setattr(experts_launch, "_COPY_FROM", copy_from)
        y, pre = experts_launch.experts_forward(*operands, activation)
        found.append([y, *experts_launch.experts_backward(grad, pre, *operands, activation, [True] * 6)])
    assert all(torch.equal(gathered, copied) for gathered, copied in zip(*found, strict=True))


def test_alternating_gate_rows_are_read_and_written_where_they_lie(case: Callable[..., Any]) -> None:
    """Such a view gives, bit for bit, what sorted weights give; its gradient has the strides of the view."""
    c = small_case(case, torch.float32, bias=True)
    operands = block(c, torch.float32)
    other = list(operands)
    for place, dim in ((2, 3), (4, 2)):
        sorted_rows = operands[place].unflatten(1, (2, 24))
        other[place] = sorted_rows.transpose(1, 2).contiguous().transpose(1, 2)
        assert other[place].dim() == dim + 1 and not other[place].is_contiguous()
    grad = torch.randn_like(operands[0])
    found = []
    for given in (operands, other):
        y, pre = experts_launch.experts_forward(*given, "swiglu")
        found.append([y, *experts_launch.experts_backward(grad, pre, *given, "swiglu", [True] * 6)])
    for plain, viewed in zip(*found, strict=True):
        assert torch.equal(plain, viewed.reshape(plain.shape))
    assert found[1][3].stride() == other[2].stride() and found[1][5].stride() == other[4].stride()


@pytest.mark.parametrize("alternating", [False, True])
def test_weights_with_their_rows_side_by_side(case: Callable[..., Any], alternating: bool) -> None:
    """As GPT-OSS stores them: bit for bit what rows give, and gradients laid out as the weights."""
    c = small_case(case, torch.float32, bias=True)
    operands = block(c, torch.float32)
    other = list(operands)
    other[3] = operands[3].transpose(1, 2).contiguous().transpose(1, 2)
    if alternating:
        other[2] = operands[2].unflatten(1, (2, 24)).permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1)
        # The bias of such weights alternates too.
        other[4] = operands[4].unflatten(1, (2, 24)).transpose(1, 2).contiguous().transpose(1, 2)
    else:
        other[2] = operands[2].transpose(1, 2).contiguous().transpose(1, 2)
    grad = torch.randn_like(operands[0])
    found = []
    for given in (operands, other):
        y, pre = experts_launch.experts_forward(*given, "swiglu")
        found.append([y, *experts_launch.experts_backward(grad, pre, *given, "swiglu", [True] * 6)])
    for plain, viewed in zip(*found, strict=True):
        assert torch.equal(plain, viewed.reshape(plain.shape))
    assert found[1][3].stride() == other[2].stride() and found[1][4].stride() == other[3].stride()


def skew(number: int, tokens: int, experts: int) -> Tensor:
    """Routing [tokens,3]: even, to three experts alone, some tokens masked, most to one, by turns."""
    if number % 4 == 1:
        return torch.tensor([[number % experts, (number + 1) % experts, (number + 2) % experts]] * tokens)
    ids = torch.stack([torch.randperm(experts)[:3] for _ in range(tokens)])
    if number % 4 == 2:
        ids[torch.rand(tokens) < 0.5] = -1
    if number % 4 == 3:
        ids[1:] = torch.tensor([0, -1, -1])
    return ids


def test_twenty_skews_through_one_graph(case: Callable[..., Any], error: Callable[[Tensor, Tensor], float]) -> None:
    """Plan, block and every gradient follow the routing of the moment, not that of the capture, in the same memory."""
    c = small_case(case, torch.float32, bias=True)
    floats = block(c, torch.float32)[:6]
    ids, grad = c.ids.clone(), torch.randn_like(c.x)
    outputs: list[Tensor] = []

    def step() -> None:
        plan = plan_launch.make_plan(ids, floats[1], 5, 63, None, None, False)
        rows = plan[2:]
        y, pre = experts_launch.experts_forward(*floats, *rows, "swiglu")
        outputs[:] = [y, *experts_launch.experts_backward(grad, pre, *floats, *rows, "swiglu", [True] * 6), *plan]

    step()
    replay = step
    if ON_GPU:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        replay = graph.replay
    for number in range(20 if ON_GPU else 8):
        ids.copy_(skew(number, 21, 5))
        replay()
        plan = reference.make_plan(ids, floats[1], num_experts=5, capacity_rows=63)
        rows = (plan.expert_offsets, plan.row_assignment, plan.assignment_row)
        wide = [tensor.double() for tensor in floats]
        y, pre = reference.experts_forward(*wide, *rows, "swiglu")
        rest = (*wide[1:4], wide[5], *rows, "swiglu", [True] * 6)
        wants = [y, *reference.experts_backward(grad.double(), wide[0], pre, *rest)]
        for name, got, want in zip(("y", *NAMES), outputs, wants, strict=False):
            assert error(got.double(), want) < TOLERANCES[torch.float32], (number, name)
        assert all(torch.equal(a, b) for a, b in zip(outputs[9:], rows, strict=True)), number
        assert torch.equal(outputs[7], plan.tokens_per_expert), number


def test_only_what_is_needed(case: Callable[..., Any]) -> None:
    """A frozen bank has no gradient, and the others are bitwise what they are with it."""
    c = small_case(case, torch.float32, bias=True)
    operands = block(c, torch.float32)
    _, pre = experts_launch.experts_forward(*operands, "swiglu")
    arguments = (torch.randn_like(operands[0]), pre, *operands, "swiglu")
    every = experts_launch.experts_backward(*arguments, [True] * 6)
    for number in range(6):
        needs = [n == number for n in range(6)]
        some = experts_launch.experts_backward(*arguments, needs)
        assert [grad is not None for grad in some] == needs
        assert torch.equal(some[number], every[number])  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.float32])
def test_weight_gradients_in_fp32_stored_and_added(
    dtype: torch.dtype, case: Callable[..., Any], error: Callable[[Tensor, Tensor], float]
) -> None:
    """Unrounded, returned or in buffers; rounded they are bitwise what 16 bits get, and all else stays as it is.

    The gradient of the pre-activation over the pre-activation changes no bit either.
    """
    c = small_case(case, dtype, rows=40, bias=True)
    operands = block(c, dtype)
    _, pre = experts_launch.experts_forward(*operands, "swiglu")
    arguments = (torch.randn_like(operands[0]), pre, *operands, "swiglu", [True] * 6)
    plain = experts_launch.experts_backward(*arguments)
    wide = experts_launch.experts_backward(*arguments, torch.float32)
    main = [torch.full_like(weight, float("nan"), dtype=torch.float32) for weight in operands[2:4]]
    stored = experts_launch.experts_backward(*arguments, None, None, *main, False)
    before = [buffer.clone() for buffer in main]
    consumed = (arguments[0], pre.clone(), *arguments[2:])
    added = experts_launch.experts_backward(*consumed, None, consumed[1], *main, True)
    for place, (narrow, unrounded) in enumerate(zip(plain, wide, strict=True)):
        assert narrow is not None and unrounded is not None
        assert torch.equal(narrow, unrounded.to(narrow.dtype))
        for other in (stored[place], added[place]):
            assert other is None if place in (2, 3) else torch.equal(narrow, other)  # type: ignore[arg-type]
    for buffer, once, unrounded in zip(main, before, wide[2:4], strict=True):
        assert unrounded is not None and torch.equal(once, unrounded) and torch.equal(buffer, 2 * once)


@pytest.mark.parametrize("gather", [True, False])
def test_grouped_linear(gather: bool, case: Callable[..., Any], error: Callable[[Tensor, Tensor], float]) -> None:
    """Product, zeros in empty rows, and both gradients."""
    c = small_case(case, torch.float32, rows=70)
    plan = block(c, torch.float32)[6:]
    inputs = c.x if gather else torch.randn(70, 40, device=DEVICE)
    used = int(c.plan.expert_offsets[-1])
    if not gather:
        inputs[used:] = float("nan")
    out = linear_launch.grouped_linear_forward(inputs, c.gate_up, *plan, gather)

    def wide(tensor: Tensor) -> Tensor:
        return tensor.double().nan_to_num()

    rows = reference.gather_rows(wide(inputs), plan[1], 3) if gather else wide(inputs)
    assert error(out.double(), reference.grouped_mm(rows, wide(c.gate_up), plan[0])) < 1e-5
    assert not out[used:].any()
    grad = torch.randn_like(out)
    d_inputs, d_weight = linear_launch.grouped_linear_backward(grad, inputs, c.gate_up, *plan, gather, [True, True])
    d_rows = reference.grouped_mm(wide(grad), wide(c.gate_up).transpose(1, 2), plan[0])
    want = reference.gather_to_tokens(d_rows, plan[2]) if gather else d_rows
    assert d_inputs is not None and d_weight is not None
    assert error(d_inputs.double(), want) < 1e-5
    assert error(d_weight.double(), reference.grouped_weight_grad(wide(grad), rows, plan[0])) < 1e-5


@pytest.mark.parametrize("gather", [True, False])
def test_the_hopper_weight_gradient_is_taken_where_it_serves(
    gather: bool, case: Callable[..., Any], error: Callable[[Tensor, Tensor], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 16 bits with a pipeline by the load; fp32 has the Triton kernel. The kernel itself is tested on a GPU."""
    taken: list[Any] = []

    def stands_in(*operands: Tensor, pipeline: hopper.Pipeline, **options: Any) -> None:
        taken.append(pipeline)
        tile = tile_for("weight_grad_down", dtype=operands[0].dtype, rows_per_expert=9.0, capability=(9, 0))
        weight_grad(*operands, tile=tile, **options)

    monkeypatch.setattr(products, "takes_hopper_kernels", lambda device: True)
    monkeypatch.setattr(hopper, "weight_grad", stands_in)
    for dtype in (torch.float16, torch.float32):
        c = small_case(case, dtype, rows=70)
        plan = block(c, dtype)[6:]
        inputs = c.x if gather else torch.randn(70, 40, device=DEVICE, dtype=dtype)
        grad = torch.randn(70, c.gate_up.shape[1], device=DEVICE, dtype=dtype)
        got = linear_launch.grouped_linear_backward(grad, inputs, c.gate_up, *plan, gather, [False, True])[1]
        rows = reference.gather_rows(inputs.double(), plan[1], 3) if gather else inputs.double()
        assert got is not None
        assert error(got.double(), reference.grouped_weight_grad(grad.double(), rows, plan[0])) < TOLERANCES[dtype]
    assert taken == [hopper.SHORT]


@pytest.fixture
def hopper_launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Hopper's launchers as the ops take them, the Triton ones standing in: what each was called for, in order."""
    taken: list[tuple[str, Any]] = []

    def weight_grad_stands_in(*operands: Tensor, pipeline: hopper.Pipeline, **options: Any) -> None:
        taken.append(("weight_grad", options["gather"]))
        tile = tile_for("weight_grad_down", dtype=operands[0].dtype, rows_per_expert=9.0, capability=(9, 0))
        weight_grad(*operands, tile=tile, **options)

    def dact_stands_in(*operands: Tensor, **options: Any) -> None:
        taken.append(("dact", options["top_k"]))
        dact(*operands, tile=Tile(rows=128, columns=128, depth=16, warps=8, stages=2), **options)

    monkeypatch.setattr(products, "takes_hopper_kernels", lambda device: True)
    monkeypatch.setattr(hopper, "weight_grad", weight_grad_stands_in)
    monkeypatch.setattr(hopper_dact, "dact", dact_stands_in)
    return taken


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("least", [12.7, 12.5])
def test_the_hopper_d_activation_is_taken_where_it_serves(
    dtype: torch.dtype,
    least: float,
    case: Callable[..., Any],
    error: Callable[[Tensor, Tensor], float],
    hopper_launches: list[tuple[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In 16 bits from a mean load on, 63 / 5 here: in place if asked. The Triton kernel writes elsewhere then."""
    monkeypatch.setattr(hopper_dact, "_ROWS_FROM", least)
    c = small_case(case, dtype, rows=70, bias=True)
    operands = block(c, dtype)
    _, pre = experts_launch.experts_forward(*operands, "swiglu")
    grad = torch.randn_like(operands[0])
    wide = [None if t is None else t.double() for t in operands[:6]]
    wants = reference.experts_backward(
        grad.double(), wide[0], pre.double(), *wide[1:4], wide[5], *operands[6:], "swiglu", [True] * 6
    )
    taken = least < 63 / 5 and dtype != torch.float32
    used = int(c.plan.expert_offsets[-1])
    before, found = pre.clone(), []
    for d_pre in (None, torch.full_like(pre, float("nan")), pre):
        hopper_launches.clear()
        got = experts_launch.experts_backward(grad, pre, *operands, "swiglu", [True] * 6, d_pre=d_pre)
        assert (("dact", 3) in hopper_launches) == taken
        for name, mine, theirs in zip(NAMES, got, wants, strict=True):
            assert mine is not None and theirs is not None and error(mine.double(), theirs) < TOLERANCES[dtype], name
        found.append(got)
        if d_pre is not None and d_pre is not pre:
            assert not d_pre[:used].isnan().any()
    assert torch.equal(pre[:used], before[:used]) == (not taken)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("copy_from", [1 << 30, 0])
def test_on_hopper_the_up_gradient_gathers_and_copies_nothing(
    copy_from: int,
    case: Callable[..., Any],
    hopper_launches: list[tuple[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The down gradient reads the rows that the d-activation had copied; the Triton kernels, in fp32, copy for both."""
    monkeypatch.setattr(experts_launch, "_COPY_FROM", copy_from)
    monkeypatch.setattr(hopper_dact, "_ROWS_FROM", 0)
    copies: list[Tensor] = []
    copy = experts_launch.gather_weighted
    monkeypatch.setattr(experts_launch, "gather_weighted", lambda *a, **k: (copies.append(a[0]), copy(*a, **k)))
    for dtype, expected in ((torch.float16, 2), (torch.float32, 3)):
        operands = block(small_case(case, dtype, bias=True), dtype)
        copies.clear()
        _, pre = experts_launch.experts_forward(*operands, "swiglu")
        experts_launch.experts_backward(torch.randn_like(operands[0]), pre, *operands, "swiglu", [True] * 6)
        assert len(copies) == (0 if copy_from else expected)
    top_k, gather = (3, "left") if copy_from else (None, None)
    assert hopper_launches == [("dact", top_k), ("weight_grad", gather), ("weight_grad", "right")]


def test_a_cpu_takes_no_hopper_kernel_and_imports_no_gluon() -> None:
    assert not takes_hopper_kernels(torch.device("cpu"))
    code = "import sys, staticmoe.ops.launch.experts\nprint([m for m in sys.modules if m.startswith(%r)])"
    for name in ("staticmoe.kernels.hopper", "triton.experimental"):
        done = subprocess.run([sys.executable, "-c", code % name], cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"


def test_combine(case: Callable[..., Any], error: Callable[[Tensor, Tensor], float]) -> None:
    """Sum, and gradients: zeros in empty rows and for dropped assignments."""
    c = small_case(case, torch.float32, rows=40)
    plan = block(c, torch.float32)[6:]
    rows = torch.randn(40, 40, device=DEVICE)
    out = combine_launch.combine_forward(rows, c.weights, plan[2])
    assert error(out, reference.combine(rows, c.weights, plan[2])) < 1e-6
    grad = torch.randn_like(out)
    got = combine_launch.combine_backward(grad, rows, c.weights, *plan)
    for mine, theirs in zip(got, reference.combine_backward(grad, rows, c.weights, *plan[1:]), strict=True):
        assert error(mine, theirs) < 1e-5


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_route_and_plan(score_function: str, error: Callable[[Tensor, Tensor], float]) -> None:
    """The same ids, weights and gradients; the same plan, also where it is doomed."""
    logits = torch.randn(33, 10, device=DEVICE)
    options = {"score_function": score_function, "norm_topk_prob": True, "routed_scaling_factor": 2.0}
    weights, ids = routing_launch.route(logits, None, None, 3, *options.values(), 1, 1)
    want_ids, want_weights = reference.route(logits, top_k=3, **options)
    assert torch.equal(ids, want_ids) and error(weights, want_weights) < 1e-6
    grad = torch.randn_like(weights)
    got = routing_launch.route_backward(grad, logits, ids, *options.values())
    assert error(got, reference.route_backward(grad, logits, ids, **options)) < 1e-5
    for capacity, doomed, dooms in ((99, 0.0, True), (60, 0.0, True), (60, 0.0, False), (99, 1.0, False)):
        doom = torch.tensor(doomed, device=DEVICE)
        tensors = plan_launch.make_plan(ids, weights, 10, capacity, 20, doom, dooms)
        want = reference.make_plan(
            ids, weights, num_experts=10, capacity_rows=capacity, expert_capacity=20, doomed=doom, overflow_dooms=dooms
        )
        wanted = (want.tokens_per_expert, want.routed_per_expert, want.expert_offsets, want.row_assignment)
        assert all(torch.equal(a, b) for a, b in zip(tensors, (*wanted, want.assignment_row), strict=True))
        assert bool(want.expert_offsets.any()) == (not doomed and not (dooms and capacity == 60))


def test_a_doomed_block_is_zeros(case: Callable[..., Any]) -> None:
    """No row is in use: the output and every gradient are exactly zero, whatever the operands hold."""
    c = small_case(case, torch.float32, bias=True)
    one = torch.ones((), device=DEVICE)
    plan = reference.make_plan(c.ids, c.weights, num_experts=5, capacity_rows=63, doomed=one)
    tensors = [torch.full_like(t, float("nan")) for t in block(c, torch.float32)[:6]]
    rows = (plan.expert_offsets, plan.row_assignment, plan.assignment_row)
    y, pre = experts_launch.experts_forward(*tensors, *rows, "swiglu")
    assert not y.any()
    grads = experts_launch.experts_backward(
        torch.full_like(y, float("nan")), pre, *tensors, *rows, "swiglu", [True] * 6
    )
    assert all(grad is not None and not grad.any() for grad in grads)


def on_a_gpu(op: Any) -> Callable[..., Any]:
    """What is registered for a GPU, called where the kernels run."""
    return op._backend_fns["cuda"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_registered_is_the_op(
    dtype: torch.dtype, case: Callable[..., Any], error: Callable[[Tensor, Tensor], float]
) -> None:
    """Every op's implementation for a GPU takes the op's arguments and gives its results; fp64 runs plain PyTorch."""
    c = small_case(case, dtype, bias=True)
    operands = block(c, dtype)
    plan, grad, needs = operands[6:], torch.randn_like(operands[0]), [True] * 6
    logits = torch.randn(21, 5, device=DEVICE, dtype=dtype)
    route = (logits, None, None, 3, "softmax", True, 1.0, 1, 1)
    rows = torch.randn(63, 40, device=DEVICE, dtype=dtype)
    _, pre, *_ = on_a_gpu(ops.experts.experts)(*operands, "swiglu")
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (ops.experts.experts, (*operands, "swiglu")),
        (ops.experts.experts_backward, (grad, pre, *operands, "swiglu", needs, None, None, None, None, False)),
        (ops.grouped_linear.grouped_linear, (operands[0], operands[2], *plan, True)),
        (ops.grouped_linear.grouped_linear_backward, (pre, operands[0], operands[2], *plan, True, [True, False])),
        (ops.combine.combine, (rows, operands[1], *plan)),
        (ops.combine.combine_backward, (grad, rows, operands[1], *plan)),
        (ops.plan.make_plan, (c.ids, operands[1], 5, 63, None)),
        (ops.routing.route, route),
        (ops.weigh.weigh, (logits, c.ids, None, "softmax", False, 1.0, 1)),
        (ops.routing.route_backward, (operands[1], logits, c.ids, "softmax", True, 1.0)),
    ]
    for op, arguments in calls:
        got, want = on_a_gpu(op)(*arguments), op._init_fn(*arguments)
        pairs = zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]
        for mine, theirs in pairs:
            assert mine.shape == theirs.shape and mine.dtype == theirs.dtype, op
            assert error(mine.double(), theirs.double()) < TOLERANCES[torch.float32], op


def test_what_the_kernels_serve() -> None:
    """Odd widths and fp64 run plain PyTorch; a view that no kernel can read is copied."""
    assert serves(torch.bfloat16, 128, 2048, 768) and serves(torch.float32, 4096, 36)
    assert not serves(torch.float64, 8, 64) and not serves(torch.bfloat16, 8, 100) and not serves(torch.float32, 4097)
    big = torch.randn(8, 65, device=DEVICE, dtype=torch.float32)
    odd = big[:, 1:]
    fit = aligned(odd)
    assert fit.is_contiguous() and torch.equal(fit, odd) and fit.data_ptr() != odd.data_ptr()
    assert aligned(fit) is fit


def test_tf32_only_when_asked() -> None:
    """By torch's older switch and by its newer one; never by itself."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.allow_tf32 = False
        assert not wants_tf32()
        matmul.allow_tf32 = True
        assert wants_tf32()
        matmul.fp32_precision = "ieee"
        assert not wants_tf32()
        matmul.fp32_precision = "tf32"
        assert wants_tf32()
    finally:
        matmul.fp32_precision = before
