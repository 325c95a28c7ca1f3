"""The same 100 steps captured, uncaptured and by a plain loop: losses, parameters, buffers, optimizer state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from staticmoe import MicroBatches, RunnerConfig, StaticMoE, StaticMoERunner

VOCABULARY = 29
Same = Callable[[Any, Any], None]


class Block(nn.Module):
    """Everything that a step must repeat: dropout, batch statistics, routing with a bias and an auxiliary loss."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.norm = nn.BatchNorm1d(16)
        self.moe = StaticMoE(16, 24, 4, 2, balancing_bias_rate=1e-2, router_aux_loss_coef=0.01, router_z_loss_coef=1e-3)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.embedding(x).flatten(0, 1)).view(*x.shape, 16)
        return self.head(h + self.dropout(self.moe(h)))


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(batch["x"])
    loss = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())
    return loss, {"logit_max": logits.max()}


def batch_of(step: int, micro: int = 0) -> dict[str, Tensor]:
    """Skewed: which tokens there are drifts with the step, so that the counts of each expert do too."""
    generator = torch.Generator().manual_seed(1000 * step + micro)
    high = 2 + step % (VOCABULARY - 2)
    x = torch.randint(high, (3, 8), generator=generator)
    return {"x": x, "y": (x * 3 + 1) % VOCABULARY}


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "sgd nesterov": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


def train(
    capture: str, steps: int, *, device: str, optimizer: str = "adamw", micro: int = 1, **options: Any
) -> dict[str, Any]:
    """Run `steps` steps and return all that they left behind."""
    torch.manual_seed(5)
    model = Block().to(device)
    chosen = OPTIMIZERS[optimizer](model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(chosen, lambda n: 1.0 / (1.0 + 0.1 * n))

    def step_input(step: int) -> Any:
        return batch_of(step) if micro == 1 else MicroBatches([batch_of(step, m) for m in range(micro)])

    config = RunnerConfig(capture=capture, max_grad_norm=0.5, gradient_accumulation_steps=micro, **options)
    with StaticMoERunner(model, chosen, example_batch=step_input(0), loss_fn=loss_fn, config=config) as runner:
        results = []
        for step in range(steps):
            results.append(runner.step(step_input(step)))
            schedule.step()
        evaluation = runner.evaluate(batch_of(7))
        return {
            "losses": [result.loss for result in results],
            "norms": [result.grad_norm for result in results],
            "metrics": [result.metrics for result in results],
            "routed": [result.moe["moe"].routed for result in results],
            "evaluation": (evaluation.loss, evaluation.metrics),
            "model": copy.deepcopy(model.state_dict()),
            "optimizer": copy.deepcopy(chosen.state_dict()),
            "telemetry": runner.telemetry()["moe"],
        }


def device_of(captured: str) -> str:
    return "cuda" if captured == "cuda" else "cpu"


def test_a_hundred_steps_are_bitwise_the_uncaptured_ones(captured: str, assert_same: Same) -> None:
    """Dropout, batch statistics, clip, schedule, balancing bias, auxiliary losses, AdamW, an evaluation."""
    device = device_of(captured)
    replayed, plain = train(captured, 100, device=device), train("off", 100, device=device)
    assert_same(replayed, plain)
    assert replayed["losses"][-1] < 0.7 * replayed["losses"][0], "a run that learns nothing compares little"
    assert len({tuple(counts) for counts in replayed["routed"]}) > 50, "equal counts in every batch would prove nothing"


@pytest.mark.parametrize("optimizer", ["adam amsgrad", "sgd nesterov", "adagrad"])
@pytest.mark.parametrize("micro", [1, 3])
def test_other_optimizers_and_accumulation_too(captured: str, assert_same: Same, optimizer: str, micro: int) -> None:
    """The same with each optimizer, one and three micro-batches."""
    if captured == "cuda" and optimizer == "adagrad":
        pytest.skip("torch has no fused Adagrad on a GPU; it is refused")
    options: dict[str, Any] = {"device": device_of(captured), "optimizer": optimizer, "micro": micro}
    assert_same(train(captured, 12, max_in_flight=3, **options), train("off", 12, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"capacity_factor": 0.6, "overflow": "drop"},
        {"capacity_factor": 0.6, "overflow": "drop", "renormalize_drops": True},
        {"autocast": torch.bfloat16},
    ],
)
def test_capacity_and_autocast_too(captured: str, assert_same: Same, options: dict[str, Any]) -> None:
    """With drops, and in bf16."""
    options = {**options, "device": device_of(captured)}
    replayed, plain = train(captured, 20, **options), train("off", 20, **options)
    assert_same(replayed, plain)
    assert (sum(replayed["telemetry"]["moe"]["dropped"]) > 0) is ("capacity_factor" in options)


def test_without_randomness_a_step_is_the_users_own_loop() -> None:
    """No dropout: the plain PyTorch loop with the same optimizer, the aux losses added by hand."""
    torch.manual_seed(1)
    model, steps = Block(dropout=0.0), 10
    # The plain loop has nobody to move the bias.
    model.moe.router.balancing_bias_rate = 0.0
    mine = copy.deepcopy(model)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        loss, _ = loss_fn(model, batch_of(step))
        terms = model.moe.router_losses()
        total = loss + 0.01 * terms["aux_loss"] + 1e-3 * terms["z_loss"]
        plain.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        plain.step()
        losses.append(loss.item())
    chosen = torch.optim.AdamW(mine.parameters(), lr=1e-2)
    with StaticMoERunner(
        mine, chosen, example_batch=batch_of(0), loss_fn=loss_fn, config=RunnerConfig(max_grad_norm=0.5)
    ) as runner:
        results = [runner.step(batch_of(step)) for step in range(steps)]
        assert [result.loss for result in results] == pytest.approx(losses, rel=1e-4)
        for (name, got), want in zip(mine.state_dict().items(), model.state_dict().values(), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5, msg=name)


def test_a_copy_or_pickle_of_a_wrapped_model_is_free(tmp_path: Any, assert_same: Same) -> None:
    """deepcopy and torch.save of a wrapped model carry neither the runner nor its binding."""
    model = Block()
    with StaticMoERunner(
        model, torch.optim.SGD(model.parameters(), lr=0.1), example_batch=batch_of(0), loss_fn=loss_fn
    ) as runner:
        runner.step(batch_of(0))
        runner.synchronize()
        twin = copy.deepcopy(model)
        torch.save(model, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        for other in (twin, loaded):
            assert_same(dict(other.state_dict()), dict(model.state_dict()))
            optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
            with StaticMoERunner(other, optimizer, example_batch=batch_of(0), loss_fn=loss_fn) as second:
                assert second.step(batch_of(1)).loss > 0
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in Block().named_buffers()]
