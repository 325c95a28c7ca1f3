"""A step that will be run again: the layer's experts do nothing from there on, and its counts stay true."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from staticmoe import Reason
from staticmoe.moe import StaticMoE

DOOMING = int(Reason.CAPACITY_OVERFLOW)


def layer_on(device: torch.device) -> StaticMoE:
    return StaticMoE(8, 16, 4, 2, device=device, dtype=torch.float32)


def forward(layer: StaticMoE, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Output, and the gradients of the experts' weights."""
    y = layer(x)
    weights = [layer.experts.gate_up_proj, layer.experts.down_proj]
    return y.detach(), list(torch.autograd.grad(y.square().sum(), weights))


def test_a_doomed_layer_gives_zeros_and_counts(device: torch.device, bind: Callable[..., Any]) -> None:
    """Output and weight gradients are exactly zero; routed and kept are those of the undoomed forward."""
    layer, x = layer_on(device), torch.randn(6, 8, device=device)
    counts = []
    for doomed in (0.0, 1.0):
        binding = bind(layer)
        binding.dooming = DOOMING
        binding.doomed.fill_(doomed)
        y, grads = forward(layer, x)
        counts.append({name: value.tolist() for name, value in binding.fields.items()})
        assert all(bool(tensor.any()) != bool(doomed) for tensor in (y, *grads))
        layer.bind_step(None)
    assert counts[0] == counts[1] and sum(counts[0]["routed"]) == 12


def test_an_evaluation_is_never_doomed(device: torch.device, bind: Callable[..., Any]) -> None:
    """Nothing dooms it (dooming 0), whatever the flag of the last step says."""
    layer, x = layer_on(device), torch.randn(6, 8, device=device)
    want = layer(x)
    binding = bind(layer)
    binding.doomed.fill_(1.0)
    assert want.any() and torch.equal(layer(x), want)


@pytest.mark.parametrize("dooming", [0, DOOMING])
def test_an_overflow_dooms_itself_and_what_follows(
    dooming: int, device: torch.device, bind: Callable[..., Any]
) -> None:
    """Where it leads to a rerun: this layer and the next do nothing. Where it drops: what fits is computed."""
    first, second = layer_on(device), layer_on(device)
    x = torch.randn(6, 8, device=device)
    narrow, wide = bind(first, factor=0.5), bind(second)
    wide.doomed = narrow.doomed
    narrow.dooming = wide.dooming = dooming
    y, z = first(x), second(x)
    assert int(narrow.reasons) == DOOMING
    assert bool(narrow.doomed) == bool(dooming)
    assert bool(y.any()) != bool(dooming) and bool(z.any()) != bool(dooming)
    assert int(narrow.fields["kept"].sum()) == 6 and int(narrow.fields["routed"].sum()) == 12


def test_where_nothing_overflows_dooming_changes_no_bit(device: torch.device, bind: Callable[..., Any]) -> None:
    """The same layer with and without: output and gradients."""
    layer, x = layer_on(device), torch.randn(6, 8, device=device)
    other = copy.deepcopy(layer)
    binding = bind(layer, factor=4.0, scope="expert")
    binding.dooming = DOOMING
    bind(other, factor=4.0, scope="expert")
    (y, grads), (want, wants) = forward(layer, x), forward(other, x)
    assert torch.equal(y, want) and all(torch.equal(a, b) for a, b in zip(grads, wants, strict=True))
    assert not binding.doomed.any()
