"""Reads a profile by what it is, not by its name."""

from __future__ import annotations

from pathlib import Path

from staticmoe.profiling.errors import ProfileError
from staticmoe.profiling.kineto import read_kineto
from staticmoe.profiling.nsys import read_nsys
from staticmoe.profiling.timeline import Timeline

_SQLITE = b"SQLite format 3\x00"


def read_profile(path: Path) -> Timeline:
    """Read an SQLite export of nsys or a Chrome trace of torch.profiler.

    Raises:
        ProfileError: it is neither, or damaged; an .nsys-rep has to be exported first.
    """
    if not path.is_file():
        raise ProfileError(f"{path}: expected a profile (.sqlite, .json, .json.gz); there is none: check the path")
    if path.suffix == ".nsys-rep":
        raise ProfileError(
            f"{path}: expected an exported report; got the report itself: nsys export --type sqlite --lazy=false {path}"
        )
    with path.open("rb") as file:
        begin = file.read(len(_SQLITE))
    if begin == _SQLITE or path.suffix in (".sqlite", ".db"):
        return read_nsys(path)
    if begin.lstrip()[:1] in (b"{", b"[") or begin[:2] == b"\x1f\x8b" or path.suffix in (".json", ".gz"):
        return read_kineto(path)
    raise ProfileError(
        f"{path}: expected an SQLite export of nsys or a Chrome trace of torch.profiler; it begins with {begin[:8]!r}: "
        "give a .sqlite, .json or .json.gz"
    )
