"""Router replay on `StaticMoE` layers: what was recorded comes back bitwise, what is replayed is what was given.

Letters: B sequences, S tokens of a sequence, L layers that route, K top_k, E experts, H hidden size.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from staticmoe import MicroBatches, RunnerConfig, StaticMoE, StaticMoERunner
from staticmoe.errors import CapacityError, ConfigError, ModelError
from staticmoe.integrations.router_replay import Recording, check, recording, replaying, routing_layers
from staticmoe.runner import regions

B, S, L, E, H = 2, 5, 4, 8, 16
KS = [1, 2, 6, 8]


class Model(nn.Module):
    """Four layers that route and a dense one between the first two; `checkpointed`: each behind a checkpoint."""

    def __init__(self, top_k: int, *, checkpointed: bool = False, reentrant: bool = False, **options: Any) -> None:
        super().__init__()
        options = {"norm_topk_prob": top_k > 1, **options}
        dense = nn.Sequential(nn.Linear(H, H), nn.GELU())
        moe = [StaticMoE(H, 8, E, top_k, **options) for _ in range(L)]
        self.layers = nn.ModuleList([moe[0], dense, *moe[1:]])
        self.checkpointed, self.reentrant = checkpointed, reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=self.reentrant) if self.checkpointed else layer(x))
        return x


def build(top_k: int, **options: Any) -> Model:
    torch.manual_seed(7)
    return Model(top_k, **options)


def drawn(seed: int, top_k: int, batch: int = B, sequence: int = S) -> Tensor:
    """Different experts for each token and layer, [B,S,L,K] int32."""
    scores = torch.rand(batch, sequence, L, E, generator=torch.Generator().manual_seed(seed))
    return scores.argsort(-1)[..., :top_k].int()


def tokens(seed: int, batch: int = B, sequence: int = S) -> Tensor:
    return torch.randn(batch, sequence, H, generator=torch.Generator().manual_seed(100 + seed))


def run(model: nn.Module, x: Tensor, scope: Any) -> tuple[Tensor, dict[str, Tensor | None], Any]:
    """Output, every gradient by name, and what the scope gave."""
    model.zero_grad()
    with scope as given:
        y = model(x)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return y.detach(), {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}, given


def assert_same(got: dict[str, Tensor | None], want: dict[str, Tensor | None]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        mine = got[name]
        assert (mine is None and value is None) or (mine is not None and value is not None and torch.equal(mine, value))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"score_function": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 2.5},
    {"score_function": "sigmoid", "n_group": 2, "topk_group": 2, "balancing_bias_rate": 0.1},
    {"router_aux_loss_coef": 0.1, "router_z_loss_coef": 0.1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["norm", "scaled", "groups and bias", "losses"])
@pytest.mark.parametrize("top_k", KS)
def test_what_was_recorded_comes_back_bitwise(top_k: int, options: dict[str, Any]) -> None:
    """Output, all gradients and the router's losses; the dense layer takes no place among the ids."""
    model, x = build(top_k, **options), tokens(0)
    for layer in model.layers:
        if isinstance(layer, StaticMoE):
            layer.router.balancing_bias.uniform_(-1, 1)
    y, grads, record = run(model, x, recording(model))
    losses = [layer.router_losses() for layer in model.layers if isinstance(layer, StaticMoE)]
    assert record.ids.shape == record.weights.shape == (B, S, L, top_k)
    assert routing_layers(model) == ["layers.0", "layers.2", "layers.3", "layers.4"]
    again, grads_again, replay = run(model, x, replaying(model, record.ids))
    assert torch.equal(again, y) and int(replay.refused) == 0
    assert_same(grads_again, grads)
    assert losses == [layer.router_losses() for layer in model.layers if isinstance(layer, StaticMoE)]
    # Ids win over bias and groups: other ones change nothing any more.
    for layer in model.layers:
        if isinstance(layer, StaticMoE):
            layer.router.balancing_bias.uniform_(-9, 9)
    assert torch.equal(run(model, x, replaying(model, record.ids))[0], y)


