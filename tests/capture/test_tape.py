"""The tape: replays what was recorded, on the same storages, with fresh inputs and fresh random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from staticmoe.capture import EmulatedCapture, Provenance, Recorder, Tape
from staticmoe.errors import CaptureError, ReplayError


class Recorded:
    """An iteration on `inputs`, recorded after one observed run."""

    def __init__(self, iteration: Callable[[], None], *, model: nn.Module | None = None, **inputs: Tensor) -> None:
        self.capture = EmulatedCapture()
        named = dict(model.named_parameters()) if model is not None else {}
        self.provenance = Provenance({**named, **inputs}, dict(model.named_buffers()) if model is not None else {})
        modules = {id(m): name for name, m in model.named_modules()} if model is not None else {}

        def recorder(tape: Tape | None = None) -> Recorder:
            return Recorder(self.provenance, modules, tape)

        with self.provenance.open():
            with recorder().watch():
                iteration()
            self.tape = self.capture.capture(iteration, recorder)

    def replay(self, seed: int = 0) -> None:
        with self.capture.seeds.seeded(seed):
            self.tape.replay()


def test_dropout_clip_and_fused_adamw_replay_bitwise() -> None:
    """A tape of dropout, norm, clip and optimizer gives the bits of the eager loop, step after step."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor, Callable[[], None]]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.05), fused=True)
        x, losses = torch.zeros(4, 8), torch.zeros(())
        parameters = list(model.parameters())
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()

        def iteration() -> None:
            loss = model(x).square().mean()
            losses.copy_(loss.detach())
            gradients = torch.autograd.grad(loss, parameters)
            norm = torch.nn.utils.get_total_norm(list(gradients))
            scale = torch.clamp(0.1 / (norm + 1e-6), max=1.0)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient * scale
            optimizer.step()

        return model, optimizer, x, losses, iteration

    eager_model, _, eager_x, eager_loss, eager = build()
    model, optimizer, x, loss, iteration = build()
    state = {f"{i}.{k}": v for i, s in enumerate(optimizer.state.values()) for k, v in s.items()}
    before = [parameter.detach().clone() for parameter in model.parameters()]
    saved = {name: value.clone() for name, value in state.items()}
    recorded = Recorded(iteration, model=model, x=x, loss=loss, lr=optimizer.param_groups[0]["lr"], **state)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), before, strict=True):
            parameter.copy_(value)
        for name, value in saved.items():
            state[name].copy_(value)
    for step in range(5):
        batch = torch.randn(4, 8)
        eager_x.copy_(batch)
        x.copy_(batch)
        with recorded.capture.seeds.seeded(step):
            eager()
        recorded.replay(step)
        assert loss.item() == eager_loss.item()
    for got, want in zip(model.parameters(), eager_model.parameters(), strict=True):
        assert torch.equal(got, want)


def test_python_does_not_run_again() -> None:
    """A Python number read by the iteration stays as recorded, as in a graph, and its code is not called."""
    x, out, calls, factor = torch.ones(3), torch.zeros(3), [], [2.0]

    def iteration() -> None:
        calls.append(1)
        out.copy_(x * factor[0])

    recorded = Recorded(iteration, x=x, out=out)
    factor[0] = 5.0
    x.fill_(10.0)
    recorded.replay()
    assert out.tolist() == [20.0] * 3
    assert len(calls) == 2


@pytest.mark.parametrize("preserve", [True, False])
def test_checkpointed_dropout_has_the_gradients_of_its_own_mask(preserve: bool) -> None:
    """Recomputation restores the random state by calls that are no operations; on the tape they are entries."""
    x, out, gradient = torch.ones(4096), torch.zeros(4096), torch.zeros(4096)

    def iteration() -> None:
        leaf = x.detach().requires_grad_()
        y = checkpoint(
            lambda t: F.dropout(t * 1.0, 0.5).square(), leaf, use_reentrant=False, preserve_rng_state=preserve
        )
        out.copy_(y.detach())
        gradient.copy_(torch.autograd.grad(y.sum(), leaf)[0])

    recorded = Recorded(iteration, x=x, out=out, gradient=gradient)
    masks = []
    for seed in range(3):
        recorded.replay(seed)
        masks.append(out != 0)
        same = torch.equal(out != 0, gradient != 0)
        assert same is preserve, "without the saved state the backward draws another mask"
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])
    assert abs(masks[0].float().mean().item() - 0.5) < 0.05


