"""The numbers of an overview, worked out by hand: series, resumes, layers, loads, alerts, formats."""

from __future__ import annotations

from typing import Any

import pytest

from staticmoe.observe.overview import (
    ALERTS_KEPT,
    HEAT_LEVELS,
    Layer,
    Overview,
    experts_per_column,
    heat_legend,
    heat_level,
    in_digits,
    in_hundredths,
    in_percent,
    in_seconds,
    relative_load,
    worst_first,
)
from staticmoe.observe.series import POINTS, Series


def train(step: int, loss: float | None, **more: Any) -> dict[str, Any]:
    record = {"kind": "train", "step": step, "attempt": 0, "void": False, "skipped": False, "reasons": []}
    return {**record, "time": 1000.0 + step, "train/loss": loss, **more}


def take(overview: Overview, *records: dict[str, Any], stream: str = "metrics") -> Overview:
    for record in records:
        overview.take(stream, record)
    return overview


def losses(overview: Overview) -> list[tuple[int, int, float]]:
    return [(point.first, point.last, point.mean) for point in overview.series["train/loss"].points]


def test_points_are_joined_in_pairs_when_they_run_out() -> None:
    series = Series(limit=4)
    for step in range(1, 5):
        series.add(step, float(step))
    assert [(p.first, p.last, p.mean) for p in series.points] == [(1, 1, 1.0), (2, 2, 2.0), (3, 3, 3.0), (4, 4, 4.0)]
    for step in range(5, 10):
        series.add(step, float(step))
    found = [(p.first, p.last, p.steps, p.mean, p.low, p.high) for p in series.points]
    assert found == [(1, 4, 4, 2.5, 1.0, 4.0), (5, 8, 4, 6.5, 5.0, 8.0), (9, 9, 1, 9.0, 9.0, 9.0)]
    assert series.stride == 4 and series.latest == 9.0


def test_a_long_series_stays_short_and_keeps_its_sum_and_its_peak() -> None:
    series = Series()
    for step in range(200_000):
        series.add(step, {123_457: 1e6, 123_461: -5.0}.get(step, float(step % 10)))
    assert 1000 <= len(series.points) <= POINTS == 2000 and series.stride == 128
    assert sum(point.steps for point in series.points) == 200_000
    assert sum(point.total for point in series.points) == 900_000 + 1e6 - 7 - 6
    (peak,) = [point for point in series.points if point.high == 1e6]
    assert peak.first <= 123_457 <= peak.last and peak.low == -5.0


def test_an_odd_number_of_points_is_joined_too() -> None:
    series = Series(limit=3)
    for step in range(1, 5):
        series.add(step, float(step))
    # The third is joined with nobody and has room for the fourth.
    assert [(p.first, p.last, p.steps) for p in series.points] == [(1, 2, 2), (3, 3, 1), (4, 4, 1)]
    series.add(5, 5.0)
    assert [(p.first, p.last, p.steps) for p in series.points] == [(1, 2, 2), (3, 3, 1), (4, 5, 2)]


def test_a_point_for_steps_on_both_sides_is_forgotten_whole() -> None:
    series = Series(limit=4)
    for step in range(1, 10):
        series.add(step, float(step))
    series.forget_from(7)
    assert [(p.first, p.last) for p in series.points] == [(1, 4)]
    series.add(7, 70.0)
    assert [(p.first, p.last, p.mean) for p in series.points] == [(1, 4, 2.5), (7, 7, 70.0)]


def test_the_evaluations_of_a_step_are_one_point_at_their_mean() -> None:
    overview = Overview()
    for step, loss in ((10, 2.0), (10, 4.0), (20, 1.0)):
        take(overview, {"kind": "eval", "step": step, "void": False, "time": 5.0, "eval/loss": loss})
    points = overview.series["eval/loss"].points
    assert [(p.first, p.steps, p.values, p.mean) for p in points] == [(10, 1, 2, 3.0), (20, 1, 1, 1.0)]
    assert overview.step is None and overview.latest == {} and overview.time == 5.0
    take(overview, {"kind": "eval", "step": 10, "void": False, "time": 6.0, "eval/loss": 7.0})
    assert [(p.first, p.mean) for p in points] == [(10, 7.0)]


