"""`staticmoe explain`: what a code of the audit means, with an example of the fault and of its mend.

staticmoe explain SM106
staticmoe explain
"""

from __future__ import annotations

from typing import Annotated

import typer

from staticmoe.audit.catalogue import lookup
from staticmoe.audit.report import catalogue_lines, entry_lines


def explain(
    code: Annotated[
        str | None, typer.Argument(help="Such as SM106; without one, all are listed.", show_default=False)
    ] = None,
) -> None:
    """Say what a code of the audit means, why, and what to write instead."""
    for line in catalogue_lines() if code is None else entry_lines(lookup(code)):
        typer.echo(line)
