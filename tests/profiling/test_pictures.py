"""The trace and the picture show the kernels where they were, under the names of their phases."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from staticmoe.profiling import plot
from staticmoe.profiling.errors import ProfileError
from staticmoe.profiling.nsys import read_nsys
from staticmoe.profiling.timeline import FOR_EVER, Copy, GraphLaunch, Kernel, Range, Timeline
from staticmoe.profiling.trace import trace_events, write_trace

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib comes with the extra `report`"
)


@pytest.fixture
def timeline(golden: Callable[..., Any], tmp_path: Path) -> Timeline:
    """The whole run."""
    return read_nsys(golden("2025.3").write(tmp_path / "x.sqlite"))


def slices(events: list[dict[str, Any]], category: str) -> list[dict[str, Any]]:
    return [event for event in events if event.get("cat") == category]


def test_the_trace_of_a_whole_run(timeline: Timeline, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.trace.json"
    write_trace(timeline, path)
    events = json.loads(path.read_text())["traceEvents"]
    assert [one.name for one in path.parent.iterdir()] == ["x.trace.json"]
    device = 1 << 24
    kernels = [event for event in events if event.get("args", {}).get("rule")]
    assert len(kernels) == len(timeline.kernels)
    (up, *others) = [event for event in kernels if event["cat"] == "up"]
    assert len(others) == 3 and up["name"] == "cutlass_gemm" and up["args"] == {"phase": "up", "rule": "lineage"}
    assert (up["pid"], up["tid"], up["ts"], up["dur"]) == (device, 7, 2050, 50)
    # Each phase of a replay is a slice over its kernels.
    phases = [event for event in slices(events, "phase") if 2000 <= event["ts"] < 3000 and event["tid"] == 7]
    assert [(one["name"], one["ts"], one["dur"]) for one in sorted(phases, key=lambda one: one["ts"])][:2] == [
        ("up", 2050, 50),
        ("attention", 2100, 50),
    ]
    assert len(phases) == 11
    steps = [event for event in slices(events, "range") if event["name"] == "iteration"]
    assert [(one["pid"], one["tid"], one["ts"], one["dur"]) for one in steps][1] == (77, 100, 2000, 900)
    names = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    assert names == {(device, 7): "stream 7", (device, 8): "stream 8", (77, 100): "thread 100", (77, 101): "thread 101"}


def test_other_work_in_the_trace() -> None:
    """Copies and whole replays lie on their streams; a range without an end is left out; runs end where phases do."""

    def kernel(start: int, correlation: int) -> Kernel:
        return Kernel(start, start + 1000, 0, 7, 5, correlation, "staticmoe_up_gemm", "x")

    made = Timeline(
        "x",
        "nsys",
        [kernel(0, 1), kernel(1000, 1), kernel(2000, 2)],
        [Copy(1, 2, 1, 9, 5, 3, "HtoD", 64), Copy(3, 4, 0, 7, 5, 4, "memset", 8)],
        [GraphLaunch(7000, 9000, 0, 7, 5, 9)],
        [],
        [Range(0, FOR_EVER, 5, 6, "replay", "staticmoe")],
    )
    events = trace_events(made)
    assert [(one["ts"], one["dur"], one["args"]) for one in slices(events, "phase")] == [
        (0, 2, {"kernels": 2}),
        (2, 1, {"kernels": 1}),
    ]
    assert {(one["name"], one["pid"], one["args"]["bytes"]) for one in slices(events, "copy")} == {
        ("copy HtoD", (1 << 24) + 1, 64),
        ("memset", 1 << 24, 8),
    }
    assert [(one["ts"], one["dur"]) for one in slices(events, "graph")] == [(7, 2)] and not slices(events, "range")


def test_bars_of_one_iteration(timeline: Timeline) -> None:
    """By stream and phase, from the first kernel of the iteration on."""
    found = plot.bars(timeline)
    assert found.keys() == {(0, 7), (0, 8)} and found[0, 8] == {"down": [(425_000, 475_000)]}
    assert found[0, 7]["up"] == [(0, 50_000)] and found[0, 7]["optimizer"] == [(600_000, 800_000)]
    assert len(found[0, 7]) == 11


def test_bars_are_of_the_iteration_in_the_middle() -> None:
    kernels = [
        Kernel(1000 * number, 1000 * number + ns, 0, 7, 5, 0, "staticmoe_up_gemm", "x")
        for number, ns in enumerate((100, 300, 900))
    ]
    steps = [Range(1000 * number, 1000 * number + 990, 5, 6, "iteration", "staticmoe") for number in range(3)]
    copies = [Copy(1200, 1250, 0, 8, 5, 3, "HtoD", 64), Copy(1290, 1400, 0, 8, 5, 3, "HtoD", 64)]
    found = plot.bars(Timeline("x", "nsys", kernels, copies, [], [], steps))
    assert found == {(0, 7): {"up": [(0, 300)]}, (0, 8): {"copies": [(200, 250), (290, 300)]}}


def test_bars_of_whole_replays() -> None:
    launches = [GraphLaunch(100, 300, 0, 7, 5, 1), GraphLaunch(400, 500, 0, 7, 5, 2)]
    found = plot.bars(Timeline("x", "nsys", [], [], launches, [], []))
    assert found == {(0, 7): {"replay": [(0, 200), (300, 400)]}}


@needs_matplotlib
def test_the_picture(timeline: Timeline, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.png"
    plot.write_plot(timeline, path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and [one.name for one in path.parent.iterdir()] == ["x.png"]
    import numpy
    from matplotlib.image import imread

    # Every phase has a colour of its own: as many as there are phases, beside black, white and the shades between them.
    pixels = imread(path)[..., :3]
    coloured = pixels[(pixels.max(-1) - pixels.min(-1)) > 0.2]
    shades, counts = numpy.unique(coloured.round(2), axis=0, return_counts=True)
    assert (counts > 500).sum() == 10 and len(shades) >= 10


def test_without_matplotlib_the_extra_is_named(
    timeline: Timeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ProfileError, match=r"pip install 'staticmoe\[report\]'"):
        plot.write_plot(timeline, tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()
