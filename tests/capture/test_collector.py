"""What `gc.freeze()` has hidden is found, and is hidden again afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from staticmoe import RunnerConfig, StaticMoE, StaticMoERunner
from staticmoe.capture import collector
from staticmoe.capture.collector import thawed

# The suite has runners told that nothing is frozen while a test runs.
HAS_FROZEN = collector.has_frozen


@pytest.fixture
def stays_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test has frozen stays so, as what the suite itself froze does; and a runner is told of it."""
    monkeypatch.setattr(collector, "has_frozen", HAS_FROZEN)
    yield
    gc.freeze()


@pytest.mark.usefixtures("stays_frozen")
def test_frozen_objects_are_listed_within_and_not_after() -> None:
    hidden = [torch.zeros(1)]
    gc.freeze()
    assert not any(one is hidden for one in gc.get_objects())
    with thawed():
        assert any(one is hidden for one in gc.get_objects()) and not gc.isenabled()
    assert not any(one is hidden for one in gc.get_objects()) and gc.isenabled()


@pytest.mark.usefixtures("stays_frozen")
def test_pythons_own_frozen_objects_freeze_nothing_else() -> None:
    """Python has some hundred from its start; that must not end in all that is alive being kept for ever."""
    gc.unfreeze()
    fresh = [torch.zeros(1)]
    with thawed():
        pass
    assert any(one is fresh for one in gc.get_objects())


def scaled(factor: float) -> Any:
    def apply(x: Tensor) -> Tensor:
        return x * factor

    def change(value: float) -> None:
        nonlocal factor
        factor = value

    return apply, change


@pytest.mark.usefixtures("stays_frozen")
def test_a_frozen_model_is_captured_again_and_watched() -> None:
    """As loops do that freeze after their first step: a tensor that is no buffer, and a variable of a helper."""
    apply, change = scaled(1.0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe, self.table = StaticMoE(8, 8, 4, 2), torch.full((8,), 2.0)

        def forward(self, x: Tensor) -> Tensor:
            return apply(self.moe(x) * self.table).sum()

    model, batch = Model(), {"x": torch.ones(2, 8)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    gc.freeze()
    config = RunnerConfig(capture="emulate")
    loss_fn = lambda model, batch: model(**batch)  # noqa: E731
    with StaticMoERunner(model, optimizer, example_batch=batch, loss_fn=loss_fn, config=config) as runner:
        first = float(runner.step(batch).loss)
        gc.freeze()
        change(3.0)
        assert float(runner.step(batch).loss) == pytest.approx(3 * first, rel=1e-6)
