"""`capture_scope="forward_backward"`: any optimizer, stepped by the host on the graph's gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from staticmoe import OptimizerError, RunnerConfig, StaticMoE, StaticMoERunner


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.moe = nn.Linear(8, 8), StaticMoE(8, 12, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(self.first(x)).square().mean()


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]) * batch["s"]


def batch_of(step: int, s: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(6, 8, generator=generator) + step % 3, "s": torch.tensor(s)}


OPTIMIZERS: dict[str, Any] = {
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "sgd dampening": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.5),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("capture", ["emulate", "off"])
def test_every_optimizer_walks_as_in_a_plain_loop(capture: str, name: str) -> None:
    """Betas, rates and state live on the host, and a change of an option needs no capture."""
    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)
    optimizer, other = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](plain.parameters())
    config = RunnerConfig(capture=capture, capture_scope="forward_backward", max_grad_norm=0.5)
    with StaticMoERunner(model, optimizer, example_batch=batch_of(0), loss_fn=loss_fn, config=config) as runner:
        for step in range(8):
            for one in (optimizer, other):
                one.param_groups[0]["lr"] = 1e-3 / (1 + step)
                one.param_groups[0]["weight_decay"] = 0.01 * step
            result = runner.step(batch_of(step))
            loss = loss_fn(plain, batch_of(step))
            other.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            other.step()
            assert result.loss == pytest.approx(loss.item(), rel=1e-5)
        for got, want in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
        assert all(parameter.grad is None for parameter in model.parameters())


def test_a_vetoed_step_is_not_applied() -> None:
    """The host learns of the veto before the optimizer steps: parameters and state stay bitwise."""
    model = Model()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
    config = RunnerConfig(capture_scope="forward_backward")
    with StaticMoERunner(model, optimizer, example_batch=batch_of(0), loss_fn=loss_fn, config=config) as runner:
        runner.step(batch_of(0))
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
        result = runner.step(batch_of(1, float("nan")))
        assert result.skipped and runner.telemetry()["skipped"] == 1
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[0][name]), name
        for number, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                assert torch.equal(value, before[1][number][key]), key
        runner.step(batch_of(2))
        assert not torch.equal(model.first.weight, before[0]["first.weight"])


def test_an_optimizer_that_runs_the_model_itself_is_refused() -> None:
    """A closure would run the model outside the graph."""
    model = Model()
    optimizer = torch.optim.LBFGS(model.parameters())
    config = RunnerConfig(capture_scope="forward_backward")
    with pytest.raises(OptimizerError, match="closure"):
        StaticMoERunner(model, optimizer, example_batch=batch_of(0), loss_fn=loss_fn, config=config)
