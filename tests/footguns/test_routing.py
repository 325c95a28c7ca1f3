"""O25, O28, O30, O35, O36: capacity at its edges, checkpointing, the gradient of aux losses, and routing weights."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from staticmoe import MicroBatches, StaticMoE
from staticmoe.errors import CapacityError, StaticMoEError


class Block(nn.Module):
    """loss = weight * mean(moe(x)^2), the block behind a checkpoint on request."""

    def __init__(self, *, hidden=8, num_experts=4, top_k=2, weight=1.0, checkpointed=False, reentrant=False, **options):
        super().__init__()
        self.moe = StaticMoE(hidden, 8, num_experts, top_k, **options)
        self.weight, self.checkpointed, self.reentrant = weight, checkpointed, reentrant

    def forward(self, x):
        if self.checkpointed:
            y = checkpoint(self.moe, x, use_reentrant=self.reentrant)
        else:
            y = self.moe(x)
        return self.weight * y.square().mean()


def block(way, **options):
    model = Block(**options).to(way.device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model


def deltas(runner, model, batch):
    """Gradients of one step, read from the move of SGD at a rate of 1."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = runner.step(batch)
    runner.synchronize()
    return result, {name: before[name] - value for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("coefficients", "top_k"), [((0.01, 0.0), 1), ((0.0, 0.01), 2), ((0.5, 0.25), 2)])
