"""The capture on a GPU: copies beside the steps, and what a failed capture leaves behind."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from staticmoe import CaptureError, StaticMoE, StaticMoERunner
from staticmoe.capture.cuda_graph import CudaStream

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = torch.device("cuda")
# About half a second of an H200: long beside a copy of some kilobytes, and beside a host that others keep busy.
SPIN_CYCLES = 1_000_000_000


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.moe = nn.Linear(8, 8), StaticMoE(8, 16, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(self.first(x)).square().mean()


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"])


def batch_of(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(16, 8, generator=torch.Generator().manual_seed(step))}


def train(loss: Any = loss_fn, steps: int = 4) -> list[float]:
    torch.manual_seed(0)
    model = Model().to(GPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with StaticMoERunner(model, optimizer, example_batch=batch_of(0), loss_fn=loss) as runner:
        return [float(runner.step(batch_of(step)).loss) for step in range(steps)]


def test_a_batch_travels_while_the_step_before_it_computes() -> None:
    """An upload arrives while the stream still spins; work launched behind it reads what was uploaded."""
    stream = CudaStream(GPU)
    host, resident = torch.full((1024,), 7.0, pin_memory=True), torch.zeros(1024, device=GPU)
    upload = stream.upload()
    assert upload is not None
    # Now: asking for pinned memory waits for the device, and so does the first use of a kernel, which loads it.
    out = torch.zeros(1024, pin_memory=True)
    out.copy_(resident.mul_(2), non_blocking=True)
    torch.cuda.synchronize()
    spinning = stream.launch(lambda: torch.cuda._sleep(SPIN_CYCLES))
    upload.wait_until_free()
    upload.run(lambda: resident.copy_(host, non_blocking=True))
    upload.wait_until_free()
    assert not stream.is_done(spinning)
    ticket = stream.launch(lambda: resident.mul_(2), lambda: out.copy_(resident, non_blocking=True))
    assert not stream.is_done(ticket)
    stream.wait(ticket)
    assert stream.is_done(spinning) and torch.equal(out, torch.full((1024,), 14.0))


def test_an_upload_waits_for_what_still_reads_the_slot() -> None:
    """The work that was marked has read the old values, although it starts long after the upload was asked for."""
    stream = CudaStream(GPU)
    host, resident = torch.ones(1024, pin_memory=True), torch.zeros(1024, device=GPU)
    upload = stream.upload()
    assert upload is not None
    seen = torch.full((1024,), -1.0, device=GPU)

    def read_late() -> None:
        torch.cuda._sleep(SPIN_CYCLES)
        seen.copy_(resident)
        upload.mark_read()

    ticket = stream.launch(read_late)
    upload.run(lambda: resident.copy_(host, non_blocking=True))
    stream.wait(ticket)
    upload.wait_until_free()
    assert float(seen.sum()) == 0 and float(resident.sum()) == 1024


def test_copying_out_does_not_hold_up_the_next_step() -> None:
    """What is launched next starts while the copy to the host is still on its way."""
    stream = CudaStream(GPU)
    out, first, second = torch.zeros(1, pin_memory=True), torch.ones(1, device=GPU), torch.zeros(1, device=GPU)
    second.fill_(2.0)
    torch.cuda.synchronize()

    def slow_copy() -> None:
        torch.cuda._sleep(SPIN_CYCLES)
        out.copy_(first, non_blocking=True)

    one = stream.launch(lambda: None, slow_copy)
    two = stream.launch(lambda: second.fill_(3.0))
    stream.wait(two)
    assert not stream.is_done(one)
    stream.wait(one)
    assert float(out) == 1


def unjoined(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Forks a stream and does not join it: fine eagerly, an error only when the capture ends."""
    loss = model(batch["x"])
    if torch.cuda.is_current_stream_capturing():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            loss.detach() * 2
    return loss


def synchronizing(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Waits for the device in the captured run alone, where nothing saw it coming."""
    loss = model(batch["x"])
    if torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream().synchronize()
    return loss


def raising(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """An error of the user's own, in the middle of a capture."""
    loss = model(batch["x"])
    if torch.cuda.is_current_stream_capturing():
        raise ZeroDivisionError("the user's own")
    return loss


@pytest.mark.parametrize(
    ("loss", "error"), [(unjoined, CaptureError), (synchronizing, CaptureError), (raising, ZeroDivisionError)]
)
def test_a_failure_inside_the_capture_leaves_nothing_behind(loss: Any, error: type[Exception]) -> None:
    """The stream works, torch draws on from the seed that `train` set, memory comes back, a good model captures."""
    want = train()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.manual_seed(0)
    expected = torch.rand(4, device=GPU)
    for _ in range(3):
        with pytest.raises(error):
            train(loss)
    assert torch.equal(torch.rand(4, device=GPU), expected)
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < 16 << 20
    assert train() == want


def test_twenty_runners_leave_no_memory_behind() -> None:
    """Built, used and let go of: what torch reserves afterwards does not grow with their number."""

    def reserved() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    train()
    before = reserved()
    for _ in range(20):
        train(steps=3)
    assert reserved() - before < 16 << 20
