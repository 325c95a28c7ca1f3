"""What is recorded, and the exact command lines for it.

The program runs twice, at node level and, for timing, at graph level. One that will not write to the same place twice
takes `{run}` in its arguments, which is "node" in the first run and "graph" in the second.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from staticmoe.profiling.errors import ProfileError

NODE, GRAPH = "node", "graph"
# In an argument of the program: stands for the level of the run.
RUN = "{run}"
ALL = "all"

# Options of torchrun that stand alone; all others take a value.
TORCHRUN_FLAGS = frozenset(
    {
        "-h", "--help", "--standalone", "-m", "--module", "--no-python", "--no_python", "--run-path", "--run_path",
        "--virtual-local-rank", "--virtual_local_rank",
    }
)  # fmt: skip
_MODULE, _NO_PYTHON = {"-m", "--module"}, {"--no-python", "--no_python"}
_TORCHRUN_MODULES = {"torch.distributed.run", "torch.distributed.launch"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording:
    """What to record.

    Args:
        command: the program and its arguments.
        folder: where the files go.
        start: the step before which recording begins.
        count: steps.
        ranks: "all", or ranks joined by commas.
        timing: record a second time at graph level, for times that tracing nodes does not change.
        timeout_s: of one run; None waits for ever.

    Raises:
        ProfileError: a value that cannot work.
    """

    command: tuple[str, ...]
    folder: Path
    start: int = 10
    count: int = 10
    ranks: str = "0"
    timing: bool = True
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if not self.command:
            raise ProfileError("command: expected a program after `--`; got none: staticmoe profile -- python train.py")
        if self.start < 1:
            raise ProfileError(f"--start: expected a step of at least 1; got {self.start}")
        if self.count < 1:
            raise ProfileError(f"--count: expected at least 1 step; got {self.count}")
        if self.ranks != ALL and re.fullmatch(r"\d+(,\d+)*", self.ranks) is None:
            raise ProfileError(f"--ranks: expected `all` or numbers like 0,3; got {self.ranks!r}")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ProfileError(f"--timeout: expected more than 0 s; got {self.timeout_s:g}")

    @property
    def window(self) -> str:
        """What the runner is told: start:count:ranks."""
        return f"{self.start}:{self.count}:{self.ranks}"

    def at(self, level: str) -> Recording:
        """The recording whose program is told which run it is."""
        return dataclasses.replace(self, command=tuple(word.replace(RUN, level) for word in self.command))

    @property
    def launched(self) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """The launcher of the ranks with its options, and the program of each rank; None for a single process."""
        return split_torchrun(self.command)


def nsys_options(nsys: Path, out: str, level: str) -> list[str]:
    """nsys with its options, to be followed by the program: nothing is sampled, for that disturbs the host."""
    return [
        str(nsys), "profile", "-t", "cuda,nvtx", f"--cuda-graph-trace={level}", "--sample=none", "--cpuctxsw=none",
        "-c", "cudaProfilerApi", "--capture-range-end=stop", "-o", out,
    ]  # fmt: skip


def record_command(recording: Recording, nsys: Path, folder: Path, level: str) -> list[str]:
    """The program under nsys; of several ranks each under its own, which names its file by the rank."""
    suffix = "" if level == NODE else "-timing"
    if recording.launched is None:
        return [*nsys_options(nsys, str(folder / f"profile{suffix}"), level), *recording.command]
    launcher, program = recording.launched
    return [*launcher, *nsys_options(nsys, str(folder / f"rank%q{{RANK}}{suffix}"), level), *program]


def kineto_path(recording: Recording, folder: Path) -> Path:
    """Where the runner shall write its own trace; of several ranks each puts its own for {rank}."""
    return folder / ("profile.json" if recording.launched is None else "rank{rank}.json")


def export_command(nsys: Path, report: Path, out: Path) -> list[str]:
    """From a report to SQLite, with all tables."""
    return [str(nsys), "export", "--type", "sqlite", "--lazy=false", "--output", str(out), str(report)]


def import_command(importer: Path, raw: Path, out: Path) -> list[str]:
    """From what an interrupted nsys left over to a report."""
    return [str(importer), "-i", str(raw), "-o", str(out)]


def split_torchrun(command: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Take a torchrun command apart, so that a tool can stand before each rank's program; None for any other.

    Raises:
        ProfileError: it names no program.
    """
    options = _options_start(command)
    if options is None:
        return None
    kept: list[str] = []
    module = plain = False
    place = options
    while place < len(command) and command[place].startswith("-") and command[place] != "--":
        word = command[place]
        module |= word in _MODULE
        plain |= word in _NO_PYTHON
        if word not in _MODULE | _NO_PYTHON:
            kept.append(word)
        place += 1
        if word not in TORCHRUN_FLAGS and "=" not in word and place < len(command):
            kept.append(command[place])
            place += 1
    if place < len(command) and command[place] == "--":
        place += 1
    if place >= len(command):
        raise ProfileError("command: expected torchrun to be given a program; got options only: name the script")
    python = [] if plain else [_python(command[0]), "-u", *(["-m"] if module else [])]
    return (*command[:options], *kept, "--no-python"), (*python, *command[place:])


def _python(launcher: str) -> str:
    """The Python that torchrun itself would start: its own, which lies beside it."""
    if Path(launcher).name.startswith("python"):
        return launcher
    found = shutil.which(launcher)
    beside = Path(found).parent / "python" if found else None
    return str(beside) if beside is not None and beside.is_file() else "python"


def _options_start(command: Sequence[str]) -> int | None:
    """Place after `torchrun` or `python -m torch.distributed.run`; None where the command is neither."""
    if command and Path(command[0]).name == "torchrun":
        return 1
    for place, word in enumerate(command[:-1]):
        if word == "-m" and command[place + 1] in _TORCHRUN_MODULES and Path(command[0]).name.startswith("python"):
            return place + 2
        if place and not word.startswith("-"):
            return None
    return None
