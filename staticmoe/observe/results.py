"""What a user gets back from a step: lazy, and each result keeps its own values for ever."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from staticmoe.observe.record import Reason, Record


@dataclasses.dataclass(frozen=True)
class LayerLoad:
    """Assignments of one MoE layer in one step, summed over its micro-batches.

    Attributes:
        routed: for each expert, assignments before capacity.
        kept: for each expert, assignments that were computed.
        capacity_rows: rows that the layer's buffers hold for one micro-batch.
    """

    routed: list[int]
    kept: list[int]
    capacity_rows: int

    @property
    def dropped(self) -> list[int]:
        """For each expert, assignments over capacity."""
        return [routed - kept for routed, kept in zip(self.routed, self.kept, strict=True)]

    @property
    def drop_rate(self) -> float:
        """Dropped share of the routed assignments, 0 to 1."""
        return sum(self.dropped) / max(sum(self.routed), 1)

    @property
    def max_vio(self) -> float:
        """Load of the busiest expert over the mean load, minus 1."""
        return max(self.routed) * len(self.routed) / max(sum(self.routed), 1) - 1


class MoEResults(Mapping[str, LayerLoad]):
    """Loads by module name, in module order."""

    def __init__(self, layers: Mapping[str, LayerLoad]) -> None:
        self._layers = dict(layers)

    @classmethod
    def from_record(cls, record: Record, facts: Mapping[str, Mapping[str, int]]) -> MoEResults:
        """Loads of the participants that recorded routed and kept assignments."""
        return cls(
            {
                name: LayerLoad(fields["routed"], fields["kept"], facts[name]["capacity_rows"])
                for name, fields in record.fields.items()
                if "routed" in fields and "kept" in fields
            }
        )

    def __getitem__(self, name: str) -> LayerLoad:
        return self._layers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __repr__(self) -> str:
        return f"MoEResults({self._layers!r})"

    @property
    def drop_rate(self) -> float:
        """Dropped share of all routed assignments, 0 to 1."""
        routed = sum(sum(layer.routed) for layer in self._layers.values())
        return sum(sum(layer.dropped) for layer in self._layers.values()) / max(routed, 1)


class StepResult:
    """Values of one `step` or `evaluate`. Reading any but `step` waits for it, and for all steps before it.

    Attributes:
        step: number of the call to `step`, from 1; for an evaluation, of the last step before it.
    """

    def __init__(self, step: int, wait: Callable[[StepResult], None]) -> None:
        self.step = step
        self._wait = wait
        self._record: Record | None = None
        self._facts: Mapping[str, Mapping[str, int]] = {}
        self._error: BaseException | None = None

    def settle(self, record: Record, facts: Mapping[str, Mapping[str, int]]) -> None:
        """Give the result its values; the runner does this when the record has arrived."""
        self._record, self._facts = record, facts

    def fail(self, error: BaseException) -> None:
        """Give the result an error that every later read raises."""
        self._error = error

    @property
    def ready(self) -> bool:
        """Whether reading would not wait."""
        return self._record is not None or self._error is not None

    def _read(self) -> Record:
        if not self.ready:
            self._wait(self)
        if self._error is not None:
            raise self._error
        assert self._record is not None, "the runner settles a result or fails it"
        return self._record

    @property
    def loss(self) -> float:
        """The user's loss, joined over micro-batches, without the participants' losses."""
        return self._read().scalars["loss"]

    @property
    def grad_norm(self) -> float:
        """2-norm over all gradients, before clipping. Absent from an evaluation (KeyError)."""
        return self._read().scalars["grad_norm"]

    @property
    def metrics(self) -> dict[str, float]:
        """The participants' losses before their coefficients, `lr`, and the user's own metrics."""
        return {name: value for name, value in self._read().scalars.items() if name not in ("loss", "grad_norm")}

    @property
    def moe(self) -> MoEResults:
        """Loads and drops of the MoE layers by module name."""
        return MoEResults.from_record(self._read(), self._facts)

    @property
    def skipped(self) -> bool:
        """Whether the step committed nothing."""
        return self._read().veto

    @property
    def attempt(self) -> int:
        """0, or 1 where the step's rows did not fit at first and it was run again with room for all."""
        return self._read().attempt

    @property
    def reasons(self) -> Reason:
        """Why the step did not commit, or what a policy let pass; 0 for none."""
        return self._read().reasons

    def __repr__(self) -> str:
        if self._record is None:
            return f"{type(self).__name__}(step={self.step}, in flight)"
        return f"{type(self).__name__}(step={self.step}, loss={self._record.scalars['loss']:.6g})"


class EvalResult(StepResult):
    """Values of one `evaluate`."""
