"""The table of the candidates: for each capacity factor its rows, drops, reruns, memory and time, with bounds.

Bounds are 95 % ones, from `staticmoe.tune.intervals`, with the correlation time of the steps' required factors or of
the losses themselves, whichever is longer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from staticmoe.config import CAPACITY_SCOPES
from staticmoe.errors import ConfigError
from staticmoe.tune.intervals import Interval, correlation_time, event_interval, share_interval
from staticmoe.tune.loads import Loads
from staticmoe.tune.outcomes import Arrivals, Outcome, limit_of

FACTORS = (1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)
# So many independent steps with a loss tell how much is lost.
_SEEN = 5
# Fewer steps than this say little, and a reader should know.
FEW_STEPS = 30


@dataclasses.dataclass(frozen=True)
class Row:
    """One candidate.

    Attributes:
        factor: capacity factor; None is dropless.
        capacity_rows: R of the layer with the most.
        limit: what is bounded there: C of an expert, or R of a rank.
        drop: share of all assignments that is dropped.
        worst_layer, worst_drop: the layer that drops the largest share of its own, and that share as observed.
        rerun: probability that some layer overflows in a step.
        time: of a step with overflow="rerun", 1 being one without an overflow.
        extra_bytes: capacity rows above the balanced load, all layers; None where a row's bytes are not known. On one
            GPU there are none: no more rows arrive than the balanced load has, and no more are held.
    """

    factor: float | None
    capacity_rows: int
    limit: int
    drop: Interval
    worst_layer: str
    worst_drop: float
    rerun: Interval
    time: float
    extra_bytes: int | None


def expected_time(rerun_rate: float, max_in_flight: int, narrow: float = 1.0, wide: float = 1.0) -> float:
    """Expected time of a step under overflow="rerun", in steps without an overflow, at most.

    A step whose rows do not fit costs up to 1 + max_in_flight narrow steps that commit nothing, and a wider one. Work
    follows rows, not capacity: wide and narrow take the same time, and a factor that nothing exceeds costs memory only.
    """
    return 1 + rerun_rate * ((1 + max_in_flight) * narrow + wide)


class Judge:
    """Holds a recording against capacities.

    Args:
        loads: the recording.
        scope: "rank" or "expert".
        ranks: EP.
        max_in_flight: of the runner, for the time of a rerun.
        row_bytes: of one capacity row of a layer, or None.

    Raises:
        ConfigError: an unknown scope, and whatever `Arrivals` refuses.
    """

    def __init__(
        self,
        loads: Loads,
        scope: str = "expert",
        ranks: int = 1,
        *,
        max_in_flight: int = 2,
        row_bytes: float | None = None,
    ) -> None:
        if scope not in CAPACITY_SCOPES:
            raise ConfigError(f"scope: expected one of {', '.join(CAPACITY_SCOPES)}; got {scope!r}")
        self.loads, self.scope, self.ranks = loads, scope, ranks
        self._max_in_flight, self._row_bytes = max_in_flight, row_bytes
        self.arrivals = Arrivals(loads, scope, ranks)
        self._whole = np.sum(list(self.arrivals.routed.values()), axis=0).astype(np.float64)
        self._time = correlation_time(self.arrivals.required())

    @property
    def steps(self) -> int:
        """Steps that the recording makes, groups of EP ranks."""
        return self.arrivals.steps

    def can_overflow(self, factor: float | None) -> bool:
        """Whether some routing has more rows than fit."""
        return any(shape.can_overflow for shape in self.arrivals.at(factor).shapes.values())

    def row(self, factor: float | None) -> Row:
        """The candidate `factor`."""
        outcome = self.arrivals.at(factor)
        rerun, drop = self.rates(factor)
        routed = self.arrivals.routed
        rates = {name: float(lost.sum()) / max(int(routed[name].sum()), 1) for name, lost in outcome.dropped.items()}
        worst = max(rates, key=lambda name: rates[name])
        widest = max(outcome.shapes.values(), key=lambda shape: shape.capacity_rows)
        return Row(
            factor=factor,
            capacity_rows=widest.capacity_rows,
            limit=limit_of(widest),
            drop=drop,
            worst_layer=worst,
            worst_drop=rates[worst],
            rerun=rerun,
            time=expected_time(rerun.rate, self._max_in_flight),
            extra_bytes=self._extra_bytes(outcome),
        )

    def rates(self, factor: float | None, ahead: int | None = None) -> tuple[Interval, Interval]:
        """Rerun and drop rate at `factor`; with `ahead` the bounds are for so many steps to come."""
        outcome = self.arrivals.at(factor)
        if not any(shape.can_overflow for shape in outcome.shapes.values()):
            return Interval(0.0, 0.0, 0.0), Interval(0.0, 0.0, 0.0)
        time = max(self._time, correlation_time(outcome.overflowed.astype(np.float64)))
        rerun, drop = event_interval(outcome.overflowed, time, ahead), self._drop(outcome, factor, ahead)
        narrower = self._narrower(factor)
        if narrower is not None:
            high = self._drop(self.arrivals.at(narrower), narrower, ahead).high
            drop = dataclasses.replace(drop, high=min(drop.high, high))
        return rerun, drop

    def _drop(self, outcome: Outcome, factor: float | None, ahead: int | None) -> Interval:
        lost = outcome.lost.astype(np.float64)
        time = max(self._time, correlation_time(outcome.overflowed.astype(np.float64)), correlation_time(lost))
        return share_interval(lost, self._whole, time, self._severity(factor), ahead)

    def _narrower(self, factor: float | None) -> float | None:
        """The widest capacity below `factor` at which losses were seen often enough; None where there is none.

        A wider capacity drops no more in any step, so that the upper bound of the narrower one holds for it too. Where
        next to nothing was seen at `factor` itself, that is the better of the two.
        """
        enough = math.ceil(_SEEN * self._time)
        required = np.sort(self.arrivals.required())
        # A row less than those steps require, and a little, which rounding up to whole rows must not take back.
        found = float(required[-enough]) - 1.01 * self.arrivals.one_row if enough <= len(required) else 0.0
        return found if found > 0 and (factor is None or found < factor) else None

    def observed(self, factor: float | None) -> tuple[float, float]:
        """Rerun and drop rate at `factor` as recorded, without bounds."""
        outcome = self.arrivals.at(factor)
        return float(outcome.overflowed.mean()), float(outcome.lost.sum() / max(self._whole.sum(), 1.0))

    def _severity(self, factor: float | None) -> float:
        """What a step is taken to lose that overflows for the first time: what the worst recorded one loses at 1."""
        narrow = self.arrivals.at(min(factor, 1.0) if factor is not None else None).lost
        return float(np.max(np.maximum(narrow, 1) / np.maximum(self._whole, 1)))

    def _extra_bytes(self, outcome: Outcome) -> int | None:
        layers = self.loads.layers
        rows = sum(max(shape.capacity_rows - layers[name].assignments, 0) for name, shape in outcome.shapes.items())
        if rows and self._row_bytes is None:
            return None
        return round(rows * (self._row_bytes or 0.0))


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """The candidates of one scope and one number of ranks.

    Attributes:
        judge: judges further factors of the same recording.
        rows: ascending by factor.
        notes: what a reader should know.
    """

    judge: Judge
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    def sensitive(self, factor: float | None) -> float | None:
        """`factor` if something can overflow there, else the smallest candidate where it can; None: nothing can."""
        return next((f for f in (factor, *(row.factor for row in self.rows)) if self.judge.can_overflow(f)), None)


def tabulate(judge: Judge, factors: Sequence[float] = FACTORS) -> Table:
    """Return the table of `factors`.

    Raises:
        ConfigError: no factors, or one that is not above 0.
    """
    if not factors:
        raise ConfigError("factors: expected at least one; got none")
    notes = list(judge.loads.notes)
    if judge.steps < FEW_STEPS:
        notes.append(
            f"only {judge.steps} steps of {judge.arrivals.rows_per_step} recorded rows: fewer than {FEW_STEPS} say "
            "little, and the bounds are as wide as that"
        )
    return Table(judge, tuple(_descending(judge.row(factor) for factor in sorted(set(factors)))), tuple(notes))


def _descending(rows: Iterable[Row]) -> Iterator[Row]:
    """Rows with upper bounds that do not rise: a wider capacity neither drops more in any step nor overflows more."""
    drop = rerun = 1.0
    for row in rows:
        drop, rerun = min(drop, row.drop.high), min(rerun, row.rerun.high)
        yield dataclasses.replace(
            row, drop=dataclasses.replace(row.drop, high=drop), rerun=dataclasses.replace(row.rerun, high=rerun)
        )


def row_bytes_of(meta: dict[str, object]) -> float | None:
    """Bytes of one capacity row of a layer, by the memory forecast in meta.json; None where that does not tell.

    The forecast has the bytes of the rows above the balanced load, `memory.forecast.capacity_slack`, at the recorded
    capacity: pre-activations and what else is as long as the rows.
    """
    memory, config, participants = (meta.get(key) for key in ("memory", "config", "participants"))
    if not (isinstance(memory, dict) and isinstance(config, dict) and isinstance(participants, dict)):
        return None
    slack = (memory.get("forecast") or {}).get("capacity_slack", 0)
    factor, balanced = config.get("capacity_factor"), 0
    if not slack or factor is None or factor <= 1:
        return None
    rows = sum(facts.get("capacity_rows", 0) for facts in participants.values())
    balanced = sum(facts.get("tokens", 0) * facts.get("top_k", 0) for facts in participants.values())
    return slack / (rows - balanced) if rows > balanced > 0 else None
