"""Records as lines of JSON in a file that survives a crash: one object a line, the first names the schema.

A file looks like this:

    {"kind": "meta", "schema": 2, ...}
    {"kind": "train", "step": 1, "train/loss": 5.54, ...}
    {"kind": "train", "step": 2, "train/loss": null, ..., "nonfinite": {"train/loss": "nan"}}

A file that is open for a whole run says where it was continued: by a meta line with "resumed": true.

JSON has no NaN and no infinity. Such a value becomes null, so that every column stays numeric, and the
object gains the key "nonfinite": dotted path of the value -> "nan", "inf" or "-inf".

A file that has grown over a limit becomes a part, name.1.jsonl, then name.2.jsonl, ascending in time, and a new file
begins. `read_rotated` reads all of them.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from staticmoe.errors import StaticMoEError

SCHEMA_VERSION = 2
NONFINITE_KEY, RESUMED_KEY = "nonfinite", "resumed"
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
        meta: entries of the first record of a new file and of each part, beside "kind" and "schema".
        max_bytes: a line that would take the file over this goes into a new file, and the file becomes a part; a file
            has one record at least. None: one file.
        say_resumed: begin what continues a file with a meta line that says so.

    Raises:
        JsonlError: the file exists and does not begin with a record of this schema.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        meta: Mapping[str, Any] | None = None,
        *,
        max_bytes: int | None = None,
        say_resumed: bool = False,
    ) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        head = {"kind": "meta", "schema": SCHEMA_VERSION, **(meta or {})}
        self._first = _encoded(head)
        self._max_bytes = max_bytes
        self._fd: int | None = self._open()
        try:
            _drop_torn_line(self._fd)
            if os.fstat(self._fd).st_size:
                with self.path.open("rb") as stream:
                    _check_schema(stream.readline(), self.path)
                if say_resumed:
                    self._write(_encoded({**head, RESUMED_KEY: True}))
            else:
                self._write(self._first)
        except BaseException:
            self.close()
            raise

    def _open(self) -> int:
        # O_APPEND and no buffer of our own: a line is one write, and what is written is never rewritten.
        return os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Append `record`. Values should be host values already: what has `tolist` is read with it, at once.

        Raises:
            JsonlError: the sink is closed.
            OSError: the line could not be written; the file is as before.
        """
        if self._fd is None:
            raise JsonlError(f"{self.path}: expected an open sink; this one was closed. Open a new one to go on")
        line = _encoded(record)
        size = os.fstat(self._fd).st_size
        if self._max_bytes is not None and size + len(line) > self._max_bytes and size > len(self._first):
            self._rotate()
            size = 0
        if size == 0:
            self._write(self._first)
        self._write(line)

    def _write(self, line: bytes) -> None:
        assert self._fd is not None, "only an open sink writes"
        before = os.fstat(self._fd).st_size
        try:
            written = 0
            while written < len(line):
                written += os.write(self._fd, line[written:])
        except OSError:
            # Half a line in the middle of a file would make the next one unreadable as well.
            os.ftruncate(self._fd, before)
            raise

    def _rotate(self) -> None:
        """Make the file the latest part, and begin a new one."""
        number = 1 + max((found for found, _ in _parts(self.path)), default=0)
        self.close()
        os.rename(self.path, self.path.with_name(f"{self.path.stem}.{number}{self.path.suffix}"))
        self._fd = self._open()

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


def _check_schema(first: bytes, path: Path) -> None:
    """Refuse a file whose first line is not a meta record of this schema."""
    try:
        record = json.loads(first)
        schema = record["schema"] if record["kind"] == "meta" else None
    except (ValueError, KeyError, TypeError):
        schema = None
    if schema != SCHEMA_VERSION:
        raise JsonlError(
            f"{path}: expected a first line with kind 'meta' and schema {SCHEMA_VERSION}; got "
            f"{first[:80].decode(errors='replace').rstrip()!r}. Move the file away, or choose another directory"
        )


def _encoded(record: Mapping[str, Any]) -> bytes:
    return encode_record(record).encode() + b"\n"


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


def read_rotated(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the records of a file and of its parts, oldest first, meta records left out; a torn last line too.

    Raises:
        FileNotFoundError: there is neither the file nor a part of it.
        JsonlError: one of them does not begin with a record of this schema.
    """
    current = Path(path)
    files = [part for _, part in _parts(current)]
    # Between a rotation and the first line of what follows there is no such file, or an empty one.
    if current.exists() or not files:
        files.append(current)
    for file in files:
        with file.open("rb") as stream:
            first = stream.readline()
            if first.endswith(b"\n"):
                _check_schema(first, file)
            for line in stream:
                if line.endswith(b"\n") and (record := json.loads(line)).get("kind") != "meta":
                    yield record


def _parts(path: Path) -> list[tuple[int, Path]]:
    """Number and path of the parts of a file, ascending."""
    pattern = re.compile(rf"{re.escape(path.stem)}\.([0-9]+){re.escape(path.suffix)}")
    found = ((pattern.fullmatch(other.name), other) for other in path.parent.glob(f"*{path.suffix}"))
    return sorted((int(match[1]), other) for match, other in found if match is not None)


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
