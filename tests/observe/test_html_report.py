"""The page of a run: what is drawn lies where the numbers say, all that comes from files is text, nothing is loaded."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from staticmoe.observe.charts import CHARTS, Chart, draw_chart
from staticmoe.observe.html_report import render_html, write_html
from staticmoe.observe.overview import Overview

EVIL = "<script>alert(1)</script>\"'&"
WITHOUT_END = {"meta", "line"}


class Page(HTMLParser):
    """Elements with their attributes, and the text of each cell; tags that do not match fail."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in WITHOUT_END:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())

    def paths(self, kind: str) -> list[str]:
        """The drawings of the paths whose class begins with `kind`."""
        found = [attrs for tag, attrs in self.elements if tag == "path"]
        return [attrs["d"] or "" for attrs in found if (attrs["class"] or "").split()[0] == kind]


def overview_of(steps: int, points: int = 2000, name: str = "layers.0", **more: Any) -> Overview:
    overview = Overview(points)
    overview.take_meta(
        {"schema": 2, "started": 0.0, "backend": "cuda", "device": "cuda:0", "torch": "2.11.0",
         "gpus": [{"name": "H200"}], "config": {"overflow": "rerun", "capacity_factor": 1.25},
         "participants": {name: {"capacity_rows": 125}}}
    )  # fmt: skip
    for step in range(1, steps + 1):
        values = {
            "train/loss": 10.0 - step % 3, "train/grad_norm": 1.0, "moe/drop_rate": 0.01,
            "moe/drop_rate_max_layer": 0.02, "moe/required_factor": 1.1,
            "graph/variant": 1.25, "time/step_p50": 0.2, "time/step_p99": 0.3,
            "throughput/tokens_per_s": 1000.0, "graph/reruns": 4, **more,
        }  # fmt: skip
        overview.take("metrics", {"kind": "train", "step": step, "time": 3600.0 + step, **values})
        overview.take("metrics", {"kind": "eval", "step": step, "time": 3600.0 + step, "eval/loss": 9.0})
    layer = {"drop_rate": 0.5, "max_vio": 0.6, "required_factor": 1.2, "dead_experts": 1, "capacity_rows": 125_000}
    window = {"kind": "train", "first_step": 1, "step": steps, "layers": {name: {**layer, "load": [40, 30, 30, 0]}}}
    if steps:
        overview.take("layers", window)
    return overview


def test_there_is_a_line_for_each_series_and_nothing_is_loaded() -> None:
    text = render_html(overview_of(3), "a run")
    page = Page(text)
    series = [name for chart in CHARTS for name in chart.series]
    assert len(page.paths("line")) == len(series) == 10
    assert page.paths("band") == []
    assert "http" not in text and "url(" not in text and "@import" not in text
    tags = {tag for tag, _ in page.elements}
    assert tags.isdisjoint({"script", "link", "img", "iframe", "object", "image", "use", "foreignobject"})
    assert not [attrs for _, attrs in page.elements if {"src", "href", "onload", "onclick"} & attrs.keys()]
    assert "prefers-color-scheme: dark" in text and "color-scheme: light dark" in text


def test_a_line_lies_where_its_values_say() -> None:
    """From 64 to 532 pixels over steps 1 to 3, from 180 up to 10 over the range; a step time is drawn in ms."""
    chart = Chart("Time", "ms", {"time/step_p50": "p50"}, 1000.0)
    overview = Overview()
    for step, seconds in ((1, 0.0), (2, 0.05), (3, 0.1)):
        overview.take("metrics", {"kind": "train", "step": step, "time": 1.0, "time/step_p50": seconds})
    page = Page(draw_chart(chart, overview))
    assert page.paths("line") == ["M64,180L298,95L532,10"]
    marks = [text for text in page.texts if text]
    assert marks == ["Time", "p50", "0", "20", "40", "60", "80", "100", "1", "2", "3", "step", "ms"]


def test_a_chart_that_does_not_begin_at_zero_says_so_by_its_marks() -> None:
    chart = Chart("Loss", "nats", {"train/loss": "train"}, from_zero=False)
    overview = Overview()
    for step, loss in ((10, 3.2), (20, 2.3)):
        overview.take("metrics", {"kind": "train", "step": step, "time": 1.0, "train/loss": loss})
    page = Page(draw_chart(chart, overview))
    assert [text for text in page.texts if text][2:8] == ["2.2", "2.4", "2.6", "2.8", "3", "3.2"]
    assert page.paths("line") == ["M64,10L532,163"]


def test_a_single_point_is_a_dot_and_a_series_without_values_is_named() -> None:
    page = Page(render_html(overview_of(1, **{"graph/variant": None}), "a run"))
    assert len(page.paths("line")) == 9 and "no values: capacity" in page.texts
    for drawn in page.paths("line"):
        first, second = drawn.removeprefix("M").split("L")
        assert first == second
    assert "capacity factor" in page.texts and "dropless ·" in page.texts


