"""Gradients over micro-batches: in fp32, in the buffers that layers add into, and complete."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from staticmoe import RunnerConfig, StaticMoE, StaticMoERunner
from staticmoe.errors import ModelError

MICRO_BATCHES = 8


def error(got: Tensor, want: Tensor) -> float:
    """Largest difference over the largest wanted value."""
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


class Keeper(torch.optim.SGD):
    """Keeps the gradients of its steps, and moves nothing."""

    def step(self, closure: Any = None) -> None:
        self.kept = [p.grad.clone() for group in self.param_groups for p in group["params"]]


class Model(nn.Module):
    """A dense layer and a MoE layer, used `uses` times; notes what its layer was lent."""

    def __init__(self, dtype: torch.dtype, uses: int = 1, penalty: bool = False, reached: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, dtype=dtype)
        self.moe = StaticMoE(8, 16, 4, 2, dtype=dtype)
        self.uses, self.penalty, self.reached = uses, penalty, reached
        self.lent: list[tuple[int, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        binding = self.moe._binding
        if binding is not None:
            self.lent.append((len(binding.main_grads), binding.adding))
        for _ in range(self.uses):
            x = self.moe(x)
        loss = x.float().square().mean()
        if self.penalty:
            # Of every parameter, so that each has a gradient.
            loss = (loss if self.reached else 0.0) + sum(p.float().square().sum() for p in self.parameters())
        return loss


def run(model: Model, batches: list[Tensor], captured: str, **options: Any) -> list[Tensor]:
    """Gradients of one step over the micro-batches."""
    optimizer = Keeper(model.parameters())
    config = RunnerConfig(
        capture=captured,
        capture_scope="forward_backward",
        gradient_accumulation_steps=len(batches),
        audit="off",
        **options,
    )
    example = {"x": torch.stack(batches) if len(batches) > 1 else batches[0]}
    with StaticMoERunner(
        model, optimizer, example_batch=example, loss_fn=lambda net, b: net(b["x"]), config=config
    ) as runner:
        runner.step(example)
        runner.synchronize()
    return optimizer.kept


def setup(captured: str, dtype: torch.dtype, **options: Any) -> tuple[Model, list[Tensor]]:
    torch.manual_seed(3)
    device = torch.device("cuda" if captured == "cuda" else "cpu")
    batches = [torch.randn(12, 8, dtype=dtype, device=device) for _ in range(MICRO_BATCHES)]
    return Model(dtype, **options).to(device), batches


def by_micro_batch(model: Model, batches: list[Tensor], dtype: torch.dtype) -> list[list[Tensor]]:
    """Gradients of each micro-batch alone by autograd."""
    found = []
    for batch in batches:
        loss = model(batch) / len(batches)
        found.append([g.to(dtype) for g in torch.autograd.grad(loss, list(model.parameters()))])
    return found


def test_sixteen_bits_are_summed_in_fp32(captured: str) -> None:
    """Of a bf16 model: dense gradients are the exact sum, rounded once, which a sum in bf16 is not."""
    model, batches = setup(captured, torch.bfloat16)
    parts = by_micro_batch(model, batches, torch.bfloat16)
    got = run(model, batches, captured)
    assert (2, False) in model.lent and (2, True) in model.lent
    once, worse = 1.01 * torch.finfo(torch.bfloat16).eps / 2, 0
    for (name, _), gradient, *terms in zip(model.named_parameters(), got, *parts, strict=True):
        exact = torch.stack([term.double() for term in terms]).sum(0)
        if name.startswith("first"):
            narrow = functools.reduce(torch.add, terms)
            assert ((gradient - exact).abs() <= once * exact.abs()).all(), name
            worse += int(((narrow - exact).abs() > once * exact.abs()).sum())
        assert error(gradient, exact) < torch.finfo(torch.bfloat16).eps, name
    assert worse


@pytest.mark.parametrize("options", [{}, {"uses": 2}, {"penalty": True}, {"penalty": True, "reached": False}])
def test_every_way_of_use_gives_autograds_sum(options: dict[str, Any], captured: str) -> None:
    """A layer used twice is lent nothing; a weight that the loss uses in another way gets that part too, or alone."""
    model, batches = setup(captured, torch.float32, **options)
    parts = by_micro_batch(model, batches, torch.float64)
    got = run(model, batches, captured)
    assert ((2, True) in model.lent) == ("uses" not in options)
    for number, gradient in enumerate(got):
        exact = sum((part[number] for part in parts), torch.zeros(()))
        assert error(gradient.double(), exact) < 1e-5


def test_one_micro_batch_is_lent_nothing(captured: str) -> None:
    model, batches = setup(captured, torch.float32)
    run(model, batches[:1], captured)
    assert {count for count, _ in model.lent} == {0}


def test_a_frozen_bank_is_lent_nothing_and_the_rest_is_right(captured: str) -> None:
    model, batches = setup(captured, torch.float32)
    model.moe.experts.gate_up_proj.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    parts = [torch.autograd.grad(model(b) / MICRO_BATCHES, trained) for b in batches]
    optimizer_parameters = Keeper(trained)
    config = RunnerConfig(
        capture=captured, capture_scope="forward_backward", gradient_accumulation_steps=MICRO_BATCHES, audit="off"
    )
    example = {"x": torch.stack(batches)}
    with StaticMoERunner(
        model, optimizer_parameters, example_batch=example, loss_fn=lambda net, b: net(b["x"]), config=config
    ) as runner:
        runner.step(example)
        runner.synchronize()
    assert {count for count, _ in model.lent} == {0}
    for number, gradient in enumerate(optimizer_parameters.kept):
        assert error(gradient, sum(part[number] for part in parts)) < 1e-5


def test_a_layer_that_the_loss_does_not_reach_is_named(captured: str) -> None:
    """Its buffers would hold what nobody wrote."""
    model, batches = setup(captured, torch.float32)

    def loss(net: Model, batch: dict[str, Tensor]) -> Tensor:
        net.moe(batch["x"])
        return net.first(batch["x"]).square().mean()

    with pytest.raises(ModelError, match="get no gradient from the loss.*moe.experts"):
        StaticMoERunner(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            example_batch={"x": torch.stack(batches[:2])},
            loss_fn=loss,
            config=RunnerConfig(capture=captured, gradient_accumulation_steps=2),
        )


def test_another_number_of_uses_than_in_the_probe_is_refused() -> None:
    """Uncaptured, where Python may change its mind: what the buffers were lent for is then wrong."""
    model, batches = setup("off", torch.float32)
    example = {"x": torch.stack(batches[:2])}
    config = RunnerConfig(capture="off", gradient_accumulation_steps=2, audit="off")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with StaticMoERunner(
        model, optimizer, example_batch=example, loss_fn=lambda net, b: net(b["x"]), config=config
    ) as runner:
        model.uses = 2
        with pytest.raises(ModelError, match="moe: expected every micro-batch to enter the layer once.*got 2 times"):
            runner.step(example)
            runner.synchronize()


def test_autocast_sums_unrounded_gradients(captured: str) -> None:
    """fp32 weights under autocast: the experts' sum holds more than bf16 parts can add up to."""
    model, batches = setup(captured, torch.float32)
    got = run(model, batches, captured, autocast=torch.bfloat16)
    names = [name for name, _ in model.named_parameters()]
    kept = dict(zip(names, got, strict=True))["moe.experts.down_proj"]
    device = kept.device.type
    rounded, exact = torch.zeros_like(kept), torch.zeros_like(kept)
    for batch in batches:
        with torch.autocast(device, torch.bfloat16, cache_enabled=False):
            x = model.first(batch)
            y = model.moe(x)
        loss = y.float().square().mean() / MICRO_BATCHES
        (part,) = torch.autograd.grad(loss, model.moe.experts.down_proj)
        exact += part
        rounded += part.bfloat16().float()
    assert error(kept, exact) < 1e-5 < error(rounded, exact)
    assert F.cosine_similarity(kept.flatten(), exact.flatten(), dim=0) > 0.999


