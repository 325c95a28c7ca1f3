"""A parameter that was frozen with a gradient still in it stays where it is, whichever adapter runs the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from staticmoe import RunnerConfig, StaticMoE, StaticMoERunner
from staticmoe.optim import AdamW

OPTIMIZERS: dict[str, Any] = {
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "select": lambda p: torch.optim.RMSprop(p, lr=1e-2),
    "table": lambda p: AdamW(p, lr=1e-2, weight_decay=0.1),
    "outside": lambda p: torch.optim.RMSprop(p, lr=1e-2),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.moe = nn.Linear(8, 8), StaticMoE(8, 12, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(self.first(x)).square().mean()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("capture", ["emulate", "off", *(["cuda"] if torch.cuda.is_available() else [])])
def test_a_stale_gradient_moves_nothing(name: str, capture: str) -> None:
    """Two eager steps, then `first` is frozen and its gradient forgotten there; the rest trains on."""
    device = torch.device("cuda" if capture == "cuda" else "cpu")
    model, batch = Model().to(device), {"x": torch.randn(6, 8)}
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(batch["x"].to(device)).backward()
        optimizer.step()
    model.first.requires_grad_(False)
    stale = model.first.weight.grad
    assert stale is not None and stale.any()
    before = model.first.weight.clone(), model.moe.experts.down_proj.detach().clone()
    scope = "forward_backward" if name == "outside" else "iteration"
    config = RunnerConfig(capture=capture, capture_scope=scope)
    with StaticMoERunner(
        model, optimizer, example_batch=batch, loss_fn=lambda net, b: net(b["x"]), config=config
    ) as runner:
        for _ in range(3):
            runner.step(batch)
        runner.synchronize()
        assert torch.equal(model.first.weight, before[0])
        assert not torch.equal(model.moe.experts.down_proj, before[1])
    assert model.first.weight.grad is stale
