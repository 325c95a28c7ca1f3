"""The variants of one training graph, from the narrowest up: what a step runs on, and on what it is run again.

All have the same inputs, and agree bitwise wherever rows fit: which of them a step ran on is a matter of time alone.

Dimensions: T tokens, K top_k.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Callable, Sequence

from staticmoe.observe.record import Record
from staticmoe.runner.program import Program

log = logging.getLogger(__name__)

# Records that the forecast remembers: it climbs at once, and descends when none of them needed the height.
_REMEMBERED = 16


@dataclasses.dataclass
class _Rung:
    """One variant: its capacity factor (None is dropless), and its program once it is captured."""

    factor: float | None
    program: Program | None = None


class Ladder:
    """The variants of one batch shape.

    The lowest and the highest are captured beforehand, so that what does not fit in memory is refused before training;
    one between them is captured when a step needs it, if there is room.

    Args:
        lowest: what steps run on.
        factors: of the rungs above it, ascending; None, which is dropless, ends them. Empty: nothing can overflow.
        build: factor -> variant on the inputs of the lowest.
        scope: "rank" or "expert".
        forecast: start a step on the variant that would have done for the last records, instead of on the lowest.
        obstacle: what stands in the way of capturing a variant of so many bytes now, or None.
        lag: steps before the one that starts whose records the forecast leaves out, though they may have arrived: with
            several ranks those that another rank's host may not have read.
    """

    def __init__(
        self,
        lowest: Program,
        factors: Sequence[float | None] = (),
        build: Callable[[float | None], Program] | None = None,
        *,
        scope: str = "rank",
        forecast: bool = False,
        obstacle: Callable[[int], str | None] = lambda needed: None,
        lag: int = 0,
    ) -> None:
        self._rungs = [_Rung(lowest.capacity_factor, lowest), *(_Rung(factor) for factor in factors)]
        self._build = build
        self._scope = scope
        self._forecast = forecast
        self._obstacle = obstacle
        self._lag = lag
        self._needed: collections.deque[tuple[int, float]] = collections.deque(maxlen=_REMEMBERED + lag)
        if factors:
            self._rungs[-1].program = self._made(self._rungs[-1])
        # Participant -> T·K of a step, masked tokens included: the rows of a dropless variant.
        self._assignments = {
            name: facts.get("capacity_rows", 0) * lowest.inputs.micro_batches
            for name, facts in self.programs[-1].facts.items()
        }

    @property
    def programs(self) -> list[Program]:
        """The variants that are captured, ascending."""
        return [rung.program for rung in self._rungs if rung.program is not None]

    def start(self, step: int = 0) -> Program:
        """The variant for `step`; the lowest, save with a forecast. Never captures."""
        known = [needed for number, needed in self._needed if number <= step - self._lag][-_REMEMBERED:]
        if not self._forecast or not known:
            return self.programs[0]
        fitting = (program for program in self.programs if self._fits(program.capacity_factor, max(known)))
        return next(fitting, self.programs[-1])

    def above(self, program: Program, record: Record) -> Program | None:
        """The variant to run a step again on that overflowed on `program`, captured now if need be, or None.

        It is the lowest one that `record` does not rule out. Layers behind the first that overflowed were given what no
        expert had computed: their loads say nothing, and this variant may overflow too.
        """
        place = next(number for number, rung in enumerate(self._rungs) if rung.program is program)
        needed = self.required_factor(record)
        for rung in self._rungs[place + 1 :]:
            if self._fits(rung.factor, needed) and (found := self._captured(rung)) is not None:
                return found
        return None

    def note(self, record: Record) -> None:
        """Take the record of a step that ran to its end, for the forecast."""
        if self._forecast:
            self._needed.append((record.launch, self.required_factor(record)))

    def required_factor(self, record: Record) -> float:
        """The capacity factor with which every layer would have kept all of its rows, up to the first that overflowed.

        A lower bound with several micro-batches, whose counts the record sums up. With several ranks it is what the
        one with the most rows needs, the same number on all of them.
        """
        needed = 0.0
        for name, fields in record.fields.items():
            balanced = self._assignments.get(name)
            if balanced and {"routed", "kept"} <= fields.keys():
                routed = fields["routed"]
                own = [sum(routed), max(routed), sum(routed) - sum(fields["kept"])]
                total, largest, lost = record.peaks.get(name, own)
                needed = max(needed, (total if self._scope == "rank" else largest * len(routed)) / balanced)
                if lost:
                    break
        return needed

    def _made(self, rung: _Rung) -> Program:
        assert self._build is not None, "rungs above the lowest come with a way to build them"
        return self._build(rung.factor)

    @staticmethod
    def _fits(factor: float | None, needed: float) -> bool:
        return factor is None or needed <= factor

    def _captured(self, rung: _Rung) -> Program | None:
        """The program of a rung, built now if there is room."""
        if rung.program is None:
            # It runs in the memory that the others have left behind in their pool; warming it up takes as much again.
            obstacle = self._obstacle(sum(program.owned_bytes for program in self.programs))
            if obstacle is None:
                rung.program = self._made(rung)
            else:
                log.warning("not capturing the variant of capacity_factor=%s: %s", rung.factor, obstacle)
        return rung.program
