"""What a runner is put together from: the wrapped model, the optimizer's adapter, the guard, and the programs."""

from __future__ import annotations

import dataclasses
import logging
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from staticmoe.capture import Capture, CudaGraphCapture, EmulatedCapture, Provenance, Uncaptured
from staticmoe.capture.findings import Finding
from staticmoe.capture.ran import RanCode
from staticmoe.config import RunnerConfig
from staticmoe.errors import AuditError, CaptureError
from staticmoe.observe.device import Probe
from staticmoe.observe.nvml import gpu_facts
from staticmoe.optim.adapters import adapter_for
from staticmoe.optim.outside import OutsideAdapter
from staticmoe.parallel.replicas import Replicas
from staticmoe.runner.admission import (
    admit_functions,
    admit_model,
    admit_optimizer,
    admit_options,
    default_loss,
    discover,
    mask_function,
    untrained,
)
from staticmoe.runner.alike import admit_replicas, agree, compare_replicas, obstacle_anywhere, together
from staticmoe.runner.batch_shape import BatchShape
from staticmoe.runner.beside import Beside
from staticmoe.runner.family import Family
from staticmoe.runner.forecast import Foresight, Memory, MemoryBook
from staticmoe.runner.guard import DeviceGuard, GuardPolicy
from staticmoe.runner.inputs import DeviceScalars, InputRing
from staticmoe.runner.iteration import EvalIteration, LossFn, TokenMask, TrainIteration, Wrapped
from staticmoe.runner.ladder import Ladder
from staticmoe.runner.options import OptimizerState
from staticmoe.runner.participants import StepBinding, StepParticipant, scratch_fields
from staticmoe.runner.program import Iteration, Program
from staticmoe.runner.regions import Regions
from staticmoe.runner.watch import HostState

log = logging.getLogger(__name__)


