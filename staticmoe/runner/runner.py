"""StaticMoERunner: wraps a model and its optimizer, captures the iteration, replays it once per step."""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from staticmoe.capture import Capture, EmulatedCapture, Provenance, Uncaptured
from staticmoe.config import RunnerConfig
from staticmoe.errors import ClosedError, ConfigError, ModelError, ReplayError
from staticmoe.observe.publisher import Publisher
from staticmoe.observe.results import EvalResult, StepResult
from staticmoe.optim.adapters import FusedAdapter
from staticmoe.runner.admission import admit_model, admit_optimizer, admit_options, discover, untrained
from staticmoe.runner.family import Family, timed
from staticmoe.runner.guard import DeviceGuard, GuardPolicy, HostGuard
from staticmoe.runner.inputs import BatchShape, DeviceScalars, InputRing, split_micro_batches
from staticmoe.runner.iteration import EvalIteration, LossFn, TokenMask, TrainIteration, Wrapped
from staticmoe.runner.loading import StateHooks
from staticmoe.runner.participants import StepBinding
from staticmoe.runner.program import Program
from staticmoe.runner.watch import HostState, OptimizerState

log = logging.getLogger(__name__)

_EVALUATION_SEED = 0


@dataclasses.dataclass
class _Pending:
    """A launched step or evaluation whose record the host has not read."""

    ticket: int
    slot: int
    program: Program
    result: StepResult


def _default_loss(model: nn.Module, batch: Any) -> Tensor:
    """`model(**batch).loss`, as Hugging Face models give it."""
    output = model(**batch)
    loss = getattr(output, "loss", None)
    if loss is None:
        raise ModelError(
            f"loss_fn: expected model(**batch).loss, got {type(output).__name__} without a loss; pass loss_fn, or labels"
        )
    return loss


