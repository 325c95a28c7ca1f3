"""Recorded loads in, a capacity factor out: pure functions on counts of assignments.

    loads = read_run("runs/first")                       # or LoadRecorder, or calibrate(runner, batches)
    table = tabulate(Judge(loads, "expert"))
    print(recommend(table, max_drop_rate=0.001).arguments)

The counts are exact: what a layer drops at a capacity is a function of how many assignments each expert was given.
What they say about steps to come is bounded by `staticmoe.tune.intervals`.
"""

from __future__ import annotations

from staticmoe.tune.advice import Recommendation, recommend
from staticmoe.tune.drift import Drift, Holdout, compare, halves, holdout
from staticmoe.tune.intervals import Interval
from staticmoe.tune.loads import Layer, Loads
from staticmoe.tune.outcomes import Arrivals, Outcome
from staticmoe.tune.result import load_config
from staticmoe.tune.sources import LoadRecorder, calibrate, read_run
from staticmoe.tune.table import FACTORS, Judge, Row, Table, expected_time, tabulate

__all__ = [
    "FACTORS",
    "Arrivals",
    "Drift",
    "Holdout",
    "Interval",
    "Judge",
    "Layer",
    "LoadRecorder",
    "Loads",
    "Outcome",
    "Recommendation",
    "Row",
    "Table",
    "calibrate",
    "compare",
    "expected_time",
    "halves",
    "holdout",
    "load_config",
    "read_run",
    "recommend",
    "tabulate",
]
