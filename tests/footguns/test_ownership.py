"""O5, O11, O12: what trains is no longer what the user holds."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from staticmoe import StaticMoE
from staticmoe.errors import OptimizerError, StaticMoEError


def test_the_optimizer_moves_the_users_parameters(way, wrap, reference):
    """Goes wrong: the wrapper swaps modules after the optimizer took its references; experts and router are frozen and
    the loss still falls, because everything else trains.

    Instead: build the optimizer from `model.parameters()`, then wrap; the objects stay the same.
    """

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.moe = StaticMoE(8, 5, num_experts=4, top_k=2)

        def forward(self, x):
            return self.moe(x).square().sum()

    model = Model().to(way.device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    x = torch.randn(64, 8, device=way.device)
    expected = reference(model.moe, x, top_k=2, renormalise=True)
    assert min(expected.kept) > 0, "every expert must be hit"
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(expected.output.square().sum(), list(named.values()))
    before, keys = copy.deepcopy(model.state_dict()), list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = {id(parameter) for parameter in model.parameters()}

    runner = wrap(way, model, optimizer, {"x": torch.randn(64, 8, device=way.device)})
    runner.step({"x": x})
    runner.synchronize()
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == ids
    assert {id(parameter) for parameter in model.parameters()} == ids
    assert list(model.state_dict()) == keys
    for (name, parameter), gradient in zip(named.items(), gradients, strict=True):
        assert gradient.abs().max() > 0, name
        moved = parameter.detach() - before[name]
        torch.testing.assert_close(moved, -0.1 * gradient, rtol=1e-3, atol=1e-5 * float(gradient.abs().max()), msg=name)


def test_zeros_that_are_loaded_are_trained_on(way, probe, probe_batch, wrap):
    """Goes wrong: after a checkpoint load the graph reads and trains old storage.

    Instead: `load_state_dict` as usual: it copies in place, and waits for the steps in flight.
    """
    model = probe(way)
    runner = wrap(way, model, torch.optim.SGD([model.b], lr=0.1), probe_batch(way, 1))
    for _ in range(3):
        runner.step(probe_batch(way, 1))
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    result = runner.step(probe_batch(way, 2))
    assert float(result.loss) == 0.0
    runner.synchronize()
    assert float(model.b) == pytest.approx(-0.2) and not model.moe.router.weight.any()


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_a_checkpoint_resumes_bitwise(way, probe, probe_batch, wrap, name):
    """Goes wrong: `optimizer.load_state_dict` puts new tensors into the state, and the graph goes on with the old
    moments; or the checkpoint is taken while steps are in flight and holds half of one.

    Instead: save and load as usual. `state_dict` of model and optimizer wait for the steps in flight.
    """
    model = probe(way, 3)
    optimizer = {
        "adam": lambda p: torch.optim.Adam(p, lr=0.1),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    }[name](model.parameters())
    batches = [probe_batch(way, s) for s in (1, 2, -1, 3, 0.5, -2)]
    runner = wrap(way, model, optimizer, batches[0])
    for batch in batches[:3]:
        runner.step(batch)
    saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    trajectories = []
    for _ in range(2):
        for batch in batches[3:]:
            runner.step(batch)
        trajectories.append(copy.deepcopy(model.state_dict()["b"]))
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    assert torch.equal(*trajectories)
    assert not torch.equal(trajectories[0], saved[0]["b"])
    # And into a runner that starts from there.
    runner.close()
    runner = wrap(way, model, optimizer, batches[0])
    for batch in batches[3:]:
        runner.step(batch)
    assert torch.equal(model.state_dict()["b"], trajectories[0])


def test_assigned_parameters_are_refused(way, probe, probe_batch, wrap):
    """Goes wrong: `load_state_dict(assign=True)` makes new parameters, the optimizer moves the old ones.

    Instead: load with `assign=False`, or assign before the optimizer and the runner are built.
    """
    model = probe(way)
    runner = wrap(way, model, torch.optim.SGD(model.parameters(), lr=0.1), probe_batch(way, 1))
    runner.step(probe_batch(way, 1))
    runner.synchronize()
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    with pytest.raises(OptimizerError, match=r"assign"):
        runner.step(probe_batch(way, 1))


def test_data_that_is_replaced_is_trained_on(way, probe, probe_batch, wrap):
    """Goes wrong: `p.data = new` leaves the graph with the old storage: the loss is the old one and updates vanish.

    Instead: `p.copy_(new)` under `no_grad`; replacing captures anew.
    """
    model = probe(way)
    runner = wrap(way, model, torch.optim.SGD([model.b], lr=0.1), probe_batch(way, 1))
    for _ in range(3):
        runner.step(probe_batch(way, 1))
    runner.synchronize()
    model.b.data = torch.full((), 5.0, device=way.device)
    results = [runner.step(probe_batch(way, 1)) for _ in range(2)]
    assert [float(result.loss) for result in results] == pytest.approx([5.0, 4.9])
    runner.synchronize()
    assert float(model.b) == pytest.approx(4.8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_dtype_move_is_an_error_or_a_new_capture(way, probe, probe_batch, wrap, dtype):
    """Goes wrong: `model.to(dtype)` replaces the storages; the graph goes on with the old ones.

    Instead: move the model before the optimizer and the runner are built.
    """
    model = probe(way)
    optimizer = torch.optim.SGD([model.b], lr=0.5)
    runner = wrap(way, model, optimizer, probe_batch(way, 1))
    runner.step(probe_batch(way, 1))
    runner.synchronize()
    assert float(model.b) == 0.5
    model.b.data = model.b.data.to(dtype)
    try:
        result = runner.step(probe_batch(way, 1))
        loss = float(result.loss)
        runner.synchronize()
    except StaticMoEError as error:
        # A refusal says so: one clear error, and nothing trained.
        assert str(error) and float(model.b) == 0.5
    else:
        assert (loss, float(model.b), model.b.dtype) == (0.5, 0.0, dtype)


def test_a_parameter_that_is_switched_on_later_moves(way, probe, probe_batch, wrap):
    """Goes wrong: a parameter without a gradient at capture is in no update, ever.

    Instead: multiply by a flag from the batch, so that it has a gradient (of zero) at capture.
    """
    model = probe(way)
    model.u = nn.Parameter(torch.ones((), device=way.device))

    def loss_fn(model, batch):
        return model(batch["x"], batch["s"]) + batch["flag"] * model.u

    def batch(flag):
        return {**probe_batch(way, 0), "flag": torch.tensor(float(flag), device=way.device)}

    runner = wrap(way, model, torch.optim.SGD([model.u, model.b], lr=1.0), batch(0), loss_fn=loss_fn)
    seen = []
    for flag in (0, 1, 0, 1, 1):
        runner.step(batch(flag))
        runner.synchronize()
        seen.append(float(model.u))
    assert seen == [1, 0, 0, -1, -2]


def test_a_requires_grad_that_changes_is_used(way, probe, probe_batch, wrap):
    """Goes wrong: freezing or unfreezing after capture is a Python flag that the graph never sees.

    Instead: `requires_grad_` before the optimizer and runner are built; changed later it captures anew, or is refused.
    """
    model = probe(way)
    model.u = nn.Parameter(torch.ones((), device=way.device))

    def loss_fn(model, batch):
        return model(batch["x"], batch["s"]) + model.u

    runner = wrap(way, model, torch.optim.SGD([model.u, model.b], lr=1.0), probe_batch(way, 1), loss_fn=loss_fn)
    runner.step(probe_batch(way, 1))
    runner.synchronize()
    model.u.requires_grad_(False)
    try:
        runner.step(probe_batch(way, 1))
        runner.synchronize()
    except StaticMoEError as error:
        assert "grad" in str(error) and float(model.u) == 0.0
    else:
        assert (float(model.u), float(model.b)) == (0.0, -1.0)


def test_an_expert_without_tokens_decays_and_nothing_else(way, routed_model, routed_tokens, wrap):
    """Goes wrong: an expert without tokens has no gradient in one mode and a gradient of zero in the other, so weight
    decay applies in warm-up and not in replay; or its gradient is what the last replay left.

    Instead: nothing to do: the gradient is exactly zero, AdamW decays the weight (x 0.99 a call) and adds nothing.
    """
    model = routed_model(way)
    optimizer = torch.optim.AdamW(model.moe.parameters(), lr=0.1, weight_decay=0.1)
    everyone = {"x": routed_tokens(way, [0, 1, 2, 3] * 4)}
    runner = wrap(way, model, optimizer, everyone)
    start = copy.deepcopy(model.moe.experts.state_dict())
    for _ in range(5):
        runner.step({"x": routed_tokens(way, [0] * 16)})
    runner.synchronize()
    for name, value in model.moe.experts.state_dict().items():
        torch.testing.assert_close(value[1:], 0.95099 * start[name][1:], rtol=1e-5, atol=0)
        for state_name in ("exp_avg", "exp_avg_sq"):
            moment = optimizer.state[dict(model.moe.experts.named_parameters())[name]][state_name]
            assert not moment[1:].any(), f"{name}: {state_name} of an expert without tokens"
    assert not torch.allclose(model.moe.experts.down_proj[0], 0.95099 * start["down_proj"][0])
