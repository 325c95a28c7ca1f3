"""O1, O18: what the optimizer reads from Python is frozen at capture, or costs a capture on every step."""

from __future__ import annotations

import copy

import pytest
import torch

from staticmoe.errors import OptimizerError, ReplayError

B_AFTER = [0.9, 0.8, 0.7, 0.69, 0.68, 0.67]


class Rate:
    """Sets the learning rate to .1 for calls 1-3 and to .01 for calls 4-6, in one of the ways people do."""

    def __init__(self, kind, optimizer):
        self.kind, self.optimizer, self.call = kind, optimizer, 0
        self.scheduler = None
        if kind == "scheduler":
            self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.1)

    def after_call(self):
        self.call += 1
        group = self.optimizer.param_groups[0]
        if self.scheduler is not None:
            self.scheduler.step()
        elif self.call == 3 and self.kind == "float":
            group["lr"] = 0.01
        elif self.call == 3 and self.kind == "tensor filled":
            group["lr"].fill_(0.01)
        elif self.call == 3 and self.kind == "tensor replaced":
            group["lr"] = torch.tensor(0.01)


def walk(way, kind, probe, probe_batch, wrap):
    """Six calls with s = 1: the loss is b before the update, so losses are the trajectory, without a wait between."""
    model = probe(way)
    lr = torch.tensor(0.1) if kind.startswith("tensor") else 0.1
    optimizer = torch.optim.Adam([model.b], lr=lr, betas=(0.9, 0.999), eps=1e-8)
    runner = wrap(way, model, optimizer, probe_batch(way, 1))
    rate, results = Rate(kind, optimizer), []
    for _ in range(6):
        results.append(runner.step(probe_batch(way, 1)))
        # Set while the step may still be in flight: it must not reach back into it.
        rate.after_call()
    assert [float(result.loss) for result in results] == pytest.approx([1.0, *B_AFTER[:5]], abs=1e-5)
    assert [float(result.metrics["lr"]) for result in results] == pytest.approx([0.1] * 3 + [0.01] * 3)
    runner.synchronize()
    assert float(model.b) == pytest.approx(B_AFTER[5], abs=1e-5)


def test_the_learning_rate_at_every_distance_from_the_capture(every_way, probe, probe_batch, wrap):
    """Goes wrong: the rate, or Adam's step counter, is a host number recorded by value. Finals of .40 (rate frozen),
    .665 or .554 (step counter frozen) give it away; SGD at a constant rate hides it.

    Instead: set the rate as you always did.
    """
    walk(every_way, "float", probe, probe_batch, wrap)


