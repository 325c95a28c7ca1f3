"""One iteration at one batch shape: its static inputs, its record, its graph; and how they come to be.

audit by observation -> warm up -> capture -> self-check, all under veto, from the example batch.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor

from staticmoe.capture import Capture, Graph, Provenance, Recorder
from staticmoe.capture.attention import guarded
from staticmoe.capture.change import Change
from staticmoe.capture.dynamo import as_written
from staticmoe.capture.findings import Finding, Findings, audit_error, source_of_error
from staticmoe.capture.holders import holder_of
from staticmoe.capture.provenance import storage_key
from staticmoe.capture.ran import RanCode
from staticmoe.capture.surroundings import Surroundings
from staticmoe.errors import AuditError, CaptureError, ModelError, ReplicaError
from staticmoe.observe.record import RecordLayout, RecordRing
from staticmoe.phases import HostPhase, host_range
from staticmoe.runner.alike import agree, wait_for
from staticmoe.runner.commit import Shadow, restore
from staticmoe.runner.guard import DeviceGuard
from staticmoe.runner.inputs import InputRing
from staticmoe.runner.iteration import Wrapped
from staticmoe.runner.proof import Proof
from staticmoe.runner.self_check import Outcome, compare
from staticmoe.runner.watch import HostState

log = logging.getLogger(__name__)

_EXAMPLE_SEED = 0


class Iteration(Protocol):
    """What a program runs."""

    scalar_names: tuple[str, ...]
    gradients: list[Tensor]

    @property
    def gradient_names(self) -> list[str]:
        """Names of the gradients."""

    def probe(self) -> None:
        """Run without a record."""

    def equip(self, records: RecordRing, shadow: Shadow) -> None:
        """Take record and shadow."""

    def __call__(self) -> None:
        """Run once."""


class Program:
    """Static inputs, record and graph of one iteration at one batch shape.

    Attributes:
        facts: participant -> what it told about its buffers.
        capacity_factor: of training steps; None is dropless.
        findings: what the audit has found by now.
        ran: the code that the last observed iteration ran.
    """

    def __init__(
        self,
        wrapped: Wrapped,
        iteration: Iteration,
        inputs: InputRing,
        guard: DeviceGuard,
        capture: Capture,
        provenance: Provenance,
    ) -> None:
        self.inputs = inputs
        self.facts: dict[str, dict[str, int]] = {}
        self.capacity_factor = wrapped.config.capacity_factor
        self._wrapped = wrapped
        self._replicas = wrapped.replicas
        self._iteration = iteration
        # What is captured: the iteration with its dense regions compiled.
        self._run: Callable[[], None] = wrapped.regions.around(iteration) if wrapped.regions else iteration
        if capture.name == "emulate":
            self._run = as_written()(self._run)
        self._guard = guard
        self._capture = capture
        self._provenance = provenance
        self._graph: Graph | None = None
        self._records: RecordRing | None = None
        self._captured_gradients: list[Tensor] = []
        self._own: dict[str, Tensor] = {}
        self._modules = {id(module): name or "(the model)" for name, module in wrapped.model.named_modules()}
        self._audit = wrapped.config.audit if capture.name != "off" else "off"
        self.findings = Findings(dict(wrapped.model.named_parameters()))
        self.ran = RanCode()
        self._proof = Proof(wrapped.regions, wrapped.config, self.findings, self._modules)

    @property
    def records(self) -> RecordRing:
        """The record of a built program."""
        assert self._records is not None, "build comes first"
        return self._records

    @property
    def owned_bytes(self) -> int:
        """Bytes that the graph keeps between replays."""
        return self._graph.owned_bytes if self._graph is not None else 0

    @property
    def can_overflow(self) -> bool:
        """Whether some participant may get more rows than it has."""
        return any(facts.get("can_overflow") for facts in self.facts.values())

    def build(self, functions: tuple[Callable[..., Any], ...], slots: int) -> None:
        """Observe, warm up and capture from the example batch in slot 0; commits nothing.

        Raises:
            CaptureError: the iteration cannot be captured; what it had mutated is as before.
        """
        with self._observing(functions):
            before = self._observe_all(functions, slots, self._wrapped.config.capture_warmup_iters)
            # They are not to lie beside those of the graph.
            self._iteration.gradients = []
            if self._audit == "error" and self.findings.errors:
                self._surroundings.judge(before.changes())
                raise audit_error(self.findings.items)
            # Where one rank found what another did not, none of them begins to exchange again.
            agree(self._replicas, "the audit of the iteration")
            emulated = self._capture.name == "emulate"
            self._proof.before_capture(functools.partial(self._run_unseen, self._run), emulated=emulated)
            before = HostState(self._wrapped.model, functions)
            self.inputs.stage(0)
            with host_range(HostPhase.CAPTURE), self._capture.seeds.seeded(_EXAMPLE_SEED):
                self._graph = self._capture.capture(self._run, self._recorder)
            self._captured_gradients = self._iteration.gradients
            self._judge(before.changes())
        self.facts = {name: dict(binding.facts) for name, binding in self._wrapped.bindings.items()}

    def inspect(self, functions: tuple[Callable[..., Any], ...], slots: int, iterations: int) -> None:
        """Observe `iterations` after the first from slot 0, and capture nothing; commits nothing. See `findings`.

        Raises:
            StaticMoEError: the iteration cannot run, and nothing was found that might be why.
        """
        with self._observing(functions):
            before = self._observe_all(functions, slots, iterations)
            self._surroundings.judge(before.changes())
            run = functools.partial(self._run_unseen, self._iteration)
            self._proof.on_trial(run, list(self._wrapped.model.parameters()))
        self._iteration.gradients = []

    @contextlib.contextmanager
    def _observing(self, functions: tuple[Callable[..., Any], ...]) -> Iterator[None]:
        """Within, iterations are observed and commit nothing; what they write is put back."""
        model = self._wrapped.model
        self._surroundings = Surroundings(model, functions, self._modules, self.findings)
        self._recorder = functools.partial(
            Recorder,
            self._provenance,
            self._modules,
            audit=self._audit,
            findings=self.findings,
            holder=lambda tensor: holder_of(tensor, model, functions),
            calls=self._proof.calls,
        )
        self._provenance.declare({**self.inputs.tensors, **self._guard.tensors}, changing=True)
        attention = guarded(self._modules, self._proof.refuse)
        with self._provenance.open(), self._guard.withholding(), attention:
            self.findings.copies.begin(self._provenance.alive)
            try:
                yield
            finally:
                restore(self._provenance.mutated.values())
                self._provenance.mutated.clear()
                self.findings.end()

    def _observe_all(self, functions: tuple[Callable[..., Any], ...], slots: int, iterations: int) -> HostState:
        """Observe a probe and `iterations`; returns the Python state before the last.

        Raises:
            AuditError: an iteration raised after something was found, which is listed as well.
        """
        try:
            self._prepare(slots)
            # Uncaptured, one run is enough to make what an iteration makes lazily.
            count = iterations if self._capture.name != "off" else 1
            for _ in range(count - 1):
                self._observe(self._iteration)
            before = HostState(self._wrapped.model, functions)
            self._observe(self._iteration, self.ran)
            self._surroundings.draws.report()
        except ReplicaError:
            raise
        except Exception as error:
            self._surroundings.draws.report()
            self._surroundings.add_copies()
            if self._audit != "error" or not self.findings.errors:
                raise
            self._add_failure(error)
            raise audit_error(self.findings.items) from error
        return before

    def _add_failure(self, error: Exception) -> None:
        """List what ended the observation, unless it is itself the report of a finding."""
        reentrant = any(finding.code == "SM309" for finding in self.findings.items)
        stale = any(finding.code in ("SM305", "SM401") for finding in self.findings.items)
        if isinstance(error, AuditError) or (reentrant and isinstance(error, CaptureError)):
            return
        if stale and "backward through the graph a second time" in str(error):
            return
        why = f"{type(error).__name__}: {error}; it may follow from the others, and nothing behind it was looked at"
        self.findings.add(Finding("SM901", why, "mend the others first", source_of_error(error, self._modules)))

    def _prepare(self, slots: int) -> None:
        """Observe the probe, and make the record and the shadow that it shows to be needed."""
        own = {storage_key(t) for t in (*self.inputs.tensors.values(), *self._guard.tensors.values())}
        own |= {storage_key(t) for fields in self._wrapped.scratch.values() for t in fields.values()}
        for binding in self._wrapped.bindings.values():
            binding.entered = 0
        regions = self._wrapped.regions
        with self._provenance.saving(), regions.counting() if regions is not None else contextlib.nullcontext():
            self._observe(self._iteration.probe)
        idle = [name or "(the model)" for name, binding in self._wrapped.bindings.items() if not binding.entered]
        if idle:
            raise ModelError(
                f"model: expected the forward to enter every layer that takes part in the step, got none into {idle}; "
                "the loss does not use them: remove them, or use them"
            )
        mutations = [mutation for key, mutation in self._provenance.mutated.items() if key not in own]
        restore(mutations)
        if mutations:
            names = ", ".join(mutation.name or "an unnamed tensor" for mutation in mutations)
            log.info("shadowed under veto: %s", names)
            if self._replicas is not None:
                log.warning("the forward writes what each rank keeps for itself, as batch statistics are: %s", names)
        fields = tuple(
            (name, field, tuple(tensor.shape))
            for name, tensors in self._wrapped.scratch.items()
            for field, tensor in tensors.items()
        )
        ranks = self._replicas.size if self._replicas is not None else 1
        # What the ranks' records say is added up entry by entry.
        agree(self._replicas, "the first run", names_of_metrics=", ".join(self._iteration.scalar_names), fields=fields)
        layout = RecordLayout(self._iteration.scalar_names, fields, ranks)
        self._records = RecordRing(layout, slots, self._wrapped.device)
        shadow = Shadow(mutations)
        self._own = {"record row": self._records.row, "record ring": self._records.ring, **shadow.tensors}
        self._provenance.declare(self._own, changing=True)
        self._iteration.equip(self._records, shadow)

    def _judge(self, changed: list[Change]) -> None:
        """Refuse or log Python state that the captured run has changed, and what else it showed."""
        if self._audit == "off":
            return
        known = set(self.findings.items)
        self._surroundings.judge(changed)
        if self._audit == "error" and self.findings.errors:
            raise audit_error(self.findings.items)
        for finding in self.findings.items:
            if finding not in known:
                log.warning("%s", finding)

    def _observe(self, run: Callable[[], None], ran: RanCode | None = None) -> None:
        self.inputs.stage(0)
        draws = self._surroundings.draws.watch() if self._audit != "off" else contextlib.nullcontext()
        code = ran.watch() if ran is not None else contextlib.nullcontext()
        seeded, warming = self._capture.seeds.seeded(_EXAMPLE_SEED), self._capture.warming_up()
        # `code` comes last: what traces besides would take it for a debugger.
        with seeded, warming, draws, self._recorder().watch(), code:
            run()

    def _run_unseen(self, run: Callable[[], None]) -> None:
        """Run without an eye on it, under which nothing is compiled."""
        self.inputs.stage(0)
        with self._capture.seeds.seeded(_EXAMPLE_SEED), self._capture.warming_up():
            run()
        self._iteration.gradients = []

    def forget_gradients(self) -> None:
        """Let other graphs of the pool have the memory of this one's gradients; it cannot be self-checked any more."""
        self._captured_gradients = []

    def retire(self) -> None:
        """Let go of the graph and of what only this program used; it cannot run again. A second call does nothing."""
        if self._graph is not None:
            self._graph.release()
        self._graph = None
        self._provenance.forget([*self._own.values(), *self.inputs.own_tensors.values()])

    def run(self, slot: int, attempt: int = 0) -> None:
        """Stage slot `slot` and replay, in stream order; the record is then in the device's ring."""
        assert self._graph is not None, "build comes first"
        with host_range(HostPhase.STAGE_INPUTS):
            self.inputs.stage(slot, attempt)
        with host_range(HostPhase.REPLAY), self._capture.seeds.seeded(self.inputs.seed(slot)):
            self._graph.replay()

    def self_check(self, slot: int) -> None:
        """Compare a replay with the uncaptured iteration on slot `slot`, both vetoed: record and gradients, bitwise.

        Raises:
            SelfCheckError: they differ, and not because the operations vary from run to run, which is logged.
        """
        graph = self._graph
        if self._capture.name == "off" or graph is None:
            return

        def uncaptured() -> Outcome:
            # Gradients of its own; those of the graph stay where they are until it runs again.
            self._iteration.gradients = []
            return self._outcome(slot, self._run, lambda: self._iteration.gradients)

        def replay() -> Outcome:
            return self._outcome(slot, graph.replay, lambda: self._captured_gradients)

        exact = self._wrapped.device.type == "cpu"
        with self._guard.withholding():
            noise = compare(uncaptured, replay, self._somewhere, exact=exact)
        if noise:
            log.warning("self-check: uncaptured runs and replays vary alike, in %s", "; ".join(noise[:5]))
        self._iteration.gradients = []

    def _somewhere(self, found: bool) -> bool:
        """Whether it was found on any rank: what one runs again, all must."""
        return found if self._replicas is None else self._replicas.agreement.any(found)

    def _outcome(self, slot: int, run: Callable[[], None], gradients: Callable[[], list[Tensor]]) -> Outcome:

        def work() -> None:
            self.inputs.stage(slot)
            with self._capture.seeds.seeded(self.inputs.seed(slot)):
                run()

        stream = self._capture.stream
        wait_for(self._replicas, stream, stream.launch(work, lambda: self.records.copy_out(slot)))
        return Outcome(self.records.read(slot), self._iteration.gradient_names, gradients())
