"""O2, O3: a step that trains too often or not at all, and accumulation that goes wrong without a word."""

from __future__ import annotations

import copy

import pytest
import torch

from staticmoe import MicroBatches
from staticmoe.errors import BatchError


def test_n_calls_are_n_updates(every_way, probe, probe_batch, wrap):
    """Goes wrong: warm-up or the capture pass trains as well, or the captured batch is recorded and never run. The
    binary digits of b show which batch was lost or doubled.

    Instead: nothing to do; the constructor works under veto, and every call is one update.
    """
    model = probe(every_way)
    optimizer = torch.optim.SGD([model.b], lr=0.1)
    runner = wrap(every_way, model, optimizer, probe_batch(every_way, 512))
    results, expected = [], []
    for call in range(10):
        expected.append(2**call * (1 - 0.1 * (2**call - 1)))
        results.append(runner.step(probe_batch(every_way, 2**call)))
        runner.synchronize()
        assert float(model.b) == pytest.approx(1 - 0.1 * (2 ** (call + 1) - 1), rel=1e-5)
    assert [float(result.loss) for result in results] == pytest.approx(expected, rel=1e-5)
    assert [result.step - results[0].step for result in results] == list(range(10))


@pytest.mark.parametrize("calls", [1, 3])
def test_n_calls_are_n_updates_without_a_wait_between(way, probe, probe_batch, wrap, calls):
    """Goes wrong: a step in flight reads the inputs of a later one, because they share one buffer, or the last steps
    are still queued when the parameters are read.

    Instead: `runner.synchronize()` before reading parameters by hand; a batch may be overwritten as soon as `step`
    returns.
    """
    model = probe(way)
    optimizer = torch.optim.Adam([model.b], lr=0.1)
    sgd = torch.optim.SGD([model.b], lr=0.1)
    batch = probe_batch(way, 512)
    runner = wrap(way, model, sgd, batch)
    for call in range(calls):
        batch["s"].fill_(2**call)
        runner.step(batch)
        batch["s"].fill_(float("nan"))
    runner.synchronize()
    assert float(model.b) == pytest.approx(1 - 0.1 * (2**calls - 1), rel=1e-5)
    # The same for a step counter: state_dict waits by itself.
    runner.close()
    runner = wrap(way, model, optimizer, probe_batch(way, 1))
    for _ in range(calls):
        runner.step(probe_batch(way, 1))
    assert float(optimizer.state_dict()["state"][0]["step"]) == calls