@pytest.mark.filterwarnings("error:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("kind", ["scheduler", "tensor filled", "tensor replaced"])
def test_the_learning_rate_in_each_form(way, probe, probe_batch, wrap, kind):
    """Goes wrong: only one of the ways to set a rate is looked at; or a scheduler warns that nothing was stepped.

    Instead: in `param_groups`, by a scheduler, or as a tensor.
    """
    walk(way, kind, probe, probe_batch, wrap)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_walks_as_it_does_alone(way, probe, probe_batch, wrap, name):
    """Goes wrong: state that the first step creates (momentum, maxima, step counters) is created at capture, or a
    first-step flag is baked in, so that momentum starts from garbage or from one update too many.

    Instead: nothing to do; the state is created before the capture, as the first step would.
    """
    model = probe(way, 3)
    alone = torch.nn.Parameter(torch.ones(3, device=way.device))
    optimizer, plain = OPTIMIZERS[name]([model.b]), OPTIMIZERS[name]([alone])
    if name == "adagrad" and way.device.type == "cuda":
        with pytest.raises(OptimizerError, match="Adagrad"):
            wrap(way, model, optimizer, probe_batch(way, 1))
        return
    runner = wrap(way, model, optimizer, probe_batch(way, 1))
    for s in (1.0, -2.0, 0.5, 0.0, 3.0, 1.0):
        runner.step(probe_batch(way, s))
        alone.grad = torch.full_like(alone, s)
        plain.step()
        runner.synchronize()
        torch.testing.assert_close(model.b.detach(), alone.detach(), rtol=2e-6, atol=1e-6)
    mine, theirs = optimizer.state_dict()["state"].get(0, {}), plain.state_dict()["state"].get(0, {})
    for key, value in theirs.items():
        if value is not None:
            torch.testing.assert_close(
                torch.as_tensor(mine[key]).cpu(), torch.as_tensor(value).cpu(), rtol=2e-6, atol=1e-6
            )


@pytest.mark.parametrize("name", ["sgd momentum", "adam amsgrad", "adagrad"])
def test_an_optimizer_that_has_stepped_before_goes_on(way, probe, probe_batch, wrap, name):
    """Goes wrong: wrapping starts the moments and the step count anew, or keeps a first-step branch for good.

    Instead: nothing to do; existing state is used, in place.
    """
    if name == "adagrad" and way.device.type == "cuda":
        pytest.skip("torch has no fused Adagrad on a GPU; it is refused")
    model = probe(way, 3)
    alone = torch.nn.Parameter(torch.ones(3, device=way.device))
    optimizer, plain = OPTIMIZERS[name]([model.b]), OPTIMIZERS[name]([alone])
    for s in (1.0, -3.0):
        for parameter, one in ((model.b, optimizer), (alone, plain)):
            parameter.grad = torch.full_like(parameter, s)
            one.step()
    runner = wrap(way, model, optimizer, probe_batch(way, 1))
    for s in (0.5, 2.0, -1.0):
        runner.step(probe_batch(way, s))
        alone.grad = torch.full_like(alone, s)
        plain.step()
    runner.synchronize()
    torch.testing.assert_close(model.b.detach(), alone.detach(), rtol=2e-6, atol=1e-6)
    assert float(model.b[0]) != 1.0


def test_a_first_step_that_differs_from_the_others_is_refused(way, probe, probe_batch, wrap):
    """Goes wrong: SGD damps every gradient but the first; one graph holds one of the two.

    Instead: `dampening=0`, with the rate scaled by what the dampening took.
    """
    model = probe(way)
    optimizer = torch.optim.SGD([model.b], lr=0.1, momentum=0.9, dampening=0.5)
    with pytest.raises(OptimizerError, match=r"dampening=0\.5"):
        wrap(way, model, optimizer, probe_batch(way, 1))


@pytest.mark.parametrize(("key", "value"), [("weight_decay", 0.5), ("betas", (0.5, 0.7)), ("eps", 0.5)])
def test_a_changed_hyperparameter_is_used(way, probe, probe_batch, wrap, key, value):
    """Goes wrong: only the learning rate is looked at again; weight decay and betas keep the value of the capture.

    Instead: change them as you like, rarely: each change of another hyper-parameter captures anew, save those of
    `staticmoe.optim.AdamW`.
    """
    model = probe(way)
    alone = torch.nn.Parameter(torch.ones((), device=way.device))
    optimizer, plain = torch.optim.AdamW([model.b], lr=0.1), torch.optim.AdamW([alone], lr=0.1)
    runner = wrap(way, model, optimizer, probe_batch(way, 1))
    for call in range(6):
        if call == 3:
            optimizer.param_groups[0][key] = plain.param_groups[0][key] = value
        runner.step(probe_batch(way, call))
        alone.grad = torch.full_like(alone, float(call))
        plain.step()
    runner.synchronize()
    assert float(model.b) == pytest.approx(float(alone), abs=1e-5)


def test_a_hyperparameter_that_moves_on_every_step_is_an_error(captured_way, probe, probe_batch, wrap):
    """Goes wrong: OneCycleLR cycles betas with the rate, so that every step silently captures anew and training
    runs at the speed of capturing.

    Instead: `staticmoe.optim.AdamW`, whose betas are device values; or `OneCycleLR(..., cycle_momentum=False)`.
    """
    model = probe(captured_way)
    optimizer = torch.optim.Adam([model.b], lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=50)
    runner = wrap(captured_way, model, optimizer, probe_batch(captured_way, 1))
    with pytest.raises(ReplayError, match="betas"):
        for _ in range(8):
            runner.step(probe_batch(captured_way, 1))
            scheduler.step()


def test_a_moving_rate_captures_nothing_anew(captured_way, probe, probe_batch, wrap):
    """Goes wrong: a float rate is a constant of the recording, so that a schedule captures (or compiles) on every step.

    Instead: nothing to do; the rate is a device value. Twenty rates, one evaluation, no further run of the loss.
    """
    model = probe(captured_way)
    runs = []

    def loss_fn(model, batch):
        runs.append(torch.is_grad_enabled())
        return model(**batch)

    optimizer = torch.optim.Adam([model.b], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    runner = wrap(captured_way, model, optimizer, probe_batch(captured_way, 1), loss_fn=loss_fn)
    built = runs.count(True)
    for call in range(20):
        runner.step(probe_batch(captured_way, 1))
        scheduler.step()
        if call == 10:
            runner.evaluate(probe_batch(captured_way, 1))
    runner.synchronize()
    assert built > 0 and runs.count(True) == built
    expected = 1 - sum(0.1 * 0.9**call for call in range(20))
    assert float(model.b) == pytest.approx(expected, abs=1e-4)


def test_param_groups_are_as_the_user_left_them(way, probe, probe_batch, wrap):
    """Goes wrong: wrapping leaves `capturable`, `fused` or a tensor rate behind, which breaks schedulers and
    checkpoints of the unwrapped run.

    Instead: nothing to do; device values live in the recording only.
    """
    model = probe(way)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    before = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    before = copy.deepcopy(before)
    ids = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]

    def now():
        return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]

    runner = wrap(way, model, optimizer, probe_batch(way, 1))
    assert now() == before and type(optimizer.param_groups[0]["lr"]) is float
    runner.step(probe_batch(way, 1))
    runner.synchronize()
    assert now() == before and type(optimizer.param_groups[0]["lr"]) is float
    runner.close()
    assert now() == before and [[id(p) for p in group["params"]] for group in optimizer.param_groups] == ids


def test_two_groups_have_two_rates(way, probe, probe_batch, wrap):
    """Goes wrong: one device value for all groups, so that the second group's rate is the first one's.

    Instead: nothing to do.
    """
    model = probe(way)
    model.c = torch.nn.Parameter(torch.ones((), device=way.device))
    optimizer = torch.optim.SGD([{"params": [model.b], "lr": 0.1}, {"params": [model.c], "lr": 0.01}])

    def loss_fn(model, batch):
        return model(**batch) + batch["s"] * model.c

    runner = wrap(way, model, optimizer, probe_batch(way, 1), loss_fn=loss_fn)
    runner.step(probe_batch(way, 1))
    optimizer.param_groups[1]["lr"] = 0.5
    runner.step(probe_batch(way, 1))
    runner.synchronize()
    assert float(model.b) == pytest.approx(0.8) and float(model.c) == pytest.approx(1 - 0.01 - 0.5)
