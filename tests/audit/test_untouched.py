"""An audit leaves parameters, buffers, gradients, optimizer, attributes and random states as they were, bitwise."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from staticmoe import StaticMoE, StaticMoERunner
from staticmoe.audit import audit
from staticmoe.errors import AuditError


class Changing(nn.Module):
    """Changes whatever can be changed in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = StaticMoE(8, 4, 4, 2, balancing_bias_rate=0.01)
        self.norm = nn.BatchNorm1d(8)
        self.calls, self.options, self.kept, self.bank = 0, {"seen": 0}, [], None
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.options["seen"] += 1
        self.kept.append(x * 2)
        self.total = self.total + x.sum().item()
        if self.bank is None:
            self.bank = self.moe.router.weight.detach() * 2
        y = nn.functional.dropout(self.norm(self.moe(x)), 0.5) * random.random() * float(numpy.random.rand())
        return y.square().mean() + 0 * self.bank.sum()


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"])


def given(stepped: bool) -> dict[str, Any]:
    model = Changing()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if stepped:
        model(torch.randn(4, 8)).backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer, "example_batch": {"x": torch.randn(4, 8)}, "loss_fn": loss_fn}


def everything(arguments: dict[str, Any]) -> dict[str, Any]:
    model, optimizer = arguments["model"], arguments["optimizer"]
    return copy.deepcopy(
        {
            "tensors": model.state_dict(),
            "gradients": [parameter.grad for parameter in model.parameters()],
            "optimizer": optimizer.state_dict(),
            "attributes": [model.calls, model.options, model.kept, model.bank, model.training],
            "batch": arguments["example_batch"],
            "torch": torch.get_rng_state(),
        }
    )


def differing(one: Any, other: Any, where: str = "") -> list[str]:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return [] if torch.equal(one, other) else [where]
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [name for key in one for name in differing(one[key], other[key], f"{where}.{key}")]
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [name for n, (a, b) in pairs for name in differing(a, b, f"{where}[{n}]")]
    return [] if one is other or (type(one) is type(other) and one == other) else [where]


def test_the_comparison_bites() -> None:
    arguments = given(stepped=True)
    before = everything(arguments)
    assert differing(before, everything(arguments)) == []
    arguments["model"](torch.randn(4, 8))
    assert {".tensors.total", ".torch", ".attributes[0]"} <= set(differing(before, everything(arguments)))


@pytest.mark.parametrize("stepped", [False, True])
def test_an_audit_changes_nothing(stepped: bool) -> None:
    arguments = given(stepped)
    before, drawn = everything(arguments), (random.getstate(), pickled(numpy.random.get_state(legacy=False)))
    owned = {name: id(tensor) for name, tensor in arguments["model"].named_buffers()}
    report = audit(arguments)
    codes = {finding.code for finding in report.findings}
    expected = {"SM101", "SM201", "SM203", "SM204", "SM205", "SM301", "SM303"}
    # The bank is that of an observed iteration, or one that an eager step has left behind.
    assert codes == expected | {"SM403" if stepped else "SM402"}
    assert differing(before, everything(arguments)) == []
    assert (random.getstate(), pickled(numpy.random.get_state(legacy=False))) == drawn
    assert {name: id(tensor) for name, tensor in arguments["model"].named_buffers()} == owned


def pickled(state: Any) -> str:
    return repr(state["state"]["key"].tolist()) + repr(state["state"]["pos"])


def test_a_refused_runner_changes_no_tensor() -> None:
    """Its Python did run: attributes are the user's own doing."""
    arguments = given(stepped=True)
    arguments["model"].register_buffer("total", torch.zeros(()))
    before = everything(arguments)
    with pytest.raises(AuditError):
        StaticMoERunner(**arguments)
    after = everything(arguments)
    for part in ("gradients", "optimizer", "batch", "torch"):
        assert differing(before[part], after[part], part) == []
    # The forward itself binds `total` anew.
    assert differing(before["tensors"], after["tensors"]) == [".total"]


def test_what_was_audited_can_be_wrapped() -> None:
    """An audit lets go of the model, and leaves no optimizer state that a runner would trip over."""
    model = nn.Sequential(StaticMoE(8, 4, 4, 2), nn.Dropout(0.5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    arguments = {
        "model": model,
        "optimizer": optimizer,
        "example_batch": {"x": torch.randn(4, 8)},
        "loss_fn": lambda model, batch: model(batch["x"]).square().mean(),
    }
    assert audit(arguments).findings == () and not optimizer.state
    with StaticMoERunner(**arguments) as runner:
        losses = [float(runner.step(arguments["example_batch"]).loss) for _ in range(3)]
    assert len(set(losses)) == 3
