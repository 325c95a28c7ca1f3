"""Whole iterations of transformers models under the runner, without any layer of ours.

Letters: B sequences, S tokens of a padded sequence.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from staticmoe import RunnerConfig, StaticMoERunner
from staticmoe.errors import ConfigError, ModelError
from staticmoe.integrations import huggingface

transformers = pytest.importorskip("transformers")
huggingface.register()

SERVED = [
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss", "glm4_moe", "granitemoe",
    "minimax", "minimax_m2", "phimoe", "ernie4_5_moe", "dots1", "flex_olmo", "hunyuan_v1_moe", "afmoe",
]  # fmt: skip
B, S = 3, 8


def padded(lengths: list[int], *, left: bool = False) -> dict[str, Tensor]:
    """Random sequences of these lengths in [B,S]: tokens, mask, labels that count no padding, positions."""
    tokens = torch.randint(3, 64, (len(lengths), S))
    place = torch.arange(S)
    real = torch.stack([(place >= S - n) if left else (place < n) for n in lengths])
    return {
        "input_ids": torch.where(real, tokens, 0),
        "attention_mask": real.long(),
        "labels": torch.where(real, tokens, -100),
        "position_ids": (real.long().cumsum(1) - 1).clamp(min=0),
    }


def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The model's own loss, its mask made ready."""
    return model(**{**batch, "attention_mask": huggingface.causal_mask(batch["attention_mask"])}, use_cache=False).loss


def prepared(build: Callable[..., Any], name: str, **over: Any) -> Any:
    model = build(name, "staticmoe", **over).train()
    huggingface.prepare(model)
    return model


def train(model: Any, batches: list[dict[str, Tensor]], capture: str, **options: Any) -> list[Any]:
    """Results of one step for each batch."""
    batches = [{key: value.to(model.device) for key, value in batch.items()} for batch in batches]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    config = RunnerConfig(capture=capture, **options)
    with StaticMoERunner(
        model, optimizer, example_batch=batches[0], loss_fn=loss, token_mask="attention_mask", config=config
    ) as runner:
        results = [runner.step(batch) for batch in batches]
        runner.synchronize()
    return results


@pytest.mark.parametrize("name", SERVED)
def test_twenty_captured_steps_are_the_uncaptured_ones(name: str, build: Callable[..., Any], captured: str) -> None:
    """Other lengths and other experts in each step: losses, parameters and counts are bitwise the same."""
    batches = [padded(torch.randint(2, S + 1, (B,)).tolist()) for _ in range(20)]
    found = []
    for capture in (captured, "off"):
        # PhiMoE routes with noise while it trains.
        torch.manual_seed(0)
        model = prepared(build, name)
        results = train(model, batches, capture)
        counts = [{n: (layer.routed, layer.kept) for n, layer in result.moe.items()} for result in results]
        found.append(([result.loss for result in results], model.state_dict(), counts))
    (losses, state, counts), (want_losses, want_state, want_counts) = found
    assert losses == want_losses and len(set(losses)) == 20
    assert all(torch.equal(state[key], want_state[key]) for key in want_state)
    assert counts == want_counts


def test_padding_is_counted_nowhere_and_takes_no_capacity(build: Callable[..., Any], captured: str) -> None:
    """Every layer routes K assignments for each real token; with a capacity that the real ones just fit, none drops."""
    lengths = [3, S, 1]
    model = prepared(build, "mixtral")
    (result,) = train(model, [padded(lengths)], captured, capacity_factor=12 / 24 + 1e-6, capacity_scope="rank")
    assert len(result.moe) == 2
    for layer in result.moe.values():
        assert sum(layer.routed) == sum(layer.kept) == 2 * sum(lengths)


