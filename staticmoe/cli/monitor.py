"""`staticmoe monitor`: a live look at a run from its files, or a page about it. The run notices nothing.

staticmoe monitor runs/20250102-030405
staticmoe monitor runs/20250102-030405 --once
staticmoe monitor runs/20250102-030405 --html report.html
staticmoe monitor runs/20250102-030405 --rank 3
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live

from staticmoe.cli.bench import need_file
from staticmoe.cli.monitor_view import ASCII, BLOCKS, Room, frame
from staticmoe.errors import ConfigError
from staticmoe.observe.follow import RunFollower
from staticmoe.observe.html_report import write_html
from staticmoe.observe.merge import RanksFollower
from staticmoe.observe.overview import Overview
from staticmoe.observe.ranks import rank_folder

# Read between two frames: a screen stays alive while a long run is read for the first time.
STREAM_BYTES = 4 << 20
PROGRESS_SECONDS = 2.0
# Records by which a rank may be behind without a word: the ranks' files are not read at one moment.
LATE = 5

Followed = RunFollower | RanksFollower


def monitor(
    run_dir: Annotated[Path, typer.Argument(help="Directory of the run: its --run-dir, or RunnerConfig(run_dir=...).")],
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end, as without a terminal.")] = False,
    refresh: Annotated[float, typer.Option(help="Seconds between two looks at the files.")] = 1.0,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with charts and end; with --once a frame too.", show_default=False)
    ] = None,
    rank: Annotated[
        int | None, typer.Option(help="Of several ranks only this one; else all, reduced.", show_default=False)
    ] = None,
) -> None:
    """Show loss, drop rates, layers, load and alerts of a run, live or as a page. Ctrl-C ends it."""
    if not math.isfinite(refresh) or refresh <= 0:
        raise ConfigError(f"--refresh: expected seconds above 0; got {refresh}")
    if not run_dir.is_dir():
        got = "is a file" if run_dir.exists() else "does not exist"
        raise ConfigError(
            f"run directory: expected the directory of a run; {run_dir} {got}: give the --run-dir of the training, or "
            "the run_dir of its RunnerConfig"
        )
    need_file("--html", html)
    console, overview = Console(), Overview()
    follower = RanksFollower(run_dir, overview) if rank is None else RunFollower(one_rank(run_dir, rank), overview)
    try:
        if html is None and not once and console.is_terminal and not console.is_dumb_terminal:
            watch(follower, overview, console, refresh)
            return
        read_all(follower)
        follower.settle(final=True)
        if once or html is None:
            show_once(follower, overview, console)
        if html is not None:
            try:
                write_html(overview, html, title=str(follower.run_dir), unreadable=follower.unreadable)
            except OSError as error:
                raise ConfigError(
                    f"--html: expected a file that can be written; got {html}: {error.strerror}"
                ) from error
            console.print(f"page: {html}", markup=False, highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        # Asked for: nothing is half done, for nothing is written but the page, and that whole.
        raise typer.Exit(0) from None
    finally:
        follower.close()


def one_rank(run_dir: Path, rank: int) -> Path:
    """The folder of a rank.

    Raises:
        ConfigError: there is none.
    """
    folder = rank_folder(run_dir, rank)
    if rank < 0 or not folder.is_dir():
        raise ConfigError(
            f"--rank: expected a rank whose files are in {run_dir}; got {rank}, and {folder} is not there: leave it "
            "out for all ranks"
        )
    return folder


def read_all(follower: Followed) -> None:
    """Read what is there, saying how far it has come where that takes long."""
    said = time.monotonic()
    while follower.poll(STREAM_BYTES):
        if time.monotonic() - said >= PROGRESS_SECONDS:
            said = time.monotonic()
            typer.echo(f"reading: {follower.share_read:.0%}", err=True)


def show_once(follower: Followed, overview: Overview, console: Console) -> None:
    """Print a frame as wide as the console and as long as it needs."""
    room = Room(console.width, None, BLOCKS if console.encoding.startswith("utf") else ASCII)
    for line in frame(overview, str(follower.run_dir), time.time(), room, notes(follower, behind=False)):
        console.print(line)


def watch(follower: Followed, overview: Overview, console: Console, refresh: float) -> None:
    """Show frame after frame until an interruption; what stood on the screen comes back then."""
    glyphs = BLOCKS if console.encoding.startswith("utf") else ASCII
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            behind = follower.poll(STREAM_BYTES)
            room = Room(console.width, console.height, glyphs)
            lines = frame(overview, str(follower.run_dir), time.time(), room, notes(follower, behind))
            live.update(Group(*lines), refresh=True)
            if not behind:
                time.sleep(refresh)


def late(follower: Followed) -> dict[int, int]:
    """Rank -> records by which it is behind, where that is worth a word."""
    found = follower.behind.items()
    return {rank: records for rank, records in found if records > LATE and rank not in follower.absent}


def notes(follower: Followed, behind: bool) -> list[str]:
    """What else there is to say about the files."""
    found = [f"reading: {follower.share_read:.0%}"] if behind else []
    if not behind:
        found += [f"rank {rank} is {records} records behind" for rank, records in late(follower).items()]
        found += [f"of rank {rank} nothing is here" for rank in follower.absent]
    if follower.unreadable:
        found.append(f"{follower.unreadable} lines could not be read and are left out")
    return found
