"""Looks at the experts of a ModuleList: what they are called, and why they would not fit into one bank.

Dimensions: E experts, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from staticmoe.errors import ConfigError, ModelError
from staticmoe.integrations.modulelist.names import Names, names_among
from staticmoe.reference import ACTIVATIONS, activate, is_gated

_PROBED_TOKENS = 4
# Of another order of additions, in the dtype of the experts.
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def linears_of(expert: nn.Module, names: Names, where: str) -> list[nn.Linear]:
    """The linear layers of one expert, in the order of the bank.

    Raises:
        ModelError: one is missing or no plain linear layer, or the expert has parameters beside them.
    """
    found = []
    for name in names.linears:
        linear = getattr(expert, name, None)
        if not isinstance(linear, nn.Linear) or type(getattr(linear, "weight", None)) is not nn.Parameter:
            kind = type(linear).__name__ if linear is not None else "nothing"
            raise ModelError(
                f"{where}.{name}: expected an nn.Linear with a plain weight; got {kind}: merge adapters, undo "
                "parametrizations and dequantise first, or pass names="
            )
        if hasattr(linear, "parametrizations") or not linear.weight.dtype.is_floating_point:
            raise ModelError(f"{where}.{name}: expected a plain floating weight; got {linear}: dequantise it first")
        found.append(linear)
    held = {id(parameter) for linear in found for parameter in linear.parameters()}
    extra = [name for name, tensor in expert.named_parameters() if id(tensor) not in held]
    extra += [name for name, _ in expert.named_buffers()]
    if extra:
        raise ModelError(f"{where}: expected no parameters and buffers beside ({names}); got {', '.join(extra[:5])}")
    hooked = [name or "itself" for name, module in expert.named_modules() if _hooks(module)]
    if hooked:
        raise ModelError(
            f"{where}: expected no hooks, which a bank would not call; got some on {', '.join(hooked[:5])}"
        )
    return found


def _hooks(module: nn.Module) -> bool:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for kind in kinds)


def layout_of(
    experts: Sequence[nn.Module], names: Names | None, activation: str
) -> tuple[Names, list[list[nn.Linear]]]:
    """Names and linear layers of all experts, once they fit into one bank.

    Raises:
        ConfigError: an unknown activation, no experts, or unknown names.
        ModelError: experts that do not fit.
    """
    if activation not in ACTIVATIONS:
        raise ConfigError(f"activation: expected one of {', '.join(ACTIVATIONS)}; got {activation!r}")
    if len(experts) == 0:
        raise ConfigError("experts: expected at least one; got none")
    gated = is_gated(activation)
    if names is None:
        linears = (name for name, child in experts[0].named_children() if next(child.parameters(), None) is not None)
        names = names_among(linears, gated=gated, where="experts[0]")
    elif (names.gate is not None) != gated:
        raise ConfigError(f"names: expected {'a' if gated else 'no'} gate for {activation!r}; got {names!r}")
    rows = [linears_of(expert, names, f"experts[{number}]") for number, expert in enumerate(experts)]
    _refuse_differences(rows, names)
    _refuse_shared(rows, names)
    return names, rows


def _refuse_differences(rows: list[list[nn.Linear]], names: Names) -> None:
    """Every expert is like the first, and within one the layers fit each other."""
    for number, row in enumerate(rows):
        for name, linear, first in zip(names.linears, row, rows[0], strict=True):
            where = f"experts[{number}].{name}"
            for what in ("shape", "dtype", "device", "requires_grad"):
                got, wanted = getattr(linear.weight, what), getattr(first.weight, what)
                if got != wanted:
                    raise ModelError(f"{where}.weight: expected {what} {wanted} as experts[0]; got {got}")
            if (linear.bias is None) != (rows[0][0].bias is None):
                raise ModelError(f"{where}: expected biases in all linear layers or in none; got both kinds")
    *inner, down = rows[0]
    shapes = [tuple(linear.weight.shape) for linear in rows[0]]
    if len(set(shapes[:-1])) > 1 or shapes[-1] != shapes[0][::-1]:
        wanted = "[I,H] and [H,I]" if len(inner) == 1 else "[I,H], [I,H] and [H,I]"
        raise ModelError(f"experts[0]: expected weights {wanted} in ({names}); got {', '.join(map(str, shapes))}")
    for what in ("dtype", "device"):
        kinds = {getattr(linear.weight, what) for linear in rows[0]}
        if len(kinds) > 1:
            raise ModelError(f"experts[0]: expected one {what} in ({names}); got {', '.join(sorted(map(str, kinds)))}")
    if len({linear.weight.requires_grad for linear in inner}) > 1:
        raise ModelError(f"experts[0]: expected gate and up to train alike, as they become one; got ({names}) mixed")


def _refuse_shared(rows: list[list[nn.Linear]], names: Names) -> None:
    """A bank would part what experts share."""
    owners: dict[int, str] = {}
    for number, row in enumerate(rows):
        for name, linear in zip(names.linears, row, strict=True):
            for part, tensor in linear.named_parameters():
                where = f"experts[{number}].{name}.{part}"
                other = owners.setdefault(id(tensor), where)
                if other != where:
                    raise ModelError(
                        f"{where}: expected a parameter of its own; got that of {other}: a bank would part them"
                    )


def probe(experts: Sequence[nn.Module], rows: list[list[nn.Linear]], activation: str) -> None:
    """Call each expert on a few tokens and compare with what a bank computes.

    Raises:
        ModelError: they differ, with the activation that would agree, if one does.
    """
    weight = rows[0][0].weight
    if weight.is_meta:
        return
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_PROBED_TOKENS, weight.shape[1], generator=generator).to(weight)
    with torch.no_grad(), torch.random.fork_rng(devices=[weight.device] if weight.is_cuda else []):
        for number, (expert, row) in enumerate(zip(experts, rows, strict=True)):
            try:
                theirs = expert(x)
            except Exception as error:
                raise ModelError(
                    f"experts[{number}]: expected a forward of one [T,H] tensor; got {type(error).__name__}: {error}: "
                    "pass probe_experts=False if it takes more and computes the same"
                ) from error
            if not _agrees(theirs, _computed(row, x, activation)):
                others = [name for name in ACTIVATIONS if is_gated(name) == is_gated(activation)]
                fits = [name for name in others if _agrees(theirs, _computed(row, x, name))]
                fix = f"pass activation={fits[0]!r}" if fits else "names= may be in another order, or it does more"
                raise ModelError(f"experts[{number}]: expected {activation!r} of its layers; got other values: {fix}")


def _computed(row: list[nn.Linear], x: Tensor, activation: str) -> Tensor:
    *inner, down = row
    return down(activate(torch.cat([linear(x) for linear in inner], dim=-1), activation).to(x.dtype))


def _agrees(theirs: object, ours: Tensor) -> bool:
    if not isinstance(theirs, Tensor) or theirs.shape != ours.shape:
        return False
    error = (theirs.double() - ours.double()).norm() / ours.double().norm().clamp(min=1e-30)
    return bool(error <= _TOLERANCE.get(ours.dtype, 5e-2))
