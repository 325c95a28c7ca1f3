"""Router replay on transformers models: the family's own arithmetic, with other experts in it.

Letters: B sequences, S tokens of a sequence, L layers that route, K top_k, E experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from staticmoe import RunnerConfig, StaticMoERunner
from staticmoe.errors import ConfigError, ModelError
from staticmoe.integrations import huggingface
from staticmoe.integrations.router_replay import check, recording, replaying, routing_layers
from staticmoe.runner import regions

pytest.importorskip("transformers")
huggingface.register()

B, S, K, E = 2, 9, 2, 6
NAMES = [
    "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "granitemoe", "minimax_m2", "ernie4_5_moe",
    "hunyuan_v1_moe", "afmoe", "lfm2_moe", "nemotron_h: no gate",
]  # fmt: skip


def drawn(seed: int, layers: int, sequence: int = S) -> Tensor:
    """Different experts for each token and layer, [B,S,L,K] int64."""
    scores = torch.rand(B, sequence, layers, E, generator=torch.Generator().manual_seed(seed))
    return scores.argsort(-1)[..., :K]


Step = Callable[..., tuple[Tensor, dict[str, Tensor]]]


def within(step: Step, model: Any, scope: Any) -> tuple[Tensor, dict[str, Tensor], Any]:
    """Output and gradients of a forward within the scope; the backward within it too, as `step` is made."""
    with scope as given:
        out, grads = step(model)
    return out, grads, given


@pytest.mark.parametrize("name", NAMES)
def test_what_was_recorded_comes_back_bitwise(name: str, build: Callable[..., Any], step: Step) -> None:
    """Output and all gradients, weighed anew; with recorded weights the same output, routers without gradient."""
    model = build(name, "staticmoe")
    out, grads, record = within(step, model, recording(model))
    layers = len(routing_layers(model))
    assert record.ids.shape == record.weights.shape == (B, S, layers, K)
    again, grads_again, replay = within(step, model, replaying(model, record.ids))
    assert torch.equal(again, out) and int(replay.refused) == 0
    assert grads.keys() == grads_again.keys() and all(torch.equal(grads_again[n], g) for n, g in grads.items())
    given, grads_given, _ = within(step, model, replaying(model, record.ids, record.weights))
    assert torch.equal(given, out)
    routers = grads.keys() - grads_given.keys()
    assert len(routers) >= layers and all("gate" in n or "router" in n for n in routers)
    other = within(step, model, replaying(model, drawn(0, layers)))[0]
    assert (other - out).abs().max() > 1e-2 and torch.equal(step(model)[0], out)


def weigh_by_hand(name: str, logits: Tensor, ids: Tensor) -> Tensor:
    """What the families' papers say."""
    chosen = logits.float().gather(1, ids)
    if name == "deepseek_v3":
        scores = chosen.sigmoid()
        return scores / scores.sum(-1, keepdim=True) * 2.5
    return chosen.softmax(-1)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "mixtral"])
def test_other_ids_are_the_eager_experts_with_them(
    name: str, build: Callable[..., Any], step: Step, error: Callable[[Tensor, Tensor], float]
) -> None:
    """Against the family's loop, whose router was put out of office."""
    over = {"norm_topk_prob": True, "routed_scaling_factor": 2.5}
    model, plain = build(name, "staticmoe", **over), build(name, **over)
    names = routing_layers(model)
    ids = drawn(3, len(names))

    def choosing(number: int) -> Any:
        def instead(router: Any, args: Any, output: Any) -> Any:
            chosen = ids[:, :, number].reshape(-1, K)
            return output[0], weigh_by_hand(name, output[0], chosen), chosen

        return instead

    for number, path in enumerate(names):
        plain.get_submodule(path.replace(".experts", ".gate")).register_forward_hook(choosing(number))
    want, want_grads = step(plain)
    got, grads, _ = within(step, model, replaying(model, ids))
    assert error(got, want) < 1e-5
    assert grads.keys() == want_grads.keys() and any("gate.weight" in n for n in grads)
    assert all(error(grads[n], want_grads[n]) < 1e-4 for n in grads)


def test_a_router_without_topk_takes_weights(build: Callable[..., Any], step: Step) -> None:
    """PhiMoE finds its experts by masking maxima."""
    model = build("phimoe", "staticmoe")
    out, _, record = within(step, model, recording(model))
    with pytest.raises(ModelError, match=r"one torch.topk.*got 0: hand over weights as well as ids"):
        within(step, model, replaying(model, record.ids))
    assert torch.equal(within(step, model, replaying(model, record.ids, record.weights))[0], out)