def test_aux_losses_reach_the_router(way, wrap, reference, coefficients, top_k):
    """Goes wrong: the aux loss is logged and never differentiated, or twice (by the runner and by the user).

    Instead: leave it to the runner; `result.loss` is the user's loss, the aux losses are apart.
    """
    aux, z = coefficients
    names = {"router_aux_loss_coef": aux, "router_z_loss_coef": z}
    model = block(way, top_k=top_k, weight=0.0, norm_topk_prob=False, **names)
    x = torch.randn(16, 8, device=way.device)
    expected = reference(model.moe, x, top_k=top_k)
    logits = x @ model.moe.router.weight.T
    total = aux * expected.aux_loss + z * torch.logsumexp(logits, dim=-1).square().mean()
    (gradient,) = torch.autograd.grad(total, model.moe.router.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    runner = wrap(way, model, optimizer, {"x": torch.randn(16, 8, device=way.device)})
    result, moved = deltas(runner, model, {"x": x})
    assert float(result.loss) == 0.0 and gradient.abs().max() > 1e-4
    torch.testing.assert_close(moved["moe.router.weight"], gradient, rtol=1e-4, atol=1e-6)
    assert not moved["moe.experts.down_proj"].any()


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_aux_loss_does_not_count_micro_batches(way, wrap, micro):
    """Goes wrong: the aux gradient grows with the number of micro-batches, or shrinks with their size.

    Instead: `loss_reduction="mean"` divides it as it divides the loss.
    """
    model = block(way, weight=0.0, router_aux_loss_coef=0.01, norm_topk_prob=False)
    sequence = torch.randn(1, 6, 8, device=way.device)
    logits = sequence[0] @ model.moe.router.weight.T
    probabilities = logits.softmax(-1)
    share = nn.functional.one_hot(probabilities.topk(2).indices, 4).float().mean((0, 1))
    expected = torch.autograd.grad(0.01 * 4 * (share * probabilities.mean(0)).sum(), model.moe.router.weight)[0]
    parts = [{"x": sequence.expand(8 // micro, 6, 8)} for _ in range(micro)]
    batch = parts[0] if micro == 1 else MicroBatches(parts)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    runner = wrap(way, model, optimizer, batch, gradient_accumulation_steps=micro)
    result, moved = deltas(runner, model, batch)
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(moved["moe.router.weight"], expected, rtol=1e-3, atol=1e-6)
    assert sum(result.moe["moe"].routed) == 8 * 6 * 2


@pytest.mark.skip(reason="two ranks: expert parallelism is not offered yet")
def test_aux_loss_does_not_count_ranks():
    """Goes wrong: the aux gradient is scaled by the data-parallel size. Instead: wait for `parallel/`."""


@pytest.mark.parametrize("ties", [True, False])
def test_checkpointing_routes_once(way, wrap, ties):
    """Goes wrong: the recomputed forward counts again (twice the tokens, twice the drops), or breaks ties otherwise
    than the first forward did, and gradients belong to another routing.

    Instead: `use_reentrant=False`, anywhere around the layer.
    """
    seen = []
    for checkpointed in (False, True):
        torch.manual_seed(11)
        model = block(way, checkpointed=checkpointed, router_aux_loss_coef=0.1)
        if ties:
            with torch.no_grad():
                model.moe.router.weight.zero_()
        batches = [{"x": torch.randn(16, 8, device=way.device)} for _ in range(2)]
        options = {"capacity_factor": 1.0, "capacity_scope": "expert", "overflow": "drop"}
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        runner = wrap(way, model, optimizer, batches[0], **options)
        seen.append([deltas(runner, model, batch) for batch in batches])
    for (plain, plain_moved), (again, again_moved) in zip(*seen, strict=True):
        assert sum(again.moe["moe"].routed) == 16 * 2
        assert again.moe["moe"].routed == plain.moe["moe"].routed
        assert again.moe["moe"].dropped == plain.moe["moe"].dropped
        assert float(again.metrics["aux_loss"]) == pytest.approx(float(plain.metrics["aux_loss"]), rel=1e-6)
        for name, value in plain_moved.items():
            torch.testing.assert_close(again_moved[name], value, rtol=1e-6, atol=1e-6, msg=name)
    if ties:
        # Equal logits: the two lowest experts are chosen by every token, C = ceil(16 * 2 / 4) = 8.
        first = seen[1][0][0].moe["moe"]
        assert (first.routed, first.dropped) == ([16, 16, 0, 0], [8, 8, 0, 0])
    assert seen[0][0][1]["moe.experts.down_proj"].abs().max() > 1e-4


def test_reentrant_checkpointing_is_refused(captured_way, wrap):
    """Goes wrong: the reentrant form runs a backward inside the backward and keeps its random state on the host.

    Instead: `use_reentrant=False`.
    """
    model = block(captured_way, checkpointed=True, reentrant=True)
    x = torch.randn(16, 8, device=captured_way.device, requires_grad=False)

    def loss_fn(model, batch):
        # A gradient must flow into the checkpoint, else the reentrant form computes none.
        return model(batch["x"] + 0 * model.moe.router.weight.sum())

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(StaticMoEError, match="(?i)reentrant"):
        wrap(captured_way, model, optimizer, {"x": x}, loss_fn=loss_fn)


@pytest.mark.parametrize("scope", ["rank", "expert"])
def test_capacity_larger_than_the_tokens(way, wrap, reference, scope):
    """Goes wrong: ten slots for five tokens crash, or are clamped and misalign the buffer.

    Instead: nothing to do.
    """
    model = block(way)
    x = torch.randn(5, 8, device=way.device)
    expected = reference(model.moe, x, top_k=2, renormalise=True)
    options = {"capacity_factor": 4.0, "capacity_scope": scope, "overflow": "drop"}
    runner = wrap(way, model, torch.optim.SGD(model.parameters(), lr=0.0), {"x": x}, **options)
    result = runner.step({"x": x})
    assert result.moe["moe"].dropped == [0, 0, 0, 0] and result.moe["moe"].kept == expected.kept
    assert float(result.loss) == pytest.approx(float(expected.output.square().mean()), rel=1e-4)


@pytest.mark.parametrize("top_k", [1, 4])
def test_one_token(way, wrap, reference, top_k):
    """Goes wrong: T = 1 takes another path (squeezed away, no full block).

    Instead: nothing to do.
    """
    model = block(way, top_k=top_k, norm_topk_prob=top_k > 1)
    x = torch.randn(1, 8, device=way.device)
    expected = reference(model.moe, x, top_k=top_k, renormalise=top_k > 1)
    options = {"capacity_factor": 4.0, "capacity_scope": "expert", "overflow": "drop"}
    runner = wrap(way, model, torch.optim.SGD(model.parameters(), lr=0.0), {"x": x}, **options)
    result = runner.step({"x": x})
    assert sum(result.moe["moe"].kept) == top_k and result.moe.drop_rate == 0.0
    assert float(result.loss) == pytest.approx(float(expected.output.square().mean()), rel=1e-4)


@pytest.mark.parametrize("scope", ["rank", "expert"])
def test_a_tiny_factor_leaves_one_slot(way, wrap, scope):
    """Goes wrong: a capacity that rounds to zero rows: an empty buffer, a division by zero, a silent no-op.

    Instead: nothing to do: rows are rounded up, so at least one is left.
    """
    model = block(way, top_k=1, norm_topk_prob=False)
    with torch.no_grad():
        model.moe.router.weight.zero_()
    x = torch.randn(5, 8, device=way.device)
    options = {"capacity_factor": 0.01, "capacity_scope": scope, "overflow": "drop"}
    runner = wrap(way, model, torch.optim.SGD(model.parameters(), lr=0.0), {"x": x}, **options)
    result = runner.step({"x": x})
    assert result.moe["moe"].routed == [5, 0, 0, 0]
    assert (result.moe["moe"].kept, result.moe["moe"].dropped) == ([1, 0, 0, 0], [4, 0, 0, 0])
    assert result.moe.drop_rate == 0.8 and math.isfinite(float(result.loss)) and float(result.loss) > 0


@pytest.mark.parametrize(("policy", "moved"), [("drop", True), ("skip", False)])
def test_an_overflow_does_what_its_policy_says(way, routed_model, routed_tokens, wrap, policy, moved):
    """Goes wrong: the flag is read from the wrong slot (always or never over budget), or a drop is not counted.

    Instead: choose: "drop" counts and commits, "skip" vetoes the step, "raise" stops.
    """
    model = routed_model(way)
    options = {"capacity_factor": 1.0, "capacity_scope": "expert", "overflow": policy}
    even, skewed = routed_tokens(way, [0, 1, 2, 3] * 4), routed_tokens(way, [0] * 5 + [1] * 3 + [2, 3] * 4)
    runner = wrap(way, model, torch.optim.SGD([model.scale], lr=1e-3), {"x": even}, **options)
    results = [runner.step({"x": x}) for x in (even, skewed, even)]
    runner.synchronize()
    assert [bool(result.skipped) for result in results] == [False, not moved, False]
    assert [result.moe["moe"].routed for result in results] == [[4, 4, 4, 4], [5, 3, 4, 4], [4, 4, 4, 4]]
    full = 6 * 4 * (1 + 2 + 3 + 4)
    steps = [full, full - 6 * 2 if moved else 0, full]
    assert float(model.scale) == pytest.approx(1 - 1e-3 * sum(steps), rel=1e-4)
    if moved:
        assert [result.moe["moe"].dropped for result in results] == [[0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
        assert results[1].moe.drop_rate == 1 / 16
    else:
        assert "overflow" in repr(results[1].reasons).lower()


def test_the_policy_raise_stops_before_the_step(way, routed_model, routed_tokens, wrap):
    """Goes wrong: the error comes when the weights have gone on.

    Instead: `overflow="raise"`; the message names the layer and a factor that would do.
    """
    model = routed_model(way)
    options = {"capacity_factor": 1.0, "capacity_scope": "expert", "overflow": "raise"}
    even, skewed = routed_tokens(way, [0, 1, 2, 3] * 4), routed_tokens(way, [0] * 16)
    runner = wrap(way, model, torch.optim.SGD([model.scale], lr=1e-3), {"x": even}, **options)
    with pytest.raises(CapacityError, match="moe"):
        for x in (even, skewed, even, even, even):
            runner.step({"x": x})
        runner.synchronize()
    assert float(model.scale) == pytest.approx(1 - 1e-3 * 240, rel=1e-5)


@pytest.mark.parametrize("renormalise", [False, True])
def test_one_expert_and_renormalised_weights(way, wrap, renormalise):
    """Goes wrong: K = 1 with renormalised weights: the weight is always 1 and the router learns nothing, silently.

    Instead: `norm_topk_prob=False` with `top_k=1`; the other is warned about.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer = StaticMoE(4, 3, num_experts=2, top_k=1, norm_topk_prob=renormalise, device=way.device)
    warned = [str(one.message) for one in caught if "norm_topk_prob" in str(one.message)]
    assert len(warned) == (1 if renormalise else 0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.router.weight[0, 0] = 1
        layer.experts.gate_up_proj[:, 0, 2], layer.experts.gate_up_proj[:, 3, 2] = 16, 1
        layer.experts.down_proj[:, :, 0] = torch.tensor([3.0, 5.0], device=way.device)[:, None] / 16

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.moe = layer

        def forward(self, x):
            return self.moe(x)[..., 0].sum()

    model, x = Model(), torch.tensor([[1.0, 0, 1, 0]], device=way.device)
    runner = wrap(way, model, torch.optim.SGD(model.parameters(), lr=1.0), {"x": x})
    result, moved = deltas(runner, model, {"x": x})
    router = moved["moe.router.weight"]
    if renormalise:
        assert float(result.loss) == pytest.approx(3.0, rel=1e-6) and not router.any()
    else:
        assert float(result.loss) == pytest.approx(0.731059 * 3, rel=1e-5)
        assert float(router[0, 0]) == pytest.approx(0.196612 * 3, rel=1e-4)
        assert float(router[1, 0]) == pytest.approx(-0.196612 * 3, rel=1e-4)


@pytest.mark.parametrize("top_k", [2, 8])
def test_tiny_sigmoid_scores_share_evenly(way, routed_layer, wrap, top_k):
    """Goes wrong: an epsilon beside tiny scores makes every share vanish: the router drives all logits down and the
    aux loss, which it was to pay, goes to zero.

    Instead: nothing to do: at logits of -60 each of eight experts has 1/8, and the aux loss is 1.
    """
    layer = routed_layer(
        way,
        num_experts=8,
        top_k=top_k,
        score_function="sigmoid",
        norm_topk_prob=True,
        router_aux_loss_coef=0.5,
    )
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[:, 0] = -60

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.moe = layer

        def forward(self, x):
            return self.moe(x)[..., 0].mean()

    x = torch.zeros(16, 10, device=way.device)
    x[:, 0] = x[:, 8] = 1
    model = Model()
    runner = wrap(way, model, torch.optim.SGD(model.parameters(), lr=0.0), {"x": x})
    result = runner.step({"x": x})
    assert float(result.metrics["aux_loss"]) == pytest.approx(1.0, rel=1e-5)
    # Ties go to the lowest experts: constants 1..K at weights of 1 / K.
    assert float(result.loss) == pytest.approx((top_k + 1) / 2, rel=1e-5)


def test_a_layer_alone_is_a_plain_module(way, reference):
    """Goes wrong: a layer works under its runner only, and cannot be looked at.

    Instead: call it; without a runner it is dropless and uncaptured.
    """
    model = block(way)
    x = torch.randn(7, 8, device=way.device, requires_grad=True)
    expected = reference(model.moe, x, top_k=2, renormalise=True)
    inputs = [x, *model.moe.parameters()]
    mine = torch.autograd.grad(model.moe(x).square().sum(), inputs)
    theirs = torch.autograd.grad(expected.output.square().sum(), inputs)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert copy.deepcopy(model.moe).state_dict().keys() == model.moe.state_dict().keys()