@pytest.mark.parametrize("attention", ["eager", "sdpa", "sdpa, bool"])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
@pytest.mark.usefixtures("device")
def test_a_padded_batch_is_its_sequences_alone(
    name: str, left: bool, attention: str, build: Callable[..., Any], error: Callable[[Tensor, Tensor], float]
) -> None:
    """Logits of real tokens, and the gradients of their sum, are those of the eager experts without padding."""
    lengths = [3, S, 5]
    model, plain = build(name, "staticmoe", attention=attention.split(",")[0]), build(name)
    batch = {key: value.to(plain.device) for key, value in padded(lengths, left=left).items()}
    real = batch["attention_mask"].bool()
    dtype = torch.bool if attention.endswith("bool") else torch.float32
    mask, places = huggingface.causal_mask(batch["attention_mask"], dtype=dtype), batch["position_ids"]
    got = model(input_ids=batch["input_ids"], attention_mask=mask, position_ids=places, use_cache=False).logits
    alone = [
        plain(input_ids=row[keep][None], use_cache=False).logits[0]
        for row, keep in zip(batch["input_ids"], real, strict=True)
    ]
    want = torch.cat(alone)
    assert error(got[real], want) < 1e-5
    direction = torch.randn_like(want)
    grads = torch.autograd.grad((got[real] * direction).sum(), list(model.parameters()), allow_unused=True)
    wants = torch.autograd.grad((want * direction).sum(), list(plain.parameters()), allow_unused=True)
    for mine, theirs in zip(grads, wants, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert error(mine, theirs) < 2e-5


def test_packed_sequences_are_those_alone(build: Callable[..., Any], error: Callable[[Tensor, Tensor], float]) -> None:
    """Three sequences and padding in one row of S, told apart by their numbers."""
    model = build("qwen3_moe", "staticmoe")
    lengths = [2, 3, 1]
    tokens = torch.randint(3, 64, (1, S))
    numbers = torch.tensor([[0, 0, 1, 1, 1, 2, 3, 3]])
    places = torch.tensor([[0, 1, 0, 1, 2, 0, 0, 1]])
    mask = huggingface.causal_mask((numbers < 3).long(), sequence_ids=numbers)
    got = model(input_ids=tokens, attention_mask=mask, position_ids=places, use_cache=False).logits[0]
    start = 0
    for length in lengths:
        piece = tokens[:, start : start + length]
        want = model(input_ids=piece, use_cache=False).logits[0]
        assert error(got[start : start + length], want) < 1e-5
        start += length


def test_a_window_ends_what_is_seen() -> None:
    mask = huggingface.causal_mask(torch.ones(1, 4), sliding_window=2, dtype=torch.bool)
    assert mask[0, 0].tolist() == [
        [True, False, False, False], [True, True, False, False], [False, True, True, False], [False, False, True, True],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "options", [{"sequence_ids": torch.zeros(1, 3)}, {"sliding_window": 0}, {"dtype": torch.int64}]
)
def test_masks_that_mean_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        huggingface.causal_mask(torch.ones(1, 4), **options)
    with pytest.raises(ConfigError, match=r"attention_mask: expected \[batch, tokens\]"):
        huggingface.causal_mask(torch.ones(4), **options)


@pytest.mark.parametrize("change", ["checkpointing", "tied", "accumulation", "frozen experts", "frozen layer"])
def test_what_users_do_to_a_model(change: str, build: Callable[..., Any], captured: str) -> None:
    """Each is captured as it runs, and what is frozen stays."""
    batches = [padded([3, S, 5]), padded([S, 2, 2]), padded([1, 4, 7]), padded([6, 6, 6])]
    options: dict[str, Any] = {}
    if change == "accumulation":
        options["gradient_accumulation_steps"] = 2
        batches = [
            {key: torch.stack([a[key], b[key]]) for key in a} for a, b in zip(batches[::2], batches[1::2], strict=True)
        ]
    found = []
    for capture in (captured, "off"):
        model = prepared(build, "qwen3_moe", tie_word_embeddings=change == "tied")
        before = copy.deepcopy(model.state_dict())
        frozen: list[str] = []
        if change == "checkpointing":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for name, parameter in model.named_parameters():
            if (change == "frozen experts" and ".experts." in name) or (
                change == "frozen layer" and "layers.0" in name
            ):
                parameter.requires_grad_(False)
                frozen.append(name)
        results = train(model, batches, capture, **options)
        assert bool(frozen) == change.startswith("frozen")
        assert all(torch.equal(model.state_dict()[name], before[name]) for name in frozen)
        found.append(([result.loss for result in results], model.state_dict()))
    (losses, state), (want_losses, want_state) = found
    assert losses == want_losses and len(set(losses)) == len(batches)
    assert all(torch.equal(state[key], want_state[key]) for key in want_state)


def test_generate_and_save_between_steps(
    build: Callable[..., Any], captured: str, device: torch.device, tmp_path: Any
) -> None:
    """The model is the user's all the while: what generates and what is saved is what the steps have made of it."""
    batches = [padded([3, S, 5]), padded([S, 2, 2]), padded([1, 4, 7])]
    batches = [{key: value.to(device) for key, value in batch.items()} for batch in batches]
    found = []
    for disturbed in (True, False):
        model = prepared(build, "mixtral")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with StaticMoERunner(
            model, optimizer, example_batch=batches[0], loss_fn=loss, token_mask="attention_mask",
            config=RunnerConfig(capture=captured),
        ) as runner:  # fmt: skip
            for batch in batches:
                runner.step(batch)
                if disturbed:
                    runner.synchronize()
                    model.generate(batch["input_ids"][:1, :3], max_new_tokens=2, do_sample=False)
                    model.save_pretrained(tmp_path)
            runner.synchronize()
        found.append(model.state_dict())
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="staticmoe")
    for key, value in found[1].items():
        assert torch.equal(found[0][key], value) and torch.equal(saved.state_dict()[key].to(device), value)
    assert not [key for key in found[0] if "step" in key or "staticmoe" in key]


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "ernie4_5_moe", "minimax_m2"])
def test_the_selection_bias_moves_towards_even_loads_when_asked(
    name: str, build: Callable[..., Any], captured: str, device: torch.device
) -> None:
    """By the rate, up below the mean and down above it, in every layer; captured as uncaptured; not at all unasked."""
    batches = [padded([3, S, 5]), padded([S, 2, 2])]

    def biases(model: Any) -> dict[str, Tensor]:
        every = {**dict(model.named_buffers()), **dict(model.named_parameters())}
        return {
            n.rpartition(".mlp.")[0]: t.detach().clone().flatten()
            for n, t in every.items()
            if n.endswith("correction_bias")
        }

    found = []
    for capture, rate in ((captured, 0.125), ("off", 0.125), (captured, 0.0)):
        model = build(name, "staticmoe").train()
        huggingface.prepare(model, balancing_bias_rate=rate)
        before = biases(model)
        results = train(model, batches, capture)
        expected = dict(before)
        for result in results:
            for layer, load in result.moe.items():
                routed = torch.tensor(load.routed, device=device)
                step = torch.sign(routed.sum() - len(routed) * routed).float() * rate
                expected[layer.rpartition(".mlp.")[0]] = expected[layer.rpartition(".mlp.")[0]] + step
        after = biases(model)
        assert after and all(torch.equal(after[layer], expected[layer]) for layer in after)
        found.append(after)
    assert all(torch.equal(found[0][layer], found[1][layer]) for layer in found[0])
    assert any(not torch.equal(found[0][layer], found[2][layer]) for layer in found[0])


