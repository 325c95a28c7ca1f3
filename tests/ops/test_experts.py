"""The expert block against a loop over assignments: output and every gradient, in fp64 and in training dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from staticmoe import functional, ops
from staticmoe.errors import ConfigError
from staticmoe.reference import ACTIVATIONS, activate, activation_backward

# Weight gradients in the weights' dtype, no memory lent.
ALONE = (None, None, None, None, False)
ACTIVATION_NAMES = list(ACTIVATIONS)

# T, K, E, H, I: aligned, odd, one token, one expert, more experts than assignments
SIZES = [(12, 2, 4, 16, 8), (7, 3, 5, 9, 11), (1, 1, 3, 5, 3), (1, 4, 4, 8, 8), (10, 1, 1, 8, 16), (3, 2, 17, 12, 4)]


def gradients(out: Tensor, operands: dict[str, Tensor], direction: Tensor) -> dict[str, Tensor]:
    grads = torch.autograd.grad(out, list(operands.values()), direction.to(out.dtype))
    return dict(zip(operands, grads, strict=True))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("drop", [False, True])
def test_against_a_loop(
    size: tuple[int, ...],
    activation: str,
    bias: bool,
    drop: bool,
    device: torch.device,
    case: Callable[..., Any],
    error: Callable[[Tensor, Tensor], float],
) -> None:
    rows = max(1, size[0] * size[1] // 2) if drop else None
    c = case(*size, device=device, activation=activation, bias=bias, rows=rows)
    got, want = c.run(), c.loop()
    assert error(got, want) < 1e-12
    direction = torch.randn_like(want)
    got_grads = gradients(got, c.floats(), direction)
    for name, want_grad in gradients(want, c.floats(), direction).items():
        assert error(got_grads[name], want_grad) < 1e-11, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [(33, 2, 6, 24, 16), (13, 3, 5, 9, 11)])
@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
def test_training_dtypes(
    dtype: torch.dtype,
    size: tuple[int, ...],
    activation: str,
    device: torch.device,
    case: Callable[..., Any],
    error: Callable[[Tensor, Tensor], float],
) -> None:
    """Against the same operands in fp64: the error is that of rounding."""
    c = case(*size, device=device, dtype=dtype, activation=activation, bias=True)
    for tensor in (c.gate_up, c.down):
        tensor.data.div_(tensor.shape[2] ** 0.5)
    wide = case(*size, device=device, activation=activation, bias=True, ids=c.ids)
    for name, tensor in c.floats().items():
        wide.floats()[name].data.copy_(tensor)
    got, want = c.run(), wide.loop()
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    assert got.dtype == dtype
    assert error(got.double(), want) < tolerance
    direction = torch.randn_like(got)
    got_grads = gradients(got, c.floats(), direction)
    for name, want_grad in gradients(want, wide.floats(), direction).items():
        assert got_grads[name].dtype == c.floats()[name].dtype
        assert error(got_grads[name].double(), want_grad) < tolerance, name


@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
def test_gradcheck(activation: str, case: Callable[..., Any]) -> None:
    """Finite differences through the op, with dropped assignments and an expert without tokens."""
    ids = torch.tensor([[0, 1], [1, 0], [3, 0], [0, 1]])
    c = case(4, 2, 4, 3, 2, device=torch.device("cpu"), ids=ids, rows=6, activation=activation, bias=True)

    def run(*operands: Tensor) -> Tensor:
        x, weights, gate_up, down, gate_up_bias, down_bias = operands
        biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
        return functional.experts(x, weights, c.plan, gate_up, down, activation=activation, **biases)

    assert torch.autograd.gradcheck(run, tuple(c.floats().values()))


def test_clamps_of_gpt_oss(device: torch.device) -> None:
    """Both clamps bind, and a value exactly on a limit behaves as torch.clamp has it."""
    pre = torch.tensor([[9.0, 7.0, -9.0, 1.0, 8.0, -7.0, -8.0, 7.0]], dtype=torch.float64, device=device)
    gate, up = pre.clone().requires_grad_().chunk(2, dim=1)
    want = (up.clamp(-7, 7) + 1) * gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7))
    assert torch.allclose(activate(pre, "gpt_oss"), want)
    leaf = pre.clone().requires_grad_()
    gate, up = leaf.chunk(2, dim=1)
    out = (up.clamp(-7, 7) + 1) * gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7))
    (want_grad,) = torch.autograd.grad(out.sum(), leaf)
    assert torch.allclose(activation_backward(pre, torch.ones_like(want), "gpt_oss"), want_grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("widths", [(64, 96), (9, 11)])
def test_experts_without_tokens_get_exact_zeros(
    dtype: torch.dtype, widths: tuple[int, int], device: torch.device, case: Callable[..., Any]
) -> None:
    """O22: an expert with no tokens has a weight gradient of exactly zero, whatever its weights hold."""
    counts = [5, 0, 17, 1, 0, 41, 0, 0]
    ids = torch.tensor([[e] for e, n in enumerate(counts) for _ in range(n)])
    c = case(64, 1, 8, *widths, device=device, dtype=dtype, ids=ids, bias=True)
    idle = [1, 4, 6, 7]
    clean = gradients(c.run(), c.floats(), torch.ones(64, widths[0], device=device))
    with torch.no_grad():
        for tensor in (c.gate_up, c.down, c.gate_up_bias, c.down_bias):
            tensor[idle] = float("nan")
    out = c.run()
    assert out.isfinite().all()
    grads = gradients(out, c.floats(), torch.ones(64, widths[0], device=device))
    for name, grad in grads.items():
        assert torch.equal(grad, clean[name]), name
        if grad.shape[0] == 8:
            assert (grad[idle] == 0).all(), name
            assert (grad[[0, 2, 3, 5]] != 0).any(dim=tuple(range(1, grad.dim()))).all(), name


def test_one_expert_takes_everything(
    device: torch.device, case: Callable[..., Any], error: Callable[[Tensor, Tensor], float]
) -> None:
    ids = torch.full((20, 1), 3)
    for rows in (None, 20, 7):
        c = case(20, 1, 5, 8, 6, device=device, ids=ids, rows=rows)
        assert error(c.run(), c.loop()) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_dropped_assignments_add_nothing_and_get_nothing(
    dtype: torch.dtype, device: torch.device, case: Callable[..., Any]
) -> None:
    """A dropped assignment's weight may be NaN: output and gradients are those of the kept ones."""
    ids = torch.tensor([[0, 1], [0, 2], [0, 1], [0, -1]])
    c = case(4, 2, 3, 8, 8, device=device, dtype=dtype, ids=ids, expert_capacity=2)
    with torch.no_grad():
        c.weights.copy_(torch.tensor([[0.5, 0.25], [0.0, 0.25], [0.75, 0.25], [0.1, 0.9]], device=device))
    c.plan = functional.make_plan(c.ids, c.weights, num_experts=3, expert_capacity=2)
    dropped = c.plan.assignment_row < 0
    assert dropped.tolist() == [[False, False], [True, False], [False, False], [True, True]]
    with torch.no_grad():
        c.weights[dropped] = float("nan")
    out = c.run()
    assert out.isfinite().all() and (out[3] == 0).all()
    grads = gradients(out, c.floats(), torch.ones_like(out))
    assert all(grad.isfinite().all() for grad in grads.values())
    assert (grads["weights"][dropped] == 0).all() and (grads["x"][3] == 0).all()