def test_building_a_runner_changes_nothing(every_way, probe, probe_batch, wrap):
    """Goes wrong: warm-up moves parameters, moments, buffers or the random state; a run resumed from a checkpoint is
    then not the run that was saved.

    Instead: nothing to do. Optimizer state exists afterwards, as zeros.
    """
    model = probe(every_way, 3)
    model.norm = torch.nn.BatchNorm1d(8).to(every_way.device)
    model.drop = torch.nn.Dropout(0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def loss_fn(model, batch):
        x = model.drop(model.norm(batch["x"]))
        return model(x, batch["s"]) + x.square().sum()

    batch = probe_batch(every_way, 1)
    before = copy.deepcopy(model.state_dict())
    random, modes = torch.get_rng_state(), [module.training for module in model.modules()]
    wrap(every_way, model, optimizer, batch, loss_fn=loss_fn)
    assert torch.equal(torch.get_rng_state(), random)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert [module.training for module in model.modules()] == modes
    for state in optimizer.state_dict()["state"].values():
        assert float(state["step"]) == 0 and not state["exp_avg"].any() and not state["exp_avg_sq"].any()


def test_a_forward_that_writes_a_buffer_writes_it_once_a_call(way, probe, probe_batch, wrap):
    """Goes wrong: warm-up, capture, self-check and vetoed steps advance running statistics or counters that the
    forward writes.

    Instead: keep such state in a registered buffer and write it in place; it then changes only where a step commits.
    """
    model = probe(way)
    model.register_buffer("calls", torch.zeros((), dtype=torch.int64, device=way.device))

    def loss_fn(model, batch):
        model.calls.add_(1)
        return model(**batch)

    runner = wrap(way, model, torch.optim.SGD([model.b], lr=0.1), probe_batch(way, 1), loss_fn=loss_fn)
    assert int(model.calls) == 0
    for s in (1.0, float("inf"), 1.0, 1.0):
        runner.step(probe_batch(way, s))
    runner.synchronize()
    # Four calls, one of them vetoed: the buffer belongs to the state that a veto keeps.
    assert int(model.calls) == 3 and float(model.b) == pytest.approx(0.7)


@pytest.mark.parametrize(("reduction", "moved"), [("sum", 7.0), ("mean", 7 / 3)])
@pytest.mark.parametrize("form", ["micro batches", "leading dimension"])
def test_accumulation_counts_every_micro_batch_once(way, probe, probe_batch, wrap, reduction, moved, form):
    """Goes wrong: gradients of the window before are added again, or only the last micro-batch counts, because
    `.grad` is a buffer of the graph.

    Instead: one `step` for one window, the example being one. "mean" divides by the number of micro-batches,
    "sum" does not.
    """
    model = probe(way)
    micro = [probe_batch(way, s) for s in (1, 2, 4)]

    def window():
        if form == "micro batches":
            return MicroBatches(micro)
        return {key: torch.stack([batch[key] for batch in micro]) for key in micro[0]}

    options = {"gradient_accumulation_steps": 3, "loss_reduction": reduction}
    runner = wrap(way, model, torch.optim.SGD([model.b], lr=1.0), window(), **options)
    results = [runner.step(window()) for _ in range(5)]
    runner.synchronize()
    assert float(model.b) == pytest.approx(1 - 5 * moved, rel=1e-5)
    expected = [moved * (1 - moved * call) for call in range(5)]
    assert [float(result.loss) for result in results] == pytest.approx(expected, rel=1e-5)
    assert all(sum(result.moe["moe"].routed) == 3 * 4 for result in results)


def test_a_short_window_is_refused(way, probe, probe_batch, wrap):
    """Goes wrong: a window of two at the end of the data replays a graph of three, the third being the old one.

    Instead: drop the tail, fill it with fully masked micro-batches, or build a second runner for it.
    """
    model = probe(way)
    window = MicroBatches([probe_batch(way, s) for s in (1, 2, 4)])
    options = {"gradient_accumulation_steps": 3, "loss_reduction": "sum"}
    runner = wrap(way, model, torch.optim.SGD([model.b], lr=1.0), window, **options)
    runner.step(window)
    with pytest.raises(BatchError, match=r"(?s)3.*2|2.*3"):
        runner.step(MicroBatches([probe_batch(way, s) for s in (1, 2)]))
    runner.step(window)
    runner.synchronize()
    assert float(model.b) == pytest.approx(1 - 14)


def test_zero_grad_between_calls_is_harmless(way, probe, probe_batch, wrap):
    """Goes wrong: `zero_grad(set_to_none=True)` drops the tensors that the graph writes, and nothing refills them.

    Instead: leave `zero_grad` where it is, or take it out: gradients live inside the iteration.
    """
    model = probe(way)
    optimizer = torch.optim.SGD([model.b], lr=0.1)
    runner = wrap(way, model, optimizer, probe_batch(way, 1))
    for _ in range(4):
        optimizer.zero_grad(set_to_none=True)
        model.zero_grad()
        runner.step(probe_batch(way, 1))
        optimizer.zero_grad(set_to_none=False)
    runner.synchronize()
    assert float(model.b) == pytest.approx(0.6)


def test_a_gradient_of_the_users_is_left_alone(way, probe, probe_batch, wrap):
    """Goes wrong: a gradient object held from call i changes at call i + 1, or is added to the update.

    Instead: read `result.grad_norm`; for single gradients run `torch.autograd.grad` on the model yourself.
    """
    model = probe(way)
    held = torch.full((), 5.0, device=way.device)
    model.b.grad = held
    runner = wrap(way, model, torch.optim.SGD([model.b], lr=0.1), probe_batch(way, 1))
    results = [runner.step(probe_batch(way, s)) for s in (1, 3)]
    runner.synchronize()
    assert model.b.grad is held and float(held) == 5.0
    assert all(parameter.grad is None for parameter in model.moe.parameters())
    assert float(model.b) == pytest.approx(1 - 0.1 - 0.3)
    assert [float(result.grad_norm) for result in results] == pytest.approx([1.0, 3.0])