def by_hand(model: Model, x: Tensor, ids: Tensor, weights: Tensor | None = None) -> Tensor:
    """The model as a loop over tokens, with the experts of `ids`."""
    x, number = x.double(), 0
    for layer in model.layers:
        if not isinstance(layer, StaticMoE):
            x = x + F.gelu(F.linear(x, layer[0].weight.double(), layer[0].bias.double()))
            continue
        y = torch.zeros_like(x)
        for b, s in torch.cartesian_prod(torch.arange(x.shape[0]), torch.arange(x.shape[1])).tolist():
            chosen = ids[b, s, number].long()
            scores = F.linear(x[b, s], layer.router.weight.double())[chosen].softmax(0)
            for k, e in enumerate(chosen.tolist()):
                gate, up = F.linear(x[b, s], layer.experts.gate_up_proj[e].double()).chunk(2)
                out = F.linear(F.silu(gate) * up, layer.experts.down_proj[e].double())
                y[b, s] += (scores[k] if weights is None else weights[b, s, number, k].double()) * out
        x, number = x + y, number + 1
    return x


@pytest.mark.parametrize("given", [False, True], ids=["weighed by the router", "weights given"])
@pytest.mark.parametrize("top_k", KS[1:])
def test_other_ids_are_the_model_by_hand(top_k: int, given: bool) -> None:
    """Each layer takes its own; the router learns unless weights are given."""
    model, x, ids = build(top_k), tokens(1), drawn(1, top_k)
    weights = torch.rand(ids.shape) if given else None
    y, grads, _ = run(model, x, replaying(model, ids, weights))
    want = by_hand(model, x, ids, weights)
    torch.testing.assert_close(y.double(), want.detach(), rtol=1e-4, atol=1e-5)
    (want * torch.linspace(-1, 1, y.numel()).view_as(want)).sum().backward(inputs=list(model.parameters()))
    routers = [name for name in grads if "router" in name]
    assert len(routers) == L and all((grads[name] is None) == given for name in routers)
    model.zero_grad()
    wants = torch.autograd.grad(
        (by_hand(model, x, ids, weights) * torch.linspace(-1, 1, y.numel()).view_as(want)).sum(),
        list(model.parameters()),
        allow_unused=True,
    )
    for (name, got), expected in zip(grads.items(), wants, strict=True):
        assert (got is None) == (expected is None), name
        if got is not None and expected is not None:
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)


def layouts(ids: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same values in other dtypes and other places: strides, odd offsets, other orders of dimensions."""
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
        yield f"{dtype}", ids.to(dtype)
        wide = torch.full((ids.shape[0], ids.shape[1] + 1, L, ids.shape[3] + 3), 99, dtype=dtype)
        wide[:, 1:, :, 1:-2] = ids
        yield f"{dtype}, odd offset, gaps", wide[:, 1:, :, 1:-2]
        yield f"{dtype}, layers first", ids.to(dtype).permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
        yield f"{dtype}, slots apart", ids.to(dtype).permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)


@pytest.mark.parametrize("top_k", KS)
def test_any_layout_is_the_contiguous_one(top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """O34. Each layer is handed [T,K] int32 of its own: contiguous, with nothing else in its memory, aligned."""
    model, x, ids = build(top_k), tokens(2), drawn(2, top_k)
    seen: list[Tensor] = []
    forward = StaticMoE.forward

    def watched(self: StaticMoE, x: Tensor, token_mask: Any = None, routing: Any = None) -> Tensor:
        seen.append(routing[0])
        return forward(self, x, token_mask, routing)

    monkeypatch.setattr(StaticMoE, "forward", watched)
    y, grads, _ = run(model, x, replaying(model, ids))
    for name, variant in layouts(ids):
        got, got_grads, replay = run(model, x, replaying(model, variant))
        assert torch.equal(got, y) and int(replay.refused) == 0, name
        assert_same(got_grads, grads)
    for number, given in enumerate(seen):
        assert torch.equal(given, ids[:, :, number % L].reshape(-1, top_k)) and given.dtype == torch.int32
        assert given.is_contiguous() and given.storage_offset() == 0 and given.data_ptr() % 16 == 0
        assert given.untyped_storage().nbytes() == 4 * given.numel()


def test_ids_that_count_dense_layers_are_told_which() -> None:
    model, x, ids = build(2), tokens(0), drawn(0, 2)
    wide = torch.zeros(B, S, L + 1, 2, dtype=torch.int64)
    wide[:, :, [0, 2, 3, 4]] = ids.long()
    want = run(model, x, replaying(model, ids))[0]
    assert torch.equal(run(model, x, replaying(model, wide, layers=[0, 2, 3, 4]))[0], want)
    with pytest.raises(
        ConfigError, match=r"expected 4 layers in dimension 2.*layers.0, \.\.\., layers.4.*got 5.*layers="
    ):
        run(model, x, replaying(model, wide))
    with pytest.raises(ConfigError, match="layers: expected 4 indices below 5"):
        run(model, x, replaying(model, wide, layers=[0, 2, 3, 5]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ids: ids[..., :1], r"expected 2 slots in dimension 3, the top_k of layers.0; got 1"),
        (lambda ids: ids[:, :, 1:], r"expected 4 layers in dimension 2.*got 3"),
        (lambda ids: ids[:, 1:], r"expected 2 x 5 tokens, as come to layers.0; got 2 x 4.*-1"),
        (lambda ids: ids[1:], r"expected 2 x 5 tokens, as come to layers.0; got 1 x 5"),
        (lambda ids: ids.transpose(0, 1), r"expected 2 x 5 tokens.*got 5 x 2, \[sequences, tokens\]"),
        (lambda ids: ids.flatten(0, 1), r"expected 4 dimensions.*\(10, 4, 2\)"),
        (lambda ids: ids.float(), "ids: expected integers; got torch.float32"),
        (lambda ids: ids == 1, "ids: expected integers; got torch.bool"),
        (lambda ids: ids.to("meta"), "ids: expected a tensor on cpu as the model; got meta: move it there"),
    ],
)
def test_ids_of_another_shape_are_refused(change: Callable[[Tensor], Tensor], words: str) -> None:
    """By shapes alone, on the host; afterwards the model routes for itself."""
    model, x = build(2), tokens(0)
    want = run(model, x, contextlib.nullcontext())[0]
    with pytest.raises(ConfigError, match=words) as caught:
        run(model, x, replaying(model, change(drawn(0, 2))))
    assert isinstance(caught.value, ValueError)
    assert torch.equal(run(model, x, contextlib.nullcontext())[0], want)


def test_weights_and_masks_of_another_shape_are_refused() -> None:
    model, ids = build(2), drawn(0, 2)
    with pytest.raises(ConfigError, match=r"weights: expected shape \(2, 5, 4, 2\) as ids; got \(2, 4, 4, 2\)"):
        run(model, tokens(0), replaying(model, ids, torch.ones(B, S - 1, L, 2)))
    with pytest.raises(ConfigError, match=r"weights: expected floats; got torch.int32"):
        run(model, tokens(0), replaying(model, ids, ids))
    with pytest.raises(ConfigError, match=r"token_mask: expected shape \(2, 5\).*got \(2, 4\)"):
        run(model, tokens(0), replaying(model, ids, token_mask=torch.ones(B, S - 1)))


@pytest.mark.parametrize("kind", ["too large", "below -1", "int64 beyond int32", "twice", "-1 beside others"])
@pytest.mark.parametrize("given", [False, True])
def test_what_cannot_be_replayed_has_no_expert_and_is_counted(kind: str, given: bool) -> None:
    """As if it were padding, in that layer alone; and `check` names the first."""
    model, x, ids = build(2), tokens(3), drawn(3, 2).long()
    weights = torch.rand(ids.shape) if given else None
    if given:
        for layer in model.layers:
            if isinstance(layer, StaticMoE):
                layer.router.requires_grad_(False)
    bad, empty = ids.clone(), ids.clone()
    values = {"too large": E, "below -1": -2, "int64 beyond int32": 2**32, "-1 beside others": -1}
    for b, s, layer in ((1, 2, 1), (1, 3, 1), (0, 0, 3)):
        bad[b, s, layer, 1] = bad[b, s, layer, 0] if kind == "twice" else values[kind]
        empty[b, s, layer] = -1
    y, grads, replay = run(model, x, replaying(model, bad, weights))
    want, want_grads, clean = run(model, x, replaying(model, empty, weights))
    assert torch.equal(y, want) and int(replay.refused) == 3 and int(clean.refused) == 0
    assert_same(grads, want_grads)
    assert not torch.equal(y, run(model, x, replaying(model, ids, weights))[0])
    check(model, empty, weights)
    with pytest.raises(
        ConfigError, match=r"got 3 of 40 \(token, layer\) pairs.*sequence 0, token 0, layer 3 \(layers.4\)"
    ):
        check(model, bad, weights)
    mask = torch.ones(B, S)
    mask[0, 0] = mask[1, 2] = mask[1, 3] = 0
    check(model, bad, weights, token_mask=mask)


def test_unsigned_ids_have_no_padding_by_sign() -> None:
    """255 is an id that no layer has, not -1."""
    model, ids = build(2), drawn(0, 2).to(torch.uint8)
    ids[0, 0] = 255
    assert int(run(model, tokens(0), replaying(model, ids))[2].refused) == L


def test_padding_takes_no_capacity() -> None:
    """With rows for the real tokens alone nothing is dropped, whatever padding says: -1, or zeros under a mask."""
    ids, real = drawn(0, 2), torch.arange(S)[None, :] < torch.tensor([[3], [5]])
    marked = torch.where(real[:, :, None, None], ids, -1)
    # An engine that fills its buffer with zeros: all padding at expert 0.
    zeros = torch.where(real[:, :, None, None], ids, 0)
    results = []
    for given, mask in ((marked, None), (zeros, "real"), (marked, "real")):
        model = build(2)
        batch = {"x": tokens(0), "ids": given, "real": real}
        config = RunnerConfig(capture="emulate", capacity_factor=8 / 10, overflow="raise")
        with StaticMoERunner(
            model, sgd(model), example_batch=batch, loss_fn=replayed_loss, token_mask=mask, config=config
        ) as runner:
            result = runner.step(batch)
            for number, name in enumerate(routing_layers(model)):
                want = [int((marked[:, :, number] == e).sum()) for e in range(E)]
                assert list(result.moe[name].routed) == list(result.moe[name].kept) == want
            assert result.metrics["replay_refused"] == 0
            results.append(model.layers[0].experts.gate_up_proj.detach().clone())
    assert torch.equal(results[0], results[2])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def replayed_loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    real = batch["real"][..., None] if "real" in batch else 1.0
    with replaying(model, batch["ids"]):
        return (model(batch["x"]) * real).square().mean()


def batches(count: int, top_k: int) -> list[dict[str, Tensor]]:
    """Other tokens and other routing in each."""
    return [{"x": tokens(n), "ids": drawn(n, top_k)} for n in range(count)]


def train(model: nn.Module, given: list[Any], loss_fn: Any = replayed_loss, **options: Any) -> tuple[list[Any], Any]:
    config = RunnerConfig(**{"capture": "emulate", "audit": "off", "self_check": False, **options})
    with StaticMoERunner(model, sgd(model), example_batch=given[0], loss_fn=loss_fn, config=config) as runner:
        results = [runner.step(batch) for batch in given]
        runner.synchronize()
        return results, model.state_dict()


def counts(ids: Tensor) -> list[int]:
    return torch.nn.functional.one_hot(ids.flatten().long(), E).sum(0).tolist()


@pytest.mark.parametrize(("top_k", "checkpointed"), [(1, False), (2, True), (6, False), (6, True), (8, True)])
def test_a_captured_step_reads_the_ids_of_its_batch(top_k: int, checkpointed: bool) -> None:
    """Bitwise the plain loop, each with routing of its own; captured and not."""
    given = batches(5, top_k)
    plain = build(top_k)
    optimizer, losses = sgd(plain), []
    for batch in given:
        optimizer.zero_grad()
        loss = replayed_loss(plain, batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert len(set(losses)) == 5
    for capture in ("emulate", "off"):
        model = build(top_k, checkpointed=checkpointed)
        results, state = train(model, given, capture=capture, audit="error", self_check=True)
        assert [float(result.loss) for result in results] == losses
        assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
        for result, batch in zip(results, given, strict=True):
            assert result.metrics["replay_refused"] == 0
            for number, name in enumerate(routing_layers(model)):
                assert list(result.moe[name].routed) == counts(batch["ids"][:, :, number])


def test_refused_tokens_are_in_the_metrics_of_their_step() -> None:
    given = batches(4, 2)
    given[1]["ids"][0, :3, 1] = E
    given[2]["ids"][0, 0, 2, 1] = given[2]["ids"][0, 0, 2, 0]
    results, _ = train(build(2), given)
    assert [result.metrics["replay_refused"] for result in results] == [0, 3, 1, 0]


def test_compiled_regions_beside_replayed_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """compile="blocks": the dense region is compiled once, for all routings, and nothing changes."""
    monkeypatch.setattr(regions, "BACKEND", "aot_eager")
    given = batches(4, 6)
    want, _ = train(build(6), given, capture="off")
    model = build(6)
    config = RunnerConfig(capture="off", compile="blocks")
    with StaticMoERunner(model, sgd(model), example_batch=given[0], loss_fn=replayed_loss, config=config) as runner:
        got = [float(runner.step(batch).loss) for batch in given]
        found = runner._parts._regions
        assert found is not None and [(one.name, one.entries) for one in found.regions] == [("layers.1", 1)]
    torch.testing.assert_close(got, [float(result.loss) for result in want], rtol=1e-6, atol=0)


@pytest.mark.parametrize("scope", ["rank", "expert"])
def test_replayed_assignments_overflow_as_routed_ones(scope: str) -> None:
    """The recording is that of before capacity: replayed, the same ones are dropped, for the same result."""
    options = {"capacity_factor": 0.6, "capacity_scope": scope, "overflow": "drop"}
    record = Recording(torch.zeros(B, S, L, 2, dtype=torch.int32), torch.zeros(B, S, L, 2))

    def routed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with recording(model, into=record):
            return model(batch["x"]).square().mean()

    batch = batches(1, 2)[0]
    (want,), want_state = train(build(2), [batch], routed, **options)
    batch["ids"] = record.ids.clone()
    (got,), state = train(build(2), [batch], **options)
    assert float(got.loss) == float(want.loss) and want.moe.drop_rate > 0
    assert all(torch.equal(state[name], want_state[name]) for name in state)
    for name in routing_layers(build(2)):
        mine, theirs = got.moe[name], want.moe[name]
        assert (mine.routed, mine.kept, mine.dropped) == (theirs.routed, theirs.kept, theirs.dropped)


def test_an_overflow_by_replay_follows_the_policy() -> None:
    """One expert gets everything: run again as the dropless run, or an error."""
    given = batches(4, 1)
    given[2]["ids"].fill_(3)
    want, want_state = train(build(1), given)
    options = {"capacity_factor": 1.5, "capacity_scope": "expert", "max_rerun_fraction": 1.0}
    got, state = train(build(1), given, overflow="rerun", **options)
    assert [float(result.loss) for result in got] == [float(result.loss) for result in want]
    assert all(torch.equal(state[name], want_state[name]) for name in state)
    assert got[2].moe["layers.0"].kept[3] == B * S
    with pytest.raises(CapacityError):
        train(build(1), given, overflow="raise", **options)


def test_micro_batches_have_their_own_ids() -> None:
    """Behind checkpoints too; counts are those of the whole step."""
    given = batches(6, 2)
    found = []
    for options in ({"capture": "emulate"}, {"capture": "off"}, {"capture": "emulate", "checkpointed": True}):
        model = build(2, checkpointed=options.pop("checkpointed", False))
        pairs = [MicroBatches(given[n : n + 2]) for n in (0, 2, 4)]
        results, state = train(model, pairs, gradient_accumulation_steps=2, **options)
        found.append(([float(result.loss) for result in results], state))
        for result, pair in zip(results, (given[:2], given[2:4], given[4:]), strict=True):
            both = torch.cat([batch["ids"][:, :, 3] for batch in pair])
            assert list(result.moe["layers.4"].routed) == counts(both)
    assert found[0][0] == found[1][0] == found[2][0]
    assert all(torch.equal(found[0][1][name], other[1][name]) for other in found[1:] for name in other[1])


def test_recomputed_forwards_keep_to_their_own_scope() -> None:
    """Two scopes, and a forward without one, then one backward: each is recomputed under what it ran under."""
    first, second = drawn(0, 6), drawn(1, 6)
    found = []
    for checkpointed in (False, True):
        model = build(6, checkpointed=checkpointed)
        with replaying(model, first):
            a = model(tokens(0)).square().mean()
        b = model(tokens(1)).square().mean()
        with replaying(model, second):
            c = model(tokens(2)).square().mean()
        (a + 2 * b + 3 * c).backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert_same(found[1], found[0])
    # Within a later scope, and the scope itself behind the checkpoint.
    found = []
    for checkpointed in (False, True):
        model = build(6, checkpointed=checkpointed)

        def scoped(x: Tensor, model: nn.Module = model) -> Tensor:
            with replaying(model, second):
                return model(x)

        with replaying(model, first):
            a = model(tokens(0)).square().mean()
        b = (checkpoint(scoped, tokens(1), use_reentrant=False) if checkpointed else scoped(tokens(1))).square().mean()
        with replaying(model, second):
            c = model(tokens(2)).square().mean()
            (a + 2 * b + 3 * c).backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert_same(found[1], found[0])


def test_a_checkpoint_without_a_graph_is_refused() -> None:
    """It would recompute under the router's own choice."""
    model = build(2, checkpointed=True, reentrant=True)
    with replaying(model, drawn(0, 2)):
        loss = model(tokens(0).requires_grad_()).sum()
    with pytest.raises(ModelError, match="checkpoint with use_reentrant=False"):
        loss.backward()


def test_a_scope_lives_as_long_as_its_graph() -> None:
    model = build(2, checkpointed=True)
    with replaying(model, drawn(0, 2)) as replay:
        loss = model(tokens(0)).sum()
    alive = weakref.ref(replay)
    del replay
    loss.backward()
    assert alive() is not None
    del loss
    gc.collect()
    assert alive() is None
    with replaying(model, drawn(0, 2)) as replay, torch.no_grad():
        model(tokens(0))
    alive = weakref.ref(replay)
    del replay
    gc.collect()
    assert alive() is None


def test_one_forward_for_each_scope() -> None:
    """A second one, none, a part of one, or a scope within a scope: an error, and no scope is left open."""
    model, ids, x = build(2), drawn(0, 2), tokens(0)
    for scope in (lambda: replaying(model, ids), lambda: recording(model)):
        with pytest.raises(ModelError, match="expected one forward; got a second one through layers.0"), scope():
            model(x)
            model(x)
        with pytest.raises(ModelError, match="expected a forward through 4 layers; got none through layers.0"), scope():
            pass
        with pytest.raises(ModelError, match=r"got none through layers\.2"), scope():
            model.layers[0](x)
        with pytest.raises(ModelError, match="one within another"), scope(), scope():
            pass
        with pytest.raises(ZeroDivisionError), scope():
            raise ZeroDivisionError
    with pytest.raises(ModelError, match=r"called with routing=\.\.\."), replaying(model, ids):
        model.layers[0](x, None, (ids[:, :, 0], None))
    assert torch.equal(run(model, x, recording(model))[0], run(model, x, contextlib.nullcontext())[0])
    with pytest.raises(ModelError, match="expected layers that route tokens; got none"):
        routing_layers(nn.Linear(1, 1))


def test_recordings_are_of_what_was_used() -> None:
    """Replayed ids, given weights and masked tokens; recomputation adds nothing."""
    model, ids = build(2, checkpointed=True), drawn(0, 2)
    weights = torch.rand(ids.shape)
    ids[0, 1] = -1
    with replaying(model, ids, weights), recording(model) as record:
        model(tokens(0)).sum().backward()
    assert torch.equal(record.ids, ids)
    assert torch.equal(record.weights, torch.where(ids >= 0, weights, 0.0)) and not record.weights.requires_grad
    with recording(model) as record, replaying(model, ids):
        model(tokens(0)).sum().backward()
    assert torch.equal(record.ids, ids)
    torch.testing.assert_close(record.weights.sum(-1), (ids[..., 0] >= 0).float())
    layer = StaticMoE(H, 8, E, 2)
    mask = torch.tensor([1, 0, 1])
    with recording(layer) as record:
        layer(torch.randn(3, H), mask)
    assert record.ids.shape == (1, 3, 1, 2) and torch.equal(record.ids[0, :, 0, 0] >= 0, mask.bool())
    with replaying(layer, record.ids) as replay:
        layer(torch.randn(3, H), token_mask=mask)
    assert int(replay.refused) == 0


@pytest.mark.parametrize("capture", ["emulate", "off"])
def test_a_recording_holds_what_the_last_committed_step_chose(capture: str) -> None:
    """A buffer of the user's, written by each replay; a vetoed step leaves it."""
    model, given = build(2), batches(4, 2)
    given[2]["x"][0, 0, 0] = float("nan")
    with recording(model) as record:
        model(given[0]["x"])
    before = copy.deepcopy(record)

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with replaying(model, batch["ids"]), recording(model, into=record):
            return model(batch["x"]).square().mean()

    config = RunnerConfig(capture=capture)
    with StaticMoERunner(model, sgd(model), example_batch=given[0], loss_fn=loss_fn, config=config) as runner:
        assert torch.equal(record.ids, before.ids) and torch.equal(record.weights, before.weights)
        for number, batch in enumerate(given):
            runner.step(batch)
            runner.synchronize()
            if capture == "emulate" or number != 2:
                assert torch.equal(record.ids, given[1 if number == 2 else number]["ids"])
    words = r"into.ids: expected torch.int32 of \(2, 4, 4, 2\); got .*\(2, 5, 4, 2\)"
    with pytest.raises(ConfigError, match=words), recording(model, into=record):
        model(tokens(0, B, S - 1))


def test_an_evaluation_replays_too() -> None:
    model, given = build(2), batches(3, 2)
    config = RunnerConfig(capture="emulate")
    with StaticMoERunner(model, sgd(model), example_batch=given[0], loss_fn=replayed_loss, config=config) as runner:
        for batch in given:
            result = runner.evaluate(batch)
            with torch.no_grad():
                assert float(result.loss) == float(replayed_loss(model, batch))


def test_a_model_with_hooks_is_copied_and_saved(tmp_path: Any) -> None:
    """Nothing of a scope goes with it, and the copy has scopes of its own."""
    model, x, ids = build(2), tokens(0), drawn(0, 2)
    want = run(model, x, replaying(model, ids))[0]
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert torch.equal(run(other, x, replaying(other, ids))[0], want)
        assert torch.equal(run(other, x, contextlib.nullcontext())[0], run(model, x, contextlib.nullcontext())[0])
    assert not [name for name in model.state_dict() if "replay" in name]
