"""A run as one HTML page: charts as inline SVG, heat map, layers, alerts, configuration. No script, nothing to load.

Everything that comes from files is escaped. Colours follow `prefers-color-scheme`.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from staticmoe.observe.charts import CHARTS, draw_chart
from staticmoe.observe.overview import (
    Layer,
    Overview,
    heat_legend,
    heat_level,
    in_digits,
    in_hundredths,
    in_percent,
    in_seconds,
    number,
    relative_load,
)
from staticmoe.observe.series import POINTS

# Of the heat map: pixels of a cell and of the names before it, and the widest that a map may become.
CELL_HEIGHT, NAMES_WIDTH, MAP_WIDTH = 16, 240, 1120

STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1c1e21; --dim: #5f6670; --line: #d8dce2;
  --s0: #1f62c4; --s1: #c2410c; --h0: #1c1e21; --h1: #2166ac; --h2: #67a9cf; --h3: #b9d7ea; --h4: #e4e4e4;
  --h5: #fbc58f; --h6: #ef7f45; --h7: #b2182b; --bad: #b42318; }
@media (prefers-color-scheme: dark) { :root { --back: #14171a; --text: #e6e8eb; --dim: #9aa2ad; --line: #343a42;
  --s0: #7fb2ff; --s1: #ff9a5c; --h0: #ffffff; --h1: #3b82c4; --h2: #35658f; --h3: #2c4a63; --h4: #3a3f46;
  --h5: #7a5230; --h6: #c2652f; --h7: #f0545f; --bad: #ff7b72; } }
body { margin: 24px auto; max-width: 1160px; padding: 0 16px; background: var(--back); color: var(--text);
  font: 14px/1.45 system-ui, sans-serif; }
h1 { font-size: 20px; overflow-wrap: anywhere; } h2 { font-size: 16px; margin: 28px 0 8px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(340px, 1fr)); gap: 16px; }
figure { margin: 0; } figcaption { font-weight: 600; } figcaption span { margin-left: 8px; }
.dim { color: var(--dim); font-weight: 400; }
svg { width: 100%; height: auto; } svg text { fill: var(--dim); font-size: 11px; }
.grid { stroke: var(--line); fill: none; } .line { fill: none; stroke-width: 1.6; stroke-linecap: round; }
.s0 { stroke: var(--s0); } .s1 { stroke: var(--s1); } .band { stroke: none; opacity: .2; }
.f0 { fill: var(--s0); } .f1 { fill: var(--s1); } .c0 { color: var(--s0); } .c1 { color: var(--s1); }
.h0 { fill: var(--h0); } .h1 { fill: var(--h1); } .h2 { fill: var(--h2); } .h3 { fill: var(--h3); }
.h4 { fill: var(--h4); } .h5 { fill: var(--h5); } .h6 { fill: var(--h6); } .h7 { fill: var(--h7); }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { padding: 3px 12px 3px 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top;
  overflow-wrap: anywhere; }
td.n, th.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; } .bad { color: var(--bad); }
"""


