"""The picture of a tuning: drop rate and rerun rate over the capacity factor, with their bounds."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from staticmoe.errors import ConfigError
from staticmoe.tune.intervals import Interval
from staticmoe.tune.table import Table


def need_matplotlib() -> None:
    """Refuse a plot where it cannot be drawn.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot: expected matplotlib, which is not installed; it comes with the extra `report`: "
            "pip install 'staticmoe[report]'"
        )


def curves(table: Table) -> dict[str, tuple[list[float], list[Interval]]]:
    """Heading -> factors and rates."""
    rows = [row for row in table.rows if row.factor is not None]
    factors = [float(row.factor) for row in rows if row.factor is not None]
    return {
        "dropped share": (factors, [row.drop for row in rows]),
        "rerun rate": (factors, [row.rerun for row in rows]),
    }


def write_plot(tables: Sequence[Table], path: Path) -> None:
    """Draw into a PNG, one curve a table.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    need_matplotlib()
    # No pyplot: its state and its choice of a screen are the caller's.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2)
    for table in tables:
        for axes, (heading, (factors, rates)) in zip(panels, curves(table).items(), strict=True):
            axes.plot(factors, [rate.rate for rate in rates], marker="o", label=f"EP {table.judge.ranks}")
            axes.fill_between(factors, [rate.low for rate in rates], [rate.high for rate in rates], alpha=0.2)
            axes.set_title(heading, fontsize=10)
            axes.set_xlabel(f"capacity factor, scope {table.judge.scope}")
            # Linear near 0, which is the rate that is hoped for.
            axes.set_yscale("symlog", linthresh=1e-4)
            axes.set_ylim(bottom=0)
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=150)