def test_variants_agree_bitwise(device: torch.device, case: Callable[..., Any]) -> None:
    """With nothing dropped, output and gradients do not depend on the capacity."""
    ids = torch.tensor([[0, 1], [2, -1], [0, 2], [-1, -1], [1, 0]])
    c = case(5, 2, 4, 16, 8, device=device, dtype=torch.float32, ids=ids)
    results = []
    for rows in (7, 8, 10):
        c.plan = functional.make_plan(c.ids, c.weights, num_experts=4, capacity_rows=rows)
        out = c.run()
        results.append([out, *gradients(out, c.floats(), torch.ones_like(out)).values()])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_twice_the_same_bits(device: torch.device, case: Callable[..., Any]) -> None:
    """O29: atomic adds in combine would give another sum each time."""
    c = case(96, 4, 8, 64, 32, device=device, dtype=torch.bfloat16)
    runs = []
    for _ in range(5):
        out = c.run()
        runs.append([out, *gradients(out, c.floats(), torch.ones_like(out)).values()])
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_saves_x_and_the_pre_activation_and_nothing_else(device: torch.device, case: Callable[..., Any]) -> None:
    """No activation and no row of the down projection stays alive between forward and backward."""
    c = case(12, 2, 4, 16, 8, device=device, bias=True)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        c.run()
    known = {t.data_ptr() for t in (*c.floats().values(), c.plan.expert_offsets)}
    known |= {c.plan.row_assignment.data_ptr(), c.plan.assignment_row.data_ptr()}
    extra = [tensor for tensor in saved if tensor.data_ptr() not in known]
    assert [tuple(tensor.shape) for tensor in extra] == [(24, 16)]


