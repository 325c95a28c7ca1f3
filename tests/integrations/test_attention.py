"""Attention without a mask: captured, equal to transformers' own, and refused wherever it would be wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from staticmoe import RunnerConfig, StaticMoERunner
from staticmoe.errors import ConfigError
from staticmoe.integrations import huggingface

transformers = pytest.importorskip("transformers")
huggingface.register()


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(3, 64, (2, 8))
    return {"input_ids": tokens, "labels": tokens}


def loss(model: Any, given: dict[str, Tensor]) -> Tensor:
    return model(**given, use_cache=False).loss


def built(build: Callable[..., Any], name: str = "qwen3_moe", **over: Any) -> Any:
    return build(name, "staticmoe", attention="sdpa", **over)


def test_full_sequences_train_captured_as_uncaptured_and_as_with_transformers_own(build: Callable[..., Any]) -> None:
    model = built(build).train()
    huggingface.prepare(model)
    other, batches = copy.deepcopy(model), [batch() for _ in range(4)]
    want = [float(loss(other, given)) for given in batches[:1]]
    losses = {}
    for capture in ("emulate", "off"):
        one = copy.deepcopy(model)
        huggingface.prepare(one)
        huggingface.attend_causally(one)
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
        with StaticMoERunner(
            one, optimizer, example_batch=batches[0], loss_fn=loss, config=RunnerConfig(capture=capture)
        ) as runner:
            losses[capture] = [float(runner.step(given).loss) for given in batches]
    assert losses["emulate"] == losses["off"]
    assert losses["off"][0] == pytest.approx(want[0], rel=1e-6)


def test_there_is_a_way_back(build: Callable[..., Any]) -> None:
    model, given = built(build).eval(), batch()
    want = model(**given).logits
    huggingface.attend_causally(model)
    huggingface.attend_causally(model)
    torch.testing.assert_close(model(**given).logits, want)
    model.set_attn_implementation("sdpa")
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    assert model(**given, attention_mask=mask).logits.shape == want.shape


def test_generation_with_a_mask_of_ones_is_as_before(build: Callable[..., Any]) -> None:
    model, prompt = built(build).eval(), torch.randint(3, 64, (2, 5))
    ones = torch.ones_like(prompt)
    want = model.generate(prompt, attention_mask=ones, max_new_tokens=4, do_sample=False)
    huggingface.attend_causally(model)
    assert torch.equal(model.generate(prompt, attention_mask=ones, max_new_tokens=4, do_sample=False), want)


def test_a_mask_that_nobody_would_look_at_is_refused(build: Callable[..., Any]) -> None:
    model, given = built(build), batch()
    huggingface.attend_causally(model)
    mask = torch.ones(2, 8, dtype=torch.long)
    with pytest.raises(ConfigError, match="attention_mask: expected none after attend_causally"):
        model.train()(**given, attention_mask=mask)
    with pytest.raises(ConfigError, match="attention_mask: expected none after attend_causally"):
        model(given["input_ids"], mask)
    mask[0, 0] = 0
    with pytest.raises(ConfigError, match="expected no padding after attend_causally, got some"):
        model.eval()(**given, attention_mask=mask)
    with pytest.raises(ConfigError, match="attention_mask: expected none"):
        model.eval()(**given, attention_mask=huggingface.causal_mask(mask))


def test_a_window_and_another_attention_are_refused(build: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="got sliding_window=4"):
        huggingface.attend_causally(built(build, "mixtral", sliding_window=4))
    hybrid = built(build)
    hybrid.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ConfigError, match="got linear_attention; keep"):
        huggingface.attend_causally(hybrid)
    with pytest.raises(ConfigError, match="expected a transformers model with attn_implementation='sdpa', got 'eager'"):
        huggingface.attend_causally(build("qwen3_moe", "staticmoe", attention="eager"))
    with pytest.raises(ConfigError, match="got None"):
        huggingface.attend_causally(torch.nn.Linear(2, 2))
