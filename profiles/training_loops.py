"""Training loops over transformers models, and one way to time them: the one that a user writes, and the runner's.

For the scripts beside this file, which are run by path.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from staticmoe import RunnerConfig, StaticMoERunner
from staticmoe.bench.timing import clean, spread
from staticmoe.integrations import huggingface

WARMUP, LEARNING_RATE, MAX_GRAD_NORM = 10, 3e-4, 1.0

Loss = Callable[[Any, dict[str, Tensor]], Tensor]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Over what is trained."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE, fused=True)


def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross entropy of the next token in nats, as transformers computes it."""
    return model(**batch).loss


def loss_by_positions(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The same as transformers reads a packed batch without flash attention: by its positions, if it has no mask."""
    return loss_of(model, {key: batch[key] for key in ("input_ids", "labels", "position_ids")})


def loss_with_ready_mask(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The same without a host read: the mask is made ready."""
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    places = batch.get("position_ids")
    numbers = None if places is None else (places == 0).cumsum(1)
    given = {key: value for key, value in batch.items() if "cu_seq_lens" not in key}
    return loss_of(model, {**given, "attention_mask": huggingface.ready_masks(model, mask, sequence_ids=numbers)})


class Loop:
    """What a user of transformers writes; no value is read.

    Args:
        called: the model, or what it was compiled to.
    """

    def __init__(self, model: nn.Module, loss: Loss, device: torch.device, called: Any = None) -> None:
        self._called, self._loss, self._device = model if called is None else called, loss, device
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = adamw(model)
        self._losses: list[Tensor] = []

    def step(self, batch: dict[str, Tensor]) -> None:
        """One update."""
        moved = {key: value.to(self._device, non_blocking=True) for key, value in batch.items()}
        loss = self._loss(self._called, moved)
        loss.backward()
        nn.utils.clip_grad_norm_(self._trained, MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._losses.append(loss.detach())

    def losses(self) -> list[float]:
        """Of every step, in nats; waits for all."""
        return [float(loss) for loss in self._losses]

    def close(self) -> None:
        """Nothing to close."""


class Runner:
    """The same under the runner; `compiled`: its dense regions."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        example: dict[str, Tensor],
        capture: str,
        token_mask: str | None = None,
        *,
        compiled: bool = False,
    ) -> None:
        huggingface.prepare(model)
        config = RunnerConfig(capture=capture, max_grad_norm=MAX_GRAD_NORM, compile="blocks" if compiled else "off")
        self._runner = StaticMoERunner(
            model, adamw(model), example_batch=example, loss_fn=loss, token_mask=token_mask, config=config
        )
        self._results: list[Any] = []

    def step(self, batch: dict[str, Tensor]) -> None:
        """One update."""
        self._results.append(self._runner.step(batch))

    def losses(self) -> list[float]:
        """Of every step, in nats; waits for all."""
        return [float(result.loss) for result in self._results]

    def close(self) -> None:
        """Let go of model and graphs."""
        self._runner.close()


def wait(device: torch.device) -> None:
    """Until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def mark(device: torch.device) -> Any:
    """A point in time of the device's stream: an event, or the clock of a CPU in s."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds_between(start: Any, end: Any) -> float:
    """Between two marks that have passed."""
    return 1e3 * (end - start) if isinstance(start, float) else start.elapsed_time(end)


def measure(
    make: Callable[[], Loop | Runner], data: Sequence[dict[str, Tensor]], device: torch.device, tokens: float
) -> dict[str, Any]:
    """Train on each batch once, and time the steps after the first `WARMUP`, or after half of them where they are few.

    Returns `ms` a step by the wall clock, with one wait at the end; `events`, the times between CUDA events after each
    step; `start_s` from making the loop to the end of its first step (compilation, capture); `losses` of all steps in
    nats; `peak_gib` since the last reset, and `reserved_gib`, what torch has taken from the device for it.

    Args:
        make: what takes the steps; making it counts as start.
        tokens: of a batch, for the rate.
    """
    warmup = min(WARMUP, len(data) // 2)
    began = time.perf_counter()
    trained = make()
    trained.step(data[0])
    wait(device)
    start = time.perf_counter() - began
    for batch in data[1:warmup]:
        trained.step(batch)
    wait(device)
    began, marks = time.perf_counter(), [mark(device)]
    for batch in data[warmup:]:
        trained.step(batch)
        marks.append(mark(device))
    wait(device)
    seconds = (time.perf_counter() - began) / (len(data) - warmup)
    times = [milliseconds_between(*pair) for pair in zip(marks, marks[1:], strict=False)]
    found: dict[str, Any] = {
        "ms": 1e3 * seconds, "events": spread(times), "tokens_per_s": tokens / seconds, "start_s": start,
        "losses": trained.losses(),
    }  # fmt: skip
    if device.type == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        found["reserved_gib"] = torch.cuda.max_memory_reserved(device) / 2**30
    trained.close()
    return found


def attempt(measured: Callable[[], dict[str, Any]], device: torch.device) -> dict[str, Any]:
    """What was measured, on memory whose peak was reset, or why not; afterwards nothing of it is held."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        row = measured()
    except Exception as error:  # out of memory, or whatever else keeps this mode from running: it is the finding
        row = {"failed": f"{type(error).__name__}: {error}"[:600]}
    torch._dynamo.reset()
    clean(device)
    return row