def test_frozen_operands_cost_nothing(device: torch.device, case: Callable[..., Any]) -> None:
    """Gradients that nobody needs come back empty from the op and as None to autograd."""
    c = case(6, 2, 3, 8, 4, device=device, bias=True)
    full = gradients(c.run(), c.floats(), torch.ones(6, 8, device=device))
    for name in c.floats():
        for other, tensor in c.floats().items():
            tensor.requires_grad_(other == name)
        (grad,) = torch.autograd.grad(c.run(), [c.floats()[name]], torch.ones(6, 8, device=device).double())
        assert torch.equal(grad, full[name]), name
    plan = (c.plan.expert_offsets, c.plan.row_assignment, c.plan.assignment_row)
    tensors = [tensor.detach() for tensor in c.floats().values()]
    y, pre, *_ = ops.experts.experts(*tensors, *plan, c.activation)
    grads = ops.experts.experts_backward(
        torch.ones_like(y), pre, *tensors, *plan, c.activation, [True, True] + [False] * 4, *ALONE
    )
    assert [tuple(grad.shape) for grad in grads] == [(6, 8), (6, 2)] + [(0,)] * 4
    assert torch.equal(grads[0], full["x"]) and torch.equal(grads[1], full["weights"])


def test_nothing_differentiates_through_the_saved_pre_activation(
    device: torch.device, case: Callable[..., Any]
) -> None:
    c = case(6, 2, 3, 8, 4, device=device)
    plan = (c.plan.expert_offsets, c.plan.row_assignment, c.plan.assignment_row)
    y, pre, *_ = ops.experts.experts(c.x, c.weights, c.gate_up, c.down, None, None, *plan, "swiglu")
    assert y.requires_grad and not pre.requires_grad


