"""Low-rank adapters by PEFT, on attention and on the experts themselves, under the runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from staticmoe import RunnerConfig, StaticMoERunner
from staticmoe.errors import CaptureError
from staticmoe.integrations import huggingface

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
huggingface.register()

WHERE = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "experts": {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
}


def loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    mask = huggingface.causal_mask(batch["attention_mask"])
    return model(**{**batch, "attention_mask": mask}, use_cache=False).loss


def adapted(build: Callable[..., Any], implementation: str, where: str) -> Any:
    torch.manual_seed(0)
    model = build("qwen3_moe", implementation).train()
    config = peft.LoraConfig(r=4, lora_dropout=0.0, init_lora_weights=False, **WHERE[where])
    return peft.get_peft_model(model, config)


def batches() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    made = []
    for _ in range(4):
        real = torch.arange(8) < torch.randint(2, 9, (3, 1))
        tokens = torch.randint(3, 64, (3, 8))
        made.append(
            {
                "input_ids": torch.where(real, tokens, 0),
                "attention_mask": real.long(),
                "labels": torch.where(real, tokens, -100),
            }
        )
    return made


def train(where: str, capture: str, build: Callable[..., Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of four steps, and the adapters afterwards; nothing else may have moved."""
    model = adapted(build, "staticmoe", where)
    huggingface.prepare(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora" in name for name in trained)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    with StaticMoERunner(
        model, optimizer, example_batch=batches()[0], loss_fn=loss, token_mask="attention_mask",
        config=RunnerConfig(capture=capture),
    ) as runner:  # fmt: skip
        losses = [float(runner.step(batch).loss) for batch in batches()]
        runner.synchronize()
    assert {name for name, p in model.named_parameters() if not torch.equal(p, before[name])} == set(trained)
    return losses, {name: p.detach().clone() for name, p in trained.items()}


def test_adapters_of_attention_are_captured(build: Callable[..., Any]) -> None:
    (losses, adapters), (want_losses, want_adapters) = (train("attention", c, build) for c in ("emulate", "off"))
    assert losses == want_losses and len(set(losses)) == 4
    assert all(torch.equal(adapters[name], want_adapters[name]) for name in want_adapters)


def test_adapters_of_experts_train_uncaptured_and_are_refused_in_a_graph(build: Callable[..., Any]) -> None:
    """PEFT puts the sum in the parameter's place anew in every forward, which a replay would not do."""
    losses, _ = train("experts", "off", build)
    assert len(set(losses)) == 4
    with pytest.raises(CaptureError, match=r"peft.*register_parametrization.*mlp\.experts.*replaces or resizes"):
        train("experts", "emulate", build)


@pytest.mark.parametrize("where", WHERE)
def test_the_adapters_gradients_are_those_of_the_eager_experts(
    where: str, build: Callable[..., Any], error: Callable[..., float]
) -> None:
    grads = []
    for implementation in ("staticmoe", "eager"):
        model = adapted(build, implementation, where)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        grads.append(dict(zip(trained, torch.autograd.grad(loss(model, batches()[0]), trained.values()), strict=True)))
    for name, want in grads[1].items():
        assert error(grads[0][name], want) < 2e-5, name
