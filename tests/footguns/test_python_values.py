"""O6: Python values keep what they were when the iteration was captured."""

from __future__ import annotations

import types

import pytest
import torch

from staticmoe import DeviceScalars
from staticmoe.errors import CaptureError, StaticMoEError

SCALE = 1.0


def test_a_capacity_factor_set_later_is_in_force(way, routed_model, routed_tokens, wrap):
    """Goes wrong: the capacity is a Python number, or a static budget that replay no longer looks at.

    Instead: `runner.set_capacity_factor(f)`.
    """
    model = routed_model(way)
    options = {"capacity_factor": 1.0, "capacity_scope": "expert", "overflow": "drop"}
    batch = {"x": routed_tokens(way, [0] * 64)}
    runner = wrap(way, model, torch.optim.SGD([model.scale], lr=0.0), batch, **options)
    for factor, dropped in ((None, 48), (2.0, 32), (4.0, 0), (1.0, 48)):
        if factor is not None:
            runner.set_capacity_factor(factor)
        results = [runner.step(batch) for _ in range(3)]
        for result in results:
            view = result.moe["moe"]
            assert (view.routed, view.kept, view.dropped) == (
                [64, 0, 0, 0],
                [64 - dropped, 0, 0, 0],
                [dropped, 0, 0, 0],
            )
            assert view.drop_rate == result.moe.drop_rate == dropped / 64
            assert float(result.loss) == pytest.approx(6 * (64 - dropped), rel=1e-5)


def test_a_module_attribute_that_changes_is_used(way, probe, probe_batch, wrap):
    """Goes wrong: a float attribute read in forward (temperature, scale) is frozen at its value of the capture.

    Instead: change it rarely (it captures anew), or make it a `DeviceScalars` value.
    """
    model = probe(way)
    model.temperature = 1.0

    def loss_fn(model, batch):
        return model(**batch) * model.temperature

    batch = probe_batch(way, 3)
    runner = wrap(way, model, torch.optim.SGD([model.b], lr=0.0), batch, loss_fn=loss_fn)
    first = runner.step(batch)
    model.temperature = 2.0
    second = runner.step(batch)
    assert [float(first.loss), float(second.loss)] == [3.0, 6.0]


def test_an_attribute_deep_inside_the_model_that_changes_is_used(way, probe, probe_batch, wrap):
    """Goes wrong: only the outermost module is looked at.

    Instead: as above.
    """
    model = probe(way)
    model.body = torch.nn.Sequential(torch.nn.Identity(), torch.nn.LeakyReLU(0.5))

    def loss_fn(model, batch):
        return model(**batch) + model.body(-batch["s"])

    batch = probe_batch(way, 4)
    runner = wrap(way, model, torch.optim.SGD([model.b], lr=0.0), batch, loss_fn=loss_fn)
    first = runner.step(batch)
    model.body[1].negative_slope = 0.25
    second = runner.step(batch)
    assert [float(first.loss), float(second.loss)] == [2.0, 3.0]


def test_a_closure_cell_that_changes_is_used(way, probe, probe_batch, wrap):
    """Goes wrong: a number that the loss closes over is frozen.

    Instead: as above.
    """
    model = probe(way)
    scale = 1.0

    def loss_fn(model, batch):
        return model(**batch) * scale

    batch = probe_batch(way, 3)
    runner = wrap(way, model, torch.optim.SGD([model.b], lr=0.0), batch, loss_fn=loss_fn)
    first = runner.step(batch)
    scale = 2.0
    second = runner.step(batch)
    assert [float(first.loss), float(second.loss)] == [3.0, 6.0]


def test_a_global_that_changes_is_used(way, probe, probe_batch, wrap, monkeypatch):
    """Goes wrong: a module-level constant that a script changes is frozen.

    Instead: as above.
    """
    model = probe(way)

    def loss_fn(model, batch):
        return model(**batch) * SCALE

    batch = probe_batch(way, 3)
    runner = wrap(way, model, torch.optim.SGD([model.b], lr=0.0), batch, loss_fn=loss_fn)
    first = runner.step(batch)
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    second = runner.step(batch)
    assert [float(first.loss), float(second.loss)] == [3.0, 6.0]


