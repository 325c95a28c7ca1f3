"""Records as lines of JSON in a file that survives a crash: one object a line, the first names the schema.

A file looks like this:

    {"kind": "meta", "schema": 1, ...}
    {"step": 0, "loss": 5.54, ...}
    {"step": 1, "loss": null, ..., "nonfinite": {"loss": "nan"}}

JSON has no NaN and no infinity. Such a value becomes null, so that every column stays numeric, and the
object gains the key "nonfinite": dotted path of the value -> "nan", "inf" or "-inf".
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from staticmoe.errors import StaticMoEError

SCHEMA_VERSION = 1
NONFINITE_KEY = "nonfinite"
_TAIL_BLOCK = 1 << 16


class JsonlError(StaticMoEError, ValueError):
    """A file that records should be appended to holds something else. Names the file, what came and the fix."""


class JsonlSink:
    """Appends every record it is called with to a file, as one line, at once.

    An existing file of the same schema is continued. A line that a crash cut short is removed, back to
    the last newline. After a step was resumed a step number can occur again: its last line counts.

    A line is handed to the operating system before the call returns, so it outlives the process; it is
    not forced to the disk line by line, so the last lines may not outlive the machine.

    Args:
        path: the file; its directory is created.
        meta: entries of the first record of a new file, beside "kind" and "schema".

    Raises:
        JsonlError: the file exists and does not begin with a record of this schema.
    """

    def __init__(self, path: str | os.PathLike[str], meta: Mapping[str, Any] | None = None) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # O_APPEND and no buffer of our own: a line is one write, and what is written is never rewritten.
        self._fd: int | None = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            _drop_torn_line(self._fd)
            if os.fstat(self._fd).st_size == 0:
                self({"kind": "meta", "schema": SCHEMA_VERSION, **(meta or {})})
            else:
                self._check_schema()
        except BaseException:
            self.close()
            raise

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Append `record`. Values should be host values already: what has `tolist` is read with it, at once.

        Raises:
            JsonlError: the sink is closed.
            OSError: the line could not be written; the file is as before.
        """
        if self._fd is None:
            raise JsonlError(f"{self.path}: expected an open sink; this one was closed. Open a new one to go on")
        line = encode_record(record).encode() + b"\n"
        before = os.fstat(self._fd).st_size
        try:
            written = 0
            while written < len(line):
                written += os.write(self._fd, line[written:])
        except OSError:
            # Half a line in the middle of a file would make the next one unreadable as well.
            os.ftruncate(self._fd, before)
            raise

    def close(self) -> None:
        """Force the file to the disk and close it; a second call does nothing."""
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def __enter__(self) -> JsonlSink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_schema(self) -> None:
        """Refuse to append to a file whose first line is not a meta record of this schema."""
        with self.path.open("rb") as stream:
            first = stream.readline()
        try:
            record = json.loads(first)
            schema = record["schema"] if record["kind"] == "meta" else None
        except (ValueError, KeyError, TypeError):
            schema = None
        if schema != SCHEMA_VERSION:
            raise JsonlError(
                f"{self.path}: expected a first line with kind 'meta' and schema {SCHEMA_VERSION}; got "
                f"{first[:80].decode(errors='replace').rstrip()!r}. Move the file away, or choose another directory"
            )


def encode_record(record: Mapping[str, Any]) -> str:
    """Return `record` as one line of JSON, without the newline."""
    nonfinite: dict[str, str] = {}
    plain = {str(key): _plain(value, str(key), nonfinite) for key, value in record.items()}
    if nonfinite:
        plain[NONFINITE_KEY] = nonfinite
    # In ASCII, so that no string, however broken, can fail to be encoded.
    return json.dumps(plain, allow_nan=False)


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the records of a file, the meta record first; a line still being written is left out."""
    lines = Path(path).read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[:-1]]


def _plain(value: Any, path: str, nonfinite: dict[str, str]) -> Any:
    """Return `value` as what JSON knows; note a float that JSON does not know in `nonfinite`, and give None for it."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        nonfinite[path] = "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(entry, f"{path}.{key}", nonfinite) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry, f"{path}.{index}", nonfinite) for index, entry in enumerate(value)]
    if hasattr(value, "tolist"):
        return _plain(value.tolist(), path, nonfinite)
    # A path, a dtype, a device: a log should not end a run for want of a better spelling.
    return str(value)


def _drop_torn_line(fd: int) -> None:
    """Cut the file behind `fd` back to the end of its last newline."""
    size = end = os.fstat(fd).st_size
    while end > 0:
        start = max(0, end - _TAIL_BLOCK)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(fd, end)
