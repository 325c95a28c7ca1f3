"""Steps in flight: launched, not yet known to have committed. The host settles them in order, late."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

from staticmoe.capture import Stream
from staticmoe.errors import ClosedError, ReplayError
from staticmoe.observe.derive import Arrival
from staticmoe.observe.publisher import Publisher
from staticmoe.observe.record import Reason, Record
from staticmoe.observe.results import EvalResult, StepResult
from staticmoe.parallel.replicas import Replicas
from staticmoe.phases import HostPhase, host_range
from staticmoe.runner.alike import wait_for
from staticmoe.runner.guard import DeviceGuard, HostGuard
from staticmoe.runner.ladder import Ladder
from staticmoe.runner.modes import outside_inference
from staticmoe.runner.program import Program


@dataclasses.dataclass(frozen=True)
class _Pending:
    """A launched step or evaluation whose record the host has not read."""

    ticket: int
    slot: int
    ladder: Ladder
    program: Program
    result: StepResult


class Flight:
    """The queue of launched steps and evaluations.

    Args:
        stream: runs the work.
        limit: `max_in_flight`.
        device_guard, host_guard: decide on a step, there and here.
        publisher: takes each record.
        versions: a number that changes when somebody writes a trained parameter.
        broken: called with the error of a replay that failed half-way.
        replicas: the ranks whose steps are one step, and whose hosts may read results later than this one, or None.
    """

    def __init__(
        self,
        stream: Stream,
        limit: int,
        device_guard: DeviceGuard,
        host_guard: HostGuard,
        publisher: Publisher,
        versions: Callable[[], int],
        broken: Callable[[BaseException], None],
        replicas: Replicas | None = None,
    ) -> None:
        self._stream = stream
        self._limit = limit
        self._device_guard = device_guard
        self._host_guard = host_guard
        self._publisher = publisher
        self._versions = versions
        self._broken = broken
        self._replicas = replicas
        self._pending: collections.deque[_Pending] = collections.deque()
        self._launches = 0
        self._seen_versions = 0

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def next_slot(self) -> int:
        """Slot of the next launch; free once there is room."""
        return self._launches % (self._limit + 1)

    def launch(self, ladder: Ladder, program: Program, result: StepResult) -> None:
        """Run `program`, a variant of `ladder`, on `next_slot`, in stream order."""
        slot = self.next_slot
        if not self._pending:
            self._seen_versions = self._versions()
        self._launches += 1
        self._pending.append(_Pending(self._enqueue(program, slot), slot, ladder, program, result))

    def _enqueue(self, program: Program, slot: int, attempt: int = 0) -> int:
        self._publisher.counts.replays += 1

        def work() -> None:
            program.run(slot, attempt)
            self._seen_versions = self._versions()

        return self._stream.launch(work, lambda: program.records.copy_out(slot))

    def make_room(self) -> None:
        """The fixed point: before launching s + max_in_flight the host acts on the record of s."""
        while len(self._pending) >= self._limit:
            self._settle_oldest()

    def flush(self) -> None:
        """Settle everything."""
        while self._pending:
            self._settle_oldest()

    def settle_until(self, result: StepResult) -> None:
        """Settle, in order, until `result` has its values.

        Raises:
            ClosedError: they will never come.
        """
        while not result.ready and self._pending:
            self._settle_oldest()
        if not result.ready:
            raise ClosedError(f"{result!r}: the runner was closed before its values arrived")

    def check_order(self) -> None:
        """On a GPU a write by the user queues behind launched steps; where it would overtake them, refuse it.

        Raises:
            ReplayError: a trained parameter was written while steps were in flight.
        """
        if self._stream.overtakes and self._pending and self._versions() != self._seen_versions:
            self._seen_versions = self._versions()
            raise ReplayError(
                f"a parameter was written while {len(self._pending)} steps were in flight: it happened before those "
                "steps, not after; call runner.synchronize() before touching parameters"
            )

    @outside_inference
    def _settle_oldest(self) -> None:
        """Wait for the oldest, give its result its values, and do what the guard demands."""
        self.check_order()
        pending = self._pending[0]
        self._wait(pending.ticket)
        record, program = pending.program.records.read(pending.slot), pending.program
        training, causes = not isinstance(pending.result, EvalResult), Reason(0)
        if self._replicas is not None and training and not record.void and self._host_guard.halts(record):
            self._let_others_pass(pending)
        if training and self._host_guard.wants_rerun(record):
            record, program, causes = self._rerun(pending, record)
        self._pending.popleft()
        pending.result.settle(record, program.facts)
        arrival = Arrival(
            step=pending.result.step,
            record=record,
            facts=program.facts,
            training=training,
            micro_batches=program.inputs.micro_batches,
            capacity_factor=program.capacity_factor,
            lag=len(self._pending),
            causes=causes,
        )
        self._publisher.publish(arrival)
        if not training or record.void:
            return
        pending.ladder.note(record)
        capacities = {name: facts.get("capacity_rows", 0) for name, facts in program.facts.items()}
        refusal = self._host_guard.judge(record, capacities, lambda: pending.ladder.required_factor(record))
        if refusal is None:
            return
        if self._host_guard.halts(record):
            # Whatever was launched after it is void; let it pass before the device may commit again.
            self.flush()
            self._device_guard.halted.zero_()
        raise refusal

    def _let_others_pass(self, halting: _Pending) -> None:
        """Replay `halting` in place of the void steps that are not launched here, as they are where nobody asked early.

        Behind a step that halts, every rank replays up to the fixed point of its host, and what a replay exchanges must
        meet what the others exchange in theirs. Such a replay is void, and its record is not read.
        """
        for _ in range(self._limit - len(self._pending)):
            self._publisher.counts.replays += 1
            self._wait(self._stream.launch(lambda: halting.program.run(halting.slot)))

    def _rerun(self, pending: _Pending, record: Record) -> tuple[Record, Program, Reason]:
        """Run the oldest step again where it fits, then those after it, which were void; none of them is lost.

        Each runs from its own slot: same inputs, hyper-parameters and random numbers. The oldest climbs until its rows
        fit, which on the highest variant they do. Returns its last record, the variant that it ran on, and the reasons
        of the attempts before.
        """
        self._wait(self._pending[-1].ticket)
        program, attempt, causes = pending.program, 0, Reason(0)
        while self._host_guard.wants_rerun(record):
            try:
                wider = pending.ladder.above(program, record)
            except BaseException as error:
                self._fail(error)
                raise
            if wider is None:
                break
            self._device_guard.halted.zero_()
            program, attempt, causes = wider, attempt + 1, causes | record.reasons
            self._wait(self._enqueue(program, pending.slot, attempt))
            record = program.records.read(pending.slot)
        later = list(self._pending)[1:]
        again = [dataclasses.replace(one, ticket=self._enqueue(one.program, one.slot)) for one in later]
        self._pending = collections.deque([pending, *again])
        return record, program, causes

    def _wait(self, ticket: int) -> None:
        """Wait for `ticket`; a replay that failed ends everything that is in flight."""
        try:
            with host_range(HostPhase.POLL):
                wait_for(self._replicas, self._stream, ticket)
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Give up everything that is in flight."""
        while self._pending:
            self._pending.popleft().result.fail(error)
        self._broken(error)