class StaticMoERunner:
    """Trains `model` with `optimizer`, one captured graph per step.

    The constructor checks, warms up, captures and self-checks from the example batch and commits nothing:
    parameters, optimizer state, buffers and torch's random state are afterwards bitwise as before, save
    that optimizer state exists. N calls of `step` are exactly N updates, save those that a policy skips.

    Args:
        model: any module with at least one staticmoe layer, all on one device.
        optimizer: built by the user from `model.parameters()`.
        example_batch: what `step` will be given: a pytree of tensors, numbers and None; with accumulation
            `MicroBatches` of them or one with a leading dimension N. A list declares several shapes; all but the
            first are captured at their first use.
        loss_fn: (model, batch) -> scalar loss, or (loss, {name: scalar}). Default: `model(**batch).loss`.
        eval_fn: the same for `evaluate`. Default: `loss_fn`.
        token_mask: which tokens are real, for every layer: a key of the batch, or batch -> bool tensor.
        scalars: device scalars that the loss function reads.
        config: options.

    Raises:
        ModelError, OptimizerError, BatchError, ConfigError: something given cannot work; nothing is changed.
        CaptureError: the iteration cannot be captured; nothing is left behind.
        SelfCheckError: a replay differs from the uncaptured iteration.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        example_batch: Any,
        loss_fn: LossFn | None = None,
        eval_fn: LossFn | None = None,
        token_mask: str | TokenMask | None = None,
        scalars: DeviceScalars | None = None,
        config: RunnerConfig | None = None,
    ) -> None:
        self._closed: str | None = None
        self._config = config if config is not None else RunnerConfig()
        device = admit_model(model)
        mode = admit_options(self._config, device)
        participants = discover(model)
        admit_optimizer(optimizer, model)
        examples = example_batch if type(example_batch) is list else [example_batch]
        micro = self._config.gradient_accumulation_steps
        shapes = [BatchShape(split_micro_batches(example, micro)[0]) for example in examples]
        self._model, self._optimizer, self._device = model, optimizer, device
        self._adapter = FusedAdapter(optimizer)
        self.scalars = scalars if scalars is not None else DeviceScalars()
        self._loss_fn = loss_fn if loss_fn is not None else _default_loss
        self._eval_fn = eval_fn if eval_fn is not None else self._loss_fn
        self._token_mask = _mask_function(token_mask)
        self._capture: Capture = EmulatedCapture() if mode == "emulate" else Uncaptured()
        self._guard = DeviceGuard(GuardPolicy.of(self._config), device)
        self._host_guard = HostGuard(self._config)
        self._publisher = Publisher(self._config.run_dir)
        self._in_flight: collections.deque[_Pending] = collections.deque()
        self._launches = self._step = 0
        self._seen_versions = 0
        self._hooks: StateHooks | None = None
        bound: dict[str, StepBinding] = {}
        try:
            for name, participant in participants.items():
                binding = StepBinding({}, self._guard.reasons, self._config.train_capacity)
                participant.bind_step(binding)
                bound[name] = binding
            self._wrapped = self._wrap(participants, bound)
            self._start(shapes)
        except BaseException:
            self._closed = "its construction failed"
            for name in bound:
                participants[name].bind_step(None)
            self._publisher.close()
            raise

    def _wrap(self, participants: Mapping[str, Any], bindings: Mapping[str, StepBinding]) -> Wrapped:
        scratch = {
            name: {
                field: torch.zeros(shape, dtype=torch.int64, device=self._device)
                for field, shape in participant.step_fields().items()
            }
            for name, participant in participants.items()
        }
        return Wrapped(
            model=self._model,
            participants=participants,
            bindings=bindings,
            loss_fn=self._loss_fn,
            token_mask=self._token_mask,
            config=self._config,
            device=self._device,
            scratch=scratch,
        )

    def _start(self, shapes: list[BatchShape]) -> None:
        """Everything of the construction that runs the model."""
        idle = list(untrained(self._optimizer, self._model))
        if idle:
            log.warning("parameters that require a gradient and are not in the optimizer: %s", ", ".join(idle[:5]))
        scratch = {f"scratch {n}.{f}": t for n, fields in self._wrapped.scratch.items() for f, t in fields.items()}
        self._provenance = Provenance(
            changing={**dict(self._model.named_parameters()), **scratch},
            steady=dict(self._model.named_buffers()),
        )
        self._training = Family(
            "training",
            shapes,
            self._build_training,
            lambda: HostState(self._model, self._functions(self._loss_fn)),
            lambda: OptimizerState(self._optimizer, self._model),
        )
        self._evaluation = Family(
            "evaluation",
            shapes,
            self._build_evaluation,
            lambda: HostState(self._model, self._functions(self._eval_fn), ignored=frozenset({"training"})),
            None,
        )
        self._training.program(0)
        self._hooks = StateHooks(self._model, self._optimizer, self)
        self._publisher.start(self._describe())

    def _functions(self, loss_fn: LossFn) -> tuple[Callable[..., Any], ...]:
        return (loss_fn,) if self._token_mask is None else (loss_fn, self._token_mask)

    def _inputs(self, shape: BatchShape, micro_batches: int) -> InputRing:
        groups = len(self._optimizer.param_groups)
        slots = self._config.max_in_flight + 1
        inputs = InputRing(shape, micro_batches, slots, groups, self.scalars, self._device)
        self._fill(inputs, 0, [shape.example] * micro_batches, launch=0, seed=0)
        return inputs

    def _fill(self, inputs: InputRing, slot: int, values: list[list[Any]], *, launch: int, seed: int) -> None:
        rates = self._adapter.learning_rates()
        inputs.fill(slot, values, rates, self.scalars.host_values(), launch, seed)

    def _build_training(self, shape: BatchShape) -> Program:
        # Now, not in the first step: a graph of a step that creates state would create it anew each time.
        self._adapter.create_state()
        self._provenance.declare(self._adapter.state_tensors, changing=True)
        inputs = self._inputs(shape, self._config.gradient_accumulation_steps)
        iteration = TrainIteration(self._wrapped, self._adapter, inputs, self._guard)
        return self._build(iteration, inputs, self._loss_fn, "training")

    def _build_evaluation(self, shape: BatchShape) -> Program:
        inputs = self._inputs(shape, 1)
        iteration = EvalIteration(self._wrapped, self._eval_fn, inputs, self._guard)
        return self._build(iteration, inputs, self._eval_fn, "evaluation")

    def _build(self, iteration: Any, inputs: InputRing, loss_fn: LossFn, kind: str) -> Program:
        program = Program(self._wrapped, iteration, inputs, self._guard, self._capture, self._provenance)
        functions, slots = self._functions(loss_fn), self._config.max_in_flight + 1
        timed(lambda: program.build(functions, slots), f"built the {kind} graph ({self._capture.name})")
        for name, facts in program.facts.items():
            log.info("%s: %s", name or "(the model)", ", ".join(f"{key} {value}" for key, value in facts.items()))
        if kind == "training":
            self._refuse_missing_ladder(program)
        if self._config.self_check:
            program.self_check(0)
        return program

    def _refuse_missing_ladder(self, program: Program) -> None:
        if self._config.overflow != "rerun":
            return
        over = [name for name, facts in program.facts.items() if facts.get("can_overflow")]
        if over:
            raise ConfigError(
                f"overflow='rerun': this version has no wider variant to rerun on, and capacity_factor="
                f"{self._config.capacity_factor} with capacity_scope='{self._config.capacity_scope}' can overflow in "
                f"{', '.join(over[:3])}; use overflow='drop', 'skip' or 'raise', or capacity_factor=None"
            )

    @property
    def backend(self) -> str:
        """How iterations run: "emulate" or "off"."""
        return self._capture.name

    @property
    def config(self) -> RunnerConfig:
        """Options in force."""
        return self._config

    def step(self, batch: Any) -> StepResult:
        """Train on one batch; with accumulation on `MicroBatches([...])` or one batch with a leading dimension N.

        Returns while fewer than `max_in_flight` earlier steps are outstanding, else waits for the oldest.
        When it returns, the batch may be overwritten.

        Raises:
            BatchError: the batch does not fit; nothing has happened.
            OptimizerError: the optimizer no longer has the captured parameters.
            NonFiniteError, CapacityError: an earlier step met its policy; that step and those launched after it
                were not applied, and the runner goes on with the next call.
        """
        self._check_open()
        self._check_order()
        self._follow_changes(self._training)
        micro = split_micro_batches(batch, self._config.gradient_accumulation_steps)
        shape, number = self._training.shape_of(micro[0])
        values = [shape.values(one) for one in micro]
        self._make_room()
        program = self._training.program(number)
        result = StepResult(self._step + 1, self._settle_until)
        slot = self._prepare(program, values, self._step + 1, seed=self._capture.draw_seed())
        self._step += 1
        every = self._config.recheck_every
        if every and self._step % every == 0:
            self.flush()
            program.self_check(slot)
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        self._launch(program, slot, result)
        return result

    def evaluate(self, batch: Any) -> EvalResult:
        """Run `eval_fn` on one micro-batch of a declared shape, in eval mode without gradients.

        It sees the state after all steps so far. The first batch of a shape captures its graph.

        Raises:
            BatchError: the batch does not fit; nothing has happened.
        """
        self._check_open()
        self.flush()
        self._follow_changes(self._evaluation)
        shape, number = self._evaluation.shape_of(batch)
        values = [shape.values(batch)]
        program = self._evaluation.program(number)
        result = EvalResult(self._step, self._settle_until)
        # One seed for all: an evaluation that draws gives the same for the same batch, and training draws on undisturbed.
        self._launch(program, self._prepare(program, values, self._step, seed=_EVALUATION_SEED), result)
        return result

    def _prepare(self, program: Program, values: list[list[Any]], launch: int, *, seed: int) -> int:
        """Fill the next slot."""
        slot = self._launches % (self._config.max_in_flight + 1)
        self._fill(program.inputs, slot, values, launch=launch, seed=seed)
        return slot

    def _launch(self, program: Program, slot: int, result: StepResult) -> None:
        def work() -> None:
            program.run(slot)
            self._seen_versions = self._versions()

        if not self._in_flight:
            self._seen_versions = self._versions()
        self._launches += 1
        self._in_flight.append(_Pending(self._capture.stream.launch(work), slot, program, result))

    def _make_room(self) -> None:
        """The fixed point: before launching s + max_in_flight the host acts on the record of s."""
        while len(self._in_flight) >= self._config.max_in_flight:
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        """Wait for the oldest outstanding step, give its result its values, and do what the guard demands."""
        self._check_order()
        pending = self._in_flight[0]
        try:
            self._capture.stream.wait(pending.ticket)
        except BaseException as error:
            self._break(error)
            raise
        self._in_flight.popleft()
        record = pending.program.records.read(pending.slot)
        pending.result.settle(record, pending.program.facts)
        training = not isinstance(pending.result, EvalResult)
        self._publisher.publish(pending.result, record, training=training)
        if not training or record.void:
            return
        capacities = {name: facts.get("capacity_rows", 0) for name, facts in pending.program.facts.items()}
        error = self._host_guard.judge(record, capacities)
        if error is not None:
            # Whatever was launched after a halting step is void; let it pass before the device may commit again.
            while self._in_flight:
                self._settle_oldest()
            self._guard.halted.zero_()
            raise error

    def _settle_until(self, result: StepResult) -> None:
        while not result.ready and self._in_flight:
            self._settle_oldest()
        if not result.ready:
            raise ClosedError(f"{result!r}: the runner was closed before its values arrived")

    def _break(self, error: BaseException) -> None:
        """A replay failed half-way: no result will come, and the parameters cannot be trusted."""
        while self._in_flight:
            self._in_flight.popleft().result.fail(error)
        self._shut(f"a replay failed ({type(error).__name__}: {error}); restore a checkpoint and wrap again")

    def _versions(self) -> int:
        return sum(parameter._version for parameter in self._adapter.parameters)

    def _check_order(self) -> None:
        """On a GPU a write by the user queues behind launched steps; here it would overtake them, so refuse it."""
        if self._in_flight and self._versions() != self._seen_versions:
            self._seen_versions = self._versions()
            raise ReplayError(
                f"a parameter was written while {len(self._in_flight)} steps were in flight: it happened before those "
                "steps, not after; call runner.synchronize() before touching parameters"
            )

    def _follow_changes(self, family: Family) -> None:
        changes = family.changes()
        if changes and self._capture.name != "off":
            self.flush()
            family.follow(changes)

    def flush(self) -> None:
        """Return when every launched step has committed or been dealt with."""
        while self._in_flight:
            self._settle_oldest()

    def synchronize(self) -> None:
        """Like `flush`; afterwards tensors of model and optimizer may be read and written by hand."""
        self.flush()

    def recapture(self) -> None:
        """Drop all graphs and capture the training graphs again."""
        self._check_open()
        self.flush()
        for family in (self._training, self._evaluation):
            family.drop()

    def set_capacity_factor(self, factor: float | None) -> None:
        """Change the capacity of training steps and recapture; None is dropless.

        Raises:
            ConfigError: not a positive number or None, or a factor that the overflow policy cannot serve; the old
                factor stays in force.
        """
        self._check_open()
        self.flush()
        before = self._config
        try:
            self._reconfigure(dataclasses.replace(before, capacity_factor=factor))
            self._training.program(0)
        except BaseException:
            self._reconfigure(before)
            raise

    def _reconfigure(self, config: RunnerConfig) -> None:
        self._config = config
        self._wrapped = dataclasses.replace(self._wrapped, config=config)
        self._host_guard.configure(config)
        self._training.drop()

    def subscribe(self, sink: Callable[[dict[str, Any]], None]) -> None:
        """Call `sink(record)` for every step and evaluation, late, in order; a sink that fails is dropped with a log line."""
        self._publisher.subscribe(sink)

    def telemetry(self) -> dict[str, Any]:
        """Totals over the committed steps whose records have arrived; never waits."""
        totals = self._publisher.totals()
        return {**totals, "backend": self.backend, "launched": self._step, "in_flight": len(self._in_flight)}

    def summary(self) -> str:
        """A few lines about backend, steps, drops and memory, after waiting for all steps."""
        if self._closed is None:
            self.flush()
        totals = self.telemetry()
        owned = sum(program.owned_bytes for program in (*self._training.programs, *self._evaluation.programs))
        lines = [
            f"backend {self.backend}: {totals['committed']} steps committed, {totals['skipped']} skipped",
            f"graphs keep {owned / 2**20:.1f} MiB",
        ]
        for name, layer in totals["moe"].items():
            dropped, routed = sum(layer["dropped"]), sum(layer["routed"])
            lines.append(f"{name or '(the model)'}: {dropped} of {routed} assignments dropped ({dropped / max(routed, 1):.3%})")
        return "\n".join(lines)

    def state_dict(self) -> dict[str, Any]:
        """Step count, totals and scalars, after waiting for all steps. Model and optimizer have their own."""
        self.flush()
        return {
            "version": 1,
            "step": self._step,
            "committed": int(self._guard.committed),
            "scalars": dict(zip(self.scalars, self.scalars.host_values(), strict=True)),
            "totals": self._publisher.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`."""
        self._check_open()
        self.flush()
        if state.get("version") != 1:
            raise ConfigError(f"runner state: expected version 1, got {state.get('version')!r}")
        self._step = state["step"]
        self._guard.committed.fill_(state["committed"])
        for name, value in state["scalars"].items():
            self.scalars[name] = value
        self._publisher.load_state_dict(state["totals"])

    def _describe(self) -> dict[str, Any]:
        facts = self._training.programs[0].facts
        return {
            "backend": self.backend,
            "device": str(self._device),
            "torch": torch.__version__,
            "config": {k: v if isinstance(v, (int, float, bool, type(None))) else str(v) for k, v in vars(self._config).items()},
            "participants": facts,
        }

    def close(self) -> None:
        """Wait for all steps, let go of model, optimizer and graphs; a second call does nothing."""
        if self._closed is not None:
            return
        try:
            self.flush()
        finally:
            self._shut("it was closed")

    def _shut(self, reason: str) -> None:
        if self._closed is not None:
            return
        self._closed = reason
        if self._hooks is not None:
            self._hooks.remove()
        for participant in self._wrapped.participants.values():
            participant.bind_step(None)
        self._training.drop()
        self._evaluation.drop()
        self._publisher.close()

    def _check_open(self) -> None:
        if self._closed is not None:
            raise ClosedError(f"runner: expected an open runner, but {self._closed}; make a new one")

    def __enter__(self) -> StaticMoERunner:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _mask_function(token_mask: str | TokenMask | None) -> TokenMask | None:
    """A batch key as a function of the batch."""
    if token_mask is None or callable(token_mask):
        return token_mask
    key = token_mask

    def mask(batch: Any) -> Tensor:
        if not isinstance(batch, Mapping) or batch.get(key) is None:
            keys = list(batch) if isinstance(batch, Mapping) else type(batch).__name__
            raise ConfigError(f"token_mask: expected a key of the batch with a tensor, got {key!r}; the batch has {keys}")
        return batch[key]

    return mask


