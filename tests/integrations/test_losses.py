"""transformers' own load-balancing loss in a step: captured as uncaptured, equal to the eager model's, of real tokens.

Letters: B sequences, S tokens of a padded sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from staticmoe import RunnerConfig, StaticMoERunner
from staticmoe.errors import ModelError
from staticmoe.integrations import huggingface

transformers = pytest.importorskip("transformers")
huggingface.register()

BALANCED = [
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "granitemoe", "minimax", "minimax_m2", "phimoe",
    "ernie4_5_moe", "flex_olmo",
]  # fmt: skip
B, S, STEPS = 3, 8, 4
# So large that a step that leaves it out is another one.
COEFFICIENT = 0.5


def padded(device: torch.device, seed: int = 0) -> dict[str, Tensor]:
    """Random sequences, padded on the right; labels count no padding."""
    generator = torch.Generator().manual_seed(seed)
    real = torch.arange(S) < torch.randint(3, S + 1, (B, 1), generator=generator)
    tokens = torch.randint(3, 64, (B, S), generator=generator)
    batch = {"input_ids": torch.where(real, tokens, 0), "labels": torch.where(real, tokens, -100)}
    return {key: value.to(device) for key, value in {**batch, "attention_mask": real.long()}.items()}


@pytest.fixture
def balanced(build: Callable[..., Any]) -> Callable[..., Any]:
    """Builds a model whose router has a loss."""

    def make(name: str, implementation: str = "staticmoe", **over: Any) -> Any:
        torch.manual_seed(0)
        options = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT, **over}
        # PhiMoE routes with noise while it trains.
        model = build(name, implementation, router_jitter_noise=0.0, input_jitter_noise=0.0, **options).train()
        if "router_logits" not in model._can_record_outputs:
            pytest.skip(f"{type(model).__name__} of transformers {transformers.__version__} fails at its own loss")
        if implementation == huggingface.NAME:
            huggingface.prepare(model)
        return model

    return make


@pytest.mark.parametrize("name", BALANCED)
def test_loss_and_gradients_are_those_of_the_eager_model(
    name: str, balanced: Callable[..., Any], device: torch.device, error: Callable[..., float]
) -> None:
    """transformers' loop with its own mask, in every family that has such a loss."""
    batch, found = padded(device), []
    for implementation in ("staticmoe", "eager"):
        model = balanced(name, implementation)
        if implementation == "eager":
            out = model(**batch, use_cache=False)
            values = {"loss": out.loss, "aux_loss": out.aux_loss}
        else:
            loss, metrics = huggingface.causal_lm_loss(model, batch)
            values = {"loss": loss, **metrics}
        used = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
        grads = torch.autograd.grad(values["loss"], used.values(), allow_unused=True)
        found.append(values | {key: grad for key, grad in zip(used, grads, strict=True) if grad is not None})
    got, want = found
    assert got.keys() == want.keys() and any("gate" in key or "router" in key for key in got)
    errors = {key: error(got[key], want[key]) for key in want}
    assert {key: value for key, value in errors.items() if not value < 2e-5} == {}


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "phimoe"])
def test_captured_steps_with_it_are_the_uncaptured_ones(
    name: str, balanced: Callable[..., Any], captured: str, device: torch.device
) -> None:
    """Losses, the router's apart, and parameters; and the router's loss is the one of that step."""
    found = []
    for capture, over in ((captured, {}), ("off", {}), ("off", {"output_router_logits": False})):
        model = balanced(name, **over)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with StaticMoERunner(
            model, optimizer, example_batch=padded(device), loss_fn=huggingface.causal_lm_loss,
            token_mask="attention_mask", config=RunnerConfig(capture=capture),
        ) as runner:  # fmt: skip
            results = [runner.step(padded(device, seed)) for seed in range(STEPS)]
            runner.synchronize()
        auxiliary = [result.metrics.get("aux_loss") for result in results]
        found.append(([result.loss for result in results], auxiliary, model.state_dict()))
    (losses, auxiliary, state), (want_losses, want_auxiliary, want_state), (without, none, _) = found
    assert losses == want_losses and auxiliary == want_auxiliary and len(set(auxiliary)) == STEPS
    assert all(torch.equal(state[key], want_state[key]) for key in want_state)
    assert none == [None] * STEPS
    assert losses[0] == pytest.approx(without[0] + COEFFICIENT * auxiliary[0], rel=1e-5)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_padding_is_counted_nowhere(
    name: str, balanced: Callable[..., Any], device: torch.device, error: Callable[..., float]
) -> None:
    """Other tokens in the padding change no loss; it is that of the real tokens in sequences of one length."""
    model, batch = balanced(name).eval(), padded(device)
    loss, metrics = huggingface.causal_lm_loss(model, batch)
    noise = torch.where(batch["attention_mask"] == 1, batch["input_ids"], 7)
    other, other_metrics = huggingface.causal_lm_loss(model, {**batch, "input_ids": noise})
    assert error(other, loss) < 1e-6 and error(other_metrics["aux_loss"], metrics["aux_loss"]) < 1e-6
    cut = {key: torch.cat([value[:, :5], torch.zeros_like(value[:, 5:])], 1) for key, value in batch.items()}
    cut["attention_mask"][:, :5], cut["labels"][:, 5:] = 1, -100
    short = {key: value[:, :5] for key, value in cut.items()}
    long_aux, short_aux = (huggingface.causal_lm_loss(model, given)[1]["aux_loss"] for given in (cut, short))
    assert error(long_aux, short_aux) < 1e-5


def test_a_family_without_one_reports_none(build: Callable[..., Any]) -> None:
    model = build("deepseek_v3", "staticmoe", output_router_logits=True)
    loss, metrics = huggingface.causal_lm_loss(model, padded(torch.device("cpu")))
    assert metrics == {} and loss.item() > 0


def test_the_loss_is_also_that_of_a_model_under_peft(balanced: Callable[..., Any]) -> None:
    peft = pytest.importorskip("peft")
    model, batch = balanced("qwen3_moe"), padded(torch.device("cpu"))
    want, metrics = huggingface.causal_lm_loss(model, batch)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    got, under = huggingface.causal_lm_loss(model, batch)
    assert torch.equal(got, want) and torch.equal(under["aux_loss"], metrics["aux_loss"])
    assert not model.base_model.model.base_model._forward_pre_hooks


def test_what_has_no_such_loss_is_refused(build: Callable[..., Any]) -> None:
    batch = padded(torch.device("cpu"))
    with pytest.raises(ModelError, match="Linear: expected a model of transformers"):
        huggingface.causal_lm_loss(nn.Linear(2, 2), batch)
    without = {key: value for key, value in batch.items() if key != "labels"}
    with pytest.raises(ModelError, match="MixtralForCausalLM: expected a loss.*got None: put labels"):
        huggingface.causal_lm_loss(build("mixtral", "staticmoe"), without)
