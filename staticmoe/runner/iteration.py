"""The Python of one iteration on static tensors: what a capture records, and `capture="off"` runs.

Order: begin, forward and backward of each micro-batch, with several ranks their exchange, norm, guard, COMMIT
(optimizer, participants, mutated buffers, counter), record. Letters: N micro-batches, P trained parameters.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from staticmoe.capture.provenance import storage_key
from staticmoe.config import RunnerConfig
from staticmoe.errors import ConfigError, ModelError
from staticmoe.observe.record import RecordRing
from staticmoe.optim.adapter import OptimizerAdapter
from staticmoe.parallel.replicas import Replicas
from staticmoe.phases import DevicePhase, device_range
from staticmoe.runner.commit import Shadow
from staticmoe.runner.gradients import GradientSum
from staticmoe.runner.guard import DeviceGuard, GuardPolicy
from staticmoe.runner.inputs import InputRing
from staticmoe.runner.joint import join_scalars, join_step, loss_weights
from staticmoe.runner.participants import StepBinding, StepParticipant
from staticmoe.runner.regions import Regions

LossFn = Callable[[nn.Module, Any], Any]
TokenMask = Callable[[Any], Tensor]


@dataclasses.dataclass(frozen=True)
class Wrapped:
    """What a runner was given, as its programs use it.

    Attributes:
        model: the user's.
        participants: name -> participant, in module order.
        bindings: name -> what the runner lends it.
        loss_fn: (model, batch) -> loss or (loss, metrics).
        token_mask: batch -> bool mask of the real tokens, or None.
        config: options.
        device: of everything.
        scratch: name -> field -> int64 tensor that takes the fields while no record exists yet.
        regions: parts of the model that are compiled, or None.
        replicas: the ranks whose steps are one step, or None for one rank.
    """

    model: nn.Module
    participants: Mapping[str, StepParticipant]
    bindings: Mapping[str, StepBinding]
    loss_fn: LossFn
    token_mask: TokenMask | None
    config: RunnerConfig
    device: torch.device
    scratch: Mapping[str, Mapping[str, Tensor]]
    regions: Regions | None = None
    replicas: Replicas | None = None

    @contextlib.contextmanager
    def precision(self) -> Iterator[None]:
        """Autocast as configured, with its weight cache off: a cached cast would outlive the weights it was made of."""
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        dtype = self.config.autocast
        casting = (
            contextlib.nullcontext() if dtype is None else torch.autocast(self.device.type, dtype, cache_enabled=False)
        )
        try:
            with casting:
                yield
        finally:
            torch.set_autocast_cache_enabled(cached)

    @contextlib.contextmanager
    def running(self, records: RecordRing | None, *, training: bool) -> Iterator[None]:
        """Within: bindings are active, and point at a program's record, or at scratch fields while it has none."""
        try:
            self._point(records, training=training)
            yield
        finally:
            for binding in self.bindings.values():
                binding.active, binding.token_mask, binding.main_grads = False, None, {}

    def _point(self, records: RecordRing | None, *, training: bool) -> None:
        for name, binding in self.bindings.items():
            scratch = self.scratch[name]
            binding.fields = dict(scratch) if records is None else {f: records.field(name, f) for f in scratch}
            binding.training = training
            binding.active = True
            binding.dooming = GuardPolicy.of(self.config).dooms if training else 0
            binding.capacity = self.config.train_capacity if training else self.config.eval_capacity
            binding.take_losses()

    def mask_of(self, batch: Any) -> Tensor | None:
        """Bool mask of the real tokens of `batch`."""
        if self.token_mask is None:
            return None
        mask = self.token_mask(batch)
        if not isinstance(mask, Tensor):
            raise ConfigError(f"token_mask: expected a bool tensor of the token shape, got {type(mask).__name__}")
        return mask if mask.dtype == torch.bool else mask != 0


