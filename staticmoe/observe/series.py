"""A metric over the steps in a bounded number of points, however long the run.

Each point stands for `stride` consecutive steps by their mean, lowest and highest value. When the points run out,
neighbours are joined and the stride doubles. Where a step number comes again, as after a resume, the points from there
on are forgotten, and so is one that stands for steps on both sides.
"""

from __future__ import annotations

import dataclasses

POINTS = 2000


@dataclasses.dataclass(slots=True)
class Point:
    """Consecutive steps of a series.

    Attributes:
        first, last: step numbers.
        steps, values: how many it stands for; an evaluation has several values at one step.
        total, low, high: sum, least and largest of the values.
    """

    first: int
    last: int
    steps: int
    values: int
    total: float
    low: float
    high: float

    @property
    def mean(self) -> float:
        """Mean of the values."""
        return self.total / self.values

    def add(self, step: int, value: float) -> None:
        """Stand for a value of the last step, or of the next one, as well."""
        self.steps += step != self.last
        self.last = step
        self.values += 1
        self.total += value
        self.low = min(self.low, value)
        self.high = max(self.high, value)

    def join(self, later: Point) -> None:
        """Stand for the steps of `later` as well."""
        self.last = later.last
        self.steps += later.steps
        self.values += later.values
        self.total += later.total
        self.low = min(self.low, later.low)
        self.high = max(self.high, later.high)


class Series:
    """One metric over the steps, in at most `limit` points.

    Attributes:
        points: in the order of steps.
        stride: steps of a full point.
        latest: the last value that was added.
    """

    def __init__(self, limit: int = POINTS) -> None:
        self.points: list[Point] = []
        self.stride = 1
        self.latest: float | None = None
        self._limit = limit

    def add(self, step: int, value: float) -> None:
        """Add a value; another of the last step counts beside the first, one of an earlier step begins anew there."""
        self.latest = value
        if self.points and step < self.points[-1].last:
            self.forget_from(step)
        last = self.points[-1] if self.points else None
        if last is not None and (last.last == step or last.steps < self.stride):
            last.add(step, value)
            return
        if len(self.points) == self._limit:
            self._halve()
        self.points.append(Point(step, step, 1, 1, value, value, value))

    def forget_from(self, step: int) -> None:
        """Forget every point that stands for `step` or a later one."""
        while self.points and self.points[-1].last >= step:
            self.points.pop()

    def _halve(self) -> None:
        for early, late in zip(self.points[::2], self.points[1::2], strict=False):
            early.join(late)
        self.points = self.points[::2]
        self.stride *= 2
