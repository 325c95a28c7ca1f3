"""O7, O9: stale casts under autocast, and a clip coefficient or an infinity that stays."""

from __future__ import annotations

import copy

import pytest
import torch

from staticmoe import StaticMoE
from staticmoe.errors import NonFiniteError, StaticMoEError


def test_the_clip_coefficient_is_computed_anew(every_way, probe, probe_batch, wrap):
    """Goes wrong: `if norm > max_norm` is decided once, at capture, or the coefficient is a host number.

    Instead: `max_grad_norm`; the norm is over all gradients and `result.grad_norm` is the one before clipping.
    """
    model = probe(every_way, 100)
    runner = wrap(every_way, model, torch.optim.SGD([model.b], lr=1.0), probe_batch(every_way, 0.01), max_grad_norm=1.0)
    moves, results = [], []
    before = torch.ones(100, device=every_way.device)
    for s in (1.0, 0.01, 1.0):
        results.append(runner.step(probe_batch(every_way, s)))
        runner.synchronize()
        moves.append((before - model.b.detach()).tolist())
        before = model.b.detach().clone()
    for move, expected in zip(moves, (0.1, 0.01, 0.1), strict=True):
        assert move == pytest.approx([expected] * 100, rel=1e-4)
    assert [float(result.grad_norm) for result in results] == pytest.approx([10.0, 0.1, 10.0], rel=1e-5)


def test_an_infinite_threshold_measures_and_does_not_clip(way, probe, probe_batch, wrap):
    """Goes wrong: the default threshold of infinity ends the capture (a comparison on the host), or inf / inf is NaN.

    Instead: `max_grad_norm=float("inf")`, or None, which measures as well.
    """
    for threshold in (float("inf"), None):
        model = probe(way, 100)
        optimizer = torch.optim.SGD([model.b], lr=1.0)
        runner = wrap(way, model, optimizer, probe_batch(way, 1), max_grad_norm=threshold)
        result = runner.step(probe_batch(way, 1))
        runner.synchronize()
        assert model.b.tolist() == [0.0] * 100
        assert float(result.grad_norm) == pytest.approx(10.0)


@pytest.mark.parametrize(("bad", "max_grad_norm"), [(float("inf"), None), (float("nan"), 1.0), (float("-inf"), 1.0)])
def test_a_step_that_is_not_finite_changes_nothing(way, probe, probe_batch, wrap, bad, max_grad_norm):
    """Goes wrong: one infinite gradient turns every weight and every moment to NaN (the clip coefficient is 0, and
    0 * inf is NaN), or the skip is decided on the host, one step late.

    Instead: `nonfinite="skip"` (default): the step is vetoed and says so; the next one is as if it had not been.
    """
    model = probe(way, 4)
    optimizer = torch.optim.Adam([model.b], lr=0.1)
    options = {"max_grad_norm": max_grad_norm, "max_consecutive_skips": 3}
    runner = wrap(way, model, optimizer, probe_batch(way, 1), **options)
    results = [runner.step(probe_batch(way, s)) for s in (1.0, bad, 1.0, bad, bad, 1.0)]
    runner.synchronize()
    assert [bool(result.skipped) for result in results] == [False, True, False, True, True, False]
    assert all("finite" in repr(results[i].reasons).lower() for i in (1, 3, 4))
    assert not any("finite" in repr(results[i].reasons).lower() for i in (0, 2, 5))
    # Three updates of Adam at a constant gradient of one sign.
    assert model.b.tolist() == pytest.approx([0.7] * 4, abs=1e-5)
    state = optimizer.state_dict()["state"][0]
    assert float(state["step"]) == 3 and torch.isfinite(state["exp_avg"]).all()


def test_a_gradient_that_is_not_finite_under_a_finite_loss_is_seen(way, probe, probe_batch, wrap):
    """Goes wrong: only the loss is looked at. sqrt(0) has a finite value and an infinite slope.

    Instead: nothing to do; loss and gradients are both looked at.
    """
    model = probe(way)

    def loss_fn(model, batch):
        return model(**batch) + (model.b * (batch["s"] - 1)).square().sqrt()

    runner = wrap(way, model, torch.optim.SGD([model.b], lr=0.1), probe_batch(way, 2), loss_fn=loss_fn)
    # s = 1: the root's argument is 0, and its slope times the slope of the square is infinity times 0.
    results = [runner.step(probe_batch(way, s)) for s in (2.0, 1.0, 2.0)]
    runner.synchronize()
    assert [bool(result.skipped) for result in results] == [False, True, False]
    assert float(results[1].loss) == pytest.approx(0.7)
    assert float(model.b) == pytest.approx(1 - 0.3 - 0.3)