def write_html(overview: Overview, path: str | os.PathLike[str], title: str, unreadable: int = 0) -> None:
    """Write the page whole, or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    partial = Path(f"{os.fspath(path)}.partial")
    partial.write_text(render_html(overview, title, unreadable), encoding="utf-8")
    os.replace(partial, path)


def render_html(overview: Overview, title: str, unreadable: int = 0) -> str:
    """Return the page.

    Args:
        overview: what is shown.
        title: name of the run.
        unreadable: lines of its files that were left out.
    """
    parts = [_summary(overview)]
    if unreadable:
        parts.append(f'<p class="bad">{unreadable} lines of the files could not be read and are left out.</p>')
    if overview.latest:
        charts = "".join(draw_chart(chart, overview) for chart in CHARTS)
        stride = max(series.stride for series in overview.series.values())
        parts += [
            f'<h2>Steps <span class="dim">{_stride_note(stride)}</span></h2><div class="charts">{charts}</div>',
            _heat_map(overview),
            _layers(overview),
        ]
    else:
        parts.append("<p>No records yet: the run has not finished a step.</p>")
    parts += [_alerts(overview), _configuration(overview)]
    # A surrogate half, which JSON can hold and UTF-8 cannot, becomes a question mark.
    name = escape(title)
    page = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{name}</title><style>{STYLE}</style></head>\n'
        f"<body><h1>{name}</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )
    return page.encode("utf-8", "replace").decode("utf-8")


def _stride_note(stride: int) -> str:
    if stride == 1:
        return "every committed step"
    return f"a point is the mean of {stride} steps, the band their range: at most {POINTS:,} points a series"


def _summary(overview: Overview) -> str:
    meta, value = overview.meta, overview.value
    last = None if overview.time is None else _utc(overview.time)
    factor = overview.capacity_factor
    facts = {
        "backend": meta.get("backend"),
        "device": meta.get("device"),
        "step": None if overview.step is None else f"{overview.step:,}",
        "last record": last,
        "loss": in_digits(overview.series["train/loss"].latest),
        "drop rate": in_percent(overview.series["moe/drop_rate"].latest),
        "tokens/s": in_digits(value("throughput/tokens_per_s")),
        "step p50, p99": f"{in_seconds(value('time/step_p50'))}, {in_seconds(value('time/step_p99'))}",
        "capacity factor": ("dropless" if factor is None else f"{factor:g}") if overview.latest else None,
        **{name: in_digits(value(f"graph/{name}")) for name in ("skips", "reruns", "recaptures")},
    }
    shown = [f'<span class="dim">{name}</span> {escape(str(text))}' for name, text in facts.items() if text is not None]
    return f"<p>{' &middot; '.join(shown)}</p>"


def _window(overview: Overview) -> str:
    return "" if overview.window is None else f"steps {overview.window[0]:,} to {overview.window[1]:,}"


def _heat_map(overview: Overview) -> str:
    layers = [layer for layer in overview.layers if layer.load]
    if not layers:
        return "<h2>Load</h2><p>The first window of steps is not complete.</p>"
    widest = max(len(layer.load) for layer in layers)
    cell = max(3, min(20, (MAP_WIDTH - NAMES_WIDTH) // widest))
    # One path a level instead of an element a cell: large models have tens of thousands.
    cells: list[list[str]] = [[] for _ in heat_legend()]
    names = []
    for row, layer in enumerate(layers):
        y = 20 + row * CELL_HEIGHT
        names.append(f'<text x="{NAMES_WIDTH - 8}" y="{y + 11}" text-anchor="end">{escape(_ending(layer.name))}</text>')
        for expert, ratio in enumerate(relative_load(layer.load)):
            x = NAMES_WIDTH + expert * cell
            cells[heat_level(ratio)].append(f"M{x} {y}h{cell}v{CELL_HEIGHT - 1}h-{cell}z")
    paths = [f'<path class="h{level}" d="{"".join(found)}"/>' for level, found in enumerate(cells) if found]
    width, height = NAMES_WIDTH + widest * cell + 8, 20 + len(layers) * CELL_HEIGHT
    numbers = "".join(
        f'<text x="{NAMES_WIDTH + expert * cell}" y="14">{expert}</text>'
        for expert in range(0, widest, max(1, -(-40 // cell)))
    )
    legend = " ".join(
        f'<svg viewBox="0 0 12 12" style="width:12px;height:12px" aria-hidden="true"><path class="h{level}" '
        f'd="M0 0h12v12h-12z"/></svg> {escape(text)}'
        for level, text in enumerate(heat_legend())
    )
    return (
        f'<h2>Load of the experts <span class="dim">over the even load of the layer, {_window(overview)}</span></h2>'
        f'<p class="dim">{legend}; columns are expert numbers</p>'
        f'<div class="wide"><svg viewBox="0 0 {width} {height}" style="width:{width}px" role="img" '
        f'aria-label="load of each expert by layer">{numbers}{"".join(names)}{"".join(paths)}</svg></div>'
    )


def _ending(name: str, length: int = 38) -> str:
    return name if len(name) <= length else "…" + name[1 - length :]


def _layers(overview: Overview) -> str:
    def row(layer: Layer) -> list[tuple[str, str]]:
        near = "n bad" if overview.is_near(layer) else "n"
        return [
            (layer.name, ""),
            (in_percent(layer.drop_rate), "n bad" if layer.drop_rate else "n"),
            (in_hundredths(layer.max_vio), "n"),
            (in_hundredths(layer.required_factor), near),
            (in_digits(number(layer.capacity_rows)), "n"),
            (in_digits(number(layer.dead_experts)), "n bad" if layer.dead_experts else "n"),
        ]

    heads = ["layer", "drop rate", "max_vio", "required factor", "capacity rows", "dead experts"]
    head = [(name, "n" if index else "") for index, name in enumerate(heads)]
    table = _table(head, [row(layer) for layer in overview.layers])
    return f'<h2>Layers <span class="dim">{_window(overview)}</span></h2>{table}'


def _alerts(overview: Overview) -> str:
    if not overview.alerts:
        return "<h2>Alerts</h2><p>None.</p>"
    head = [(name, "") for name in ("time", "step", "rule", "state", "value", "limit", "message", "what to do")]
    rows = [
        [
            ("-" if alert.time is None else _utc(alert.time), ""),
            ("-" if alert.step is None else f"{alert.step:,}", ""),
            (alert.rule, ""),
            ("resolved" if alert.resolved else alert.severity, "" if alert.resolved else "bad"),
            (f"{alert.metric} {in_digits(alert.value)}", ""),
            (in_digits(alert.threshold), ""),
            (alert.message, ""),
            (alert.runbook, ""),
        ]
        for alert in reversed(overview.alerts)
    ]
    still = ", ".join(overview.open_alerts) or "none"
    return f'<h2>Alerts <span class="dim">open: {escape(still)}</span></h2>{_table(head, rows)}'


def _configuration(overview: Overview) -> str:
    meta = {name: value for name, value in overview.meta.items() if name not in ("config", "participants")}
    started = number(meta.get("started"))
    if started is not None:
        meta["started"] = _utc(started)
    config = overview.meta.get("config")
    found = []
    for heading, table in (("Versions and devices", meta), ("Configuration", config)):
        if isinstance(table, dict) and table:
            rows = [[(str(name), ""), (_written(value), "")] for name, value in table.items()]
            found.append(f"<h2>{heading}</h2>{_table([('name', ''), ('value', '')], rows)}")
    return "".join(found) or "<h2>Configuration</h2><p>meta.json is not there.</p>"


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _table(head: Sequence[tuple[str, str]], rows: Iterable[Sequence[tuple[str, str]]]) -> str:
    """A table of (text, class) cells; the text is escaped."""

    def cells(row: Sequence[tuple[str, str]], tag: str) -> str:
        return "".join(f'<{tag} class="{kind}">{escape(text)}</{tag}>' for text, kind in row)

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{cells(head, "th")}</tr></thead><tbody>{body}</tbody></table></div>'


def _utc(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
