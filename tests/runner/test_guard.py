"""The device's guard: what withholds, vetoes, halts and dooms a step, each by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from staticmoe import Reason, RunnerConfig, StaticMoE, StaticMoERunner
from staticmoe.config import CapacityPolicy
from staticmoe.runner.guard import DeviceGuard, GuardPolicy
from staticmoe.runner.participants import StepBinding

OVERFLOW = int(Reason.CAPACITY_OVERFLOW)
ONE = torch.ones(())


def guard_of(overflow: str, device: torch.device) -> DeviceGuard:
    return DeviceGuard(GuardPolicy.of(RunnerConfig(overflow=overflow)), device)


def decide(guard: DeviceGuard, *, reasons: int = 0) -> tuple[float, ...]:
    """One step with these reasons: veto, halted, doomed, steps committed so far."""
    guard.begin()
    doomed = float(guard.doomed)
    guard.reasons.fill_(reasons)
    one = ONE.to(guard.veto.device)
    guard.decide(one, one)
    return float(guard.veto), float(guard.halted), doomed, int(guard.committed)


@pytest.mark.parametrize(
    ("overflow", "first", "second"),
    [("rerun", (1, 1, 0, 0), (1, 1, 1, 0)), ("raise", (1, 1, 0, 0), (1, 1, 1, 0)),
     ("skip", (1, 0, 0, 0), (0, 0, 0, 1)), ("drop", (0, 0, 0, 1), (0, 0, 0, 2))],
)  # fmt: skip
def test_an_overflow_and_the_step_behind_it(
    overflow: str, first: tuple[int, ...], second: tuple[int, ...], device: torch.device
) -> None:
    """Sticky where the host has to act: the step behind it is void from its beginning on."""
    guard = guard_of(overflow, device)
    assert decide(guard, reasons=OVERFLOW) == first
    assert decide(guard) == second
    # Only what is run again may be left out.
    assert bool(GuardPolicy.of(RunnerConfig(overflow=overflow)).dooms) == (overflow == "rerun")


def test_withheld_steps_run_whole_and_commit_nothing(device: torch.device) -> None:
    """Vetoed and not doomed; an overflow among them leaves no halt behind, and a halt of before stays."""
    guard = guard_of("rerun", device)
    with guard.withholding():
        assert decide(guard) == (1, 0, 0, 0)
        decide(guard, reasons=OVERFLOW)
    assert decide(guard) == (0, 0, 0, 1)
    decide(guard, reasons=OVERFLOW)
    with guard.withholding():
        pass
    assert float(guard.halted) == 1 and int(guard.committed) == 1


class Launches(TorchDispatchMode):
    """Names of the operations that run, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("condition", [False, True])
def test_what_a_layer_says_in_each_step_takes_few_launches(condition: bool, device: torch.device) -> None:
    """A launch is two microseconds of each layer in each step."""
    counted = torch.zeros(4, dtype=torch.int64, device=device)
    reasons = torch.full((), 4, dtype=torch.int64, device=device)
    binding = StepBinding({"kept": counted}, reasons, torch.zeros((), device=device), CapacityPolicy())
    binding.dooming = OVERFLOW
    flag, kept = torch.tensor(condition, device=device), torch.ones(4, dtype=torch.int32, device=device)
    with Launches() as launches:
        binding.add("kept", kept)
        binding.flag(OVERFLOW, flag)
        binding.flag(2, flag)
    assert launches.names == ["add_", "mul", "bitwise_or_", "masked_fill_", "mul", "bitwise_or_"]
    assert counted.tolist() == [1, 1, 1, 1] and counted.dtype == torch.int64
    assert int(reasons) == (7 if condition else 4) and reasons.dtype == torch.int64
    assert float(binding.doomed) == condition


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe, self.head = StaticMoE(8, 16, 4, 2), nn.Linear(8, 4)
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.moe(x)
        self.seen.append(float(y.detach().abs().sum()))
        return self.head(y)


def test_the_constructor_tries_out_what_a_step_computes() -> None:
    """A trial of empty plans would check nothing: every iteration of the constructor reaches the experts."""
    model, batch = Model(), {"x": torch.randn(12, 8), "y": torch.randint(4, (12,))}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = RunnerConfig(capture="off", capacity_factor=4.0, capacity_scope="expert", overflow="rerun")
    before = model.head.weight.detach().clone()

    def loss_fn(net: nn.Module, b: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(net(b["x"]), b["y"])

    with StaticMoERunner(model, optimizer, example_batch=batch, loss_fn=loss_fn, config=config) as runner:
        assert len(model.seen) >= 2 and min(model.seen) > 0
        assert torch.equal(model.head.weight, before)
        runner.step(batch)
        runner.synchronize()
        assert not torch.equal(model.head.weight, before)