_FACTOR = 1.0


@torch.library.custom_op("staticmoe_tests::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    """A custom op whose Python reads a global."""
    return x * _FACTOR


@torch.library.custom_op("staticmoe_tests::reads", mutates_args=())
def reads(x: Tensor) -> Tensor:
    """A custom op that hides a host read."""
    return x * x.sum().item()


def test_a_custom_op_is_recorded_through_its_python() -> None:
    """Run again as one operation it would take the changed global; a graph keeps the old value."""
    x, out = torch.ones(3), torch.zeros(3)
    recorded = Recorded(lambda: out.copy_(torch.ops.staticmoe_tests.scaled(x)), x=x, out=out)
    globals()["_FACTOR"] = 7.0
    try:
        recorded.replay()
    finally:
        globals()["_FACTOR"] = 1.0
    assert out.tolist() == [1.0] * 3


def test_a_host_read_inside_a_custom_op_is_refused() -> None:
    """The recording sees through the op."""
    x, out = torch.ones(3), torch.zeros(3)
    with pytest.raises(CaptureError, match="item"):
        Recorded(lambda: out.copy_(torch.ops.staticmoe_tests.reads(x)), x=x, out=out)


def test_memory_that_nothing_overwrites_is_poisoned_between_replays() -> None:
    """A buffer filled only in part keeps NaN in the rest, not what an earlier replay left there."""
    x, out = torch.ones(3), torch.zeros(4)

    def iteration() -> None:
        buffer = torch.empty(4)
        buffer[:3].copy_(x)
        out.copy_(buffer)

    recorded = Recorded(iteration, x=x, out=out)
    for value in (1.0, 2.0):
        x.fill_(value)
        recorded.replay()
        assert out[:3].tolist() == [value] * 3 and math.isnan(out[3].item())


def test_a_kept_result_is_overwritten_by_the_next_replay() -> None:
    """A tensor that Python kept from the iteration is an alias of the graph's memory."""
    x, kept = torch.ones(3), []
    recorded = Recorded(lambda: kept.append(x * 2), x=x)
    assert isinstance(recorded.tape, Tape) and recorded.tape.owned_bytes == 12
    x.fill_(5.0)
    recorded.replay()
    assert kept[-1].tolist() == [10.0] * 3 and kept[0].tolist() == [2.0] * 3


def test_a_resized_storage_is_refused_before_the_replay() -> None:
    """Writing into memory that was given back crashed the process."""
    x, out = torch.ones(3), torch.zeros(3)
    recorded = Recorded(lambda: out.copy_(x * 2), x=x, out=out)
    x.untyped_storage().resize_(0)
    with pytest.raises(ReplayError, match=r"had 12 bytes .* has 0 now"):
        recorded.replay()


def test_steps_are_in_flight_until_somebody_waits() -> None:
    """Launched work runs late and in order; a ticket says when it has."""
    stream, order = EmulatedCapture().stream, []
    tickets = [stream.launch(lambda n=n: order.append(n)) for n in range(3)]
    assert order == [] and not stream.is_done(tickets[0])
    stream.wait(tickets[1])
    assert order == [0, 1] and stream.is_done(tickets[1]) and not stream.is_done(tickets[2])


@pytest.mark.parametrize("found_inf", [0.0, 1.0, 2.0])
def test_a_veto_is_exactly_zero_or_one(found_inf: float) -> None:
    """Fused optimizers test found_inf == 1: a veto of 2 would apply the update and turn the step count back."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
    parameter.grad = torch.ones(2)
    optimizer.found_inf = torch.tensor(found_inf)  # type: ignore[attr-defined]
    optimizer.step()
    moved = not torch.equal(parameter.detach(), torch.ones(2))
    assert moved is (found_inf != 1.0)
    assert optimizer.state[parameter]["step"].item() == 1.0 - found_inf