def test_a_device_scalar_changes_at_the_next_step(way, probe, probe_batch, wrap):
    """Goes wrong: a value that moves on every step is frozen, or captures anew every time.

    Instead: this.
    """
    model = probe(way)
    scalars = DeviceScalars(alpha=0.25)
    runs = []

    def loss_fn(model, batch):
        runs.append(1)
        return model(**batch) * scalars["alpha"]

    batch = probe_batch(way, 4)
    optimizer = torch.optim.SGD([model.b], lr=0.0)
    runner = wrap(way, model, optimizer, batch, loss_fn=loss_fn, scalars=scalars)
    built, losses = len(runs), []
    for alpha in (None, 0.5, 1.0, 2.0, 4.0, 8.0):
        if alpha is not None:
            runner.scalars["alpha"] = alpha
        losses.append(runner.step(batch).loss)
    assert [float(loss) for loss in losses] == [1, 2, 4, 8, 16, 32]
    runner.synchronize()
    assert way.capture == "off" or len(runs) == built


def test_a_python_number_in_the_batch_is_no_constant(way, probe, probe_batch, wrap):
    """Goes wrong: a float in the batch is recorded by value.

    Instead: nothing to do: numbers of a batch become device scalars.
    """
    model = probe(way)
    x = probe_batch(way, 1)["x"]
    runner = wrap(way, model, torch.optim.SGD([model.b], lr=0.1), {"x": x, "s": 1.0})
    results = [runner.step({"x": x, "s": s}) for s in (1.0, 2.0, 4.0)]
    assert [float(result.loss) for result in results] == pytest.approx([1.0, 1.8, 2.8])
    runner.synchronize()
    assert float(model.b) == pytest.approx(0.3)


def test_a_tensor_that_forward_rebinds_is_refused(captured_way, probe, probe_batch, wrap):
    """Goes wrong: `self.x = self.x + 1` binds a tensor of the graph; every replay adds to the value of the capture.

    Instead: register a buffer and write it in place: `self.x.add_(1)`.
    """
    model = probe(captured_way)
    model.x = torch.zeros((), device=captured_way.device)

    def loss_fn(model, batch):
        model.x = model.x + 1
        return model(**batch) * model.x

    optimizer = torch.optim.SGD([model.b], lr=0.1)
    with pytest.raises(CaptureError, match=r"\bx\b"):
        wrap(captured_way, model, optimizer, probe_batch(captured_way, 1), loss_fn=loss_fn)


def test_a_buffer_that_forward_rebinds_is_refused(captured_way, probe, probe_batch, wrap):
    """Goes wrong: as above, with a registered buffer: `self.total = self.total + x`.

    Instead: `self.total.add_(x)`.
    """
    model = probe(captured_way)
    model.register_buffer("total", torch.zeros((), device=captured_way.device))

    def loss_fn(model, batch):
        model.total = model.total + batch["s"]
        return model(**batch) + 0 * model.total

    optimizer = torch.optim.SGD([model.b], lr=0.1)
    with pytest.raises(CaptureError, match="total"):
        wrap(captured_way, model, optimizer, probe_batch(captured_way, 1), loss_fn=loss_fn)


def test_a_counter_that_forward_counts_is_refused(captured_way, probe, probe_batch, wrap):
    """Goes wrong: `self.calls += 1` runs at capture and never again: a warm-up schedule inside the model stands still.

    Instead: count in an int64 buffer, in place, or hand the value in with the batch.
    """
    model = probe(captured_way)
    model.calls = 0

    def loss_fn(model, batch):
        model.calls += 1
        return model(**batch) / model.calls

    optimizer = torch.optim.SGD([model.b], lr=0.1)
    with pytest.raises(CaptureError, match="calls"):
        wrap(captured_way, model, optimizer, probe_batch(captured_way, 1), loss_fn=loss_fn)


def test_what_nobody_can_see_is_found_by_the_recheck(captured_way, probe, probe_batch, wrap):
    """Goes wrong: a number inside a plain object (an argparse namespace, a config) changes; nobody watches those.

    Instead: `recheck_every=N` compares a replay with the uncaptured iteration; better, make it a device scalar.
    """
    model = probe(captured_way)
    options = types.SimpleNamespace(inner=types.SimpleNamespace(scale=1.0))

    def loss_fn(model, batch):
        return model(**batch) * options.inner.scale

    batch = probe_batch(captured_way, 3)
    optimizer = torch.optim.SGD([model.b], lr=0.0)
    runner = wrap(captured_way, model, optimizer, batch, loss_fn=loss_fn, recheck_every=2)
    assert [float(runner.step(batch).loss) for _ in range(3)] == [3.0, 3.0, 3.0]
    options.inner.scale = 2.0
    losses = []
    try:
        for _ in range(4):
            losses.append(float(runner.step(batch).loss))
    except StaticMoEError:
        # Found at the latest N steps after the change.
        assert len(losses) <= 2
    else:
        assert losses == [6.0] * 4, "silently the old value"
