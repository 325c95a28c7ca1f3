"""The memory that a runner will need, by part, before anything is captured; and what came of it.

One iteration is rehearsed on tensors without memory, once for each variant, and its allocations are added up as a
GPU's allocator would round them, and cut from segments as it would. What kernels take inside of torch's own operations
(workspaces of cuBLAS, say) is not seen.

Letters: N micro-batches of a step, G parameter groups, W staged hyper-parameters of a group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from staticmoe.config import RunnerConfig
from staticmoe.errors import MemoryLimitError
from staticmoe.observe.record import RecordLayout
from staticmoe.optim.adapter import OptimizerAdapter
from staticmoe.runner.batch_shape import BatchShape
from staticmoe.runner.commit import Shadow
from staticmoe.runner.guard import DeviceGuard
from staticmoe.runner.inputs import DeviceScalars
from staticmoe.runner.iteration import TrainIteration, Wrapped
from staticmoe.runner.memory import Checks, Memory, MemoryForecast, Rehearsed, Run, Variant, in_words
from staticmoe.runner.rehearsal import Tally, bytes_of, rehearsal, sizes_of
from staticmoe.runner.segments import allocated
from staticmoe.runner.shortage import allocation_lines

log = logging.getLogger(__name__)

# From the second micro-batch on, gradients are added: more of them need no more memory.
_MOST_REHEARSED = 2
_LESS = "lower capacity_factor, the micro-batch or the model, or checkpoint activations"


class _FakeInputs:
    """The static inputs of an iteration, made where no memory is.

    Attributes:
        shown: how many micro-batches there are.
    """

    def __init__(self, shape: BatchShape, table: tuple[int, int], shown: int, device: torch.device) -> None:
        self.shown = shown
        self.hyper_parameters = torch.zeros(table, dtype=torch.float32, device=device)
        self.control = torch.zeros(3, dtype=torch.int64, device=device)
        self._batches = [shape.assemble(shape.tensors(device)) for _ in range(shown)]

    @property
    def batches(self) -> list[Any]:
        """One batch for each micro-batch."""
        return self._batches[: self.shown]


class _NoRecord:
    """Takes a record and keeps nothing of it."""

    def __init__(self, scratch: Mapping[str, Mapping[str, Tensor]], ranks: int = 1) -> None:
        self._scratch = scratch
        self.row = torch.zeros(1, dtype=torch.int64)
        fields = [(name, field, t) for name, tensors in scratch.items() for field, t in tensors.items()]
        self.layout = RecordLayout((), tuple((name, field, tuple(t.shape)) for name, field, t in fields), ranks)
        self.fields = torch.cat([t.reshape(-1) for _, _, t in fields]) if fields else self.row[:0]
        self.peaks = self.fields.new_zeros(len(self.layout.peaks), 3)

    def field(self, participant: str, name: str) -> Tensor:
        """The accumulator of a field."""
        return self._scratch[participant][name]

    def write(self, counters: list[Tensor], scalars: list[Tensor], slot: Tensor) -> None:
        """Let go of them."""


def _input_bytes(shape: BatchShape, config: RunnerConfig, table: tuple[int, int], scalars: int) -> int:
    """Static inputs and slots; see `staticmoe.runner.inputs`."""
    batch = bytes_of(tensor for tensor in shape.tensors(torch.device("meta")) if tensor is not None)
    hyper, word = table[0] * table[1], torch.float32.itemsize
    of_both = config.gradient_accumulation_steps * batch + allocated(3 * torch.int64.itemsize)
    static = of_both + allocated(hyper * word) + allocated(scalars * word)
    slot = of_both + allocated((hyper + scalars) * word)
    return static + (config.max_in_flight + 1) * slot


@dataclasses.dataclass(frozen=True)
class Foresight:
    """What a forecast is made of.

    Args:
        wrapped: model, participants and options as the first graph has them.
        variants: options of each graph, in the order in which they are captured; behind one that cannot overflow no
            other is. The first are those of `wrapped`.
        adapter, guard, scalars: of the runner.
        replayed: whether graphs are captured at all.
    """

    wrapped: Wrapped
    variants: Sequence[RunnerConfig]
    adapter: OptimizerAdapter
    guard: DeviceGuard
    scalars: DeviceScalars
    replayed: bool

    @property
    def limit(self) -> int | None:
        """Bytes that the runner may need on its device; None where nothing bounds them."""
        limit, device = self.wrapped.config.memory_limit_bytes, self.wrapped.device
        if limit is not None or device.type != "cuda":
            return limit
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)

    def of(self, shape: BatchShape) -> Rehearsed | None:
        """What micro-batches of `shape` need; None, and a line in the log, where that cannot be found out."""
        try:
            return self._rehearse(shape)
        except Exception as error:
            # What cannot be captured is for the capture to say, in its own words.
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            log.info("no memory forecast: the iteration does not run on tensors without values (%s)", reason)
            return None

    def check(self, found: Rehearsed) -> None:
        """Hold what was found against the limit.

        Raises:
            MemoryLimitError: it is above, with the bytes by part and what would fit.
        """
        limit = self.limit
        if limit is not None and found.forecast.total > limit:
            raise MemoryLimitError(self._refusal(found, limit))

    def _rehearse(self, shape: BatchShape) -> Rehearsed:
        model, device, config = self.wrapped.model, self.wrapped.device, self.wrapped.config
        self.scalars.place(device)
        existing = self._existing()
        others = torch.cuda.memory_allocated(device) - bytes_of(existing) if device.type == "cuda" else 0
        modules = {id(module): name or "(the model)" for name, module in model.named_modules()}
        real = [*existing, *self.guard.tensors.values()]
        with rehearsal(device, self._owners(), self._functions(), real, modules) as tally:
            self.adapter.create_state()
            state = bytes_of(t for t in self.adapter.state_tensors.values() if t.device.type == device.type)
            sizes = sizes_of(self._existing())
            iteration = self._learnt(shape)
            runs = list(self._rehearse_variants(tally, iteration))
            balanced = None
            if config.capacity_factor is not None and config.capacity_factor > 1:
                balanced = _rehearse_one(tally, iteration, dataclasses.replace(config, capacity_factor=1.0))
        table = len(self.adapter.optimizer.param_groups), self.adapter.width
        return Rehearsed(
            parameters=bytes_of(model.parameters()),
            buffers=bytes_of(model.buffers()),
            optimizer=state,
            inputs=_input_bytes(shape, config, table, len(self.scalars)),
            others=max(others, 0),
            sizes=sizes,
            runs=runs,
            balanced=balanced,
            checks=Checks(config.self_check, self.replayed, config.recheck_every > 0),
        )

    def _learnt(self, shape: BatchShape) -> TrainIteration:
        """The iteration; it has learnt, as a warm-up does, which participants can add gradients by themselves."""
        table = len(self.adapter.optimizer.param_groups), self.adapter.width
        shown = min(self.wrapped.config.gradient_accumulation_steps, _MOST_REHEARSED)
        inputs: Any = _FakeInputs(shape, table, shown, self.wrapped.device)
        iteration = TrainIteration(self.wrapped, self.adapter, inputs, self.guard)
        if shown > 1:
            inputs.shown = 1
            iteration.probe()
            inputs.shown = shown
        replicas = self.wrapped.replicas
        records: Any = _NoRecord(self.wrapped.scratch, 1 if replicas is None else replicas.size)
        iteration.equip(records, Shadow([]))
        return iteration

    def _rehearse_variants(self, tally: Tally, iteration: TrainIteration) -> Iterator[Run]:
        for config in self.variants:
            yield _rehearse_one(tally, iteration, config)
            if not any(binding.facts.get("can_overflow") for binding in self.wrapped.bindings.values()):
                return

    def _existing(self) -> list[Tensor]:
        """What is there already, on the device, of what the forecast counts."""
        model, device = self.wrapped.model, self.wrapped.device
        every = itertools.chain(model.parameters(), model.buffers(), self.adapter.state_tensors.values())
        return [tensor for tensor in every if tensor.device.type == device.type]

    def _owners(self) -> list[object]:
        wrapped = self.wrapped
        parts = (self.adapter, self.adapter.optimizer, *wrapped.bindings.values(), *wrapped.participants.values())
        return [owner for owner in (*wrapped.model.modules(), *parts) if hasattr(owner, "__dict__")]

    def _functions(self) -> list[Callable[..., Any]]:
        wrapped = self.wrapped
        forwards = {type(module).forward for module in wrapped.model.modules()}
        functions = [wrapped.loss_fn, *(f for f in forwards if not f.__module__.startswith("torch."))]
        return functions if wrapped.token_mask is None else [*functions, wrapped.token_mask]

    def _refusal(self, found: Rehearsed, limit: int) -> str:
        config, forecast = self.wrapped.config, found.forecast
        ways = ((what, less.forecast.total) for what, less in found.ways_out())
        fixes = [f"{what} would need {in_words(total)}" for what, total in ways if total <= limit] or [_LESS]
        return (
            f"memory: expected to need at most {in_words(limit)} ({limit} bytes"
            f"{'' if config.memory_limit_bytes is not None else ', what the device has for this process'}), the "
            f"forecast is {in_words(forecast.total)} ({forecast.total} bytes); {'; '.join(fixes)}\n"
            + "\n".join([*forecast.lines(), *allocation_lines(forecast.variants[0].largest)])
        )

    def shortage(self, shape: BatchShape, error: torch.OutOfMemoryError) -> str:
        """What to say of `error`, which came while a graph for micro-batches of `shape` was made."""
        device, reason = self.wrapped.device, (str(error).splitlines() or [""])[0]
        found = self.of(shape)
        head = f"memory: expected an iteration that fits on {device}, got out of memory ({reason})"
        if found is None:
            return f"{head}; {_LESS}. There is no forecast: the iteration does not run on tensors without values"
        forecast = found.forecast
        lines = [*forecast.lines(), *allocation_lines(forecast.variants[0].largest)]
        return "\n".join([f"{head}; the forecast is {in_words(forecast.total)}; {_LESS}", *lines])


def _rehearse_one(tally: Tally, iteration: TrainIteration, config: RunnerConfig) -> Run:
    iteration = iteration.under(config)
    tally.begin()
    iteration()
    gradients = bytes_of(iteration.gradients)
    name = "dropless" if config.capacity_factor is None else f"capacity_factor={config.capacity_factor}"
    # As they are now: what goes on to be let go of, the gradients, is not the iteration's doing.
    return Run(Variant(name, gradients, tally.peak - gradients, tally.ledger.largest()), tuple(tally.events))


class MemoryBook:
    """A runner's latest forecast, made before a capture where something bounds the memory, else when somebody asks.

    Args:
        foresight: gives what a forecast is made of, as it is now.
        shape: of a micro-batch, for who asks.
    """

    def __init__(self, foresight: Callable[[], Foresight], shape: BatchShape) -> None:
        self._foresight = foresight
        self._shape = shape
        self._made = False
        self._forecast: MemoryForecast | None = None
        self.closed = False

    def admit(self, shape: BatchShape) -> None:
        """Forecast the training graphs of `shape` before they are captured.

        Raises:
            MemoryLimitError: they would need more than there is, or than the options allow.
        """
        foresight = self._foresight()
        self._made = foresight.limit is not None
        if self._made:
            found = foresight.of(shape)
            self._forecast = None if found is None else found.forecast
            if found is not None and self._forecast is not None:
                log.info("memory forecast:\n%s", "\n".join(self._forecast.lines()))
                foresight.check(found)

    @contextlib.contextmanager
    def explaining(self, shape: BatchShape) -> Iterator[None]:
        """Within: a training graph of `shape` is made.

        Raises:
            MemoryLimitError: the device ran out of memory; with the forecast, and the largest allocations by line.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            # What the failed iteration had in its variables is free from here on.
            traceback.clear_frames(error.__traceback__)
            raise MemoryLimitError(self._foresight().shortage(shape, error)) from error

    def report(self, device: torch.device, graphs: int) -> Memory:
        """The forecast beside what has been measured on `device` by now; `graphs` bytes are kept by graphs."""
        if not self._made and not self.closed:
            found = self._foresight().of(self._shape)
            self._made, self._forecast = True, None if found is None else found.forecast
        reserved = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
        return Memory(self._forecast, reserved, graphs)
