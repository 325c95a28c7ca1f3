"""`staticmoe tune`: from the loads that a run recorded to the capacity factor to train with.

    staticmoe tune runs/first
    staticmoe tune runs/first --max-drop-rate 0.001 --output tuned.json --plot tuned.png
    staticmoe tune runs/first --skip 200 --max-drop-rate 0.01
    staticmoe tune runs/first --scope rank --ep 2,8,64 --max-rerun-rate 0.01

The run must have recorded the loads of its experts: RunnerConfig(experts_every=1). Of a run of several ranks, the files
of all of them are read: a step overflows where one of them does. Exit code 0 with a recommendation,
also where none of the candidates will do; 1 where the recording cannot be used.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from staticmoe.cli.bench import need_file
from staticmoe.config import CAPACITY_SCOPES, RunnerConfig
from staticmoe.errors import ConfigError
from staticmoe.tune.advice import recommend
from staticmoe.tune.drift import halves
from staticmoe.tune.loads import Loads
from staticmoe.tune.plot import need_matplotlib, write_plot
from staticmoe.tune.render import finding_lines, wrapped
from staticmoe.tune.result import Finding, result_of, write_result
from staticmoe.tune.sources import read_meta, read_run
from staticmoe.tune.table import FACTORS, Judge, row_bytes_of, tabulate

# Halves of a recording are compared from two steps each on.
_LEAST_STEPS = 4
_CANDIDATES = ",".join(f"{factor:g}" for factor in FACTORS)
_Number = TypeVar("_Number", int, float)


def tune(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a run with layers/experts.jsonl.", show_default=False)],
    scope: Annotated[str, typer.Option(help="expert or rank: what the capacity bounds.")] = "expert",
    max_drop_rate: Annotated[
        float | None, typer.Option(help="Share of assignments that may be dropped.", show_default=False)
    ] = None,
    max_rerun_rate: Annotated[
        float | None, typer.Option(help="Share of steps that may be run again.", show_default=False)
    ] = None,
    factors: Annotated[str, typer.Option(help="Candidates.")] = _CANDIDATES,
    ep: Annotated[str, typer.Option(help="Expert-parallel ranks, for each a table.")] = "1",
    skip: Annotated[int, typer.Option(help="Recorded steps left out at the start, where a new router settles.")] = 0,
    output: Annotated[Path | None, typer.Option(help="JSON file to write.", show_default=False)] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG file to write.", show_default=False)] = None,
) -> None:
    """Find the capacity factor for the loads that a run recorded."""
    limits = _limits(scope, max_drop_rate, max_rerun_rate)
    candidates, ranks = numbers("--factors", factors, float), numbers("--ep", ep, int)
    for option, path in (("--output", output), ("--plot", plot)):
        need_file(option, path)
    if plot is not None:
        need_matplotlib()
    console = Console()
    with console.status(f"reading {run_dir}"):
        loads = read_run(run_dir)
    steps, several = len(loads) // loads.replicas, f" of {loads.replicas} ranks" if loads.replicas > 1 else ""
    if not 0 <= skip < steps:
        raise ConfigError(f"--skip: expected at least 0 and fewer than the {steps} recorded steps; got {skip}")
    left_out = f", the first {skip} left out" if skip else ""
    say(console, [f"staticmoe tune: {steps} recorded steps{several}{left_out}, {len(loads.layers)} layers"])
    loads = loads.part(skip * loads.replicas, len(loads))
    findings = _findings(console, loads, read_meta(run_dir), scope, candidates, ranks, limits)
    if output is not None:
        write_result(result_of(findings, limits), output)
        say(console, ["", f"result: {output}", f'  RunnerConfig(**staticmoe.tune.load_config("{output}"))'])
    if plot is not None:
        write_plot([finding.table for finding in findings], plot)
        say(console, [f"plot: {plot}"])


def _limits(scope: str, max_drop_rate: float | None, max_rerun_rate: float | None) -> dict[str, float | None]:
    """Return the limits as `recommend` takes them.

    Raises:
        ConfigError: an unknown scope, both limits, or one that is no share.
    """
    if scope not in CAPACITY_SCOPES:
        raise ConfigError(f"--scope: expected one of {', '.join(CAPACITY_SCOPES)}; got {scope!r}")
    if max_drop_rate is not None and max_rerun_rate is not None:
        raise ConfigError(
            f"--max-drop-rate {max_drop_rate:g} and --max-rerun-rate {max_rerun_rate:g}: expected one of them: a step "
            "whose rows do not fit either drops some or is run again"
        )
    limits = {"max_drop_rate": max_drop_rate, "max_rerun_rate": max_rerun_rate}
    for name, limit in limits.items():
        if limit is not None and not 0 <= limit <= 1:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option}: expected a share between 0 and 1; got {limit:g}")
    return limits


def _findings(
    console: Console,
    loads: Loads,
    meta: dict[str, object],
    scope: str,
    candidates: list[float],
    ranks: list[int],
    limits: dict[str, float | None],
) -> list[Finding]:
    """Show what is found for each number of ranks, and return it; one that cannot be is left out with words.

    Raises:
        ConfigError: none of them can be.
    """
    config = meta.get("config")
    flight = config.get("max_in_flight") if isinstance(config, dict) else None
    flight = flight if isinstance(flight, int) else RunnerConfig.max_in_flight
    findings, refusals = [], []
    for number in ranks:
        say(console, [""])
        try:
            with console.status(f"{len(candidates)} factors at EP {number}"):
                judge = Judge(loads, scope, number, max_in_flight=flight, row_bytes=row_bytes_of(meta))
                table = tabulate(judge, candidates)
                advice = recommend(table, **limits)
                watched = table.sensitive(advice.factor)
                enough = watched is not None and judge.steps >= _LEAST_STEPS
                drift = halves(loads, watched, scope, number) if enough else None
        except ConfigError as error:
            if len(ranks) == 1:
                raise
            refusals.append(f"EP {number} is left out: {error}")
            say(console, wrapped(refusals[-1]))
            continue
        findings.append(Finding(table, advice, drift))
        say(console, finding_lines(findings[-1]))
    if not findings:
        raise ConfigError(f"--ep: expected a number of ranks that the recording can stand for; {'; '.join(refusals)}")
    if any(number > 1 for number in ranks):
        say(console, ["", *wrapped("note: this version has no expert parallelism: EP above 1 is a forecast for later")])
    return findings


def numbers(option: str, text: str, kind: Callable[[str], _Number]) -> list[_Number]:
    """Return the numbers of a comma-separated list, ascending and each once.

    Raises:
        ConfigError: one is no number, or not above 0.
    """
    found = []
    for part in text.split(","):
        try:
            value = kind(part)
        except ValueError:
            value = kind("0")
        if not 0 < value < float("inf"):
            word = "whole numbers" if kind is int else "numbers"
            raise ConfigError(f"{option}: expected {word} above 0 with commas between them; got {text!r}")
        found.append(value)
    return sorted(set(found))


def say(console: Console, lines: list[str]) -> None:
    """Write lines as they are: no markup, no wrapping."""
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
