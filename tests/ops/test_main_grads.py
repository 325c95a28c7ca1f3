"""Weight gradients in fp32: of fp32 weights beside 16-bit tokens, and summed over micro-batches in lent buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from staticmoe import functional
from staticmoe.errors import ConfigError
from staticmoe.functional import MainGrads

NARROW = [torch.bfloat16, torch.float16]


def small(case: Callable[..., Any], device: torch.device, dtype: torch.dtype, **options: Any) -> Any:
    c = case(40, 2, 4, 24, 16, device=device, dtype=dtype, **options)
    for weight in (c.gate_up, c.down):
        weight.data.div_(weight.shape[2] ** 0.5)
    return c


def buffers(c: Any, *, add: bool, fill: float = float("nan")) -> MainGrads:
    wide = torch.float64 if c.gate_up.dtype == torch.float64 else torch.float32
    gate_up, down = (torch.full_like(w, fill, dtype=wide, requires_grad=False) for w in (c.gate_up, c.down))
    return MainGrads(gate_up, down, torch.zeros((), dtype=c.gate_up.dtype, device=c.x.device), add=add)


@pytest.mark.parametrize("dtype", NARROW)
def test_fp32_weights_get_gradients_that_were_never_rounded(
    dtype: torch.dtype, device: torch.device, case: Callable[..., Any], error: Callable[[Tensor, Tensor], float]
) -> None:
    """The output and the tokens' gradient are those of cast weights; the weights' are fp32 and rounded once give them.

    Sums of many products in fp32 differ in their last bits where a product is done otherwise; 16 bits hold 8 or 11.
    """
    c = small(case, device, dtype)
    wide = [w.detach().float().requires_grad_() for w in (c.gate_up, c.down)]
    direction = torch.randn_like(c.x)
    plain = functional.experts(c.x, c.weights, c.plan, c.gate_up, c.down)
    want = torch.autograd.grad(plain, (c.x, c.weights, c.gate_up, c.down), direction)
    got_y = functional.experts(c.x, c.weights, c.plan, *wide)
    got = torch.autograd.grad(got_y, (c.x, c.weights, *wide), direction)
    assert torch.equal(got_y, plain)
    assert all(torch.equal(a, b) for a, b in zip(got[:2], want[:2], strict=True))
    for mine, rounded in zip(got[2:], want[2:], strict=True):
        assert mine.dtype == torch.float32
        assert error(mine.to(dtype), rounded) < 2 * torch.finfo(dtype).eps
        assert not torch.equal(mine.to(dtype).float(), mine)


def test_the_casts_are_what_is_saved(device: torch.device, case: Callable[..., Any]) -> None:
    """Not the fp32 weights, and each cast once."""
    c = small(case, device, torch.bfloat16)
    wide = [w.detach().float().requires_grad_() for w in (c.gate_up, c.down)]
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        functional.experts(c.x, c.weights, c.plan, *wide)
    weights = [tensor for tensor in saved if tensor.shape in (c.gate_up.shape, c.down.shape)]
    assert [w.dtype for w in weights] == [torch.bfloat16] * 2


@pytest.mark.parametrize("dtype", [*NARROW, torch.float32, torch.float64])
def test_the_first_stores_and_later_ones_add(
    dtype: torch.dtype, device: torch.device, case: Callable[..., Any], error: Callable[[Tensor, Tensor], float]
) -> None:
    """Two backwards into one buffer of NaN; autograd sees zeros that occupy nothing, and other gradients unchanged."""
    c = small(case, device, dtype)
    one, two = torch.randn_like(c.x), torch.randn_like(c.x)
    main = buffers(c, add=False)
    inputs = (c.x, c.weights, c.gate_up, c.down)
    plain = torch.autograd.grad(functional.experts(c.x, c.weights, c.plan, c.gate_up, c.down), inputs, one)
    y = functional.experts(c.x, c.weights, c.plan, c.gate_up, c.down, main_grads=main)
    got = torch.autograd.grad(y, inputs, one)
    assert all(torch.equal(a, b) for a, b in zip(got[:2], plain[:2], strict=True))
    for seen, weight in zip(got[2:], (c.gate_up, c.down), strict=True):
        assert seen.shape == weight.shape and seen.dtype == weight.dtype
        assert not seen.any() and seen.data_ptr() == main.seen.data_ptr()
    eps = torch.finfo(dtype).eps
    assert error(main.gate_up.to(dtype), plain[2]) < 2 * eps and error(main.down.to(dtype), plain[3]) < 2 * eps
    first = main.gate_up.clone(), main.down.clone()
    added = MainGrads(main.gate_up, main.down, main.seen, add=True)
    torch.autograd.grad(
        functional.experts(c.x, c.weights, c.plan, c.gate_up, c.down, main_grads=added), (c.gate_up, c.down), two
    )
    alone = buffers(c, add=False)
    torch.autograd.grad(
        functional.experts(c.x, c.weights, c.plan, c.gate_up, c.down, main_grads=alone), (c.gate_up, c.down), two
    )
    assert torch.equal(main.gate_up, first[0] + alone.gate_up) and torch.equal(main.down, first[1] + alone.down)


def test_an_expert_without_rows_stores_zeros_and_adds_nothing(device: torch.device, case: Callable[..., Any]) -> None:
    ids = torch.randint(0, 3, (40, 1)).repeat(1, 2)
    ids[:, 1] = (ids[:, 1] + 1) % 3
    for add, fill, want in ((False, float("nan"), 0.0), (True, 7.0, 7.0)):
        c = small(case, device, torch.float32, ids=ids)
        main = buffers(c, add=add, fill=fill)
        y = functional.experts(c.x, c.weights, c.plan, c.gate_up, c.down, main_grads=main)
        torch.autograd.grad(y.sum(), c.gate_up)
        assert (main.gate_up[3] == want).all()


def test_a_graph_that_is_kept_can_run_backward_again(device: torch.device, case: Callable[..., Any]) -> None:
    """The gradient of the pre-activation takes its place only where nobody can need it again."""
    c = small(case, device, torch.float32)
    y = functional.experts(c.x, c.weights, c.plan, c.gate_up, c.down)
    inputs, direction = (c.x, c.weights, c.gate_up, c.down), torch.randn_like(c.x)
    first, second, last = (torch.autograd.grad(y, inputs, direction, retain_graph=keep) for keep in (True, True, False))
    for again in (second, last):
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_buffer_of_another_shape_is_refused(device: torch.device, case: Callable[..., Any]) -> None:
    c = small(case, device, torch.float32)
    main = buffers(c, add=False)
    wrong = MainGrads(main.gate_up[:, :-1], main.down, main.seen, add=False)
    with pytest.raises(ConfigError, match=r"main_grads.gate_up.*\(4, 32, 24\).*\(4, 31, 24\)"):
        functional.experts(c.x, c.weights, c.plan, c.gate_up, c.down, main_grads=wrong)
