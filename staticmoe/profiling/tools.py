"""Finds nsys and its importer, and runs a tool so that what went wrong can be told.

STATICMOE_NSYS       the nsys to use
STATICMOE_NSYS_LIBS  folders with libraries that the importer lacks, joined by ":"
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from staticmoe.profiling.errors import ProfileError

NSYS, LIBRARIES = "STATICMOE_NSYS", "STATICMOE_NSYS_LIBS"
# Below the root of the file system; of several the newest version.
PLACES = (
    "opt/nvidia/nsight-systems*/target-linux-*/nsys",
    "opt/nvidia/nsight-systems*/*/target-linux-*/nsys",
    "opt/nvidia/nsight-systems*/*/bin/nsys",
    "opt/nvidia/nsight-compute/*/host/target-linux-*/nsys",
    "usr/local/cuda*/bin/nsys",
)
_LAST_LINES = 12
# How long a tool may take to end after it was asked to.
_GRACE_S = 20


def find_nsys(environment: Mapping[str, str] | None = None, root: Path = Path("/")) -> Path | None:
    """The nsys of the environment variable, of PATH, or of an installation below `root`; None where there is none.

    Raises:
        ProfileError: the variable names something that cannot be run.
    """
    environment = os.environ if environment is None else environment
    named = environment.get(NSYS)
    if named:
        found = shutil.which(named, path=environment.get("PATH"))
        if found is None:
            raise ProfileError(f"{NSYS}: expected a program that can be run; got {named}: name nsys, or unset it")
        return Path(found)
    found = shutil.which("nsys", path=environment.get("PATH", ""))
    if found is not None:
        return Path(found)
    for place in PLACES:
        candidates = [path for path in root.glob(place) if path.is_file() and os.access(path, os.X_OK)]
        if candidates:
            return max(candidates, key=_version)
    return None


def _version(path: Path) -> tuple[list[int], str]:
    """What newer versions have more of."""
    return [int(number) for number in re.findall(r"\d+", str(path))], str(path)


def find_importer(nsys: Path) -> Path | None:
    """QdstrmImporter beside the folder of an nsys, in any installation; None where there is none."""
    folder = nsys.resolve().parent
    for base in (folder.parent, folder):
        found = sorted(path for path in base.glob("*/QdstrmImporter") if path.is_file())
        if found:
            return found[-1]
    return None


def library_environment(folder: Path) -> dict[str, str]:
    """The environment of a tool that needs the libraries of its own folder and those of the variable."""
    parts = [str(folder), os.environ.get(LIBRARIES, ""), os.environ.get("LD_LIBRARY_PATH", "")]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(part for part in parts if part)}


@dataclasses.dataclass(frozen=True)
class Done:
    """A command that ended: exit code, and the last lines that it wrote."""

    command: tuple[str, ...]
    code: int
    last: tuple[str, ...]

    def failed(self, what: str, fix: str) -> ProfileError:
        """The error that tells what was run and what it said."""
        said = "\n  ".join(self.last) or "(nothing)"
        return ProfileError(
            f"{what}: expected it to work; got exit code {self.code} from\n  {shlex.join(self.command)}\n"
            f"which wrote last\n  {said}\n{fix}"
        )


def run_tool(
    command: Sequence[str],
    *,
    timeout_s: float | None,
    say: Callable[[str], None] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Done:
    """Run a command to its end; give every line that it writes to `say`.

    Raises:
        ProfileError: it cannot be started, or takes longer than the timeout, after which it is ended.
    """
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=None if environment is None else dict(environment),
            text=True,
            errors="replace",
            # Its children end with it, whatever they are.
            start_new_session=True,
        )
    except OSError as error:
        raise ProfileError(
            f"{shlex.join(command)}: expected a program that can be run; got {error.strerror}: check its path"
        ) from error
    last: deque[str] = deque(maxlen=_LAST_LINES)

    def read() -> None:
        for line in process.stdout or ():
            last.append(line.rstrip())
            if say is not None:
                say(line.rstrip("\n"))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        _end(process)
        reader.join(_GRACE_S)
        said = "\n  ".join(last) or "(nothing)"
        raise ProfileError(
            f"{shlex.join(command)}: expected an end within {timeout_s:g} s; it was stopped, and wrote last\n  {said}\n"
            "profile fewer steps, or allow more time with --timeout"
        ) from None
    except BaseException:
        # Control-C reaches only us, for the tool has a session of its own.
        _end(process)
        raise
    # A child of the tool may keep the pipe open after the end of the tool.
    reader.join(_GRACE_S)
    return Done(tuple(command), code, tuple(last))


def _end(process: subprocess.Popen[str]) -> None:
    """Ask the tool and its children to end, then make them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            continue
