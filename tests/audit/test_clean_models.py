"""No false alarm: the demo's model, a stack with everything that is allowed, evaluation, accumulation, shapes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from staticmoe import DeviceScalars, RunnerConfig, StaticMoE
from staticmoe.audit import audit
from staticmoe.demo.model import DemoLM, ModelConfig
from staticmoe.optim import AdamW


def found(**arguments: Any) -> list[str]:
    return [str(finding) for finding in audit(arguments).findings]


def test_the_demo_model_is_clean() -> None:
    config = dataclasses.replace(ModelConfig.from_depth(2, max_seq_len=16), dropout=0.1)
    model = DemoLM(config)
    ids = torch.randint(256, (2, 16))
    batch = {"tokens": ids, "labels": ids}
    assert found(model=model, optimizer=AdamW(model.parameters()), example_batch=batch) == []


class Layer(nn.Module):
    """Norm, experts, dropout; recomputed where asked for."""

    def __init__(self, recomputed: bool) -> None:
        super().__init__()
        self.norm, self.moe, self.dropout = (
            nn.LayerNorm(8),
            StaticMoE(8, 4, 4, 2, router_z_loss_coef=0.1),
            nn.Dropout(0.1),
        )
        self.recomputed = recomputed

    def _inner(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.moe(self.norm(x)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._inner, x, use_reentrant=False) if self.recomputed else self._inner(x)


class Stack(nn.Module):
    """Tied embedding and head, a lazily made table, a counter in a buffer, layers with and without recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.layers = nn.ModuleList(Layer(recomputed) for recomputed in (False, True))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.table: Tensor | None = None

    def forward(self, ids: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(8, device=ids.device) / 8.0
        self.seen.add_(ids.numel())
        x = self.embedding(ids) + self.table
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def language_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(batch["ids"]).flatten(0, 1)
    labels = batch["ids"].flatten()
    valid = labels != -100
    losses = nn.functional.cross_entropy(logits, labels.clamp(min=0), reduction="none")
    loss = torch.where(valid, losses, 0.0).sum() / valid.sum().clamp(min=1)
    return loss, {"accuracy": (logits.argmax(-1) == labels).float().mean()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"capacity_factor": 1.5, "capacity_scope": "expert", "overflow": "drop", "max_grad_norm": 1.0},
        {"gradient_accumulation_steps": 2, "autocast": torch.bfloat16},
        {"capture_scope": "forward_backward"},
    ],
    ids=["plain", "capacity", "accumulated", "outside"],
)
def test_a_stack_of_layers_is_clean(options: dict[str, Any]) -> None:
    model = Stack()
    ids = torch.randint(16, (2, 4))
    micro = options.get("gradient_accumulation_steps", 1)
    batch = {"ids": ids if micro == 1 else ids.expand(micro, 2, 4).clone()}
    arguments = {"loss_fn": language_loss, "eval_fn": language_loss, "config": RunnerConfig(**options)}
    assert found(model=model, optimizer=torch.optim.AdamW(model.parameters()), example_batch=batch, **arguments) == []


def test_every_declared_shape_and_the_evaluation_are_looked_at() -> None:
    model = Stack()

    def reads_in_short(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = language_loss(model, batch)[0]
        return loss * loss.item() if batch["ids"].shape[1] == 2 else loss

    def reads_in_evaluation(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = language_loss(model, batch)[0]
        return loss if model.training else loss * float(loss)

    report = audit(
        {
            "model": model,
            "optimizer": torch.optim.AdamW(model.parameters()),
            "example_batch": [{"ids": torch.randint(16, (2, 4))}, {"ids": torch.randint(16, (2, 2))}],
            "loss_fn": reads_in_short,
            "eval_fn": reads_in_evaluation,
            "scalars": DeviceScalars(scale=1.0),
        }
    )
    assert [finding.code for finding in report.findings] == ["SM101", "SM107"]
    assert all("return loss" in finding.source.text for finding in report.findings)


def test_a_barrier_is_named_and_a_collective_is_not() -> None:
    import torch.distributed as dist

    def reduced(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = language_loss(model, batch)[0]
        share = loss.detach().clone()
        dist.all_reduce(share)
        dist.barrier()
        return loss + 0 * share

    model = Stack()
    batch = {"ids": torch.randint(16, (2, 4))}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        report = audit(
            {"model": model, "optimizer": AdamW(model.parameters()), "example_batch": batch, "loss_fn": reduced}
        )
    finally:
        dist.destroy_process_group()
    assert [(f.code, f.source.text) for f in report.findings] == [("SM503", "dist.barrier()")]
