"""Attention without a mask: captured, equal to transformers' own, and refused wherever it would be wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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


WAYS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "ready_masks": (
        "sdpa", lambda model: None,
        lambda model, mask: {"attention_mask": huggingface.ready_masks(model, mask)},
    ),
    "ready_masks, eager": (
        "eager", lambda model: None,
        lambda model, mask: {"attention_mask": huggingface.ready_masks(model, mask)},
    ),
    "attend_causally": ("sdpa", huggingface.attend_causally, lambda model, mask: {}),
    "attend_within_sequences": (
        "sdpa", huggingface.attend_within_sequences, lambda model, mask: {"attention_mask": mask}
    ),
    "attend_by_blocks": (
        "flex_attention", huggingface.attend_by_blocks,
        lambda model, mask: {"attention_mask": huggingface.ready_masks(model, mask)},
    ),
}  # fmt: skip


def operations(model: Any, given: dict[str, Any], tracing: bool, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names and shapes of what a forward runs; `tracing`: as transformers sees a stream that captures."""
    found: list[str] = []

    class Listing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            found.append(f"{func} {tuple(out.shape) if isinstance(out, Tensor) else ''}")
            return out

    with monkeypatch.context() as patch, Listing():
        patch.setattr(transformers.masking_utils, "is_tracing", lambda tensor=None: tracing)
        model(**given, use_cache=False)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_capture_runs_what_the_warm_up_ran(
    way: str, build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same operations on the same shapes, where transformers believes that it is captured and where not."""
    attention, tell, make = WAYS[way]
    model = build("qwen3_moe", "staticmoe", attention=attention).train()
    tell(model)
    mask = torch.ones(2, 8, dtype=torch.long)
    given = {**batch(), **make(model, mask)}
    warm, captured = (operations(model, given, tracing, monkeypatch) for tracing in (False, True))
    assert captured == warm and len(warm) > 50


def test_transformers_own_way_is_another_one_under_a_capture(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason for all this: a mask of [B,1,S,S] that no warm-up made. Once it is not, these files can go."""
    model, given = built(build).train(), batch()
    warm, captured = (operations(model, given, tracing, monkeypatch) for tracing in (False, True))
    made = [one for one in captured if one.endswith("(2, 1, 8, 8)")]
    assert made and not [one for one in warm if one.endswith("(2, 1, 8, 8)")]


def test_an_adapter_does_not_go_around_the_refusal(build: Callable[..., Any]) -> None:
    """PEFT calls a model's forward, and with it none of the model's hooks."""
    peft = pytest.importorskip("peft")
    model = built(build)
    huggingface.attend_causally(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).train()
    with pytest.raises(ConfigError, match="attention_mask: expected none after attend_causally"):
        adapted(**batch(), attention_mask=torch.ones(2, 8, dtype=torch.long))
    huggingface.attend_within_sequences(adapted)
    mask, tokens = torch.ones(2, 8, dtype=torch.long), batch()["input_ids"]
    mask[0, :3] = 0
    # An adapter begins as one that changes nothing.
    want = built(build)(tokens, attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(adapted(tokens, attention_mask=mask).logits[mask.bool()], want, rtol=1e-5, atol=1e-5)
