"""The result of a tuning as text of at most 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from staticmoe.tune.intervals import LEVEL, Interval
from staticmoe.tune.result import Finding
from staticmoe.tune.table import Row, Table

WIDTH = 80
# Characters of a layer in the table.
_NAME = 5


def percent(share: float, decimals: int = 3) -> str:
    """A share in percent, at most `decimals` digits behind the point and `decimals` + 3 characters."""
    value, least = 100 * share, 10.0**-decimals
    if value == 0:
        return "0"
    if value < least / 2:
        return f"<{least:.{decimals}f}"
    return "100" if share == 1 else f"{value:.{decimals if value < 9.9995 else decimals - 1}f}"


def in_bounds(interval: Interval, decimals: int) -> str:
    """A rate in percent, and its bounds."""
    rate, low, high = (percent(share, decimals) for share in (interval.rate, interval.low, interval.high))
    return f"{rate} [{low},{high}]"


def labels(names: Sequence[str]) -> tuple[dict[str, str], str]:
    """A short name for each module, what they have in common being left out, and a pattern that says what that is."""
    parts = {name: (name or "(the model)").split(".") for name in names}
    if len(parts) == 1:
        return {name: "all" for name in parts}, ".".join(*parts.values())
    front, back = _common(list(parts.values())), _common([part[::-1] for part in parts.values()])
    # One name may be the beginning of another: then it has nothing of its own, and no common end is looked for.
    back, some = max(min(back, min(map(len, parts.values())) - front - 1), 0), next(iter(parts.values()))
    pattern = ".".join([*some[:front], "*", *some[len(some) - back :]])
    own = {name: ".".join(part[front : len(part) - back]) or "(itself)" for name, part in parts.items()}
    return {name: label if len(label) <= _NAME else "~" + label[1 - _NAME :] for name, label in own.items()}, pattern


def _common(lists: Sequence[Sequence[str]]) -> int:
    """Length of the common beginning."""
    columns = zip(*lists, strict=False)
    return next((n for n, column in enumerate(columns) if len(set(column)) > 1), min(map(len, lists)))


def line_of(row: Row, names: Mapping[str, str], *, by_expert: bool) -> str:
    """A line of the table."""
    factor = "none" if row.factor is None else f"{row.factor:g}"
    worst = f"{percent(row.worst_drop)} {names[row.worst_layer]}" if row.worst_drop else "-"
    bound = f"{row.limit:>7}" if by_expert else f"{'-':>7}"
    cells = (f"{factor:>5}", f"{row.capacity_rows:>7}", bound, f"{in_bounds(row.drop, 3):<22}", f"{worst:<12}")
    return f"{' '.join(cells)} {in_bounds(row.rerun, 2):<16} {row.time:.2f}"


def table_lines(table: Table) -> list[str]:
    """The table below its headings, and what its columns are."""
    judge = table.judge
    names, pattern = labels(list(judge.loads.layers))
    one = "one rank" if judge.loads.replicas == 1 else f"each of {judge.loads.replicas} ranks"
    ranks = one if judge.ranks == 1 else f"{judge.ranks} ranks, made of consecutive micro-batches"
    lines = [
        f"capacity scope {judge.scope}, {ranks}, {judge.steps} steps",
        f"{'f':>5} {'rows':>7} {'expert':>7} {'dropped, %':<22} {'worst layer':<12} {'reruns, %':<16} time",
        *(line_of(row, names, by_expert=judge.scope == "expert") for row in table.rows),
        *wrapped(
            f"[low,high]: bounds at {LEVEL:.0%}, for loads as they were recorded. rows: capacity_rows of a layer on a "
            "rank; expert: of one expert. reruns: steps in which some layer overflows. time: of a step with "
            "overflow='rerun', 1 being one without an overflow. Work follows rows that are there: a factor that "
            f"nothing exceeds takes no time. layers: {pattern}"
        ),
    ]
    known = [(row.factor, row.extra_bytes) for row in table.rows if row.extra_bytes is not None]
    if len(known) < len(table.rows):
        lines += wrapped("memory: grows with rows, by bytes that this run's meta.json does not tell")
    elif any(size for _, size in known):
        listed = ", ".join(f"{factor:g}: {size / 2**20:.1f} MiB" for factor, size in known)
        lines += wrapped(f"memory of the rows above the balanced load, all layers: {listed}")
    else:
        lines += wrapped("memory: no factor here has more rows than arrive without a bound, so that none costs memory")
    return lines


def finding_lines(finding: Finding) -> list[str]:
    """The table, notes, the recommendation with the options that make it so, and drift."""
    advice = finding.advice
    lines = [*table_lines(finding.table)]
    for note in finding.table.notes:
        lines += wrapped(f"note: {note}")
    factor = "dropless" if advice.factor is None else f"factor {advice.factor:g}"
    lines += ["", *wrapped(f"recommended: {factor}. {advice.reason}")]
    # Not wrapped: lines to copy.
    lines += [f"  RunnerConfig({advice.arguments})", f"  staticmoe train {advice.flags}"]
    missing = "drift: not looked for: nothing can overflow, or there are fewer than two steps in each half"
    lines += wrapped(finding.drift.words if finding.drift is not None else missing)
    return lines


def wrapped(text: str) -> list[str]:
    """Lines of at most 80 columns."""
    return textwrap.wrap(text, WIDTH, break_on_hyphens=False)
