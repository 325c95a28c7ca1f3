"""Replayed and uncaptured runs agree bitwise in every shape that users give a model, an optimizer and a batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from staticmoe import MicroBatches, RunnerConfig, StaticMoE, StaticMoERunner
from staticmoe.optim import AdamW

VOCABULARY = 32


class Model(nn.Module):
    """Tied embedding, two kinds of layer, dropout; returns an object with a loss, as Hugging Face models do."""

    def __init__(self, *, tied: bool = True, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.wide = StaticMoE(16, 24, 4, 2, router_aux_loss_coef=0.01, shared_intermediate_size=8, bias=True)
        self.single = StaticMoE(16, 24, 6, 1, norm_topk_prob=False, score_function="sigmoid")
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.dropout, self.checkpointed = nn.Dropout(0.2), checkpointed

    def block(self, h: Tensor) -> Tensor:
        return h + self.dropout(self.single(F.gelu(h) + self.wide(h)))

    def forward(self, x: Tensor, labels: Tensor, scale: float = 1.0) -> SimpleNamespace:
        h = self.embedding(x)
        h = checkpoint(self.block, h, use_reentrant=False) if self.checkpointed else self.block(h)
        logits = self.head(h) * scale
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100))


def batch_of(step: int, batch: int = 3, sequence: int = 7) -> dict[str, Any]:
    """Padding, skew and a Python number, all other at each step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(4 + 4 * (step % 8), (batch, sequence), generator=generator)
    labels = (x * 5 + 1) % VOCABULARY
    labels[0, step % sequence :] = -100
    return {"x": x, "labels": labels, "scale": 1.0 + 0.1 * (step % 3)}


def frozen() -> nn.Module:
    model = Model()
    model.wide.experts.requires_grad_(False)
    model.embedding.requires_grad_(False)
    return model


def strided() -> nn.Module:
    """Matrices stored by columns: a fused optimizer walks parameter, gradient and moments by one index."""
    model = Model(tied=False)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().contiguous().t()
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def stepped_before(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with state, and a graph of the user's that is still alive."""
    optimizer = adamw(model)
    device = next(model.parameters()).device
    for step in range(3):
        batch = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch_of(step).items()}
        optimizer.zero_grad()
        model.kept = model(**batch).loss  # type: ignore[assignment]
        model.kept.backward()
        optimizer.step()
    return optimizer


def grouped(model: Model) -> torch.optim.Optimizer:
    experts = [*model.wide.parameters(), *model.single.parameters()]
    return AdamW([{"params": [model.embedding.weight], "lr": 1e-3}, {"params": experts, "weight_decay": 0.0}], lr=1e-2)


def schedule(step: int, runner: StaticMoERunner, optimizer: torch.optim.Optimizer) -> None:
    """Every hyper-parameter moves at every step, as some schedulers do."""
    for group in optimizer.param_groups:
        group.update(lr=1e-2 / (step + 1), betas=(0.9 - 0.01 * step, 0.99), weight_decay=0.01 * step)


def narrow(step: int, runner: StaticMoERunner, optimizer: torch.optim.Optimizer) -> None:
    if step == 3:
        runner.set_capacity_factor(0.5)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointed with dropout": {"model": lambda: Model(checkpointed=True)},
    "parameter groups": {"optimizer": grouped},
    "all hyper-parameters scheduled": {"optimizer": grouped, "between": schedule},
    "frozen experts": {"model": frozen},
    "strided parameters": {"model": strided},
    "bf16 parameters": {"model": lambda: Model().to(torch.bfloat16)},
    "optimizer that has stepped": {"optimizer": stepped_before},
    "token mask": {"token_mask": lambda batch: batch["labels"] != -100},
    "several shapes": {
        "example": [batch_of(0), batch_of(0, 2, 5)],
        "batches": lambda step: batch_of(step) if step % 2 else batch_of(step, 2, 5),
    },
    "token-weighted accumulation": {
        "batches": lambda step: MicroBatches([batch_of(2 * step), batch_of(2 * step + 1)]),
        "options": {"gradient_accumulation_steps": 2, "loss_reduction": "tokens"},
    },
    "capacity changed in the run": {
        "between": narrow,
        "options": {"capacity_factor": 1.0, "capacity_scope": "expert", "overflow": "drop"},
    },
    "a batch that is not finite": {
        "batches": lambda step: {**batch_of(step), "scale": float("nan") if step == 4 else 1.0}
    },
    "optimizer outside": {
        "optimizer": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3),
        "options": {"capture_scope": "forward_backward"},
    },
}


def run(case: dict[str, Any], capture: str, device: str) -> dict[str, Any]:
    """Eight steps and two evaluations; all that they left behind."""
    torch.manual_seed(0)
    model = case.get("model", Model)().to(device)
    optimizer = case.get("optimizer", adamw)(model)
    batches, between = case.get("batches", batch_of), case.get("between")
    config = RunnerConfig(capture=capture, max_grad_norm=1.0, **case.get("options", {}))
    with StaticMoERunner(
        model,
        optimizer,
        example_batch=case.get("example", batches(0)),
        token_mask=case.get("token_mask"),
        config=config,
    ) as runner:
        results, evaluations = [], []
        for step in range(8):
            results.append(runner.step(batches(step)))
            if between is not None:
                between(step, runner, optimizer)
            if step % 4 == 3:
                evaluations.append(runner.evaluate(batch_of(100)))
        return {
            "results": [
                (r.loss, r.grad_norm, r.metrics, r.skipped, [m.routed for m in r.moe.values()]) for r in results
            ],
            "evaluations": [(e.loss, e.metrics) for e in evaluations],
            "model": copy.deepcopy(model.state_dict()),
            "optimizer": copy.deepcopy(optimizer.state_dict()["state"]),
        }


@pytest.mark.parametrize("name", CASES)
def test_replayed_is_uncaptured(name: str, captured: str, assert_same: Callable[[Any, Any], None]) -> None:
    """Losses, metrics, counts, evaluations, parameters and optimizer state, bitwise."""
    device = "cuda" if captured == "cuda" else "cpu"
    replayed = run(CASES[name], captured, device)
    assert_same(replayed, run(CASES[name], "off", device))
    assert len({str(result[4]) for result in replayed["results"]}) > 4, "equal counts at each step would prove nothing"