def split_loss(returned: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and metrics of what a loss function returned.

    Raises:
        ModelError: neither a scalar tensor nor (scalar tensor, dict of scalar tensors).
    """
    loss, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not isinstance(metrics, dict):
        raise ModelError(
            f"loss_fn: expected a scalar tensor, or (scalar tensor, {{name: scalar tensor}}); got {_kind(loss)}"
        )
    for name, value in metrics.items():
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ModelError(f"loss_fn metric {name!r}: expected a scalar tensor, got {_kind(value)}")
    return loss.reshape(()), {name: value.detach().reshape(()) for name, value in metrics.items()}


def _kind(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


class TrainIteration:
    """One training step.

    Attributes:
        scalar_names: names of the record's scalars, known once `probe` has run.
        gradients: P gradients of the latest run of the Python, clipped.
    """

    def __init__(self, wrapped: Wrapped, adapter: OptimizerAdapter, inputs: InputRing, guard: DeviceGuard) -> None:
        self._wrapped = wrapped
        self._adapter = adapter
        self._inputs = inputs
        self._guard = guard
        self._shadow = Shadow([])
        self._records: RecordRing | None = None
        self.scalar_names: tuple[str, ...] = ()
        self.gradients: list[Tensor] = []
        self._sum = GradientSum(adapter, self._names_of, wrapped.participants, wrapped.bindings, len(inputs.batches))

    def under(self, config: RunnerConfig) -> TrainIteration:
        """The same iteration with other options; it knows what this one has learnt of the participants."""
        other = copy.copy(self)
        other._wrapped = dataclasses.replace(self._wrapped, config=config)
        return other

    @property
    def gradient_names(self) -> list[str]:
        """Names of the P trained parameters."""
        return self._names_of(self._adapter.parameters)

    def _names_of(self, parameters: Sequence[nn.Parameter]) -> list[str]:
        names = {id(p): name for name, p in self._wrapped.model.named_parameters()}
        return [names[id(p)] for p in parameters]

    def probe(self) -> None:
        """Run forward and backward alone, to learn the metrics and what they mutate."""
        with self._wrapped.running(None, training=True):
            self._guard.begin()
            _, scalars, _ = self._forward_backward()
        self.scalar_names = ("loss", "grad_norm", *scalars, "lr")

    def equip(self, records: RecordRing, shadow: Shadow) -> None:
        """Take the record and the shadow that the probe showed to be needed."""
        self._records, self._shadow = records, shadow

    def __call__(self) -> None:
        """Run the iteration once."""
        records = self._records
        assert records is not None, "equip comes before the first run"
        # Those of the run before would lie beside those of this one.
        self.gradients = []
        with self._wrapped.running(records, training=True):
            with device_range(DevicePhase.RECORD):
                records.row.zero_()
                self._guard.begin()
                self._shadow.save()
            loss, scalars, gradients = self._forward_backward()
        values = [loss, *scalars.values()]
        with torch.no_grad():
            replicas = self._wrapped.replicas
            if replicas is not None:
                with device_range(DevicePhase.EXCHANGE):
                    values = join_step(replicas, self._guard.reasons, values, records, self._wrapped.bindings)
                    gradients = replicas.add_up(gradients)
            with device_range(DevicePhase.CLIP):
                norm = torch.nn.utils.get_total_norm(gradients)
                self._guard.decide(values[0], norm)
                self.gradients = self._clipped(gradients, norm)
            with device_range(DevicePhase.OPTIMIZER):
                self._commit(self.gradients)
            with device_range(DevicePhase.RECORD):
                self._write(records, [values[0], norm, *values[1:]])

    def _write(self, records: RecordRing, values: list[Tensor]) -> None:
        launch, attempt, slot = self._inputs.control
        guard = self._guard
        counters = [launch, attempt, guard.void, guard.reasons, guard.veto.to(torch.int64), guard.committed]
        records.write(counters, [*values, self._inputs.hyper_parameters[0, 0]], slot.reshape(1))

    def _clipped(self, gradients: list[Tensor], norm: Tensor) -> list[Tensor]:
        """The gradients, scaled where their norm is above the limit: in place, or copies where they share memory."""
        limit = self._wrapped.config.max_grad_norm
        if limit is None:
            return gradients
        scale = torch.clamp(limit / (norm + 1e-6), max=1.0)
        if self._wrapped.replicas is not None:
            # Their sums over ranks lie side by side, in memory of their own.
            torch._foreach_mul_(gradients, scale)
            return gradients
        # Two parameters may have been given one tensor, or one value expanded to a shape; a user's own backward may
        # hand out a buffer of the model.
        model = self._wrapped.model
        users = collections.Counter(storage_key(t) for t in (*gradients, *model.parameters(), *model.buffers()))
        own = [
            gradient if users[storage_key(gradient)] == 1 and gradient.is_contiguous() else gradient.clone()
            for gradient in gradients
        ]
        torch._foreach_mul_(own, scale)
        return own

    def _commit(self, gradients: list[Tensor]) -> None:
        """The only place where persistent state changes."""
        veto = self._guard.veto
        self._adapter.step(gradients, self._inputs.hyper_parameters, veto)
        for participant in self._wrapped.participants.values():
            participant.commit_step(veto)
        self._shadow.select(veto)

    def _forward_backward(self) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
        """Loss, scalars by name and P gradients, joined over micro-batches."""
        batches = self._inputs.batches
        weights, shares = loss_weights(batches, self._wrapped.config.loss_reduction, self._wrapped.replicas)
        scalars: dict[str, Tensor] = {}
        total: Tensor | None = None
        self._sum.begin()
        for batch, weight, share in zip(batches, weights, shares, strict=True):
            self._sum.enter()
            with device_range(DevicePhase.FORWARD):
                loss, auxiliary, metrics = self._micro_batch(batch)
            # A step may run, again or on a new variant, where its result is read: under the reader's no_grad.
            with torch.enable_grad(), device_range(DevicePhase.BACKWARD):
                self._sum.add(loss * weight + auxiliary * share)
            weighted = loss.detach() * weight
            total = weighted if total is None else total + weighted
            for name, value in metrics.items():
                scalars[name] = scalars[name] + value * share if name in scalars else value * share
        assert total is not None, "there is at least one micro-batch"
        return total, scalars, self._sum.end()

    def _micro_batch(self, batch: Any) -> tuple[Tensor, Tensor | float, dict[str, Tensor]]:
        """The user's loss, the participants' weighted losses, and the metrics of one micro-batch."""
        wrapped = self._wrapped
        with torch.enable_grad(), wrapped.precision():
            mask = wrapped.mask_of(batch)
            for binding in wrapped.bindings.values():
                binding.token_mask = mask
            loss, metrics = split_loss(wrapped.loss_fn(wrapped.model, batch))
            auxiliary: Tensor | float = 0.0
            terms: dict[str, Tensor] = {}
            for binding in wrapped.bindings.values():
                for term in binding.take_losses():
                    value = term.value.detach()
                    terms[term.name] = terms[term.name] + value if term.name in terms else value
                    if term.coefficient:
                        auxiliary = auxiliary + term.coefficient * term.value
        clash = terms.keys() & metrics.keys() | metrics.keys() & {"loss", "grad_norm", "lr"}
        if clash:
            raise ModelError(
                f"loss_fn metrics: expected names that the runner does not use, got {sorted(clash)}; rename them"
            )
        return loss, auxiliary, {**terms, **metrics}


class EvalIteration:
    """One evaluation: forward alone, in eval mode, committing nothing."""

    def __init__(self, wrapped: Wrapped, eval_fn: LossFn, inputs: InputRing, guard: DeviceGuard) -> None:
        self._wrapped = wrapped
        self._eval_fn = eval_fn
        self._inputs = inputs
        self._guard = guard
        self._records: RecordRing | None = None
        self.scalar_names: tuple[str, ...] = ()
        self.gradients: list[Tensor] = []
        self.gradient_names: list[str] = []

    def probe(self) -> None:
        """Run the forward once, to learn the metrics."""
        with self._wrapped.running(None, training=False):
            self.scalar_names = ("loss", *self._forward()[1])

    def equip(self, records: RecordRing, shadow: Shadow) -> None:
        """Take the record; an evaluation needs no shadow."""
        self._records = records

    def __call__(self) -> None:
        """Run the evaluation once."""
        records = self._records
        assert records is not None, "equip comes before the first run"
        with self._wrapped.running(records, training=False):
            records.row.zero_()
            with device_range(DevicePhase.FORWARD):
                loss, metrics = self._forward()
        values = [loss, *metrics.values()]
        if self._wrapped.replicas is not None:
            values = self._joint(self._wrapped.replicas, values)
        launch, attempt, slot = self._inputs.control
        zero = torch.zeros_like(launch)
        counters = [launch, attempt, zero, zero, zero, self._guard.committed]
        records.write(counters, values, slot.reshape(1))

    def _joint(self, replicas: Replicas, values: list[Tensor]) -> list[Tensor]:
        reduction = self._wrapped.config.loss_reduction
        (weight,), (share,) = loss_weights(self._inputs.batches, reduction, replicas)
        return join_scalars(replicas, [values[0] * weight, *(value * share for value in values[1:])])

    def _forward(self) -> tuple[Tensor, dict[str, Tensor]]:
        wrapped = self._wrapped
        batch = self._inputs.batches[0]
        with evaluation_mode(wrapped.model), torch.no_grad(), wrapped.precision():
            mask = wrapped.mask_of(batch)
            for binding in wrapped.bindings.values():
                binding.token_mask = mask
            loss, metrics = split_loss(self._eval_fn(wrapped.model, batch))
            for binding in wrapped.bindings.values():
                for term in binding.take_losses():
                    metrics[term.name] = metrics[term.name] + term.value if term.name in metrics else term.value
        return loss, metrics


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """eval() for every module, and afterwards each module's own flag as before."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag
