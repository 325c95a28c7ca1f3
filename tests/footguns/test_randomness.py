"""O8, O39: the same mask in every replay, a seed that reproduces nothing, noise in evaluation."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Dropped(nn.Module):
    """loss = sum(v * dropout(w)): the gradient of w shows the mask of the backward, the loss the one of the forward."""

    def __init__(self, probe, *, checkpointed=False):
        super().__init__()
        self.probe = probe
        self.w = nn.Parameter(torch.ones(4096, dtype=torch.float64, device=probe.b.device))
        self.dropout = nn.Dropout(0.5)
        self.checkpointed = checkpointed

    def forward(self, x, s, v):
        if self.checkpointed:
            dropped = checkpoint(self.dropout, self.w * v, use_reentrant=False)
        else:
            dropped = self.dropout(self.w * v)
        return self.probe(x, s) + dropped.square().sum()


@pytest.fixture
def dropped(probe, probe_batch):
    """Builder of (model, batch) with weights v that tell every mask from every other."""

    def build(way, **options):
        model = Dropped(probe(way), **options)
        v = torch.rand(4096, dtype=torch.float64, device=way.device) + 0.5
        return model, {**probe_batch(way, 0), "v": v}

    return build


@pytest.mark.parametrize("checkpointed", [False, True])
def test_every_step_draws_its_own_mask_and_the_backward_uses_it(way, dropped, wrap, checkpointed):
    """Goes wrong: the mask is the one of the capture for ever; or the backward (or the recomputed forward of a
    checkpoint) draws another than the forward did, and the gradient is of another function.

    Instead: nothing to do.
    """
    model, batch = dropped(way, checkpointed=checkpointed)
    v = batch["v"]
    # The loss is sum(4 * mask * (w v)^2), its gradient 8 * mask * w * v^2; a rate of zero keeps w at one, so the
    # masks are read from the momentum, which holds the last gradient alone.
    optimizer = torch.optim.SGD([model.w, model.probe.b], lr=0.0, momentum=1e-30)
    runner = wrap(way, model, optimizer, batch)
    masks = []
    for _ in range(6):
        result = runner.step(batch)
        runner.synchronize()
        gradient = optimizer.state[model.w]["momentum_buffer"].clone()
        mask = gradient.abs() > 1e-6
        torch.testing.assert_close(gradient[mask], (8 * v.square())[mask], rtol=1e-9, atol=0)
        assert abs(mask.double().mean() - 0.5) < 0.05
        assert float(result.loss) == pytest.approx(float((4 * v.square())[mask].sum()), rel=1e-6)
        masks.append(mask)
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(masks, 2))


def test_a_seed_reproduces_and_another_does_not(way, dropped, wrap):
    """Goes wrong: the generator of the graph is not the user's, so that seeding has no effect on replays.

    Instead: `torch.manual_seed` before a step; each step draws once from the default generator when it is called.
    """
    model, batch = dropped(way)
    runner = wrap(way, model, torch.optim.SGD([model.w, model.probe.b], lr=0.0), batch)

    def losses(seed):
        torch.manual_seed(seed)
        results = [runner.step(batch) for _ in range(3)]
        return [float(result.loss) for result in results]

    first, other, again = losses(7), losses(8), losses(7)
    assert first == again
    assert len({*first, *other}) == 6


def test_replayed_and_not_replayed_draw_the_same(captured_way, dropped, wrap):
    """Goes wrong: the number of draws differs (warm-up, capture, self-check), so no two ways compare.

    Instead: nothing to do.
    """
    runs = []
    for capture in (captured_way.capture, "off"):
        torch.manual_seed(1)
        model, batch = dropped(captured_way)
        runner = wrap(captured_way, model, torch.optim.SGD([model.w, model.probe.b], lr=0.0), batch, capture=capture)
        torch.manual_seed(7)
        runs.append([float(runner.step(batch).loss) for _ in range(3)])
        runs[-1].append(float(torch.rand(())))
    assert runs[0] == runs[1]


def test_the_users_generator_goes_on(way, dropped, wrap):
    """Goes wrong: after a capture torch.rand fails, stands still, or draws what the model has drawn already.

    Instead: nothing to do.
    """
    model, batch = dropped(way)
    runner = wrap(way, model, torch.optim.SGD([model.w, model.probe.b], lr=0.0), batch)
    drawn = []
    for _ in range(3):
        runner.step(batch)
        drawn.append(float(torch.rand((), device=way.device)))
    runner.close()
    drawn.append(float(torch.rand((), device=way.device)))
    assert len(set(drawn)) == 4 and all(0 <= value < 1 for value in drawn)


def test_noise_that_is_not_dropout_is_fresh_as_well(way, probe, probe_batch, wrap):
    """Goes wrong: only dropout is known to the capture; jitter drawn by rand_like, randn or bernoulli stays.

    Instead: nothing to do, as long as the noise comes from torch's default generator.
    """
    model = probe(way)

    def loss_fn(model, batch):
        noise = torch.rand_like(batch["x"]).sum() + torch.randn(3, device=batch["x"].device).sum()
        coins = torch.bernoulli(torch.full((64,), 0.5, device=batch["x"].device)).sum()
        return model(**batch), {"noise": noise, "coins": coins}

    batch = probe_batch(way, 1)
    runner = wrap(way, model, torch.optim.SGD([model.b], lr=0.0), batch, loss_fn=loss_fn)
    results = [runner.step(batch) for _ in range(6)]
    assert len({float(result.metrics["noise"]) for result in results}) == 6
    assert len({float(result.metrics["coins"]) for result in results}) >= 3


def test_evaluation_is_the_same_every_time(way, dropped, wrap):
    """Goes wrong: evaluation runs with the train graph: dropout on, training noise in the router.

    Instead: `runner.evaluate(batch)`: under eval() and no_grad, in a graph of its own.
    """
    model, batch = dropped(way)
    model.norm = nn.Dropout(0.9).eval()
    runner = wrap(way, model, torch.optim.SGD([model.w, model.probe.b], lr=0.125), batch)
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    results = [runner.evaluate(batch) for _ in range(4)]
    expected = float(batch["v"].square().sum())
    assert [float(result.loss) for result in results] == pytest.approx([expected] * 4, rel=1e-6)
    assert len({float(result.loss) for result in results}) == 1
    assert len({tuple(result.moe["probe.moe"].routed) for result in results}) == 1
    # Nothing of the training moved, not even the flags of a part that the user keeps in evaluation.
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training and model.dropout.training and model.probe.moe.training and not model.norm.training
    train = runner.step(batch)
    assert abs(float(train.loss) - 2 * expected) < 0.2 * expected, "dropout is on again"


def test_evaluation_has_its_own_capacity(way, routed_model, routed_tokens, wrap):
    """Goes wrong: the capacity of training is in force in evaluation and drops tokens of the score.

    Instead: `eval_capacity_factor`, which is dropless unless it is set.
    """
    batch = {"x": routed_tokens(way, [0] * 64)}
    for factor, dropped in ((None, 0), (2.0, 32)):
        model = routed_model(way)
        options = {"capacity_factor": 1.0, "capacity_scope": "expert", "overflow": "drop"}
        optimizer = torch.optim.SGD([model.scale], lr=0.0)
        runner = wrap(way, model, optimizer, batch, eval_capacity_factor=factor, **options)
        for _ in range(2):
            train, evaluated = runner.step(batch), runner.evaluate(batch)
            assert train.moe["moe"].dropped == [48, 0, 0, 0]
            assert evaluated.moe["moe"].routed == [64, 0, 0, 0]
            assert evaluated.moe["moe"].dropped == [dropped, 0, 0, 0]
            assert float(evaluated.loss) == pytest.approx(6 * (64 - dropped), rel=1e-5)


def test_evaluation_sees_the_last_update(way, probe, probe_batch, wrap):
    """Goes wrong: evaluation runs beside steps still in flight, on weights of some step in between.

    Instead: nothing to do.
    """
    model = probe(way)
    runner = wrap(way, model, torch.optim.SGD([model.b], lr=0.1), probe_batch(way, 1))
    losses = []
    for _ in range(3):
        runner.step(probe_batch(way, 1))
        losses.append(runner.evaluate(probe_batch(way, 1)).loss)
    assert [float(loss) for loss in losses] == pytest.approx([0.9, 0.8, 0.7])
