"""Families that make a constant on the host in each forward: seen on a CPU, and made on the device once prepared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from staticmoe import RunnerConfig, StaticMoERunner
from staticmoe.errors import AuditError
from staticmoe.integrations import huggingface
from staticmoe.integrations.huggingface import devices

transformers = pytest.importorskip("transformers")
huggingface.register()


class MiniMaxLightningAttention(nn.Module):
    """Begins as that of transformers does before 5.24."""

    def forward(self, *, hidden_states: Tensor) -> Tensor:
        start = torch.zeros(hidden_states.shape[-1]).to(hidden_states)
        return hidden_states + start + torch.arange(4, dtype=torch.float32).to(hidden_states.device)


def step(model: Any, batch: dict[str, Tensor], capture: str) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with StaticMoERunner(
        model, optimizer, example_batch=batch, loss_fn=huggingface.causal_lm_loss, token_mask="attention_mask",
        config=RunnerConfig(capture=capture),
    ) as runner:  # fmt: skip
        return float(runner.step(batch).loss)


def test_such_a_family_is_captured_once_prepared_and_else_refused_by_its_line(
    build: Callable[..., Any], captured: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.randint(3, 64, (2, 8), device=device)
    batch = {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}
    model = build("phimoe", "staticmoe", router_jitter_noise=0.0, input_jitter_noise=0.0).train()
    before = huggingface.causal_lm_loss(model, batch)[0].item()
    other = copy.deepcopy(model)
    with monkeypatch.context() as patch:
        patch.setattr(devices, "_MAKE_ON_HOST", set())
        huggingface.prepare(other)
    with pytest.raises(AuditError, match=r"modeling_phimoe.py:\d+.*'model.rotary_emb': copies .* the host .*SM119"):
        step(other, batch, captured)
    huggingface.prepare(model)
    assert step(model, batch, captured) == pytest.approx(before, rel=1e-5)


def test_what_a_module_makes_goes_to_the_device_of_its_input() -> None:
    """On a device without memory, because a machine with a CPU alone has that as well."""
    module = MiniMaxLightningAttention()
    devices.make_on_device(module)
    first = module.forward
    devices.make_on_device(module)
    assert module.forward is first
    made: list[Tensor] = []

    class Made(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func in (torch.zeros, torch.arange):
                made.append(result)
            return result

    with Made():
        out = copy.deepcopy(module)(hidden_states=torch.ones(2, 4, device="meta"))
    assert out.is_meta and len(made) == 2 and all(tensor.is_meta for tensor in made)
    assert torch.zeros(1).device.type == "cpu"
    assert torch.equal(module(hidden_states=torch.ones(1, 4)), torch.tensor([[1.0, 2.0, 3.0, 4.0]]))


def test_it_compiles_whole() -> None:
    module = MiniMaxLightningAttention()
    devices.make_on_device(module)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 4)
    assert torch.equal(compiled(hidden_states=x), module(hidden_states=x))