def test_raise_stops_with_the_state_before_the_step(way, probe, probe_batch, wrap):
    """Goes wrong: the error comes steps later, and the weights have gone on meanwhile.

    Instead: `nonfinite="raise"`: from that step on nothing commits, until the error has been raised.
    """
    model = probe(way)
    optimizer = torch.optim.SGD([model.b], lr=0.1)
    runner = wrap(way, model, optimizer, probe_batch(way, 1), nonfinite="raise")
    with pytest.raises(NonFiniteError):
        for s in (1.0, float("nan"), 1.0, 1.0, 1.0):
            runner.step(probe_batch(way, s))
        runner.synchronize()
    assert float(model.b) == pytest.approx(0.9)


def test_too_many_skips_in_a_row_are_an_error(way, probe, probe_batch, wrap):
    """Goes wrong: a run that diverged skips every step for ever and looks alive.

    Instead: `max_consecutive_skips`.
    """
    model = probe(way)
    optimizer = torch.optim.SGD([model.b], lr=0.1)
    runner = wrap(way, model, optimizer, probe_batch(way, 1), max_consecutive_skips=2)
    nan = float("nan")
    for s in (nan, nan, 1.0, nan, nan, 1.0):
        runner.step(probe_batch(way, s))
    with pytest.raises(StaticMoEError, match="finite"):
        for _ in range(8):
            runner.step(probe_batch(way, nan))
        runner.synchronize()
    assert float(model.b) == pytest.approx(0.8)


def test_weights_changed_in_place_are_seen_under_autocast(way, routed_model, routed_tokens, wrap):
    """Goes wrong: autocast caches the cast copy of a weight, made before the capture; every replay reads the stale one.

    Instead: nothing to do; casts are part of the recording. `runner.synchronize()` before changing weights by hand.
    """
    model = routed_model(way)

    def loss_fn(model, batch):
        y = model.moe(batch["x"])
        return 0 * y.sum() + model.scale, {"y": y.float().sum()}

    batch = {"x": routed_tokens(way, [0, 1, 2, 3] * 4)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    runner = wrap(way, model, optimizer, batch, loss_fn=loss_fn, autocast=torch.bfloat16)
    for _ in range(3):
        before = float(runner.step(batch).metrics["y"])
    runner.synchronize()
    with torch.no_grad():
        model.moe.experts.down_proj.mul_(2)
    after = float(runner.step(batch).metrics["y"])
    # A power of two scales exactly in every format: 6 channels, 4 tokens of each of the constants 1, 2, 3, 4.
    assert before == pytest.approx(6 * 4 * 10, rel=2e-2) and after == 2 * before


def test_twenty_steps_under_autocast_track_plain_autocast(way, wrap, reference):
    """Goes wrong: the gap to plain training grows with every step, because a cast copy is one step (or all steps) old.

    Instead: nothing to do.
    """

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)
            self.moe = StaticMoE(8, 8, num_experts=4, top_k=2)

        def forward(self, x, y):
            x = self.first(x)
            return (self.last(x + self.mixture(x)).float() - y).square().mean()

        def mixture(self, x):
            return self.moe(x)

    torch.manual_seed(5)
    model = Model().to(way.device)
    plain = copy.deepcopy(model)

    def plain_mixture(x):
        # Routing in fp32 whatever the autocast: a choice must not hang on a rounded logit.
        with torch.autocast(x.device.type, enabled=False):
            return reference(plain.moe, x.float(), top_k=2, renormalise=True).output.to(x.dtype)

    plain.mixture = plain_mixture
    target = torch.randn(8, 4, device=way.device)
    inputs = [torch.randn(16, 8, device=way.device) for _ in range(4)]
    batches = [{"x": x, "y": x @ target} for x in inputs]
    optimizer, other = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain))
    runner = wrap(way, model, optimizer, batches[0], autocast=torch.bfloat16)
    gaps, losses = [], []
    for call in range(20):
        batch = batches[call % 4]
        losses.append(float(runner.step(batch).loss))
        with torch.autocast(way.device.type, dtype=torch.bfloat16):
            loss = plain(**batch)
        other.zero_grad()
        loss.backward()
        other.step()
        gaps.append(abs(losses[-1] - float(loss)) / float(loss))
    assert losses[16] < 0.9 * losses[0], "nothing was learned, nothing was compared"
    assert max(gaps) < 2e-2
    assert sum(gaps[15:]) / 5 < 2 * max(sum(gaps[:5]) / 5, 4e-3)


@pytest.mark.skip(reason="the runner has no door for a GradScaler: float16 needs a scaled loss and is not offered yet")
def test_a_gradient_scaler_is_refused_or_works():
    """Goes wrong: the scale is replaced out of place, so that the graph multiplies by the old one.

    Instead: autocast with bfloat16, which needs no scaler.
    """
