"""The entry point `staticmoe`: joins the commands, and turns our own errors into a message and exit code 1."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from staticmoe.cli.audit import audit
from staticmoe.cli.bench import bench
from staticmoe.cli.doctor import doctor
from staticmoe.cli.explain import explain
from staticmoe.cli.monitor import monitor
from staticmoe.cli.profile import profile
from staticmoe.cli.train import train
from staticmoe.cli.tune import tune
from staticmoe.errors import StaticMoEError


class _Commands(TyperGroup):
    """A group whose commands end with a message, not with a traceback, where the error says what to do."""

    # Any: the class of a context lives in whichever click typer brings along.
    def invoke(self, ctx: Any) -> Any:
        """Run the command; our own errors become a message."""
        try:
            return super().invoke(ctx)
        except StaticMoEError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from error


# Plain help and messages, the same on a terminal, in a pipe and in a log.
app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False, rich_markup_mode=None)
app.command("train")(train)
app.command("monitor")(monitor)
app.command("tune")(tune)
app.command("profile")(profile)
app.command("audit")(audit)
app.command("explain")(explain)
app.command("doctor")(doctor)
app.command("bench")(bench)


@app.callback()
def _root() -> None:
    """Trains mixture-of-experts models at static shape: one captured graph per iteration."""


def main() -> None:
    """Run the command line."""
    app()