class Assembly:
    """Model, optimizer and options, checked and bound, and the two families of programs made of them.

    Args:
        model, optimizer, loss_fn, eval_fn, token_mask, scalars, config: as the runner was given them.
        shapes: of a micro-batch.
        flush: settles all steps in flight; called before anything is built.
        replicas: the ranks whose steps are one step, or None for one rank.

    Raises:
        ModelError, OptimizerError, ConfigError, ReplicaError: nothing is bound then.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        shapes: list[BatchShape],
        loss_fn: LossFn | None,
        eval_fn: LossFn | None,
        token_mask: str | TokenMask | None,
        scalars: DeviceScalars | None,
        config: RunnerConfig,
        flush: Callable[[], None],
        replicas: Replicas | None = None,
    ) -> None:
        self.config = config
        self._replicas = replicas
        self.device = admit_model(model)
        mode = admit_options(config, self.device)
        participants = discover(model)
        admit_optimizer(optimizer, model)
        admit_functions(function for function in (loss_fn, eval_fn, token_mask) if callable(function))
        self.optimizer = optimizer
        self.outside = OutsideAdapter(optimizer) if config.capture_scope == "forward_backward" else None
        self.adapter = adapter_for(optimizer, replayed=mode != "off") if self.outside is None else self.outside
        self.scalars = scalars if scalars is not None else DeviceScalars()
        self.capture = _backend(mode, self.device)
        self.guard = DeviceGuard(GuardPolicy.of(config), self.device)
        self._loss_fn = loss_fn if loss_fn is not None else default_loss
        self._eval_fn = eval_fn if eval_fn is not None else self._loss_fn
        self._token_mask = mask_function(token_mask)
        self._model = model
        self._flush = flush
        self._regions = self._dense_regions()
        self._beside = Beside(self._regions, self.capture)
        # Of those that no family has got, because an error came between, a traceback may hold the graph for long.
        self._programs: weakref.WeakSet[Program] = weakref.WeakSet()
        self._ran = {"training": RanCode(), "evaluation": RanCode()}
        self.training = Family(
            "training",
            self.device,
            shapes,
            self._build_training,
            lambda: HostState(model, self._functions(self._loss_fn), ran=self._ran["training"]),
            lambda: OptimizerState(optimizer, model, self.adapter.staged),
            self._beside,
            config.on_change,
        )
        self.evaluation = Family(
            "evaluation",
            self.device,
            shapes,
            self._build_evaluation,
            lambda: HostState(
                model, self._functions(self._eval_fn), ignored=frozenset({"training"}), ran=self._ran["evaluation"]
            ),
            None,
            self._beside,
            config.on_change,
        )
        if replicas is not None:
            admit_replicas(replicas, model, optimizer, shapes, self.scalars, config, self.device)
        self._bindings = self._bind(participants)
        self._scratch = scratch_fields(participants, self.device)
        self._participants = participants
        scratch = {f"scratch {n}.{f}": t for n, fields in self._scratch.items() for f, t in fields.items()}
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        # What is computed once from a frozen parameter stays true.
        frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
        self._provenance = Provenance(changing={**trained, **scratch}, steady={**dict(model.named_buffers()), **frozen})
        self._memory = MemoryBook(self._foresight, shapes[0])
        idle = list(untrained(optimizer, model))
        if idle:
            log.warning("parameters that require a gradient and are not in the optimizer: %s", ", ".join(idle[:5]))

    def _dense_regions(self) -> Regions | None:
        """What `compile` asks for; nothing under the emulated capture, whose tape holds operations alone."""
        if self.config.compile == "off":
            return None
        if self.capture.name == "emulate":
            log.warning("compile='blocks': an emulated capture runs the model uncompiled; use 'cuda' or 'off'")
            return None
        return Regions(self._model, fallback=self.config.compile_fallback, limit_s=self.config.compile_limit_s)

    def _bind(self, participants: Mapping[str, StepParticipant]) -> dict[str, StepBinding]:
        bound: dict[str, StepBinding] = {}
        try:
            for name, participant in participants.items():
                binding = StepBinding({}, self.guard.reasons, self.guard.doomed, self.config.train_capacity)
                binding.active = False
                participant.bind_step(binding)
                bound[name] = binding
        except BaseException:
            for name in bound:
                participants[name].bind_step(None)
            raise
        return bound

    def release(self) -> None:
        """Let go of the participants and the graphs."""
        for participant in self._participants.values():
            participant.bind_step(None)
        self._memory.closed = True
        self.training.drop()
        self.evaluation.drop()
        for program in self._programs:
            program.retire()

    def reconfigure(self, config: RunnerConfig) -> None:
        """Use `config` for everything that is built from here on, and drop the training graphs."""
        self.config = config
        self.training.drop()

    def fill(self, inputs: InputRing, slot: int, values: list[list[Any]], *, launch: int, seed: int) -> None:
        """Fill a slot with batch values, the hyper-parameters as they are now, and the scalars."""
        table = self.adapter.hyper_parameters()
        inputs.fill(slot, values, table, self.scalars.host_values(), launch, seed)

    def compare_replicas(self) -> None:
        """Check that the ranks have not drifted apart, as with a learning rate that one of them alone has set.

        Raises:
            ReplicaError: they have.
        """
        compare_replicas(self._replicas, self._model, self.optimizer, self.device)

    def versions(self) -> int:
        """A number that changes when somebody writes a trained parameter."""
        return sum(parameter._version for parameter in self.adapter.parameters)

    @property
    def owned_bytes(self) -> int:
        """Bytes that all graphs keep between replays."""
        return sum(program.owned_bytes for program in (*self.training.programs, *self.evaluation.programs))

    def memory(self) -> Memory:
        """What the training graphs were forecast to need, and what has been measured by now."""
        return self._memory.report(self.device, self.owned_bytes)

    def probe(self) -> Probe:
        """What samples memory and GPU for the telemetry."""
        return Probe(self.device, self._model, lambda: self.owned_bytes)

    def describe(self) -> dict[str, Any]:
        """What meta.json says of the run, as its files' readers know it."""
        return {
            "started": time.time(),
            "backend": self.capture.name,
            "device": str(self.device),
            "torch": torch.__version__,
            "gpus": gpu_facts(),
            "config": {
                k: v if isinstance(v, (int, float, bool, type(None))) else str(v) for k, v in vars(self.config).items()
            },
            "micro_batches": self.config.gradient_accumulation_steps,
            "participants": self.training.programs[0].facts,
            # Rehearsed before every capture on a GPU; elsewhere it would be for this alone.
            "memory": dataclasses.asdict(self.memory()) if self.device.type == "cuda" else None,
        }

    def _foresight(self) -> Foresight:
        configs = [self.config]
        if self.config.overflow == "rerun" and self.config.capacity_factor is not None:
            configs.append(dataclasses.replace(self.config, capacity_factor=None))
        return Foresight(
            wrapped=self._wrapped(self.config),
            variants=configs,
            adapter=self.adapter,
            guard=self.guard,
            scalars=self.scalars,
            replayed=self.capture.name != "off",
        )

    def _functions(self, loss_fn: LossFn) -> tuple[Callable[..., Any], ...]:
        return (loss_fn,) if self._token_mask is None else (loss_fn, self._token_mask)

    def _wrapped(self, config: RunnerConfig) -> Wrapped:
        return Wrapped(
            model=self._model,
            participants=self._participants,
            bindings=self._bindings,
            loss_fn=self._loss_fn,
            token_mask=self._token_mask,
            config=config,
            device=self.device,
            scratch=self._scratch,
            regions=self._regions,
            replicas=self._replicas,
        )

    def _inputs(self, shape: BatchShape, micro_batches: int) -> InputRing:
        table, slots = (len(self.optimizer.param_groups), self.adapter.width), self.config.max_in_flight + 1
        inputs = InputRing(shape, micro_batches, slots, table, self.scalars, self.device, self.capture.stream)
        self.fill(inputs, 0, [shape.example] * micro_batches, launch=0, seed=0)
        return inputs

    def _build_training(self, shape: BatchShape) -> Ladder:
        self._flush()
        with together(self._replicas, "the memory of the training graphs"):
            self._memory.admit(shape)
            # Now, not in the first step: a graph of a step that creates state would create it anew each time.
            self.adapter.create_state()
            self._provenance.declare(self.adapter.state_tensors, changing=True)
            config = self.config
            inputs = self._inputs(shape, config.gradient_accumulation_steps)
        lowest = self._build_step(inputs, config)
        factors: tuple[float | None, ...] = ()
        if config.overflow == "rerun" and lowest.can_overflow:
            factors = (*(factor for factor in config.capacity_ladder if factor > (config.capacity_factor or 0)), None)
        return Ladder(
            lowest,
            factors,
            lambda factor: self._build_step(inputs, dataclasses.replace(config, capacity_factor=factor)),
            scope=config.capacity_scope,
            forecast=config.capacity_forecast,
            obstacle=lambda needed: obstacle_anywhere(self._replicas, self._obstacle(needed)),
            lag=0 if self._replicas is None else config.max_in_flight,
        )

    def _obstacle(self, needed: int) -> str | None:
        """What stands in the way of capturing a variant of `needed` bytes between two steps, or None."""
        changes = self.training.changes()
        if changes:
            # Steps in flight were launched before the change: their variants must not see it.
            return f"what the graphs froze is different now ({changes[0]})"
        if self.device.type != "cuda":
            return None
        free = torch.cuda.mem_get_info(self.device)[0]
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return f"it needs up to {needed} bytes, {free} are free" if needed > free else None

    def _build_step(self, inputs: InputRing, config: RunnerConfig) -> Program:
        self.capture.prepare(self.adapter.parameters)
        wrapped = self._wrapped(config)
        iteration = TrainIteration(wrapped, self.adapter, inputs, self.guard)
        with self._memory.explaining(inputs.shape):
            return self._build(wrapped, iteration, inputs, self._loss_fn, "training")

    def _build_evaluation(self, shape: BatchShape) -> Ladder:
        self._flush()
        inputs = self._inputs(shape, 1)
        wrapped = self._wrapped(self.config)
        iteration = EvalIteration(wrapped, self._eval_fn, inputs, self.guard)
        return Ladder(self._build(wrapped, iteration, inputs, self._eval_fn, "evaluation"))

    def inspect(
        self, shape: BatchShape, *, training: bool, iterations: int, look: Callable[[LossFn], LossFn]
    ) -> list[Finding]:
        """What an audit finds in the step, or in the evaluation, at one shape; builds and commits nothing.

        Args:
            iterations: how many are observed, beside the one that learns what there is.
            look: gives the loss function that runs, for one that should be found things of.

        Raises:
            StaticMoEError: the iteration cannot run, and nothing was found that might be why.
        """
        loss_fn = self._loss_fn if training else self._eval_fn
        wrapped = self._wrapped(self.config)
        inputs = self._inputs(shape, self.config.gradient_accumulation_steps if training else 1)
        iteration: Iteration
        if training:
            self.adapter.create_state()
            self._provenance.declare(self.adapter.state_tensors, changing=True)
            self.capture.prepare(self.adapter.parameters)
            looked_at = dataclasses.replace(wrapped, loss_fn=look(loss_fn))
            iteration = TrainIteration(looked_at, self.adapter, inputs, self.guard)
        else:
            iteration = EvalIteration(wrapped, look(loss_fn), inputs, self.guard)
        program = Program(wrapped, iteration, inputs, self.guard, self.capture, self._provenance)
        try:
            program.inspect(self._functions(loss_fn), self.config.max_in_flight + 1, iterations)
        except AuditError as error:
            return list(error.findings)
        finally:
            program.retire()
        return program.findings.items

    def _build(self, wrapped: Wrapped, iteration: Iteration, inputs: InputRing, loss_fn: LossFn, kind: str) -> Program:
        start = time.perf_counter()
        program = Program(wrapped, iteration, inputs, self.guard, self.capture, self._provenance)
        self._programs.add(program)
        with together(self._replicas, f"the {kind} graph"):
            agree(self._replicas, f"the {kind} graph", batch=inputs.shape, factor=wrapped.config.capacity_factor)
            try:
                program.build(self._functions(loss_fn), self.config.max_in_flight + 1)
            except CaptureError:
                # A failed capture renews the random state that the other graphs are registered with.
                self.training.drop()
                self.evaluation.drop()
                raise
        self._ran[kind].update(program.ran)
        if self.config.self_check:
            program.self_check(0)
        if not self.config.recheck_every:
            program.forget_gradients()
        if self.device.type == "cuda":
            # What uncaptured runs have left is of no use to a graph.
            torch.cuda.empty_cache()
        self._beside.settle()
        log.info("built the %s graph (%s) in %.2f s", kind, self.capture.name, time.perf_counter() - start)
        for name, facts in program.facts.items():
            log.info("%s: %s", name or "(the model)", ", ".join(f"{key} {value}" for key, value in facts.items()))
        return program


def _backend(mode: str, device: torch.device) -> Capture:
    if mode == "cuda":
        return CudaGraphCapture(device)
    return EmulatedCapture() if mode == "emulate" else Uncaptured(device)
