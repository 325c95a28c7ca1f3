"""One frame of `staticmoe monitor`: lines of text that fit a width and, on a screen, a height.

Every line is cut here to the columns there are, so nothing wraps; colour only repeats what a character says already.
What comes from files is shown without control characters.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from staticmoe.observe.overview import (
    Alert,
    Layer,
    Overview,
    experts_per_column,
    heat_legend,
    heat_level,
    in_digits,
    in_hundredths,
    in_percent,
    in_seconds,
    number,
    relative_load,
    worst_first,
)

# Colours of the terminal's own palette, one for each heat level: readable on dark and light.
HEAT_STYLES = ("bold magenta", "blue", "blue", "cyan", "green", "yellow", "red", "bold red")
SEVERITY_STYLES = {"warning": "yellow", "critical": "bold red"}
# Beside the name of a layer: header -> columns.
CELLS = {"drop": 8, "max_vio": 9, "required": 10, "capacity rows": 15, "dead": 6}
# Lines of a frame that are always there: five of numbers, three headings.
FIXED_LINES = 8
NO_LIMIT = 1 << 30
# A record older than this, in seconds, is worth a look.
OLD = 60.0


@dataclasses.dataclass(frozen=True)
class Glyphs:
    """Characters by level: of a sparkline, low to high, and of a heat map, from none at all."""

    spark: str
    heat: str
    more: str


BLOCKS = Glyphs(spark="▁▂▃▄▅▆▇█", heat="·▁▂▃▄▅▆█", more="…")
ASCII = Glyphs(spark="_.-=+*%#", heat="!.:-=+*#", more="~")


@dataclasses.dataclass(frozen=True)
class Room:
    """What a frame may take: columns, lines (None: as many as it needs), and the characters that the screen knows."""

    width: int = 80
    height: int | None = None
    glyphs: Glyphs = BLOCKS


def frame(overview: Overview, title: str, now: float, room: Room, notes: Sequence[str] = ()) -> list[Text]:
    """The lines of a frame; `now` in unix seconds, `notes` are added at the end."""
    head = [_title(overview, title, room)]
    tail = [Text(_plain(note, room), "yellow") for note in notes]
    if not overview.latest:
        return _fit([*head, Text("waiting for the first record"), *tail], room)
    layers, alerts, rows, heat_rows = overview.layers, list(overview.alerts), NO_LIMIT, NO_LIMIT
    shown = len(alerts[-10:])
    if room.height is not None:
        left = max(0, room.height - FIXED_LINES - len(tail))
        shown = min(shown, max(1, left // 5, left - 2 * len(layers)))
        # The table and the heat map share what is left; a map of one line or none says too little.
        heat_rows = (left - shown) // 2
        rows = left - shown - heat_rows if heat_rows > 1 else left - shown + 1
    heat = _heat_map(layers, heat_rows, room) if heat_rows > 1 else []
    lines = [*head, *_numbers(overview, now, room), *_table(overview, rows, room), *heat]
    return _fit([*lines, *_alerts(overview, alerts, shown, room), *tail], room)


def _title(overview: Overview, title: str, room: Room) -> Text:
    meta = overview.meta
    gpus = [str(gpu.get("name", "")) for gpu in meta.get("gpus") or [] if isinstance(gpu, dict)]
    torch = f"torch {meta['torch']}" if meta.get("torch") else ""
    ranks = f"rank {meta['rank']} of {meta.get('ranks')}" if "rank" in meta else f"{meta.get('ranks')} ranks"
    several = ranks if meta.get("ranks", 1) != 1 else ""
    found = [str(fact) for fact in (several, meta.get("backend"), meta.get("device"), *gpus[:1], torch) if fact]
    facts = _plain(", ".join(found), room)
    left = _cut(f"staticmoe monitor  {_plain(title, room)}", max(1, room.width - cell_len(facts) - 2), room)
    gap = max(2, room.width - cell_len(left) - cell_len(facts))
    return Text.assemble((left, "bold"), " " * gap, (facts, "dim"))


def _numbers(overview: Overview, now: float, room: Room) -> list[Text]:
    """State, loss, drop rate, and what was run again or skipped: four lines."""
    age = None if overview.time is None else max(0.0, now - overview.time)
    state = Text.assemble(
        ("step ", "dim"),
        f"{overview.step:,}" if overview.step is not None else "-",
        ("   record ", "dim"),
        ("now" if age is not None and age < 1 else f"{in_seconds(age)} ago", "yellow" if age and age > OLD else ""),
        ("   ", ""),
        in_digits(overview.value("throughput/tokens_per_s")),
        (" tokens/s   p50 ", "dim"),
        in_seconds(overview.value("time/step_p50")),
        (" p99 ", "dim"),
        in_seconds(overview.value("time/step_p99")),
    )
    loss, drop = overview.series["train/loss"], overview.series["moe/drop_rate"]
    held = overview.series["eval/loss"].latest
    lows = [point.low for point in loss.points] or [0.0]
    highs = [point.high for point in loss.points] or [0.0]
    worst = max((point.high for point in drop.points), default=None)
    eval_loss = "" if held is None else f"  eval {in_digits(held)}"
    around = f"{in_digits(min(lows))} to {in_digits(max(highs))}{eval_loss}" if loss.points else ""
    return [
        state,
        _spark_line("loss", in_digits(loss.latest), around, [point.mean for point in loss.points], room),
        _spark_line(
            "drop",
            in_percent(drop.latest),
            f"up to {in_percent(worst)}" if worst is not None else "",
            [point.high for point in drop.points],
            room,
            floor=0.0,
        ),
        _events(overview, room),
    ]


def _spark_line(
    name: str, value: str, around: str, values: Sequence[float], room: Room, floor: float | None = None
) -> Text:
    columns = max(4, room.width - 5 - 10 - cell_len(around) - 2)
    drawn = sparkline(values, columns, room.glyphs.spark, floor)
    return Text.assemble((f"{name} ", "dim"), f"{value:<10}", (f"{drawn:<{columns}}", "cyan"), ("  " + around, "dim"))


def sparkline(values: Sequence[float], columns: int, glyphs: str, floor: float | None = None) -> str:
    """Values as characters, the largest of those that share a column, from `floor` or the least of them upwards."""
    if not values:
        return ""
    columns = min(columns, len(values))
    edges = [index * len(values) // columns for index in range(columns + 1)]
    tops = [max(values[start:end]) for start, end in zip(edges, edges[1:], strict=False)]
    low = min(tops) if floor is None else floor
    span = max(tops) - low
    top = len(glyphs) - 1
    return "".join(glyphs[min(top, int((value - low) / span * len(glyphs))) if span > 0 else 0] for value in tops)


def _events(overview: Overview, room: Room) -> Text:
    counts = [(name, overview.value(f"graph/{name}")) for name in ("skips", "reruns", "recaptures")]
    factor = overview.capacity_factor
    text = Text()
    for name, count in counts:
        text.append(f"{name} ", "dim").append(f"{in_digits(count)} ", "yellow" if count else "")
    text.append("factor ", "dim").append("dropless " if factor is None else f"{factor:g} ")
    if overview.last_event is not None:
        kind, step, reasons = overview.last_event
        why = f": {_plain(', '.join(reasons), room)}" if reasons else ""
        text.append(f"last {kind} {step:,}{why}", "dim")
    return text


def _table(overview: Overview, limit: int, room: Room) -> list[Text]:
    """A heading, and a line a layer."""
    layers = overview.layers
    width = max(8, min(room.width - sum(CELLS.values()), max((cell_len(layer.name) for layer in layers), default=0)))
    width = max(width, min(room.width - sum(CELLS.values()), 24))
    when = "" if overview.window is None else f", steps {overview.window[0]:,}-{overview.window[1]:,}"
    heading = _cell(f"layers{when}", width, room) + "".join(f"{name:>{size}}" for name, size in CELLS.items())
    lines = [Text(heading, "bold")]
    shown, more = _that_fit(layers, limit)
    for layer in shown:
        cells = {
            "drop": (in_percent(layer.drop_rate), "red" if layer.drop_rate else ""),
            "max_vio": (in_hundredths(layer.max_vio), ""),
            "required": (in_hundredths(layer.required_factor), "yellow" if overview.is_near(layer) else ""),
            "capacity rows": (in_digits(number(layer.capacity_rows)), ""),
            "dead": (in_digits(number(layer.dead_experts)), "magenta" if layer.dead_experts else ""),
        }
        line = Text(_cell(_plain(layer.name, room), width, room, keep_end=True))
        for name, (value, style) in cells.items():
            line.append(f"{value:>{CELLS[name]}}", style)
        lines.append(line)
    return [*lines, *_and_more(more)]


def _heat_map(layers: Sequence[Layer], limit: int, room: Room) -> list[Text]:
    """A legend, and a line a layer: a character an expert, or for a few of them."""
    if not any(layer.load for layer in layers):
        return [Text("load: waiting for the first window of steps", "dim")]
    labels = distinct_parts([layer.name for layer in layers])
    names = min(24, max(cell_len(label) for label in labels.values()), room.width // 3)
    each = experts_per_column(layers, room.width - names - 1)
    legend = Text.assemble(("load/even", "bold"), ("" if each == 1 else f", {each} experts a column", "dim"))
    for level, text in enumerate(heat_legend()):
        legend.append(f" {room.glyphs.heat[level]}", HEAT_STYLES[level]).append(text, "dim")
    lines = [legend]
    shown, more = _that_fit(layers, limit)
    for layer in shown:
        line = Text(_cell(_plain(labels[layer.name], room), names, room, keep_end=True) + " ")
        for ratio in relative_load(layer.load, each):
            line.append(room.glyphs.heat[heat_level(ratio)], HEAT_STYLES[heat_level(ratio)])
        lines.append(line)
    return [*lines, *_and_more(more)]


def distinct_parts(names: Sequence[str]) -> dict[str, str]:
    """Names without the parts, between dots, that all of them begin or end with: those of layers become numbers."""
    parts = [name.split(".") for name in names]
    shortest = min(map(len, parts)) - 1
    first = last = 0
    while len(names) > 1 and first < shortest and len({part[first] for part in parts}) == 1:
        first += 1
    while len(names) > 1 and last < shortest - first and len({part[-1 - last] for part in parts}) == 1:
        last += 1
    return {name: ".".join(part[first : len(part) - last]) for name, part in zip(names, parts, strict=True)}


def _that_fit(layers: Sequence[Layer], limit: int) -> tuple[Sequence[Layer], int]:
    """All in the model's order where they fit, else the worst; and how many are left out."""
    if len(layers) <= limit:
        return layers, 0
    shown = max(0, limit - 1)
    return worst_first(layers)[:shown], len(layers) - shown


