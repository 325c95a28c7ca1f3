"""StaticMoERunner: wraps a model and its optimizer, captures the iteration, replays it once per step."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from staticmoe.config import RunnerConfig
from staticmoe.errors import ClosedError, ConfigError
from staticmoe.observe.publisher import Publisher
from staticmoe.observe.results import EvalResult, StepResult
from staticmoe.parallel.replicas import Replicas
from staticmoe.phases import HostPhase, host_range
from staticmoe.runner.alike import agree
from staticmoe.runner.assembly import Assembly
from staticmoe.runner.batch_shape import BatchShape, split_micro_batches
from staticmoe.runner.family import Family
from staticmoe.runner.flight import Flight
from staticmoe.runner.forecast import Memory
from staticmoe.runner.guard import HostGuard
from staticmoe.runner.inputs import DeviceScalars
from staticmoe.runner.iteration import LossFn, TokenMask
from staticmoe.runner.loading import StateHooks
from staticmoe.runner.modes import outside_inference
from staticmoe.runner.profiling import Profiling
from staticmoe.runner.program import Program

log = logging.getLogger(__name__)

_EVALUATION_SEED = 0


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
        process_group: ranks that hold copies of the model and have batches of their own: W ranks of N micro-batches do
            what one rank does with W·N. Then the constructor and every method but `scalars`, `profile`, `subscribe`
            and `telemetry` is a call of all ranks, as is what recaptures: each must make it, in the same order. Losses
            and metrics are joint; counts in `result.moe` and files are a rank's own. A rank may read a result that
            others do not read, or save; it may have to wait for them, so call `synchronize` on all of them before a
            barrier or a collective of your own. A rank that is missing is an error after the group's timeout. Close
            the runner before `destroy_process_group`, where NCCL waits for graphs that use it. None: one rank.

    Raises:
        ReplicaError: ranks were given, or hold, something different; on all of them.
        ModelError, OptimizerError, BatchError, ConfigError: something given cannot work; nothing is changed.
        CaptureError: the iteration cannot be captured; nothing is left behind.
        SelfCheckError: a replay differs from the uncaptured iteration.
    """

    @outside_inference
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
        process_group: ProcessGroup | None = None,
    ) -> None:
        self._closed: str | None = None
        config = config if config is not None else RunnerConfig()
        self._replicas = replicas = Replicas.of(process_group)
        self._step = 0
        self._hooks: StateHooks | None = None
        with replicas.agreement.sharing_failures("StaticMoERunner") if replicas else contextlib.nullcontext():
            examples = example_batch if type(example_batch) is list else [example_batch]
            micro = config.gradient_accumulation_steps
            shapes = [BatchShape(split_micro_batches(example, micro)[0]) for example in examples]
            self._host_guard = HostGuard(config)
            self._publisher = Publisher(config)
            self._profiling = Profiling(self._publisher.folder, self._capture_again, self.flush)
            self._parts = parts = Assembly(
                model, optimizer, shapes, loss_fn, eval_fn, token_mask, scalars, config, self.flush, replicas
            )
        self._flight = Flight(
            parts.capture.stream,
            config.max_in_flight,
            parts.guard,
            self._host_guard,
            self._publisher,
            parts.versions,
            self._break,
            replicas,
        )
        try:
            parts.training.ladder(0)
            self._publisher.start(parts.describe(), parts.probe())
            self._hooks = StateHooks(model, optimizer, self)
        except BaseException:
            self._shut("its construction failed")
            raise

    @property
    def backend(self) -> str:
        """How iterations run: "cuda", "emulate" or "off"."""
        return self._parts.capture.name

    @property
    def scalars(self) -> DeviceScalars:
        """The device scalars; setting one takes effect at the next step."""
        return self._parts.scalars

    @property
    def config(self) -> RunnerConfig:
        """Options in force."""
        return self._parts.config

    @outside_inference
    def step(self, batch: Any) -> StepResult:
        """Train on one batch; with accumulation on `MicroBatches([...])` or one batch with a leading dimension N.

        Returns while fewer than `max_in_flight` earlier steps are outstanding, else waits for the oldest. With
        `capture_scope="forward_backward"` it waits for this step, to know whether the optimizer may step.
        When it returns, the batch may be overwritten.

        Raises:
            BatchError: the batch does not fit; nothing has happened.
            OptimizerError: the optimizer no longer has the captured parameters.
            ReplayError: what the graph holds frozen has changed, too often or under `on_change="raise"`; see its text.
            NonFiniteError, CapacityError: an earlier step met its policy; that step and those launched after it
                were not applied, and the runner goes on with the next call.
        """
        self._check_open()
        self._profiling.begin(self._step + 1)
        with host_range(HostPhase.ITERATION), self._publisher.clock.step(self._step + 1):
            result = self._run_step(batch)
        self._profiling.end(self._step)
        return result

    def _run_step(self, batch: Any) -> StepResult:
        self._flight.check_order()
        self._follow_changes(self._parts.training)
        micro = split_micro_batches(batch, self._parts.config.gradient_accumulation_steps)
        number, values = self._parts.training.accept(micro)
        step, every = self._step + 1, self._parts.config.recheck_every
        recheck = every > 0 and step % every == 0
        if recheck:
            self.flush()
        with self._publisher.clock.waiting():
            self._flight.make_room()
        ladder = self._parts.training.ladder(number)
        program = ladder.start(step)
        result = StepResult(step, self._flight.settle_until)
        slot = self._prepare(program, values, step, seed=self._parts.capture.seeds.draw())
        if recheck:
            program.self_check(slot)
            self._parts.compare_replicas()
        # Schedulers look for a call of the optimizer's step, which a replay is not.
        self._parts.optimizer._opt_called = True  # type: ignore[attr-defined]
        self._flight.launch(ladder, program, result)
        self._step = step
        if self._parts.outside is not None:
            with self._publisher.clock.waiting():
                self._flight.flush()
            if not result.skipped:
                self._parts.outside.apply()
        return result

    @outside_inference
    def evaluate(self, batch: Any) -> EvalResult:
        """Run `eval_fn` on one micro-batch of a declared shape, in eval mode without gradients.

        It sees the state after all steps so far. The first batch of a shape captures its graph.

        Raises:
            BatchError: the batch does not fit; nothing has happened.
        """
        self._check_open()
        self.flush()
        self._follow_changes(self._parts.evaluation)
        number, values = self._parts.evaluation.accept([batch])
        # Of a rank that evaluates alone the sums would meet those of another's step.
        agree(self._replicas, "evaluate", step=self._step, shape=number)
        ladder = self._parts.evaluation.ladder(number)
        program = ladder.start()
        result = EvalResult(self._step, self._flight.settle_until)
        # One seed for all: a batch gives the same at each evaluation, and training draws on undisturbed.
        self._prepare(program, values, self._step, seed=_EVALUATION_SEED)
        self._flight.launch(ladder, program, result)
        return result

    def _prepare(self, program: Program, values: list[list[Any]], launch: int, *, seed: int) -> int:
        """Fill the next slot."""
        slot = self._flight.next_slot
        self._parts.fill(program.inputs, slot, values, launch=launch, seed=seed)
        return slot

    def _break(self, error: BaseException) -> None:
        """A replay failed half-way: the parameters cannot be trusted."""
        self._shut(f"a replay failed ({type(error).__name__}: {error}); restore a checkpoint and wrap again")

    def _follow_changes(self, family: Family) -> None:
        changes = family.changes()
        if changes and self._parts.capture.name != "off":
            self.flush()
            family.follow(changes)
            self._publisher.counts.recaptures += 1

    def flush(self) -> None:
        """Return when every launched step has committed or been dealt with; the step before is not timed."""
        self._publisher.clock.interrupt()
        self._flight.flush()

    def synchronize(self) -> None:
        """Like `flush`; afterwards tensors of model and optimizer may be read and written by hand."""
        self.flush()

    def recapture(self) -> None:
        """Drop all graphs; each is captured again at its next use."""
        self._check_open()
        self.flush()
        for family in (self._parts.training, self._parts.evaluation):
            family.drop()
        self._publisher.counts.recaptures += 1

    def profile(self, steps: int) -> None:
        """Record the next `steps` calls of `step`: by an nsys that is there, else by torch.profiler to run_dir/profile.

        Graphs are captured again inside the window, so that their kernels can be told apart. Look at the file with
        `staticmoe profile --analyse`. From outside, a file run_dir/profile.request with a number in it does the same.

        Raises:
            ConfigError: not a positive number, a window is open, or there is nowhere to write to.
        """
        self._check_open()
        self._profiling.request(steps)

    def _capture_again(self) -> None:
        # A window may be this rank's alone, and a capture is a call of all.
        if self._parts.capture.name != "off" and self._replicas is None:
            self._parts.training.drop()
            self._parts.training.ladder(0)
            self._publisher.counts.recaptures += 1

    @outside_inference
    def set_capacity_factor(self, factor: float | None) -> None:
        """Change the capacity of training steps and recapture; None is dropless. Logs what it cost.

        Raises:
            ConfigError: not a positive number or None, or a factor that the overflow policy cannot serve; the old
                factor stays in force.
        """
        self._check_open()
        self.flush()
        before, kept, start = self._parts.config, self._parts.owned_bytes, time.perf_counter()
        try:
            self._reconfigure(dataclasses.replace(before, capacity_factor=factor))
            self._parts.training.ladder(0)
        except BaseException:
            self._reconfigure(before)
            raise
        self._publisher.counts.recaptures += 1
        log.info(
            "capacity_factor %s -> %s: captured again in %.2f s, graphs keep %.1f MiB (%.1f before)",
            before.capacity_factor, factor, time.perf_counter() - start, self._parts.owned_bytes / 2**20, kept / 2**20,
        )  # fmt: skip

    def _reconfigure(self, config: RunnerConfig) -> None:
        self._host_guard.configure(config)
        self._publisher.set_capacity_factor(config.capacity_factor)
        self._parts.reconfigure(config)

    def subscribe(self, sink: Callable[[dict[str, Any]], None]) -> None:
        """Call `sink(record)` for every step and evaluation, late, in order; one that fails is logged and dropped."""
        self._publisher.subscribe(sink)

    def telemetry(self) -> dict[str, Any]:
        """Totals over the committed steps whose records have arrived, and means ("window"); never waits."""
        totals = self._publisher.totals()
        return {**totals, "backend": self.backend, "launched": self._step, "in_flight": len(self._flight)}

    def reset_window(self) -> None:
        """Let `telemetry()["window"]`, the means of train/, moe/ and user/ metrics, begin with the next step."""
        self._publisher.reset_window(self._step)

    def memory(self) -> Memory:
        """Bytes that the training graphs were forecast to need, by part, beside what has been measured by now."""
        if self._closed is None:
            self.flush()
        return self._parts.memory()

    def summary(self) -> str:
        """A few lines about backend, steps, drops and memory, after waiting for all steps."""
        if self._closed is None:
            self.flush()
        steps, *others = self._publisher.words()
        return "\n".join([f"backend {self.backend}: {steps}", self.memory().line(), *others])

    def state_dict(self) -> dict[str, Any]:
        """Step count, totals and scalars, after waiting for all steps. Model and optimizer have their own."""
        self.flush()
        return {
            "version": 2,
            "step": self._step,
            "committed": int(self._parts.guard.committed),
            "scalars": dict(zip(self.scalars, self.scalars.host_values(), strict=True)),
            "totals": self._publisher.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`."""
        self._check_open()
        self.flush()
        if state.get("version") != 2:
            raise ConfigError(
                f"runner state: expected version 2, got {state.get('version')!r}; start the run anew, or go on with "
                "the release that wrote it"
            )
        self._step = state["step"]
        self._parts.guard.committed.fill_(state["committed"])
        for name, value in state["scalars"].items():
            self.scalars[name] = value
        self._publisher.load_state_dict(state["totals"])

    def close(self) -> None:
        """Wait for all steps, let go of model, optimizer and graphs; a second call does nothing."""
        if self._closed is not None:
            return
        try:
            self.flush()
            self._profiling.close(self._step)
        finally:
            self._shut("it was closed")

    def _shut(self, reason: str) -> None:
        if self._closed is not None:
            return
        self._closed = reason
        if self._hooks is not None:
            self._hooks.remove()
        self._parts.release()
        self._publisher.close()

    def _check_open(self) -> None:
        if self._closed is not None:
            raise ClosedError(f"runner: expected an open runner, but {self._closed}; make a new one")

    def __enter__(self) -> StaticMoERunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