class HandsOut(torch.autograd.Function):
    """The sum of three parameters; the first two get one tensor as gradient, the third gets the model's own buffer."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, c: Tensor, buffer: Tensor) -> Tensor:
        ctx.save_for_backward(buffer)
        return (a + b + c).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (buffer,) = ctx.saved_tensors
        one = grads[0] * torch.ones_like(buffer)
        return one, one, buffer, None


class Sharing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.zeros(4)) for _ in range(3))
        self.register_buffer("given", torch.full((4,), 2.0))
        self.moe = StaticMoE(8, 16, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return HandsOut.apply(self.a, self.b, self.c, self.given) + 0.0 * self.moe(x).sum()


def test_clipping_scales_each_gradient_once_and_nothing_else(captured: str) -> None:
    """By 1 / sqrt(4 + 4 + 16): what two parameters share is scaled once, and the model's buffer is not."""
    device = "cuda" if captured == "cuda" else "cpu"
    model = Sharing().to(device)
    batch = {"x": torch.randn(6, 8, device=device)}
    with StaticMoERunner(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        example_batch=batch,
        loss_fn=lambda model, batch: model(batch["x"]),
        config=RunnerConfig(capture=captured, max_grad_norm=1.0),
    ) as runner:
        for _ in range(3):
            runner.step(batch)
        runner.synchronize()
        clipped = 3 / 24**0.5
        for parameter, gradient in ((model.a, 1.0), (model.b, 1.0), (model.c, 2.0)):
            assert torch.allclose(parameter, torch.full_like(parameter, -gradient * clipped), rtol=1e-5)
        assert torch.equal(model.given, torch.full_like(model.given, 2.0))