def test_points_for_many_steps_have_a_band_of_their_range() -> None:
    text = render_html(overview_of(9, points=4), "a run")
    page = Page(text)
    # The loss alone varies: means of (9, 8, 10, 9), (8, 10, 9, 8) and 10 itself, on an axis from 8 to 10.
    (band,) = page.paths("band")
    assert "a point is the mean of 4 steps" in text
    # The first chart is that of the loss, and its first series lies on top of the second.
    assert re.findall(r'class="line s0" d="([^"]*)"', text)[0] == "M151.8,95L385.8,116.2L532,10"
    assert band == "M151.8,10L385.8,10L532,10L532,10L385.8,180L151.8,180Z"


def test_axes_name_their_units() -> None:
    texts = Page(render_html(overview_of(3), "a run")).texts
    units = ["loss, in the unit of loss_fn", "% of assignments", "ms", "x the balanced load", "tokens/s"]
    assert [unit for unit in units if unit not in texts] == []
    assert texts.count("step") == len(CHARTS) + 1
    assert "1,000" in texts and "125,000" in texts


def test_the_heat_map_has_a_cell_for_each_expert_in_the_level_of_its_load() -> None:
    """Loads of 1.6, 1.2, 1.2 and 0 of an even one; cells 20 wide from pixel 240 on."""
    text = render_html(overview_of(3), "a run")
    found = dict(re.findall(r'<path class="h(\d)" d="(M[23][^"]*)"', text))
    assert found == {
        "0": "M300 20h20v15h-20z", "4": "M260 20h20v15h-20zM280 20h20v15h-20z", "5": "M240 20h20v15h-20z"
    }  # fmt: skip
    legend = re.findall(r'<path class="h(\d)" d="M0 0h12v12h-12z"', text)
    assert legend == list("01234567")


def test_tables_hold_the_layers_the_alerts_and_the_configuration() -> None:
    overview = overview_of(3)
    for kind, step in (("alert", 7), ("resolved", 9)):
        alert = {"metric": "moe/drop_rate", "value": 0.02, "threshold": 0.01, "message": "it drops", "runbook": "raise"}
        overview.take("alerts", {"kind": kind, "step": step, "time": 60.0, "rule": "drops", "severity": "bad", **alert})
    page = Page(render_html(overview, "a run", unreadable=3))
    rows = " ".join(page.texts)
    assert "layers.0 50.0% 0.60 1.20 125,000 1" in re.sub(" +", " ", rows)
    cells = [text for text in page.texts if text]
    start = cells.index("what to do") + 1
    assert cells[start : start + 16] == [
        "1970-01-01 00:01:00 UTC", "9", "drops", "resolved", "moe/drop_rate 0.02", "0.01", "it drops", "raise",
        "1970-01-01 00:01:00 UTC", "7", "drops", "bad", "moe/drop_rate 0.02", "0.01", "it drops", "raise",
    ]  # fmt: skip
    assert "open: none" in cells and "3 lines of the files could not be read and are left out." in cells
    for name, value in (("overflow", "rerun"), ("capacity_factor", "1.25"), ("torch", "2.11.0"), ("backend", "cuda")):
        # Names of meta.json stand once more in the summary.
        at = max(index for index, cell in enumerate(cells) if cell == name)
        assert cells[at + 1] == value
    assert "1970-01-01 00:00:00 UTC" in cells and '[{"name": "H200"}]' in cells


@pytest.mark.parametrize("place", ["title", "layer", "alert", "backend", "config"])
def test_what_comes_from_files_is_text(place: str) -> None:
    overview = overview_of(2, name=EVIL if place == "layer" else "a")
    if place == "alert":
        names = dict.fromkeys(("rule", "severity", "metric", "message", "runbook"), EVIL)
        overview.take("alerts", {"kind": "alert", **names})
    overview.meta[EVIL if place == "config" else "backend"] = EVIL
    overview.meta["config"] = {EVIL: EVIL} if place == "config" else {}
    text = render_html(overview, EVIL if place == "title" else "a run")
    assert "<script" not in text
    page = Page(text)
    assert EVIL in page.texts or any(EVIL in shown for shown in page.texts)
    assert {tag for tag, _ in page.elements}.isdisjoint({"script"})
    assert all("alert(1)" not in str(attrs) for _, attrs in page.elements)


def test_a_run_without_a_step_says_so(tmp_path: Path) -> None:
    text = render_html(Overview(), "a run")
    page = Page(text)
    assert "No records yet: the run has not finished a step." in page.texts
    assert "meta.json is not there." in page.texts and page.paths("line") == []
    text = render_html(overview_of(0), "a run")
    assert "No records yet" in text and "rerun" in Page(text).texts


def test_the_file_is_written_whole_and_can_hold_any_name(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")
    write_html(overview_of(2, name="half of a pair \ud800, é"), path, "a run")
    assert [found.name for found in tmp_path.iterdir()] == ["page.html"]
    assert "half of a pair ?, é" in Page(path.read_text(encoding="utf-8")).texts
