"""Candidates and recommendations: by hand on small recordings, and on uniform, natural and adversarial loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from staticmoe.config import RunnerConfig
from staticmoe.errors import ConfigError
from staticmoe.tune import Judge, Layer, Loads, expected_time, recommend, tabulate
from staticmoe.tune.intervals import Interval, clopper_pearson
from staticmoe.tune.table import row_bytes_of

Recording = Callable[..., Loads]


def every_tenth(recording: Recording, steps: int = 200) -> Loads:
    """Balanced, and in every tenth step layer b sends all to one expert."""
    balanced = [[4, 4, 4, 4]] * steps
    skewed = [[16, 0, 0, 0] if step % 10 == 9 else [4, 4, 4, 4] for step in range(steps)]
    return recording({"a": balanced, "b": skewed}, 16)


def test_a_row_by_hand(recording: Recording) -> None:
    row = Judge(every_tenth(recording), max_in_flight=3).row(1.5)
    # C = 6: 10 of the 16 are dropped in 20 of 200 steps of one layer of two.
    assert (row.capacity_rows, row.limit) == (16, 6)
    assert row.drop.rate == 200 / 6400 and row.worst_layer == "b" and row.worst_drop == 200 / 3200
    assert row.rerun == Interval(0.1, *clopper_pearson(20, 200))
    assert row.time == pytest.approx(1 + 0.1 * (1 + 3 + 1)) and row.extra_bytes == 0
    assert row.drop.low < row.drop.rate < row.drop.high < 0.06


def test_the_time_of_reruns() -> None:
    assert expected_time(0.0, 2) == 1.0
    assert expected_time(0.01, 2) == pytest.approx(1.04)
    assert expected_time(0.5, 1, narrow=0.9, wide=1.2) == pytest.approx(1 + 0.5 * (1.8 + 1.2))


def test_steps_of_several_micro_batches_overflow_where_one_does(recording: Recording) -> None:
    rows = [[16, 0, 0, 0] if step % 10 == 9 else [4, 4, 4, 4] for step in range(200)]
    row = Judge(recording({"a": rows}, 16, accumulate=5)).row(1.5)
    assert row.rerun.rate == 0.5 and row.drop.rate == 200 / 3200


def test_uniform_loads_need_little_and_natural_ones_more(recording: Recording) -> None:
    """The factor that drops at most a thousandth, for even and for uneven popularity, by the same number of steps."""
    random = np.random.default_rng(0)
    found = {}
    for name, concentration in (("uniform", 1e6), ("natural", 4.0)):
        popularity = random.dirichlet(np.full(8, concentration))
        loads = recording({"a": random.multinomial(4096, popularity, size=400)}, 4096)
        table = tabulate(Judge(loads), [1.0 + 0.05 * n for n in range(40)])
        found[name] = recommend(table, max_drop_rate=0.001)
        row = next(row for row in table.rows if row.factor == found[name].factor)
        assert row.drop.rate <= row.drop.high <= 0.001
        smaller = [other for other in table.rows if other.factor < row.factor]
        assert smaller and all(other.drop.high > 0.001 for other in smaller)
        # With that much noise less than a fraction of a percent, popularity alone decides.
        assert found[name].factor == pytest.approx(max(popularity) * 8, abs=0.12)
    assert found["uniform"].factor < 1.15 < found["natural"].factor


def test_an_adversarial_batch_is_not_averaged_away(recording: Recording) -> None:
    """All of every tenth batch goes to one expert: no factor below the one where nothing can overflow keeps it."""
    table = tabulate(Judge(every_tenth(recording)), [1.0, 2.0, 3.5])
    advice = recommend(table, max_rerun_rate=0.05)
    assert advice.factor is None and not advice.candidate and "dropless" in advice.reason
    assert [row.rerun.rate for row in table.rows] == [0.1, 0.1, 0.1]
    # Half of the steps may be run again: then the smallest will do.
    assert recommend(table, max_rerun_rate=0.5).factor == 1.0


def test_the_upper_bound_decides_and_not_the_rate(recording: Recording) -> None:
    """Nothing overflowed at 1.5 in 100 steps, which shows no more than that 3.6 % do not."""
    rows = [[5, 4, 4, 3]] * 100
    table = tabulate(Judge(recording({"a": rows}, 16)), [1.5, 2.0])
    high = table.rows[0].rerun.high
    assert table.rows[0].rerun.rate == 0 and high == pytest.approx(clopper_pearson(0, 100)[1]) and 0.036 < high < 0.037
    assert recommend(table, max_rerun_rate=0.037).factor == 1.5
    advice = recommend(table, max_rerun_rate=0.01)
    assert advice.factor is None and not advice.candidate
    assert "factor 1.5 has it; to show that takes about 360 steps of recording instead of 100" in advice.reason
    more = tabulate(Judge(recording({"a": rows * 4}, 16)), [1.5, 2.0])
    assert recommend(more, max_rerun_rate=0.01).factor == 1.5


def test_the_smallest_that_would_do_is_found_beyond_the_candidates(recording: Recording) -> None:
    """Ten of 16 in every tenth step: C = 10, from 2.26 on by rounding up."""
    rows = [[10, 2, 2, 2] if step % 10 == 9 else [4, 4, 4, 4] for step in range(400)]
    advice = recommend(tabulate(Judge(recording({"a": rows}, 16)), [1.0, 2.0]), max_rerun_rate=0.01)
    assert advice.factor == 2.26 and not advice.candidate
    assert advice.reason.endswith("the smallest that would do is 2.26")
    both = recommend(tabulate(Judge(recording({"a": rows}, 16)), [1.0, 2.26]), max_drop_rate=0.5, max_rerun_rate=0.01)
    assert both.factor == 2.26 and both.candidate and both.overflow == "drop"


def test_the_fastest_counts_reruns_and_takes_no_more_than_that(recording: Recording) -> None:
    rows = [[10, 2, 2, 2] if step % 10 == 9 else [4, 4, 4, 4] for step in range(400)]
    table = tabulate(Judge(recording({"a": rows}, 16)), [2.0, 2.5, 3.0])
    advice = recommend(table)
    assert [round(row.time, 9) for row in table.rows] == [1.4, 1.0, 1.0] and advice.factor == 2.5
    assert advice.config == {"capacity_factor": 2.5, "capacity_scope": "expert", "overflow": "rerun"}
    assert RunnerConfig(**advice.config).train_capacity.factor == 2.5
    assert advice.arguments == "capacity_factor=2.5, capacity_scope='expert', overflow='rerun'"
    assert advice.flags == "--capacity-factor 2.5 --capacity-scope expert --overflow rerun"
    often = recommend(tabulate(Judge(recording({"a": [[16, 0, 0, 0]] * 50}, 16)), [1.0, 2.0]))
    assert often.factor == 1.0 and "max_rerun_fraction=0.2" in often.reason and "max_rerun" not in advice.reason


def test_a_rank_on_one_gpu_has_nothing_to_tune(recording: Recording) -> None:
    loads = every_tenth(recording)
    table = tabulate(Judge(loads, "rank"), [1.0, 2.0])
    assert all(row.drop == row.rerun == Interval(0.0, 0.0, 0.0) and row.time == 1 for row in table.rows)
    advice = recommend(table, max_drop_rate=0.0)
    assert advice.factor is None and advice.reason.startswith("nothing to tune") and table.sensitive(None) is None
    assert advice.flags == "--capacity-scope rank --overflow drop"
    several = recommend(tabulate(Judge(loads, "rank", 4), [1.0, 4.0]), max_rerun_rate=0.5)
    assert several.factor == 4.0, "with four ranks one of them can be sent everything"
    assert table.judge.can_overflow(0.9) and tabulate(Judge(loads, "rank", 2)).sensitive(None) == 1.0


def test_few_steps_are_said_and_widen(recording: Recording) -> None:
    table = tabulate(Judge(every_tenth(recording), "expert", 4), [1.0, 2.0])
    assert table.judge.steps == 50 and table.notes == ()
    few = tabulate(Judge(every_tenth(recording, 80), "expert", 4), [1.0, 2.0])
    assert few.judge.steps == 20 and "only 20 steps of 4 recorded rows: fewer than 30" in few.notes[0]
    assert few.rows[0].rerun.high - few.rows[0].rerun.low > table.rows[0].rerun.high - table.rows[0].rerun.low


def test_a_load_that_stays_for_long_is_little_evidence(recording: Recording) -> None:
    """Half of the steps overflow either way; in two long runs that is hardly more than two observations."""
    skewed, balanced = [[8, 4, 2, 2]], [[4, 4, 4, 4]]
    mixed, slow = (
        Judge(recording({"a": rows}, 16)).row(1.5)
        for rows in ((skewed + balanced) * 100, skewed * 100 + balanced * 100)
    )
    assert mixed.rerun.rate == slow.rerun.rate == 0.5
    assert mixed.rerun.high < 0.58 and slow.rerun.high > 0.8 and slow.drop.high > 1.3 * mixed.drop.high


def test_notes_of_the_recording_are_handed_on(recording: Recording) -> None:
    loads = recording({"a": [[4, 4]] * 40}, 8, notes=("recorded so",))
    assert tabulate(Judge(loads), [1.0]).notes == ("recorded so",)


def test_the_bytes_of_a_row_come_from_the_run_or_from_nowhere(recording: Recording) -> None:
    meta: dict[str, Any] = {
        "config": {"capacity_factor": 1.5},
        "participants": {name: {"capacity_rows": 24, "tokens": 8, "top_k": 2} for name in ("a", "b")},
        "memory": {"forecast": {"capacity_slack": 16 * 100}},
    }
    assert row_bytes_of(meta) == 100
    assert row_bytes_of({**meta, "memory": None}) is None and row_bytes_of({}) is None
    assert row_bytes_of({**meta, "config": {"capacity_factor": 1.0}}) is None
    loads = every_tenth(recording)
    # R of four ranks at 2: one expert each, C = ceil(2 * 64 / 4) = 32, 16 more than balanced, in two layers.
    assert Judge(loads, "expert", 4, row_bytes=100.0).row(2.0).extra_bytes == 3200
    assert Judge(loads, "expert", 4).row(2.0).extra_bytes is None
    assert Judge(loads, "expert", 4, row_bytes=100.0).row(1.0).extra_bytes == 0


def test_what_cannot_be_asked_is_refused(recording: Recording) -> None:
    loads = every_tenth(recording)
    with pytest.raises(ConfigError, match="scope: expected one of rank, expert; got 'all'"):
        Judge(loads, "all")
    with pytest.raises(ConfigError, match="factors: expected at least one"):
        tabulate(Judge(loads), [])
    with pytest.raises(ConfigError, match="capacity_factor: expected None"):
        tabulate(Judge(loads), [0.0])
    for limits in ({"max_drop_rate": -0.1}, {"max_rerun_rate": 1.5}):
        with pytest.raises(ConfigError, match=rf"{next(iter(limits))}: expected a share between 0 and 1"):
            recommend(tabulate(Judge(loads), [1.0]), **limits)


def test_a_wider_capacity_never_has_a_higher_bound(recording: Recording) -> None:
    """One step in twenty needs 90 rows of an expert, which is a factor of 2.25; no step needs more."""
    rows = [[90, 30, 20, 20] if step % 20 == 9 else [40, 40, 40, 40] for step in range(400)]
    judge = Judge(recording({"a": rows}, 160))
    highs = [judge.row(factor).drop.high for factor in (1.5, 2.0, 2.225, 2.5, 3.0)]
    assert highs == sorted(highs, reverse=True) and 1 / 3200 < highs[2] < 1 / 1600
    # At 2.225, with 89 rows, one row is lost twenty times. Unseen losses alone would allow 50 of 160 rows in 0.9 %.
    assert judge.row(2.5).drop.rate == 0 and highs[3] == highs[4] == highs[2] < 0.2 * 50 / 160 * 0.009


def test_upper_bounds_do_not_rise_with_the_factor() -> None:
    """Losses that die away look correlated for ever, and where none is left the bound is that of a first one."""
    random = np.random.default_rng(3)
    skew = 1 + 3 * np.exp(-np.arange(400) / 40)
    rows = [random.multinomial(512, np.array([s, *[1.0] * 7]) / (s + 7)) for s in skew]
    loads = Loads({"moe": Layer(8, 512)}, {"moe": np.array(rows)})
    judge = Judge(loads)
    alone = [judge.row(factor).drop.high for factor in (1.5, 2.0, 3.0, 4.0)]
    assert alone != sorted(alone, reverse=True), "else there is nothing to see"
    table = tabulate(judge, (1.5, 2.0, 3.0, 4.0))
    for rates in ([row.drop for row in table.rows], [row.rerun for row in table.rows]):
        highs = [rate.high for rate in rates]
        assert highs == sorted(highs, reverse=True) and all(rate.rate <= rate.high for rate in rates)
    assert table.rows[-1].drop.high == min(alone)
