"""Which of staticmoe's activations a transformers experts module computes: found by comparing values, not names.

The same formula has many names (GPT-OSS, MiniMax-M3 and the privacy filter each define their own clamp), and one
name many formulas. A wrong guess would still train, so value and derivative are compared on a grid.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from staticmoe.reference import ACTIVATIONS, is_gated
from staticmoe.reference.activation import activate, activation_backward

# Wide enough to meet any clamp, dense where the activations differ from one another.
_TAIL = torch.logspace(1.1, 15, 8, dtype=torch.float64, device="cpu")
_AXIS = torch.cat([-_TAIL, torch.linspace(-11.7, 11.9, 40, dtype=torch.float64, device="cpu"), _TAIL])
# Some modules compute in fp32 whatever they are given; variants of gelu differ by 1e-4 and more.
_RTOL, _ATOL = 2e-5, 1e-6

_found: WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], str | None]] = WeakKeyDictionary()


def activation_of(module: Any) -> str | None:
    """Return the name of the activation that `module` applies between its products; None if it is not one of ours.

    Looked for once, and again when a number or the function that it may depend on has changed.

    Graph-safe: yes. The comparison runs on constants of the CPU and outside of any mode, so that no recording sees
    it; to a compiler its result is a constant.
    """
    act_fn = getattr(module, "act_fn", None)
    key = (type(module), act_fn, *_numbers(module), *_numbers(act_fn))
    known = _found.get(module)
    if known is None or known[0] != key:
        known = (key, _search(module, act_fn))
        _found[module] = known
    return known[1]


def _numbers(owner: Any) -> list[tuple[str, Any]]:
    """The attributes that a formula may depend on."""
    found = getattr(owner, "__dict__", {}).items()
    return [(name, value) for name, value in found if name != "training" and isinstance(value, (int, float, str))]


@torch.compiler.assume_constant_result
def _search(module: Any, act_fn: Any) -> str | None:
    if isinstance(act_fn, nn.Module) and any(True for _ in (*act_fn.parameters(), *act_fn.buffers())):
        # It learns, or may be moved: equal today says nothing about tomorrow.
        return None
    with _disable_current_modes(), torch.inference_mode(False), torch.autocast("cpu", enabled=False):
        names = [name for name in ACTIVATIONS if is_gated(name) == module.has_gate]
        return next((name for name in names if _agrees(module, name)), None)


def _agrees(module: Any, name: str) -> bool:
    """Whether value and derivative of the module's activation are those of `name`."""
    if is_gated(name):
        # Two columns to a half: with one, side by side and interleaved would be the same thing.
        pairs = torch.cartesian_prod(_AXIS, _AXIS).view(-1, 2, 2)
        halves = pairs.transpose(1, 2).flatten(1)
        own = (halves if module.is_concatenated else pairs.flatten(1)).clone().requires_grad_()
    else:
        halves = _AXIS[:, None]
        own = halves.clone().requires_grad_()
    try:
        # What is saved here is not for the hooks of a checkpoint around it, which counts the tensors of its forward.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_same, _same):
            got = module._apply_gate(own) if module.has_gate else module.act_fn(own)
            (slope,) = torch.autograd.grad(got.sum(), own)
    # Any failure of foreign code on so narrow an input only means that it is not one of ours.
    except Exception:
        return False
    want = activate(halves, name)
    want_slope = activation_backward(halves, torch.ones_like(want), name)
    if is_gated(name) and not module.is_concatenated:
        want_slope = want_slope.unflatten(1, (2, -1)).transpose(1, 2).flatten(1)
    return got.shape == want.shape and _close(got, want) and _close(slope, want_slope)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _close(got: Tensor, want: Tensor) -> bool:
    return bool(torch.allclose(got.double(), want.double(), rtol=_RTOL, atol=_ATOL))
