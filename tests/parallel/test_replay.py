"""Collectives on a tape: every replay exchanges anew, and waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import Tensor

from staticmoe.capture import EmulatedCapture, Provenance, Recorder, Tape
from staticmoe.errors import AuditError

REPLAYS = 12
# Large enough that a read before the exchange has ended would find the old values.
SIZE = 1 << 16


def in_place(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x * 2
    dist.all_reduce(total)
    both = torch.empty(2 * SIZE)
    dist.all_gather_into_tensor(both, x)
    parts = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(parts, x + 1)
    first = x * 3
    dist.broadcast(first, 0)
    turned = torch.empty_like(x)
    dist.all_to_all_single(turned, x)
    return total + both[:SIZE] * 5 + both[SIZE:] * 7 + parts[0] * 11 + parts[1] * 13 + first * 17 + turned * 19


def with_handles(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Both are under way before either is waited for."""
    total, most = x * 2, x * 3
    works = [dist.all_reduce(total, async_op=True), dist.all_reduce(most, dist.ReduceOp.MAX, async_op=True)]
    other = x.sin()
    for work in works:
        work.wait()
    return total + most * 5 + other


def functional_ones(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = functional.all_reduce(x * 2, "sum", group)
    both = functional.all_gather_tensor(x, 0, group)
    half = functional.reduce_scatter_tensor(x, "sum", 0, group)
    several = functional.all_reduce_coalesced([x, x * 5], "max", group)
    return total + both[:SIZE] * 5 + both[SIZE:] * 7 + torch.cat([half, half]) * 11 + several[0] * 13 + several[1]


def through_backward(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    with torch.enable_grad():
        y = x.clone().requires_grad_()
        turned = functional.all_to_all_single_autograd(y * y, None, None, group)
        total = differentiable.all_reduce(y.sin() * turned)
        (gradient,) = torch.autograd.grad((total * total).sum(), y)
    return gradient


def replays(which: str) -> bool:
    """Whether replays on inputs that change give what the plain call gives."""
    iteration: Callable[..., Tensor] = globals()[which]
    rank, group = dist.get_rank(), dist.group.WORLD
    x, out = torch.zeros(SIZE), torch.zeros(SIZE)
    provenance = Provenance({"x": x, "out": out}, {})
    capture = EmulatedCapture()

    def step() -> None:
        out.copy_(iteration(x, group))

    def recorder(tape: Tape | None = None) -> Recorder:
        return Recorder(provenance, {}, tape)

    with provenance.open():
        with recorder().watch():
            step()
        tape = capture.capture(step, recorder)
    same = True
    for number in range(REPLAYS):
        x.copy_(torch.arange(SIZE) * (number + 1) + rank * 1000.0)
        tape.replay()
        found = out.clone()
        same = same and torch.equal(found, iteration(x, group))
    return same and bool(out.any()) and not capture.stream.overtakes


@pytest.mark.parametrize("which", ["in_place", "with_handles", "functional_ones", "through_backward"])
def test_a_replay_is_the_plain_call(on_ranks: Callable[..., list[Any]], which: str) -> None:
    assert on_ranks("replays", which=which) == [True, True]


def send_and_receive(x: Tensor) -> None:
    rank = dist.get_rank()
    works = [dist.isend(x * 2, 1 - rank), dist.irecv(torch.zeros_like(x), 1 - rank)]
    for work in works:
        work.wait()


def barrier(x: Tensor) -> None:
    dist.barrier()


def refusal(which: str) -> str:
    x = torch.zeros(4)
    provenance = Provenance({"x": x}, {})
    try:
        with provenance.open(), Recorder(provenance, {}).watch():
            globals()[which](x)
    except AuditError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("which", "why"), [("send_and_receive", "with one rank"), ("barrier", "is a barrier")])
def test_what_cannot_be_replayed_is_named(on_ranks: Callable[..., list[Any]], which: str, why: str) -> None:
    for message in on_ranks("refusal", which=which):
        assert "SM503" in message and why in message and "test_replay.py" in message