def test_no_gradient_is_made_up_for_what_only_is_saved(device: torch.device, case: Callable[..., Any]) -> None:
    """Autograd would fill zeros of the size of the pre-activation, and of the casts of fp32 weights."""
    c = case(6, 2, 3, 8, 4, device=device, dtype=torch.bfloat16)
    wide = [w.detach().float().requires_grad_() for w in (c.gate_up, c.down)]
    y = functional.experts(c.x, c.weights, c.plan, *wide)
    made: list[tuple[str, tuple[int, ...]]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and "zeros" in str(func) or "fill" in str(func):
                made.append((str(func), tuple(out.shape)))
            return out

    with torch.autograd.set_multithreading_enabled(False), Watch():
        torch.autograd.grad(y, (c.x, *wide), torch.ones_like(y))
    assert not [shape for _, shape in made if shape in ((12, 8), c.gate_up.shape, c.down.shape)], made


@pytest.mark.parametrize("grouped_mm", [True, False])
def test_autocast_does_not_reach_into_the_op(
    grouped_mm: bool, device: torch.device, case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The op computes in the dtypes that it is given; under autocast the products of the loop would turn bf16."""
    if not grouped_mm:
        monkeypatch.setattr("staticmoe.reference.grouped._has_grouped_mm", lambda rows, num_experts: False)
    c = case(6, 2, 3, 8, 4, device=device, dtype=torch.float32)
    want = c.run()
    want_grads = gradients(want, c.floats(), torch.ones_like(want))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = c.run()
        got_grads = gradients(got, c.floats(), torch.ones_like(want))
    assert got.dtype == torch.float32 and torch.equal(got, want)
    assert all(torch.equal(got_grads[name], want_grads[name]) for name in want_grads)


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("bias", [False, True])
def test_opcheck(activation: str, bias: bool, device: torch.device, case: Callable[..., Any]) -> None:
    c = case(5, 2, 3, 8, 4, device=device, dtype=torch.float32, rows=8, activation=activation, bias=bias)
    plan = (c.plan.expert_offsets, c.plan.row_assignment, c.plan.assignment_row)
    args = (c.x, c.weights, c.gate_up, c.down, c.gate_up_bias, c.down_bias, *plan, activation)
    detached = [a.detach() if isinstance(a, Tensor) else a for a in args]
    # On a GPU a backward overwrites the pre-activation, of which this test looks at the values afterwards.
    traced = "test_aot_dispatch_dynamic"
    others = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops.experts.experts, args, test_utils=(*others, traced) if device.type == "cpu" else others)
    torch.library.opcheck(ops.experts.experts, detached, test_utils=traced)
    y, pre, *_ = ops.experts.experts(*detached)
    for needs in ([True] * 4 + [bias] * 2, [False, True, False, True, False, False]):
        torch.library.opcheck(ops.experts.experts_backward, (torch.randn_like(y), pre, *detached, needs, *ALONE))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"activation": "tanh"}, "activation.*swiglu, geglu, gpt_oss, relu2.*tanh"),
        ({"activation": "relu2"}, r"gate_up.*\(3, 4, 8\).*relu2.*\(3, 8, 8\)"),
        ({"x": torch.zeros(5, 8)}, r"x.*\(6, 8\).*\(5, 8\)"),
        ({"x": torch.zeros(6, 7)}, r"down.*\(3, 7, 4\).*\(3, 8, 4\)"),
        ({"x": torch.zeros(6, 8, dtype=torch.float64)}, "gate_up.*float64.*float32.*cast"),
        ({"down": torch.zeros(3, 8, 4, dtype=torch.bfloat16)}, "down.*float32 as gate_up.*bfloat16.*cast"),
        ({"weights": torch.zeros(6, 3)}, r"topk_weights.*\(6, 2\).*\(6, 3\)"),
        ({"gate_up_bias": torch.zeros(3, 4)}, r"gate_up_bias.*\(3, 8\).*\(3, 4\)"),
        ({"down_bias": torch.zeros(2, 8)}, r"down_bias.*\(3, 8\).*\(2, 8\)"),
    ],
)
def test_refusals_name_value_and_fix(change: dict[str, Any], words: str, case: Callable[..., Any]) -> None:
    c = case(6, 2, 3, 8, 4, device=torch.device("cpu"), dtype=torch.float32)
    for name, value in change.items():
        setattr(c, name, value)
    with pytest.raises(ConfigError, match=words):
        c.run()


@pytest.mark.parametrize("bias", [False, True])
def test_alternating_gate_rows_go_in_as_a_view(
    bias: bool, device: torch.device, case: Callable[..., Any], error: Callable[[Tensor, Tensor], float]
) -> None:
    """Weights stored gate, up, gate, up: the same output, and the gradients lie in the user's own order."""
    c = case(12, 2, 4, 16, 8, device=device, bias=bias)
    want = c.run()
    direction = torch.randn_like(want)
    wanted = gradients(want, c.floats(), direction)

    def alternate(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        return tensor.detach().unflatten(1, (2, 8)).transpose(1, 2).flatten(1, 2).contiguous().requires_grad_()

    def view(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.unflatten(1, (8, 2)).transpose(1, 2)

    weight, added = alternate(c.gate_up), alternate(c.gate_up_bias)
    got = functional.experts(
        c.x, c.weights, c.plan, view(weight), c.down, gate_up_bias=view(added), down_bias=c.down_bias
    )
    assert error(got, want) < 1e-14
    named = {"gate_up": weight, **({"gate_up_bias": added} if bias else {})}
    for name, grad in gradients(got, named, direction).items():
        assert error(grad, alternate(wanted[name]).detach()) < 1e-13, name