def test_void_skipped_and_unfinite_records_are_no_points() -> None:
    overview = take(
        Overview(),
        train(1, 5.0),
        train(2, 99.0, void=True),
        train(2, 4.0, attempt=1, reasons=["capacity_overflow"]),
        train(3, 50.0, skipped=True, reasons=["nonfinite"]),
        train(4, None, nonfinite={"train/loss": "nan"}),
        train(5, 3.0),
        train(6, 99.0, void=True),
    )
    assert losses(overview) == [(1, 1, 5.0), (2, 2, 4.0), (5, 5, 3.0)]
    assert overview.step == 5 and overview.time == 1006.0 and overview.latest["step"] == 5
    assert overview.last_event == ("skip", 3, ("nonfinite",))
    assert take(Overview(), train(2, 4.0, attempt=1)).last_event == ("rerun", 2, ())
    assert take(Overview(), train(1, 5.0)).last_event is None


def test_a_resumed_run_forgets_what_it_does_again() -> None:
    overview = take(Overview(), *(train(step, float(step)) for step in range(1, 6)))
    take(overview, {"kind": "eval", "step": 2, "time": 1.0, "eval/loss": 2.5})
    take(overview, {"kind": "eval", "step": 5, "time": 1.0, "eval/loss": 5.5})
    take(overview, train(4, 40.0))
    assert losses(overview) == [(1, 1, 1.0), (2, 2, 2.0), (3, 3, 3.0), (4, 4, 40.0)]
    assert [point.mean for point in overview.series["eval/loss"].points] == [2.5]
    assert overview.step == 4


def test_values_are_those_of_the_last_step() -> None:
    overview = take(
        Overview(),
        train(1, 5.0, **{"graph/variant": 1.5, "graph/reruns": 3, "time/step_p50": 0.25}),
        train(2, 4.0, **{"graph/variant": 1.25, "graph/reruns": 4, "time/step_p50": float("inf")}),
    )
    assert overview.capacity_factor == 1.25 and overview.value("graph/reruns") == 4.0
    assert overview.value("time/step_p50") is None and overview.value("absent") is None
    assert [point.mean for point in overview.series["graph/variant"].points] == [1.5, 1.25]
    assert take(overview, train(3, 4.0, **{"graph/variant": None})).capacity_factor is None


WINDOW = {
    "kind": "train", "first_step": 51, "step": 100, "steps": 50, "time": 9.0,
    "layers": {
        "a": {"routed": 100, "dropped": 1, "drop_rate": 0.01, "max_vio": 0.6, "required_factor": 1.2,
              "dead_experts": 1, "capacity_rows": 125, "load": [40, 30, 30, 0]},
        "b": {"routed": 100, "dropped": 0, "drop_rate": 0.0, "max_vio": 0.0, "required_factor": 1.0,
              "dead_experts": 0, "capacity_rows": 125, "load": [25, 25, 25, 25]},
    },
}  # fmt: skip


def test_layers_are_those_of_the_last_window_and_names_alone_before_it() -> None:
    overview = Overview()
    assert overview.layers == () and overview.window is None
    overview.take_meta({"participants": {"a": {}, "b": {}}})
    assert overview.layers == (Layer("a"), Layer("b"))
    take(overview, {**WINDOW, "first_step": 1, "step": 50, "layers": {}}, WINDOW, stream="layers")
    take(overview, {"kind": "other"}, stream="layers")
    assert overview.window == (51, 100)
    assert overview.layers == (
        Layer("a", 0.01, 0.6, 1.2, 125, 1, (40, 30, 30, 0)),
        Layer("b", 0.0, 0.0, 1.0, 125, 0, (25, 25, 25, 25)),
    )


@pytest.mark.parametrize(("required", "factor", "near"), [(1.2, 1.3, True), (1.1, 1.3, False), (1.2, None, False)])
def test_a_layer_is_near_from_nine_tenths_of_the_capacity_on(required: float, factor: float | None, near: bool) -> None:
    overview = take(Overview(), train(1, 5.0, **{"graph/variant": factor}))
    assert overview.is_near(Layer("a", required_factor=required)) is near
    assert overview.is_near(Layer("a")) is False


def test_the_worst_layer_drops_most_then_needs_most_then_is_most_uneven() -> None:
    layers = [
        Layer("even", 0.0, 0.1, 1.0), Layer("uneven", 0.0, 0.9, 1.0), Layer("full", 0.0, 0.2, 1.5),
        Layer("drops", 0.02, 0.1, 1.1), Layer("unknown"), Layer("last"),
    ]  # fmt: skip
    names = [layer.name for layer in worst_first(layers)]
    assert names == ["drops", "full", "uneven", "even", "unknown", "last"]


