"""A ModuleList of experts to one bank, and back. Weights are copied bit for bit; no tensor is shared afterwards.

Dimensions: E experts, H hidden, I intermediate.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from staticmoe.errors import ConfigError, ModelError
from staticmoe.integrations.modulelist.layout import layout_of, linears_of, probe
from staticmoe.integrations.modulelist.names import Names, names_among
from staticmoe.integrations.modulelist.states import joined, parted
from staticmoe.moe import StaticMoE
from staticmoe.moe.experts import Experts
from staticmoe.reference import is_gated


def from_modulelist(
    experts: nn.ModuleList | Sequence[nn.Module],
    *,
    names: Names | None = None,
    activation: str = "swiglu",
    probe_experts: bool = True,
) -> Experts:
    """Return `experts` as one bank: gate_up_proj [E,2I,H], down_proj [E,H,I], their values bit for bit.

    Device, dtype, training mode and requires_grad are theirs; weights on the meta device stay there. Build the
    optimizer afterwards: the parameters are new. Both exist until the old ones are let go of.

    Args:
        names: of the linear layers; None finds (w1, w3, w2) or (gate_proj, up_proj, down_proj).
        activation: as of `StaticMoE`.
        probe_experts: call each of them on a few tokens, to see that they compute what the bank will. Not on meta.
    Raises:
        ConfigError: unknown names or activation, no experts.
        ModelError: experts that differ in shape, dtype, device or training, have biases in part, share parameters,
            hold more than these layers, have hooks, or compute something else.
    """
    modules = list(experts)
    names, rows = layout_of(modules, names, activation)
    if probe_experts:
        probe(modules, rows, activation)
    first = rows[0][0]
    hidden, width, biased = first.in_features, first.out_features, first.bias is not None
    with torch.device("meta"):
        bank = Experts(hidden, width, len(rows), activation=activation, bias=biased, dtype=first.weight.dtype)
    for part in ("weight", "bias") if biased else ("weight",):
        tensors = [[getattr(linear, part) for linear in row] for row in rows]
        suffix = "" if part == "weight" else "_bias"
        for name, trains, tensor in zip(
            ("gate_up_proj", "down_proj"), (tensors[0][0].requires_grad, tensors[0][-1].requires_grad), joined(tensors),
            strict=True,
        ):  # fmt: skip
            setattr(bank, name + suffix, nn.Parameter(tensor, requires_grad=trains))
    return bank.train(experts[0].training)


def layer_from(
    experts: nn.ModuleList | Sequence[nn.Module],
    router_weight: Tensor,
    top_k: int,
    *,
    names: Names | None = None,
    activation: str = "swiglu",
    probe_experts: bool = True,
    **options: Any,
) -> StaticMoE:
    """Return a `StaticMoE` with these experts and the router weight [E,H], which it keeps in fp32.

    Args:
        options: others of `StaticMoE`; what the old block's router does is not known here: see `check`.
        names, activation, probe_experts: as of `from_modulelist`.
    Raises:
        ConfigError: a router weight of another shape, or as `from_modulelist` and `StaticMoE`.
        ModelError: as `from_modulelist`.
    """
    bank = from_modulelist(experts, names=names, activation=activation, probe_experts=probe_experts)
    count, hidden, width = bank.down_proj.shape
    if tuple(router_weight.shape) != (count, hidden):
        raise ConfigError(f"router_weight: expected [E,H] = {(count, hidden)}; got {tuple(router_weight.shape)}")
    biased = bank.gate_up_proj_bias is not None
    layer = StaticMoE(
        hidden, width, count, top_k, activation=activation, bias=biased, device=bank.down_proj.device,
        dtype=bank.down_proj.dtype, **options,
    )  # fmt: skip
    layer.experts = bank
    layer.router.weight = nn.Parameter(
        router_weight.detach().to(torch.float32, copy=True), requires_grad=router_weight.requires_grad
    )
    return layer.train(experts[0].training)


def to_modulelist(bank: Experts, *, like: nn.Module, names: Names | None = None) -> nn.ModuleList:
    """Return the experts of `bank` as a ModuleList of copies of `like`, with its values bit for bit.

    Args:
        like: an expert of these names and shapes; its own values do not matter, so it may be on the meta device.
        names: as of `from_modulelist`.
    Raises:
        ConfigError: unknown names.
        ModelError: `like` has other layers, shapes or biases.
    """
    gated = is_gated(bank.activation)
    if names is None:
        children = (name for name, child in like.named_children() if next(child.parameters(), None) is not None)
        names = names_among(children, gated=gated, where="like")
    for linear, tensor in zip(linears_of(like, names, "like"), _of_expert(bank, "", 0, gated), strict=True):
        if linear.weight.shape != tensor.shape or (linear.bias is None) != (bank.down_proj_bias is None):
            raise ModelError(
                f"like: expected a layer of {tuple(tensor.shape)} with biases as the bank has; got {linear}"
            )
    experts = nn.ModuleList()
    for number in range(bank.down_proj.shape[0]):
        expert = copy.deepcopy(like)
        linears = linears_of(expert, names, "like")
        for part, suffix in (("weight", ""), ("bias", "_bias")):
            if getattr(bank, f"down_proj{suffix}") is None:
                continue
            trains = [getattr(bank, f"{name}{suffix}").requires_grad for name in ("gate_up_proj", "down_proj")]
            for place, (linear, tensor) in enumerate(
                zip(linears, _of_expert(bank, suffix, number, gated), strict=True)
            ):
                last = place == len(linears) - 1
                setattr(linear, part, nn.Parameter(tensor.clone(), requires_grad=trains[last]))
        experts.append(expert)
    return experts.train(bank.training)


def bank_paths(model: nn.Module) -> list[str]:
    """Dotted paths of all banks in `model`, "" for itself: where `to_banks` and the others convert."""
    return [path for path, module in model.named_modules() if isinstance(module, Experts)]


def _of_expert(bank: Experts, suffix: str, number: int, gated: bool) -> list[Tensor]:
    gate_up, down = getattr(bank, f"gate_up_proj{suffix}"), getattr(bank, f"down_proj{suffix}")
    return parted(gate_up.detach()[number], down.detach()[number], gated=gated)
