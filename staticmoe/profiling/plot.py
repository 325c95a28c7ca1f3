"""The picture of one iteration: what each stream did, in the colours of the phases."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path

from staticmoe.profiling.attribution import UNATTRIBUTED, Attributed, attribute
from staticmoe.profiling.errors import ProfileError
from staticmoe.profiling.intervals import Span, union
from staticmoe.profiling.metrics import median
from staticmoe.profiling.result import write_file
from staticmoe.profiling.timeline import Timeline
from staticmoe.profiling.window import find_window

COPIES, REPLAYS = "copies", "replay"
# A picture has about so many columns: shorter kernels beside each other are drawn as one.
_COLUMNS = 4000
Track = tuple[int, int]


def need_plot() -> None:
    """Check that a plot can be drawn, before anything takes time.

    Raises:
        ProfileError: matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ProfileError(
            "--plot: expected matplotlib, which is not installed; it comes with the extra `report`: "
            "pip install 'staticmoe[report]'"
        )


def bars(timeline: Timeline) -> dict[Track, dict[str, list[Span]]]:
    """(device, stream) -> phase -> intervals in ns after the start of the iteration of median length.

    Raises:
        ProfileError: no device did anything.
    """
    window = find_window(timeline)
    kernels: dict[int, list[Attributed]] = {}
    for one in attribute(timeline):
        number = window.of_work(one.kernel, one.call)
        if number is not None:
            kernels.setdefault(number, []).append(one)
    spans: list[tuple[Track, str, int, int]] = []
    if kernels:
        lengths = {number: _extent(found) for number, found in kernels.items()}
        middle = median([end - start for start, end in lengths.values()])
        chosen = min(lengths, key=lambda number: (abs(lengths[number][1] - lengths[number][0] - middle), number))
        begin, end = lengths[chosen]
        for one in kernels[chosen]:
            spans.append(((one.kernel.device, one.kernel.stream), one.phase, one.kernel.start, one.kernel.end))
    else:
        begin, end = window.span
    for copy in timeline.copies:
        spans.append(((copy.device, copy.stream), COPIES, max(copy.start, begin), min(copy.end, end)))
    for launch in timeline.launches:
        spans.append(((launch.device, launch.stream), REPLAYS, max(launch.start, begin), min(launch.end, end)))
    found: dict[Track, dict[str, list[Span]]] = {}
    for track, phase, start, stop in sorted(spans):
        if stop > start:
            found.setdefault(track, {}).setdefault(phase, []).append((start - begin, stop - begin))
    return found


def _extent(kernels: Sequence[Attributed]) -> Span:
    return min(one.kernel.start for one in kernels), max(one.kernel.end for one in kernels)


def write_plot(timeline: Timeline, path: Path) -> None:
    """Draw into a PNG, and make the folder that it lies in.

    Raises:
        ProfileError: matplotlib is missing, no device did anything, or the file cannot be written.
    """
    need_plot()
    # No pyplot: its state and its choice of a screen are the caller's.
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tracks = bars(timeline)
    ends = [end for phases in tracks.values() for spans in phases.values() for _, end in spans]
    least = max(ends, default=1) // _COLUMNS
    figure = Figure(figsize=(14.0, 1.8 + 0.7 * len(tracks)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = sorted({phase for phases in tracks.values() for phase in phases})
    palette = [colormaps[kind](number) for kind in ("tab20", "tab20b", "tab20c") for number in range(20)]
    colours = {name: "0.8" if name == UNATTRIBUTED else palette[i % len(palette)] for i, name in enumerate(names)}
    shown: set[str] = set()
    for row, phases in enumerate(tracks.values()):
        for phase, spans in phases.items():
            joined = union((start, max(end, start + least)) for start, end in spans)
            # A label that starts with an underscore is none: the legend names each phase once.
            label = f"_{phase}" if phase in shown else phase
            shown.add(phase)
            parts = [(start / 1e6, (end - start) / 1e6) for start, end in joined]
            axes.broken_barh(parts, (row - 0.4, 0.8), color=colours[phase], label=label, linewidth=0)
    axes.set_yticks(range(len(tracks)), [f"GPU {device}, stream {stream}" for device, stream in tracks])
    axes.set_xlabel("ms after the first kernel of the iteration")
    figure.legend(loc="outside lower center", ncols=8, fontsize=8)
    raw = io.BytesIO()
    figure.savefig(raw, format="png", dpi=150)
    write_file(path, raw.getvalue())
