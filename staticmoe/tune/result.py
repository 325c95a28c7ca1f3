"""The result of a tuning as JSON: what was asked and found, and the options that a runner takes."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from staticmoe.errors import ConfigError
from staticmoe.tune.advice import Recommendation
from staticmoe.tune.drift import Drift
from staticmoe.tune.intervals import LEVEL
from staticmoe.tune.table import Table

KIND, SCHEMA = "staticmoe.tune", 1


@dataclasses.dataclass(frozen=True, eq=False)
class Finding:
    """All that was found for one number of ranks; `drift` is None where a half is too short to say."""

    table: Table
    advice: Recommendation
    drift: Drift | None


def result_of(findings: Sequence[Finding], limits: dict[str, float | None]) -> dict[str, Any]:
    """The result as plain values; "config" is the recommendation for the first number of ranks."""
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "config": findings[0].advice.config,
        "level": LEVEL,
        "limits": limits,
        "tables": [
            {
                "expert_parallel": finding.table.judge.ranks,
                "capacity_scope": finding.table.judge.scope,
                "steps": finding.table.judge.steps,
                "notes": list(finding.table.notes),
                "rows": [dataclasses.asdict(row) for row in finding.table.rows],
                "recommendation": {
                    **finding.advice.config, "candidate": finding.advice.candidate, "reason": finding.advice.reason
                },
                "drift": None if finding.drift is None else {
                    **dataclasses.asdict(finding.drift), "drifted": finding.drift.drifted
                },
            }
            for finding in findings
        ],
    }  # fmt: skip


def write_result(result: dict[str, Any], path: Path) -> None:
    """Write the result; the file is there as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    os.replace(partial, path)


def load_config(path: str | Path) -> dict[str, Any]:
    """Return the options that a tuning recommends: `RunnerConfig(**load_config("tuned.json"))`.

    Raises:
        ConfigError: the file is missing, or was not written by `staticmoe tune --output`.
    """
    wanted = "expected a file that `staticmoe tune RUN_DIR --output` has written"
    try:
        result = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {wanted}; got {error}") from error
    found = (result.get("kind"), result.get("schema")) if isinstance(result, dict) else None
    if found != (KIND, SCHEMA):
        raise ConfigError(f"{path}: {wanted}, kind {KIND!r} and schema {SCHEMA}; got {found}: tune again")
    return dict(result["config"])