def test_ids_of_another_shape_are_refused(build: Callable[..., Any], step: Step) -> None:
    """The block's tokens have two dimensions, so that ids turned round are found; K shows where the router chooses."""
    model = build("deepseek_v3", "staticmoe", num_hidden_layers=3)
    ids, want = drawn(0, 2), step(model)[0]
    weights = torch.rand(ids.shape)
    for change, words in (
        (lambda t: t.transpose(0, 1), r"expected 2 x 9 tokens.*layers.1.mlp.experts; got 9 x 2"),
        (lambda t: t[:, 1:], r"expected 2 x 9 tokens.*got 2 x 8"),
        (lambda t: t[..., :1], r"expected 2 slots in dimension 3, the top_k of the model; got 1"),
        (lambda t: t[:, :, :1], r"expected 2 layers in dimension 2.*layers.2.mlp.experts\); got 1"),
    ):
        for given in (None, change(weights)):
            with pytest.raises(ConfigError, match=words):
                within(step, model, replaying(model, change(ids), given))
            assert torch.equal(step(model)[0], want)
    wide = torch.cat([torch.zeros_like(ids[:, :, :1]), ids], 2)
    assert torch.equal(
        within(step, model, replaying(model, wide, layers=[1, 2]))[0], within(step, model, replaying(model, ids))[0]
    )
    ids[1, 4, 1] = 3
    with pytest.raises(
        ConfigError, match=r"got 1 of 36.*\[3, 3\] at sequence 1, token 4, layer 1 .*layers.2.mlp.experts"
    ):
        check(model, ids)
    model.set_experts_implementation("eager")
    with pytest.raises(ModelError, match="expected experts_implementation=\"staticmoe\"; got 'eager'"):
        routing_layers(model)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_tokens_without_experts_get_nothing_from_them(name: str, build: Callable[..., Any], step: Step) -> None:
    """-1, or ids that are none, counted: alike, with finite gradients."""
    model = build(name, "staticmoe")
    ids = drawn(0, len(routing_layers(model)))
    empty, bad = ids.clone(), ids.clone()
    empty[0, 2:] = -1
    bad[0, 2:, :, 0] = E
    want, want_grads, clean = within(step, model, replaying(model, empty))
    got, grads, replay = within(step, model, replaying(model, bad))
    assert torch.equal(got, want) and all(torch.equal(grads[n], want_grads[n]) for n in grads)
    assert int(clean.refused) == 0 and int(replay.refused) == (S - 2) * ids.shape[2]
    assert all(torch.isfinite(g).all() for g in grads.values())
    assert not torch.equal(got, within(step, model, replaying(model, ids))[0])


def batches(count: int, layers: int) -> list[dict[str, Tensor]]:
    """Padded sequences, each batch with routing of its own; padding says expert 0, as an engine's buffer does."""
    found = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        real = torch.arange(S)[None, :] < torch.randint(3, S + 1, (B, 1), generator=generator)
        tokens = torch.randint(3, 64, (B, S), generator=generator)
        ids = torch.where(real[:, :, None, None], drawn(number, layers), 0)
        found.append(
            {
                "input_ids": torch.where(real, tokens, 0),
                "attention_mask": real.long(),
                "labels": torch.where(real, tokens, -100),
                "routed_experts": ids,
            }
        )
    return found


def loss_fn(model: Any, batch: dict[str, Tensor]) -> Tensor:
    mask = huggingface.causal_mask(batch["attention_mask"])
    with replaying(model, batch["routed_experts"]):
        return model(input_ids=batch["input_ids"], attention_mask=mask, labels=batch["labels"], use_cache=False).loss


def train(model: Any, given: list[Any], **options: Any) -> tuple[list[Any], Any]:
    config = RunnerConfig(**options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with StaticMoERunner(
        model, optimizer, example_batch=given[0], loss_fn=loss_fn, token_mask="attention_mask", config=config
    ) as runner:
        results = [runner.step(batch) for batch in given]
        runner.synchronize()
        return results, model.state_dict()


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_captured_steps_read_the_ids_of_their_batch(name: str, build: Callable[..., Any]) -> None:
    """Bitwise the uncaptured ones, also behind gradient checkpointing; counts are those of the real tokens' ids."""
    found = []
    for options, checkpointed in (({"capture": "emulate"}, True), ({"capture": "off"}, False)):
        model = build(name, "staticmoe").train()
        huggingface.prepare(model)
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        names = routing_layers(model)
        given = batches(4, len(names))
        results, state = train(model, given, **options)
        for result, batch in zip(results, given, strict=True):
            assert result.metrics["replay_refused"] == 0
            for number, path in enumerate(names):
                ids = batch["routed_experts"][:, :, number][batch["attention_mask"].bool()]
                assert list(result.moe[path].routed) == F.one_hot(ids.flatten(), E).sum(0).tolist()
        found.append(([float(result.loss) for result in results], state))
    assert found[0][0] == found[1][0] and len(set(found[0][0])) == 4
    assert all(torch.equal(found[0][1][key], value) for key, value in found[1][1].items())


def test_routers_run_uncompiled_where_they_replay(build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """compile="blocks": other regions are compiled; an evaluation that routes for itself compiles the routers too."""
    monkeypatch.setattr(regions, "BACKEND", "aot_eager")
    losses = []
    for options in ({}, {"compile": "blocks"}):
        model = build("qwen3_moe", "staticmoe").train()
        huggingface.prepare(model)
        given = batches(3, 2)
        with StaticMoERunner(
            model, torch.optim.SGD(model.parameters(), lr=1e-2), example_batch=given[0], loss_fn=loss_fn,
            eval_fn=lambda model, batch: model(input_ids=batch["input_ids"], labels=batch["labels"]).loss,
            token_mask="attention_mask", config=RunnerConfig(capture="off", **options),
        ) as runner:  # fmt: skip
            found = runner._parts._regions
            trained = [float(runner.step(batch).loss) for batch in given]
            if found is not None:
                gates = [one for one in found.regions if one.name.endswith("gate")]
                assert len(gates) == 2 and not any(one.calls for one in gates)
                assert all(one.entries for one in found.regions if one not in gates)
            losses.append([*trained, float(runner.evaluate(given[0]).loss)])
            if found is not None:
                assert all(one.entries for one in gates)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)


def test_a_failing_block_leaves_no_scope(build: Callable[..., Any], step: Step) -> None:
    """An error below the router: the next forward routes for itself."""
    model = build("qwen3_moe", "staticmoe")
    want = step(model)[0]
    experts = model.get_submodule(routing_layers(model)[0])
    handle = experts.register_forward_pre_hook(lambda module, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        within(step, model, replaying(model, drawn(0, 2)))
    handle.remove()
    assert torch.equal(within(step, model, contextlib.nullcontext())[0], want)