def test_a_bias_that_is_not_there_or_too_coarse_is_refused(build: Callable[..., Any]) -> None:
    with pytest.raises(ModelError, match="one e_score_correction_bias of 6 experts.*got 0.*balancing_bias_rate=0"):
        huggingface.prepare(build("mixtral", "staticmoe"), balancing_bias_rate=0.1)
    with pytest.raises(ModelError, match=r"expected fp32.*got torch.bfloat16"):
        huggingface.prepare(build("minimax_m2", "staticmoe").bfloat16(), balancing_bias_rate=0.1)


def test_a_model_that_was_not_prepared_is_told_so(build: Callable[..., Any]) -> None:
    model = build("mixtral", "staticmoe")
    with pytest.raises(ModelError, match=r"huggingface.prepare\(model\)"):
        train(model, [padded([3, S, 5])], "off")


def test_two_runners_on_one_model_are_refused(build: Callable[..., Any]) -> None:
    model, batch = prepared(build, "mixtral"), padded([3, S, 5])
    huggingface.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    given = {"example_batch": batch, "loss_fn": loss, "config": RunnerConfig(capture="off")}
    with StaticMoERunner(model, optimizer, **given), pytest.raises(ModelError, match="close that runner"):
        StaticMoERunner(model, optimizer, **given)
    with StaticMoERunner(model, optimizer, **given) as again:
        assert again.step(batch).loss > 0


def test_a_mask_of_other_tokens_is_refused(build: Callable[..., Any]) -> None:
    model, batch = prepared(build, "mixtral"), padded([3, S, 5])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.raises(ModelError, match="token_mask: expected one value for each of the 24 tokens"):
        StaticMoERunner(
            model, optimizer, example_batch=batch, loss_fn=loss, token_mask=lambda b: b["attention_mask"][:, 1:],
            config=RunnerConfig(capture="off"),
        )  # fmt: skip


def test_a_dropped_model_is_let_go(build: Callable[..., Any]) -> None:
    """The participant beside a module does not keep it alive."""
    import gc
    import weakref

    model = prepared(build, "mixtral")
    module = weakref.ref(next(m for m in model.modules() if hasattr(m, "is_transposed")))
    assert isinstance(module(), nn.Module)
    del model
    gc.collect()
    assert module() is None


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("name", "over"), [("qwen3_moe", {}), ("gpt_oss", {}), ("mixtral", {"sliding_window": 4})])
def test_ready_masks_are_those_that_transformers_makes(
    build: Callable[..., Any], name: str, over: dict[str, Any], attention: str
) -> None:
    """One mask, one a kind of layer, and a window everywhere; a window that is left out shows."""
    if (name, attention) == ("gpt_oss", "sdpa"):
        pytest.skip("GPT-OSS has an attention of its own")
    over = {"sliding_window": 4, **over} if name == "gpt_oss" else over
    model, batch = build(name, "staticmoe", attention=attention, **over).eval(), padded([8, 5])
    real = batch["attention_mask"].bool()
    want = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[real]
    ready = huggingface.ready_masks(model, batch["attention_mask"])
    assert isinstance(ready, dict) == (name == "gpt_oss")
    got = model(input_ids=batch["input_ids"], attention_mask=ready).logits[real]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    if over:
        wrong = model(
            input_ids=batch["input_ids"], attention_mask=huggingface.causal_mask(batch["attention_mask"])
        ).logits[real]
        assert float((wrong - want).abs().max()) > 1e-3


def test_a_kind_of_layer_without_such_a_mask_is_named(build: Callable[..., Any]) -> None:
    model = build("gpt_oss", "staticmoe")
    model.config.layer_types = ["sliding_attention", "chunked_attention"]
    with pytest.raises(ConfigError, match="got chunked_attention"):
        huggingface.ready_masks(model, torch.ones(1, 4))