def test_loads_are_relative_to_an_even_one_and_columns_share_experts() -> None:
    assert relative_load([40, 30, 30, 0]) == [1.6, 1.2, 1.2, 0.0]
    assert relative_load([40, 30, 30, 0], per_column=2) == pytest.approx([1.4, 0.6])
    # The last column has one expert: its mean is its load.
    assert relative_load([10, 20, 30, 40, 50], per_column=2) == pytest.approx([0.5, 35 / 30, 50 / 30])
    assert relative_load([0, 0]) == [0.0, 0.0] and relative_load([]) == []
    wide = [Layer("a", load=(1,) * 8), Layer("b", load=(1,) * 129)]
    assert experts_per_column(wide, 64) == 3 and experts_per_column(wide, 129) == 1 and experts_per_column([], 9) == 1


def test_levels_begin_at_their_bounds_and_an_even_load_is_in_the_middle() -> None:
    ratios = [0, 1e-9, 0.2499, 0.25, 0.5, 0.8, 1.0, 1.2499, 1.25, 2.0, 3.9, 4.0, 100]
    assert [heat_level(ratio) for ratio in ratios] == [0, 1, 1, 2, 3, 4, 4, 4, 5, 6, 6, 7, 7]
    assert heat_legend() == ["0", "<0.25", "<0.5", "<0.8", "<1.25", "<2", "<4", ">=4"]
    assert len(heat_legend()) == HEAT_LEVELS == 8


def alert(kind: str, rule: str, step: int) -> dict[str, Any]:
    texts = {"severity": "warning", "metric": "moe/drop_rate", "message": "drops", "runbook": "raise it"}
    return {"kind": kind, "time": 1.0, "step": step, "rule": rule, "value": 0.02, "threshold": 0.01, **texts}


def test_alerts_are_open_until_they_are_resolved() -> None:
    overview = take(Overview(), alert("alert", "a", 1), alert("alert", "b", 2), stream="alerts")
    take(overview, alert("resolved", "a", 3), alert("other", "c", 4), stream="alerts")
    assert [(one.rule, one.resolved, one.step) for one in overview.alerts] == [
        ("a", False, 1), ("b", False, 2), ("a", True, 3)
    ]  # fmt: skip
    assert list(overview.open_alerts) == ["b"]
    last = overview.open_alerts["b"]
    assert (last.value, last.threshold, last.message, last.runbook) == (0.02, 0.01, "drops", "raise it")
    take(overview, *(alert("alert", "d", step) for step in range(500)), stream="alerts")
    assert len(overview.alerts) == ALERTS_KEPT == 200 and overview.alerts[0].step == 300


def test_a_stream_that_begins_anew_is_forgotten_and_the_others_stay() -> None:
    overview = take(Overview(), train(7, 5.0))
    take(overview, WINDOW, stream="layers")
    take(overview, alert("alert", "a", 1), stream="alerts")
    overview.restart("metrics")
    assert overview.step is None and overview.latest == {} and losses(overview) == []
    assert len(overview.layers) == 2 and len(overview.alerts) == 1
    overview.restart("layers")
    assert overview.layers == () and overview.window is None and len(overview.alerts) == 1
    overview.restart("alerts")
    assert not overview.alerts and overview.open_alerts == {}


def test_numbers_in_words() -> None:
    rates = [None, 0.0, 0.00001, 0.00052, 0.0123, 0.123, 1.0]
    assert [in_percent(rate) for rate in rates] == ["-", "0.00%", "<0.01%", "0.05%", "1.23%", "12.3%", "100%"]
    times = [None, 4e-6, 0.0123, 1.5, 90.0, 7200.0, 90000.0]
    assert [in_seconds(time) for time in times] == ["-", "4 us", "12.3 ms", "1.5 s", "1.5 min", "2 h", "1.04 d"]
    assert [in_digits(value) for value in (None, 3.21456, 12345.6, 0.00012346, -1234)] == [
        "-", "3.215", "12,346", "0.0001235", "-1,234"
    ]  # fmt: skip
    assert [in_hundredths(value) for value in (None, 1, 1.256)] == ["-", "1.00", "1.26"]