def _and_more(count: int) -> list[Text]:
    return [Text(f"and {count} more", "dim")] if count else []


def _alerts(overview: Overview, alerts: Sequence[Alert], shown: int, room: Room) -> list[Text]:
    if not alerts:
        return [Text("no alerts", "dim")]
    open_rules = ", ".join(overview.open_alerts) or "none"
    lines = [Text.assemble(("alerts", "bold"), ("  open: " + _plain(open_rules, room), "dim"))]
    for alert in alerts[-shown:]:
        clock = "--:--:--" if alert.time is None else time.strftime("%H:%M:%S", time.localtime(alert.time))
        kind = "resolved" if alert.resolved else alert.severity
        step = "" if alert.step is None else f" step {alert.step:,}"
        line = Text(f"{clock} ", "dim").append(_plain(kind, room), SEVERITY_STYLES.get(kind, "green"))
        lines.append(line.append(_plain(f"{step} {alert.rule}: {alert.message}", room)))
    return lines


def _fit(lines: Sequence[Text], room: Room) -> list[Text]:
    """Cut lines to the width, and their number to the height."""
    kept = list(lines if room.height is None else lines[: room.height])
    for line in kept:
        line.no_wrap, line.overflow = True, "crop"
        if cell_len(line.plain) > room.width:
            line.truncate(room.width - len(room.glyphs.more))
            line.append(room.glyphs.more)
        line.rstrip()
    return kept


def _plain(text: str, room: Room) -> str:
    """Text that moves no cursor and that the screen can show."""
    shown = "".join(character if character.isprintable() else "?" for character in text)
    return shown if room.glyphs is BLOCKS else shown.encode("ascii", "replace").decode()


def _cut(text: str, width: int, room: Room, keep_end: bool = False) -> str:
    """At most `width` columns, with a mark where something was cut off."""
    if cell_len(text) <= width:
        return text
    if not keep_end:
        return set_cell_size(text, width - len(room.glyphs.more)) + room.glyphs.more
    kept = text
    while cell_len(kept) > width - len(room.glyphs.more):
        kept = kept[1:]
    return room.glyphs.more + kept


def _cell(text: str, width: int, room: Room, keep_end: bool = False) -> str:
    return set_cell_size(_cut(text, width, room, keep_end), width)
