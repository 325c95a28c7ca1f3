"""Optimizers that cannot skip a step by themselves, inside the graph: stepped, and undone under a veto."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from staticmoe import OptimizerError, RunnerConfig, StaticMoE, StaticMoERunner
from staticmoe.optim.adapters import adapter_for

OPTIMIZERS: dict[str, Any] = {
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True, weight_decay=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5, weight_decay=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2, t0=2),
}
# Without capturable=True, which torch has on a GPU alone, these read their step count on the host.
READ_ON_HOST = ("nadam", "radam", "adamax", "asgd")


def ways() -> list[tuple[str, str]]:
    """(capture, optimizer), on the device that the capture stands for."""
    emulated = [("emulate", name) for name in OPTIMIZERS if name not in READ_ON_HOST]
    plain = [("off", name) for name in OPTIMIZERS]
    return emulated + plain + ([("cuda", name) for name in OPTIMIZERS] if torch.cuda.is_available() else [])


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


def wrap(capture: str, name: str) -> tuple[nn.Module, torch.optim.Optimizer, RunnerConfig]:
    torch.manual_seed(0)
    model = Model().to("cuda" if capture == "cuda" else "cpu")
    return model, OPTIMIZERS[name](model.parameters()), RunnerConfig(capture=capture, max_grad_norm=0.5)


@pytest.mark.parametrize(("capture", "name"), ways())
@pytest.mark.parametrize("stepped", [False, True])
def test_every_optimizer_walks_as_in_a_plain_loop(capture: str, name: str, stepped: bool) -> None:
    """Eight steps with a vetoed one among them; also an optimizer that has stepped before it was wrapped."""
    model, optimizer, config = wrap(capture, name)
    device = next(model.parameters()).device
    plain = copy.deepcopy(model)
    other = OPTIMIZERS[name](plain.parameters())

    def by_hand(net: nn.Module, one: torch.optim.Optimizer, step: int) -> float:
        loss = loss_fn(net, {key: value.to(device) for key, value in batch_of(step).items()})
        one.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        one.step()
        return loss.item()

    if stepped:
        for step in (20, 21):
            by_hand(model, optimizer, step)
            by_hand(plain, other, step)
        optimizer.zero_grad()
    groups = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
    with StaticMoERunner(model, optimizer, example_batch=batch_of(0), loss_fn=loss_fn, config=config) as runner:
        for step in range(8):
            if step == 3:
                assert runner.step(batch_of(9, float("nan"))).skipped
            result = runner.step(batch_of(step))
            assert result.loss == pytest.approx(by_hand(plain, other, step), rel=1e-4)
        for got, want in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
        mine, theirs = optimizer.state_dict()["state"], other.state_dict()["state"]
        for number, state in theirs.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    torch.testing.assert_close(mine[number][key].cpu(), value.cpu(), rtol=1e-3, atol=1e-6, msg=key)
    assert groups == [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("capture", "name"), ways())
def test_a_vetoed_step_leaves_not_one_bit(capture: str, name: str) -> None:
    """Parameters and every tensor of the state, step counts included; the next step moves them."""
    model, optimizer, config = wrap(capture, name)
    with StaticMoERunner(model, optimizer, example_batch=batch_of(0), loss_fn=loss_fn, config=config) as runner:
        runner.step(batch_of(0))
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
        assert runner.step(batch_of(1, float("nan"))).skipped
        for key, value in model.state_dict().items():
            assert torch.equal(value, before[0][key]), key
        for number, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                assert torch.equal(value, before[1][number][key]), key
        runner.step(batch_of(2))
        runner.synchronize()
        assert not torch.equal(model.first.weight, before[0]["first.weight"])


@pytest.mark.parametrize("capture", ["emulate", *(["cuda"] if torch.cuda.is_available() else [])])
def test_a_changed_rate_recaptures_and_says_so(capture: str, caplog: pytest.LogCaptureFixture) -> None:
    """The rate is part of the graph: the change costs a capture, and is applied."""
    model, optimizer, config = wrap(capture, "rmsprop")
    with (
        caplog.at_level(logging.INFO, logger="staticmoe"),
        StaticMoERunner(model, optimizer, example_batch=batch_of(0), loss_fn=loss_fn, config=config) as runner,
    ):
        assert "copies of parameters and optimizer state" in caplog.text
        runner.step(batch_of(0))
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.param_groups[0]["weight_decay"] = 0.0
        runner.synchronize()
        before = model.first.weight.detach().clone()
        runner.step(batch_of(1))
        runner.synchronize()
        # The momentum buffer still moves; the rate of 0 does not apply it.
        assert torch.equal(before, model.first.weight)
        assert "recapturing" in caplog.text and "lr" in caplog.text


@pytest.mark.parametrize("name", READ_ON_HOST)
def test_a_step_count_read_on_the_host_is_refused_by_name(name: str) -> None:
    """On a CPU torch has no capturable form of these; the refusal says what works, and nothing is left changed."""
    model, optimizer, config = wrap("emulate", name)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(OptimizerError, match=f"{type(optimizer).__name__}: .*forward_backward"):
        StaticMoERunner(model, optimizer, example_batch=batch_of(0), loss_fn=loss_fn, config=config)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_what_cannot_be_part_of_a_graph() -> None:
    """A tensor rate is read on the host, and a differentiable step has no in-place form."""
    model = Model()
    with pytest.raises(OptimizerError, match="float"):
        adapter_for(torch.optim.RMSprop(model.parameters(), lr=torch.tensor(1e-3)))
    with pytest.raises(OptimizerError, match="differentiable"):
        adapter_for(torch.optim.RMSprop(model.parameters(), lr=1e-3, differentiable=True))
