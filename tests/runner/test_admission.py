"""What a runner refuses because of what the loss functions hold on to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from staticmoe import ConfigError, RunnerConfig, StaticMoE, StaticMoERunner

BATCH = {"x": torch.ones(4, 8)}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = StaticMoE(8, 16, 4, 2)

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=self.moe(x).square().mean())


def test_a_loss_scaler_is_refused_by_name() -> None:
    """float16's scaler would scale the gradients, and nobody would divide them again; a disabled one does nothing."""
    model = Model()
    scaler = torch.amp.GradScaler("cpu")

    def scaled(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return scaler.scale(net(**batch).loss)

    def build(**options: object) -> StaticMoERunner:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return StaticMoERunner(model, optimizer, example_batch=BATCH, config=RunnerConfig(capture="off"), **options)

    for option in ("loss_fn", "eval_fn"):
        with pytest.raises(ConfigError, match="GradScaler 'scaler'.*bfloat16"):
            build(**{option: scaled})
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with build(loss_fn=scaled) as runner:
        assert float(runner.step(BATCH).loss) > 0
