"""Whether a graph still is the iteration: replays held against uncaptured runs, bit by bit, and what noise explains."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from staticmoe.errors import SelfCheckError
from staticmoe.observe.record import Record

# What the order of additions may make: of a loss or a gradient norm, relative to it; of a gradient's element, to the
# largest, where some are sums of numbers rounded to 16 bits.
_ROUNDING, _GRADIENT_ROUNDING = 1e-3, 5e-2
# Runs among which one must differ before an operation counts as not deterministic. An atomic addition may well come in
# the same order twice, and hardly nine times.
_RUNS = 8


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one run of an iteration gave.

    Attributes:
        record: of the run.
        names, gradients: of the parameters, in one order. Those of a graph are overwritten by its next replay.
    """

    record: Record
    names: Sequence[str]
    gradients: Sequence[Tensor]

    def kept(self) -> Outcome:
        """The same with gradients that no replay overwrites."""
        return dataclasses.replace(self, gradients=[gradient.clone() for gradient in self.gradients])

    def differences(self, other: Outcome) -> list[str]:
        """What differs in any bit, in words; NaN is like NaN."""
        found = [
            f"{name} ({value!r} against {other.record.scalars[name]!r})"
            for name, value in self.record.scalars.items()
            if not _same_float(value, other.record.scalars[name])
        ]
        if (self.record.fields, self.record.peaks) != (other.record.fields, other.record.peaks):
            found.append("the participants' counts")
        for name, left, right in zip(self.names, self.gradients, other.gradients, strict=True):
            if not bool(((left == right) | (left.isnan() & right.isnan())).all()):
                found.append(f"the gradient of {name} (by at most {float((left - right).abs().max()):.3g})")
        return found

    def same(self, other: Outcome) -> bool:
        """Whether nothing differs in any bit."""
        return not self.differences(other)

    def near(self, other: Outcome, part: float = 1.0) -> bool:
        """Whether no scalar of the record and no gradient differs by more than rounding, or than `part` of it."""
        of_scalars, of_gradients = part * _ROUNDING, part * _GRADIENT_ROUNDING
        pairs = [(value, other.record.scalars[name]) for name, value in self.record.scalars.items()]
        if not all(abs(a - b) <= of_scalars * max(abs(a), abs(b), 1e-30) for a, b in pairs if not _same_float(a, b)):
            return False
        return all(
            bool((left - right).abs().amax() <= of_gradients * torch.maximum(left.abs(), right.abs()).amax())
            for left, right in zip(self.gradients, other.gradients, strict=True)
            if not torch.equal(left, right)
        )


def compare(
    uncaptured: Callable[[], Outcome], replay: Callable[[], Outcome], somewhere: Callable[[bool], bool], *, exact: bool
) -> list[str]:
    """Run both ways; where they differ, find out whether the operations themselves vary from run to run.

    Atomic additions vary in the last bits, uncaptured and replayed. A host value that changes from run to run varies
    in the first ones, and only uncaptured: replays have one value of it.

    Args:
        uncaptured, replay: run once, on the same inputs and seeds.
        somewhere: whether something was found on any rank: what one runs again, all must.
        exact: of a device on which every operation repeats its bits.

    Returns:
        What varies without a graph; empty where a replay is the uncaptured run bit by bit.

    Raises:
        SelfCheckError: the graph differs, and not because its operations vary.
    """
    plain, replayed = uncaptured(), replay()
    differences = plain.differences(replayed)
    if not somewhere(bool(differences)):
        return []
    near = plain.near(replayed)
    del replayed
    noise: list[str] = []
    varies = False
    for _ in range(1 if exact else _RUNS):
        again = uncaptured()
        noise, near = plain.differences(again), near and plain.near(again)
        # At a time no more than two sets of gradients beside the graph's.
        del again
        if varies := somewhere(bool(noise)):
            break
    del plain
    if not somewhere(exact or not near):
        explained = varies or _varies(replay, somewhere, Outcome.same)
    else:
        # Noise in the last bits explains nothing here, and a host value of every run's own would vary uncaptured alone.
        # A tenth: what was off by so much once need not be again.
        explained = varies and _varies(replay, somewhere, Outcome.same if exact else _nearly_the_same)
    if not explained:
        words = "; ".join(differences[:5]) or "what another rank says"
        raise SelfCheckError(
            f"a replay differs from the uncaptured iteration in {words}, by more than its operations vary from run to "
            "run: something that it reads on the host is frozen in the graph; keep it in a buffer or in runner.scalars"
        )
    return noise or differences or ["what another rank says"]


def _nearly_the_same(one: Outcome, other: Outcome) -> bool:
    return one.near(other, part=0.1)


def _varies(
    run: Callable[[], Outcome], somewhere: Callable[[bool], bool], alike: Callable[[Outcome, Outcome], bool]
) -> bool:
    first = run().kept()
    return any(somewhere(not alike(first, run())) for _ in range(_RUNS))


def _same_float(one: float, other: float) -> bool:
    return one == other or (one != one and other != other)
