"""What cannot be replayed is refused while recording, with the line that does it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor, nn

from staticmoe.capture import EmulatedCapture, Provenance, Recorder
from staticmoe.errors import CaptureError

X = torch.arange(6, dtype=torch.float32)


def record(iteration: Callable[[Tensor, Tensor], None], warmups: int = 1, model: nn.Module | None = None) -> None:
    """Observe `warmups` runs of iteration(x, out), then record one."""
    x, out = X.clone(), torch.zeros(6)
    named = dict(model.named_parameters()) if model is not None else {}
    provenance = Provenance({"x": x, "out": out, **named}, {})
    with provenance.open():
        for _ in range(warmups):
            with Recorder(provenance, {}).watch():
                iteration(x, out)
        EmulatedCapture().capture(lambda: iteration(x, out), lambda tape: Recorder(provenance, {}, tape))


@pytest.mark.parametrize(
    ("read", "word"),
    [
        (lambda x: x.sum().item(), r"item\(\)"),
        (lambda x: x.tolist(), r"tolist\(\)"),
        (lambda x: x.cpu(), r"cpu\(\)"),
        (lambda x: x.numpy(), r"numpy\(\)"),
        (lambda x: numpy.asarray(x), "numpy"),
        (lambda x: f"{x.sum()}", "formatting"),
        (lambda x: repr(x), "printing"),
        (lambda x: 1 if x.sum() > 0 else 2, "branch"),
        (lambda x: float(x[0]), r"float\(tensor\)"),
        (lambda x: int(x[0]), r"int\(tensor\)"),
        (lambda x: [1, 2, 3, 4][x[1].long()], "index"),
        (lambda x: torch.equal(x, x), "equal"),
        (lambda x: torch.allclose(x, x), "host"),
        (lambda x: x[x > 2], "boolean mask"),
        (lambda x: torch.nonzero(x), "size depends on values"),
        (lambda x: torch.masked_select(x, x > 2), "size depends on values"),
        (lambda x: torch.unique(x), "size depends on values"),
        (lambda x: torch.repeat_interleave(x, (x > 2).long()), "size depends on values"),
        (lambda x: x.clone().resize_(3), "memory of a tensor"),
        (lambda x: torch.manual_seed(1), "same numbers"),
    ],
)
def test_a_host_read_or_a_size_by_value_is_refused_by_line(read: Callable[[Tensor], object], word: str) -> None:
    """Silent on a CPU, an error or a frozen value on a GPU."""

    def iteration(x: Tensor, out: Tensor) -> None:
        read(x)
        out.copy_(x)

    with pytest.raises(CaptureError, match=word) as caught:
        record(iteration)
    assert "test_refusals.py" in str(caught.value)


def test_forms_of_fixed_size_are_let_through() -> None:
    """The near twins of the above that a graph can hold."""

    def iteration(x: Tensor, out: Tensor) -> None:
        y = torch.where(x > 2, x, 0.0)
        z = y.clone()
        z[z > 3] = 0.0
        w = torch.repeat_interleave(x[:2], torch.ones_like(x[:2]).long(), output_size=2)
        out.copy_(y + z)
        out[:2] += w
        torch.get_rng_state()

    record(iteration)


def test_memory_read_before_it_is_written_is_refused() -> None:
    """torch.empty holds whatever was there."""
    with pytest.raises(CaptureError, match="nothing has written"):
        record(lambda x, out: out.copy_(torch.empty(6) + x))
    record(lambda x, out: out.copy_(torch.empty(6).copy_(x)))


def test_values_made_on_the_host_are_refused() -> None:
    """numpy and torch.tensor leave no operation, so a replay would see the value of the capture."""
    with pytest.raises(CaptureError, match="host values"):
        record(lambda x, out: out.copy_(x * torch.tensor(2.0)))

    def through_numpy(x: Tensor, out: Tensor) -> None:
        out.copy_(torch.from_numpy(numpy.full(6, 3.0, dtype=numpy.float32)) + x)

    with pytest.raises(CaptureError, match="host values"):
        record(through_numpy)


def test_an_operation_in_another_thread_is_refused() -> None:
    """The recording of one thread does not see another."""

    def iteration(x: Tensor, out: Tensor) -> None:
        made: list[Tensor] = []
        thread = threading.Thread(target=lambda: made.append(x * 2))
        thread.start()
        thread.join()
        out.copy_(made[0])

    with pytest.raises(CaptureError, match="another thread"):
        record(iteration)


def test_a_bank_cached_by_an_earlier_iteration_is_refused() -> None:
    """Computed from weights once and kept: every replay would use the first weights."""
    model = nn.Linear(6, 6)
    cache: dict[str, Tensor] = {}

    def iteration(x: Tensor, out: Tensor) -> None:
        with torch.no_grad():
            if "bank" not in cache:
                cache["bank"] = model.weight * 2
            out.copy_(cache["bank"] @ x)

    with pytest.raises(CaptureError, match="an earlier iteration computed"):
        record(iteration, model=model)


def test_a_constant_cached_by_an_earlier_iteration_is_let_through() -> None:
    """A lazily built table depends on nothing that changes."""
    cache: dict[str, Tensor] = {}

    def iteration(x: Tensor, out: Tensor) -> None:
        if "table" not in cache:
            cache["table"] = torch.arange(6) * 2.0
        out.copy_(cache["table"] + x)

    record(iteration)


def test_a_cast_cached_by_autocast_is_refused() -> None:
    """Autocast keeps the bf16 copy of a weight until its outermost region ends."""
    model = nn.Linear(6, 6)

    def iteration(x: Tensor, out: Tensor) -> None:
        out.copy_(model(x).detach().float())

    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(CaptureError, match="earlier iteration|cache inside torch"),
    ):
        record(iteration, model=model)


def test_a_barrier_is_refused() -> None:
    """The host waits at it, which no graph does; tests/parallel has the collectives that are replayed."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(CaptureError, match="is a barrier"):
            record(lambda x, out: dist.barrier())
    finally:
        dist.destroy_process_group()


def test_the_backward_names_its_node() -> None:
    """An operation of the backward shows only the line of the backward call; the node's name helps."""

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            return gradient * gradient.sum().item()

    def iteration(x: Tensor, out: Tensor) -> None:
        leaf = x.detach().requires_grad_()
        out.copy_(torch.autograd.grad(Reads.apply(leaf).sum(), leaf)[0])

    with pytest.raises(CaptureError, match="ReadsBackward"):
        record(iteration)
