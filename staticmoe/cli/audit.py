"""`staticmoe audit`: what a captured iteration could not hold, listed in one pass before anything is captured.

    staticmoe audit my_package.training:runner_arguments
    staticmoe audit train.py -- --config small.yaml
    staticmoe audit my_package.training:runner_arguments --json audit.json

Exit code: 0 without errors (warnings and notes may be listed), 2 with errors, 1 where the audit itself could not run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from staticmoe.audit.report import report_lines
from staticmoe.audit.targets import audit_factory, audit_script
from staticmoe.errors import ConfigError

FOUND = 2


def audit(
    target: Annotated[
        str, typer.Argument(help="pkg.module:factory, which returns a dict of the runner's arguments, or a script.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script, behind --.", show_default=False)
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="JSON file to write.", show_default=False)] = None,
) -> None:
    """List what a captured iteration of yours could not hold; captures and changes nothing."""
    if json_file is not None and not json_file.parent.is_dir():
        raise ConfigError(f"--json: expected a file in a folder that exists; got {json_file}")
    typer.echo(f"staticmoe audit {target}: a few iterations are run and observed, none is captured", err=True)
    if target.endswith(".py"):
        report = audit_script(Path(target), arguments or [])
    elif arguments:
        raise ConfigError(f"arguments: expected none for a factory; got {' '.join(arguments)}")
    else:
        report = audit_factory(target)
    for line in report_lines(report):
        typer.echo(line)
    if json_file is not None:
        try:
            json_file.write_text(json.dumps(report.as_dict(), indent=1) + "\n")
        except OSError as error:
            raise ConfigError(
                f"--json: expected a file that can be written; got {json_file}: {error.strerror}"
            ) from error
        typer.echo(f"written: {json_file}")
    if report.counts["error"]:
        raise typer.Exit(FOUND)
