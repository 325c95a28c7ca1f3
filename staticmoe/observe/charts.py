"""Charts of a run's series as inline SVG, for its page: a line of means, a band of ranges, axes with their units.

Colours are classes that the page's style defines: s0, s1 of lines, f0, f1 of bands, c0, c1 of the key.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from html import escape

from staticmoe.observe.overview import Overview, in_digits
from staticmoe.observe.series import Point

WIDTH, HEIGHT = 560, 220
LEFT, RIGHT, TOP, BOTTOM = 64, 28, 10, 40
TICKS = 5


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart of series over the steps.

    Attributes:
        title, unit: what is drawn, and the label of the vertical axis.
        series: metric -> its name in the key, at most two.
        scale: drawn value of a value of 1.
        from_zero: whether the vertical axis begins at 0.
    """

    title: str
    unit: str
    series: dict[str, str]
    scale: float = 1.0
    from_zero: bool = True


CHARTS = (
    Chart("Loss", "loss, in the unit of loss_fn", {"train/loss": "train", "eval/loss": "eval"}, from_zero=False),
    Chart(
        "Drop rate",
        "% of assignments",
        {"moe/drop_rate": "all layers", "moe/drop_rate_max_layer": "worst layer"},
        100.0,
    ),
    Chart("Step time", "ms", {"time/step_p50": "p50", "time/step_p99": "p99"}, 1000.0),
    Chart(
        "Required factor against capacity",
        "x the balanced load",
        {"moe/required_factor": "required", "graph/variant": "capacity"},
    ),
    Chart("Throughput", "tokens/s", {"throughput/tokens_per_s": "tokens/s"}),
    Chart("Gradient norm", "norm of all gradients", {"train/grad_norm": "before clipping"}),
)


def draw_chart(chart: Chart, overview: Overview) -> str:
    """Return the chart as a figure; where no series has a point, one that says so."""
    drawn = {name: overview.series[name].points for name in chart.series if overview.series[name].points}
    keys = [
        f' <span class="c{index}">{escape(label)}</span>'
        for index, (name, label) in enumerate(chart.series.items())
        if name in drawn
    ]
    missing = [label for name, label in chart.series.items() if name not in drawn]
    note = f' <span class="dim">no values: {escape(", ".join(missing))}</span>' if missing else ""
    caption = f"<figcaption>{escape(chart.title)}{''.join(keys)}{note}</figcaption>"
    if not drawn:
        return f"<figure>{caption}</figure>"
    points = [point for series in drawn.values() for point in series]
    steps = _Axis.over(min(point.first for point in points), max(point.last for point in points), LEFT, WIDTH - RIGHT)
    low = 0.0 if chart.from_zero else min(point.low for point in points) * chart.scale
    high = max(point.high for point in points) * chart.scale
    values = _Axis.over(min(low, high), high, HEIGHT - BOTTOM, TOP, nice=True)
    lines = []
    # The first lies on top.
    for index, name in reversed(list(enumerate(chart.series))):
        if name in drawn:
            lines.append(_band(drawn[name], steps, values, chart.scale, index))
            lines.append(_line(drawn[name], steps, values, chart.scale, index))
    label = f"{escape(chart.title)}, {escape(chart.unit)}, over the steps"
    return (
        f'<figure>{caption}<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f"{_axes(steps, values, chart.unit)}{''.join(lines)}</svg></figure>"
    )


@dataclasses.dataclass(frozen=True)
class _Axis:
    """Values from `low` to `high`, drawn from pixel `start` to `end`, with marks at round numbers."""

    low: float
    high: float
    start: float
    end: float
    marks: tuple[float, ...]

    @classmethod
    def over(cls, low: float, high: float, start: float, end: float, nice: bool = False) -> _Axis:
        """An axis that holds both; `nice`: widened to the round numbers around them."""
        if high <= low:
            high = low + (abs(low) or 1.0)
        rough = (high - low) / TICKS
        size = 10.0 ** math.floor(math.log10(rough))
        gap = next(size * times for times in (1, 2, 5, 10) if size * times >= rough)
        first, last = math.floor(low / gap), math.ceil(high / gap)
        if nice:
            low, high = first * gap, last * gap
        marks = (float(index * gap) for index in range(first, last + 1))
        return cls(low, high, start, end, tuple(mark for mark in marks if low <= mark <= high))

    def at(self, value: float) -> float:
        """The pixel of a value."""
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1)


def _axes(steps: _Axis, values: _Axis, unit: str) -> str:
    found = []
    for mark in values.marks:
        y = values.at(mark)
        found.append(f'<line class="grid" x1="{LEFT}" y1="{y:g}" x2="{WIDTH - RIGHT}" y2="{y:g}"/>')
        found.append(f'<text x="{LEFT - 6}" y="{y + 4:g}" text-anchor="end">{in_digits(mark, 5)}</text>')
    for mark in (mark for mark in steps.marks if mark.is_integer()):
        x = steps.at(mark)
        found.append(f'<line class="grid" x1="{x:g}" y1="{HEIGHT - BOTTOM}" x2="{x:g}" y2="{HEIGHT - BOTTOM + 4}"/>')
        found.append(f'<text x="{x:g}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{mark:,.0f}</text>')
    middle = (TOP + HEIGHT - BOTTOM) // 2
    found.append(f'<text x="{(LEFT + WIDTH - RIGHT) // 2}" y="{HEIGHT - 6}" text-anchor="middle">step</text>')
    found.append(
        f'<text x="12" y="{middle}" text-anchor="middle" transform="rotate(-90 12 {middle})">{escape(unit)}</text>'
    )
    return "".join(found)


def _line(points: Sequence[Point], steps: _Axis, values: _Axis, scale: float, index: int) -> str:
    """The means; a single one is drawn as a dot."""
    drawn = [f"{steps.at((point.first + point.last) / 2):g},{values.at(point.mean * scale):g}" for point in points]
    return f'<path class="line s{index}" d="M{"L".join(drawn if len(drawn) > 1 else drawn * 2)}"/>'


def _band(points: Sequence[Point], steps: _Axis, values: _Axis, scale: float, index: int) -> str:
    """The range of the values behind each point; nothing where each point is one value."""
    if all(point.low == point.high for point in points):
        return ""
    xs = [f"{steps.at((point.first + point.last) / 2):g}" for point in points]
    upper = [f"{x},{values.at(point.high * scale):g}" for x, point in zip(xs, points, strict=True)]
    lower = [f"{x},{values.at(point.low * scale):g}" for x, point in zip(xs, points, strict=True)]
    return f'<path class="band f{index}" d="M{"L".join([*upper, *reversed(lower)])}Z"/>'
