"""The picture of a result: forward + backward TFLOP/s of every block in every case, beside the ceiling."""

from __future__ import annotations

import importlib.util
import statistics
from pathlib import Path
from typing import Any

# Bars of a case take this much of its place.
GROUP_WIDTH = 0.8


def why_no_plot() -> str | None:
    """What is missing for a plot and how to get it; None where nothing is."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no plot: matplotlib is not installed; it comes with the extra `report`: pip install 'staticmoe[report]'"
    return None


def bars(result: dict[str, Any]) -> dict[str, list[float | None]]:
    """Block -> forward + backward TFLOP/s in each case; None where it was left out."""
    names = list(dict.fromkeys(name for row in result["cases"] for name in row["blocks"]))
    return {
        name: [row["blocks"][name]["both"]["tflops"] if name in row["blocks"] else None for row in result["cases"]]
        for name in names
    }


def write_plot(result: dict[str, Any], path: Path) -> None:
    """Draw into a PNG, and make the folder that it lies in."""
    # No pyplot: its state and its choice of a screen are the caller's.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights, cases = bars(result), result["cases"]
    figure = Figure(figsize=(max(6.0, 1.2 * len(cases) * max(1, len(heights)) ** 0.5 + 3.0), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    width = GROUP_WIDTH / max(1, len(heights))
    for number, (name, values) in enumerate(heights.items()):
        places = [case - GROUP_WIDTH / 2 + (number + 0.5) * width for case in range(len(cases))]
        drawn = axes.bar(places, [value or 0.0 for value in values], width, label=name)
        axes.bar_label(drawn, labels=["-" if value is None else f"{value:.0f}" for value in values], fontsize=7)
    for case, row in enumerate(cases):
        ceiling = statistics.mean(row["ceiling_tflops"])
        # A label that starts with an underscore is none: the legend names the ceiling once.
        label = "_" if case else "ceiling: 8192^3 bf16 product"
        axes.hlines(ceiling, case - 0.5, case + 0.5, colors="black", linestyles="dashed", label=label)
    axes.set_xticks(range(len(cases)), [f"{row['tokens']} tokens\n{row['routing']}" for row in cases])
    axes.set_ylabel("TFLOP/s, forward + backward")
    axes.set_ylim(bottom=0)
    axes.set_title(title(result), fontsize=10)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def title(result: dict[str, Any]) -> str:
    """The shape, the dtype and where it ran."""
    sizes = "{hidden} x {intermediate}, {experts} experts, top {top_k}".format(**result["shape"])
    gpu = result["provenance"]["gpu"]
    name = gpu if isinstance(gpu, str) else gpu[0]["name"]
    return f"MoE block {sizes}, {result['dtype']}, {name}"
