"""Compares a block with its experts in a ModuleList with the same block over a bank: outputs, and every gradient."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from staticmoe.errors import ConfigError, ModelError
from staticmoe.integrations.modulelist.convert import bank_paths
from staticmoe.integrations.modulelist.names import Names
from staticmoe.integrations.modulelist.states import to_banks
from staticmoe.moe.experts import Experts
from staticmoe.reference import is_gated

_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 3e-2}


@dataclasses.dataclass(frozen=True)
class BlockCheck:
    """Relative errors of a block over a bank against the old block, in the Frobenius norm.

    Attributes:
        output: of the output.
        input_gradient: of the gradient of x.
        gradients: parameter name -> of its gradient.
    """

    output: float
    input_gradient: float
    gradients: dict[str, float]

    @property
    def worst(self) -> float:
        """The largest."""
        return max(self.output, self.input_gradient, *self.gradients.values())


def check(
    old: nn.Module,
    new: nn.Module,
    x: Tensor,
    *,
    names: Names | None = None,
    renamed: Mapping[str, str] | None = None,
    rtol: float | None = None,
) -> BlockCheck:
    """Run both blocks forward and backward on `x` and compare; gradients of both are afterwards as before.

    The loss is a fixed random projection of the output: of its first floating tensor, where it is several. Both
    blocks must be in one mode and draw nothing at random, or they differ.

    Args:
        names: of the old experts' layers, as of `from_modulelist`.
        renamed: old -> new name of parameters that are called otherwise, such as {"gate.weight": "router.weight"}.
        rtol: None takes 1e-5 for fp32, 3e-2 for bf16.
    Raises:
        ConfigError: the parameters of the two do not correspond.
        ModelError: an output or a gradient differs by more than `rtol`, or one has a gradient that the other lacks.
    """
    rtol = _TOLERANCE.get(x.dtype, 3e-2) if rtol is None else rtol
    theirs, ours = _gradients(old, x), _gradients(new, x)
    paths = bank_paths(new)
    gated = {is_gated(module.activation) for module in new.modules() if isinstance(module, Experts)}
    if len(gated) != 1:
        raise ConfigError("new: expected banks of one kind, gated or not; got " + ("none" if not gated else "both"))
    expected = to_banks(theirs.of_parameters, paths, names=names, gated=gated.pop())
    expected = {(renamed or {}).get(name, name): gradient for name, gradient in expected.items()}
    differing = sorted(expected.keys() ^ ours.of_parameters.keys())
    if differing:
        raise ConfigError(
            f"new: expected the parameters of old; got a difference in {', '.join(differing[:4])}: renamed="
        )
    found = BlockCheck(
        output=_error(theirs.output, ours.output),
        input_gradient=_error(theirs.of_input, ours.of_input),
        gradients={name: _error(gradient, ours.of_parameters[name]) for name, gradient in expected.items()},
    )
    # Not `>`: NaN is worse than any bound.
    wrong = {
        name: error
        for name, error in {
            "the output": found.output, "the gradient of x": found.input_gradient,
            **{f"the gradient of {name}": error for name, error in found.gradients.items()},
        }.items()
        if not error <= rtol
    }  # fmt: skip
    if wrong:
        listed = ", ".join(f"{name} by {error:.2g}" for name, error in list(wrong.items())[:4])
        raise ModelError(f"new: expected what old computes within {rtol:g}; got a difference in {listed}")
    return found


@dataclasses.dataclass(frozen=True)
class _Outcome:
    output: Tensor
    of_input: Tensor
    of_parameters: dict[str, Tensor]


def _gradients(block: nn.Module, x: Tensor) -> _Outcome:
    """Output and gradients; of what the output does not depend on they are zero."""
    parameters = {name: parameter for name, parameter in block.named_parameters() if parameter.requires_grad}
    given = x.detach().clone().requires_grad_(True)
    with torch.enable_grad(), _seeded(x):
        output = _first(block(given))
        generator = torch.Generator().manual_seed(0)
        projection = torch.randn(output.shape, generator=generator).to(output)
        loss = (output * projection).sum()
        found = torch.autograd.grad(loss, [given, *parameters.values()], allow_unused=True, materialize_grads=True)
    return _Outcome(output.detach(), found[0], dict(zip(parameters, found[1:], strict=True)))


def _seeded(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """The random state is afterwards as before."""
    return torch.random.fork_rng(devices=[x.device] if x.is_cuda else [])


def _first(output: Any) -> Tensor:
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not tensors:
        raise ModelError(f"block: expected an output with a floating tensor; got {type(output).__name__}")
    return tensors[0]


def _error(expected: Tensor, got: Tensor) -> float:
    """|got - expected| / |expected|; the plain distance where nothing is expected."""
    if expected.shape != got.shape:
        return float("inf")
    scale = float(expected.double().norm())
    return float((got.double() - expected.double()).norm()) / (scale or 1.0)
