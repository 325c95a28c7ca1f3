"""Reads the SQLite file that `nsys export` writes, of 2023.4 and of newer versions.

A table exists only where it has rows, and columns come and go: both are asked for before they are read.
Nodes of graphs are in CUDA_GRAPH_EVENTS (2023.4) or CUDA_GRAPH_NODE_EVENTS (newer, where the former lists graphs).
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from staticmoe.profiling.errors import ProfileError
from staticmoe.profiling.timeline import (
    FOR_EVER,
    MEMSET,
    Copy,
    GraphLaunch,
    HostCall,
    Kernel,
    NodeOrigin,
    Range,
    Timeline,
)

_ACTIVITY = "CUPTI_ACTIVITY_KIND_"
_NODE_TABLES = ("CUDA_GRAPH_NODE_EVENTS", "CUDA_GRAPH_EVENTS")
_COPY_KINDS = {
    1: "HtoD",
    2: "DtoH",
    3: "HtoA",
    4: "AtoH",
    5: "AtoA",
    6: "AtoD",
    7: "DtoA",
    8: "DtoD",
    9: "HtoH",
    10: "PtoP",
}
_PAGEABLE, _RANGE_TYPES, _DOMAIN_TYPE = 0, (59, 60), 75
_VERSION = re.compile(r"(_v\d+)?(_ptsz|_ptds)?$")
_FIX = "export the report again: nsys export --type sqlite --lazy=false"


def read_nsys(path: Path) -> Timeline:
    """Everything of interest in an exported file.

    Raises:
        ProfileError: the file is missing, empty, damaged, or no export of nsys.
    """
    if not path.is_file():
        raise ProfileError(f"{path}: expected an SQLite file exported by nsys; there is none: check the path")
    if path.stat().st_size == 0:
        raise ProfileError(f"{path}: expected an SQLite file exported by nsys; it is empty: {_FIX}")
    try:
        connection = sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro", uri=True)
    except sqlite3.Error as error:
        raise ProfileError(f"{path}: expected an SQLite file that can be opened; got {error}: {_FIX}") from error
    try:
        return _Export(path, connection).timeline()
    except sqlite3.Error as error:
        raise ProfileError(f"{path}: expected an SQLite file exported by nsys; got {error}: {_FIX}") from error
    finally:
        connection.close()


def _pid(identity: int) -> int:
    return identity >> 24 & 0xFFFFFF


def _tid(identity: int) -> int:
    return identity & 0xFFFFFF


class _Export:
    """One open file."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path, self._connection = path, connection
        # Names of foreign code need not be UTF-8.
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
        self._tables = {name for (name,) in tables}
        if "StringIds" not in self._tables:
            listed = ", ".join(sorted(self._tables)[:5]) or "no table"
            raise ProfileError(f"{path}: expected an nsys export with the table StringIds; got {listed}: {_FIX}")
        self._strings: dict[int, str] = dict(self._rows("StringIds", ("id", "value")))

    def timeline(self) -> Timeline:
        """All of it."""
        return Timeline(
            str(self._path),
            "nsys",
            list(self._kernels()),
            [*self._copies(), *self._memsets()],
            list(self._launches()),
            list(self._calls()),
            list(self._ranges()),
            list(self._origins()),
        )

    def _columns(self, table: str) -> set[str]:
        return {row[1] for row in self._connection.execute(f"PRAGMA table_info({table})")}

    def _rows(self, table: str, needed: tuple[str, ...], wanted: tuple[str, ...] = ()) -> Iterator[tuple[Any, ...]]:
        """Rows with the needed columns and then the wanted ones, None for those that the file does not know."""
        if table not in self._tables:
            return
        there = self._columns(table)
        missing = [name for name in needed if name not in there]
        if missing:
            raise ProfileError(
                f"{self._path}: expected the columns {', '.join(needed)} in {table}; "
                f"{', '.join(missing)} is missing: {_FIX}"
            )
        chosen = [f'"{name}"' for name in needed] + [f'"{name}"' if name in there else "NULL" for name in wanted]
        yield from self._connection.execute(f'SELECT {", ".join(chosen)} FROM "{table}"')

    def _text(self, number: int | None) -> str:
        return self._strings.get(number, "") if number is not None else ""

    def _kernels(self) -> Iterator[Kernel]:
        needed = ("start", "end", "deviceId", "streamId", "globalPid", "correlationId", "shortName")
        for start, end, device, stream, owner, correlation, short, full, node in self._rows(
            f"{_ACTIVITY}KERNEL", needed, ("demangledName", "graphNodeId")
        ):
            name = self._text(short) or self._text(full)
            yield Kernel(
                start, end, device, stream, _pid(owner), correlation or 0, name, self._text(full) or name, node or None
            )

    def _copies(self) -> Iterator[Copy]:
        needed = ("start", "end", "deviceId", "streamId", "globalPid", "correlationId", "bytes", "copyKind")
        for start, end, device, stream, owner, correlation, size, kind, source, target, node in self._rows(
            f"{_ACTIVITY}MEMCPY", needed, ("srcKind", "dstKind", "graphNodeId")
        ):
            yield Copy(
                start, end, device, stream, _pid(owner), correlation or 0, _COPY_KINDS.get(kind, f"copy {kind}"), size,
                _PAGEABLE in (source, target), node or None,
            )  # fmt: skip

    def _memsets(self) -> Iterator[Copy]:
        needed = ("start", "end", "deviceId", "streamId", "globalPid", "correlationId")
        for start, end, device, stream, owner, correlation, size, node in self._rows(
            f"{_ACTIVITY}MEMSET", needed, ("bytes", "graphNodeId")
        ):
            yield Copy(
                start, end, device, stream, _pid(owner), correlation or 0, MEMSET, size or 0, False, node or None
            )

    def _launches(self) -> Iterator[GraphLaunch]:
        needed = ("start", "end", "deviceId", "streamId", "globalPid", "correlationId")
        for start, end, device, stream, owner, correlation in self._rows(f"{_ACTIVITY}GRAPH_TRACE", needed):
            yield GraphLaunch(start, end, device, stream, _pid(owner), correlation or 0)

    def _calls(self) -> Iterator[HostCall]:
        needed = ("start", "end", "globalTid", "correlationId", "nameId")
        for start, end, thread, correlation, name in self._rows(f"{_ACTIVITY}RUNTIME", needed):
            plain = _VERSION.sub("", self._text(name), count=1)
            yield HostCall(start, end, _pid(thread), _tid(thread), correlation or 0, plain)

    def _ranges(self) -> Iterator[Range]:
        rows = list(
            self._rows("NVTX_EVENTS", ("start", "end", "eventType", "globalTid"), ("text", "textId", "domainId"))
        )
        texts = [text if text is not None else self._text(number) for *_, text, number, _ in rows]
        # The default domain has number 0 and no row of its own; those made before recording began may have none either.
        domains: dict[tuple[int, int], str | None] = {}
        for (_, _, kind, thread, _, _, domain), text in zip(rows, texts, strict=True):
            if kind == _DOMAIN_TYPE and thread is not None:
                domains[_pid(thread), domain] = text
        for (start, end, kind, thread, _, _, domain), text in zip(rows, texts, strict=True):
            if kind in _RANGE_TYPES and thread is not None:
                owner = "" if not domain else domains.get((_pid(thread), domain))
                yield Range(start, FOR_EVER if end is None else end, _pid(thread), _tid(thread), text, owner)

    def _origins(self) -> Iterator[NodeOrigin]:
        needed = ("start", "globalTid", "graphNodeId")
        for table in _NODE_TABLES:
            if table in self._tables and self._columns(table) >= set(needed):
                for time, thread, node, original in self._rows(table, needed, ("originalGraphNodeId",)):
                    if node:
                        yield NodeOrigin(time, _pid(thread), _tid(thread), node, original or None)
