"""Follows the files of a run while it writes them: each record once, across rotation, torn lines and replaced files.

Files are opened to read, and nothing else: a run does not notice. A part is known by its file, not by its name, so a
part that is renamed while it is read is read to its end, and then the one that came after it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from staticmoe.errors import StaticMoEError
from staticmoe.observe.sinks.jsonl import RESUMED_KEY, SCHEMA_VERSION

BLOCK_BYTES = 1 << 20
# The last bytes that were read are compared at each poll: a file that was written anew does not hold them.
TAIL_BYTES = 128
# Looks at the names that changed while they were looked at, before that is left to a later poll.
TRIES = 8
# Name of a stream -> its file below the directory of a run.
STREAMS = {"metrics": "metrics.jsonl", "layers": "layers/layers.jsonl", "alerts": "alerts.jsonl"}

Identity = tuple[int, int]


class RunFilesError(StaticMoEError, ValueError):
    """Files of a run that cannot be read as such. Names the file, what was expected, what came and the fix."""


class Receiver(Protocol):
    """What takes the records of a run in."""

    def take_meta(self, meta: dict[str, Any]) -> None:
        """Meta.json, at first and after each change."""

    def take(self, stream: str, record: dict[str, Any]) -> None:
        """A record of a stream, in order."""

    def restart(self, stream: str) -> None:
        """Forget the stream: its file was replaced, and its records come from the first one on."""

    def resume(self, stream: str) -> None:
        """The run was taken up again: what comes may have come before."""


@dataclasses.dataclass(frozen=True)
class _Part:
    path: Path
    identity: Identity
    size: int


class Follower:
    """One file of records, read together with its rotated parts as they grow.

    Args:
        path: the file that is written to; name.1.jsonl, name.2.jsonl, ... beside it are its rotated parts.
        take: called with every record in order, the meta lines left out.
        restart: called where what was read is no longer there; all records come again.
        resume: called where the run was taken up again, before its next record.

    Attributes:
        unreadable: whole lines that hold no JSON object, and were left out.
        read_bytes, total_bytes: how far it has come, and how much there was at the last poll.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        take: Callable[[dict[str, Any]], None],
        restart: Callable[[], None],
        resume: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = Path(path)
        self.unreadable = 0
        self.read_bytes = self.total_bytes = 0
        self._take, self._restart, self._resume = take, restart, resume
        self._rotated = re.compile(re.escape(self.path.stem) + r"\.(\d+)" + re.escape(self.path.suffix))
        # Open while it is followed: no other file can then get its identity.
        self._fd: int | None = None
        self._part: _Part | None = None
        self._offset = 0
        self._tail = b""

    def poll(self, limit: int | None = None) -> bool:
        """Hand on what is there, about `limit` bytes of it at most; return whether more is there already.

        A last line without its newline is left for a later poll.

        Raises:
            RunFilesError: a file begins with another schema, or may not be read.
        """
        left, tries = limit, TRIES
        try:
            while left is None or left > 0:
                parts = self._parts()
                here = self._place(parts) if parts else None
                if not parts or not tries:
                    return False
                if here is None:
                    tries -= 1
                    continue
                read, at_end = self._read(BLOCK_BYTES if left is None else min(BLOCK_BYTES, left))
                left = None if left is None else left - read
                self.read_bytes = sum(part.size for part in parts[:here]) + self._offset
                self.total_bytes = max(self.read_bytes, sum(part.size for part in parts))
                if at_end and here + 1 == len(parts):
                    return False
                if at_end:
                    # Listed before it was read: what was renamed by then is never written to again.
                    tries = TRIES if self._open(parts[here + 1]) else tries - 1
        except OSError as error:
            raise RunFilesError(
                f"{self.path}: expected a file that can be read; got {error.strerror}: give read permission"
            ) from error
        return True

    def close(self) -> None:
        """Close the file; a later poll begins anew."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd, self._part, self._offset, self._tail = None, None, 0, b""

    def _names(self) -> list[Path]:
        """The parts' paths, the oldest first."""
        try:
            names = os.listdir(self.path.parent)
        except (FileNotFoundError, NotADirectoryError):
            return []
        matches = [match for match in map(self._rotated.fullmatch, names) if match]
        rotated = [match.group() for match in sorted(matches, key=lambda match: int(match.group(1)))]
        return [self.path.parent / name for name in [*rotated, *([self.path.name] if self.path.name in names else [])]]

    def _parts(self) -> list[_Part]:
        """The parts of one moment, the oldest first."""
        while True:
            paths, parts = self._names(), []
            for path in paths:
                try:
                    found = path.stat()
                except FileNotFoundError:
                    continue
                parts.append(_Part(path, (found.st_dev, found.st_ino), found.st_size))
            # A rotation brings a name that was not there before: without one, none fell between the calls of stat.
            if paths == self._names():
                return parts

    def _place(self, parts: list[_Part]) -> int | None:
        """Where the part at hand is among the parts; None where one was opened, or has to be, before it is read."""
        if self._part is None:
            self._open(parts[0])
            return None
        places = [index for index, part in enumerate(parts) if part.identity == self._part.identity]
        if places and not self._replaced():
            return places[0]
        self.close()
        self.unreadable = 0
        self._restart()
        return None

    def _open(self, part: _Part) -> bool:
        """Go on with the first byte of `part`; nothing is done, and False returned, where its name is another's now."""
        try:
            fd = os.open(part.path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        found = os.fstat(fd)
        if (found.st_dev, found.st_ino) != part.identity:
            os.close(fd)
            return False
        self.close()
        self._fd, self._part = fd, part
        return True

    def _replaced(self) -> bool:
        """Whether the file no longer holds what was read of it last; what lay behind that may be cut off."""
        assert self._fd is not None, "a part is open"
        return os.pread(self._fd, len(self._tail), self._offset - len(self._tail)) != self._tail

    def _read(self, size: int) -> tuple[int, bool]:
        """Hand on the whole lines of the next block; return their bytes, and whether no whole line is left."""
        assert self._fd is not None, "a part is open"
        while True:
            block = os.pread(self._fd, size, self._offset)
            end = block.rfind(b"\n") + 1
            at_end = self._offset + len(block) >= os.fstat(self._fd).st_size
            if end or at_end:
                break
            size *= 2
        for line in block[:end].split(b"\n")[:-1]:
            first = self._offset == 0
            self._offset += len(line) + 1
            self._tail = line[1 - TAIL_BYTES :] + b"\n"
            self._hand_on(line, first)
        return end, at_end

    def _hand_on(self, line: bytes, first: bool) -> None:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if first:
            self._check_schema(line, record)
        elif not isinstance(record, dict):
            self.unreadable += 1
        elif record.get("kind") != "meta":
            self._take(record)
        elif record.get(RESUMED_KEY):
            self._resume()

    def _check_schema(self, line: bytes, record: Any) -> None:
        if isinstance(record, dict) and record.get("kind") == "meta" and record.get("schema") == SCHEMA_VERSION:
            return
        part = self._part.path if self._part is not None else self.path
        self.close()
        raise RunFilesError(
            f"{part}: expected a first line with kind 'meta' and schema {SCHEMA_VERSION}; got "
            f"{line[:80].decode(errors='replace').rstrip()!r}: look at it with the version of staticmoe that wrote it"
        )


class RunFollower:
    """The files of a run: meta.json and the streams, handed to a receiver as they grow.

    Args:
        run_dir: directory of the run; its files may come later.
        receiver: takes meta.json and the records in.
    """

    def __init__(self, run_dir: str | os.PathLike[str], receiver: Receiver) -> None:
        self.run_dir = Path(run_dir)
        self._receiver = receiver
        self._meta_stamp: tuple[int, int, int] | None = None
        self._followers = {stream: self._follow(stream, self.run_dir / file) for stream, file in STREAMS.items()}

    def _follow(self, stream: str, path: Path) -> Follower:
        return Follower(
            path,
            take=lambda record: self._receiver.take(stream, record),
            restart=lambda: self._receiver.restart(stream),
            resume=lambda: self._receiver.resume(stream),
        )

    def poll(self, limit: int | None = None) -> bool:
        """Hand on what is there, about `limit` bytes a stream at most; return whether more is there already.

        Raises:
            RunFilesError: a file is of another schema, broken, or may not be read.
        """
        self._read_meta()
        return any([follower.poll(limit) for follower in self._followers.values()])

    def again(self, stream: str) -> None:
        """Hand on the records of a stream from the first one on, without telling the receiver."""
        self._followers[stream].close()
        self._followers[stream].unreadable = 0

    def settle(self, *, final: bool = False) -> None:
        """Nothing: one rank waits for no other."""

    @property
    def behind(self) -> dict[int, int]:
        """No rank: one waits for no other."""
        return {}

    @property
    def absent(self) -> list[int]:
        """No rank: the only one is there or comes."""
        return []

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes that were read, and that there were at the last poll."""
        read = sum(follower.read_bytes for follower in self._followers.values())
        return read, sum(follower.total_bytes for follower in self._followers.values())

    @property
    def share_read(self) -> float:
        """Share of the bytes there that were read, 0 to 1."""
        read, there = self.sizes
        return read / there if there else 1.0

    @property
    def unreadable(self) -> int:
        """Whole lines that hold no JSON object, and were left out."""
        return sum(follower.unreadable for follower in self._followers.values())

    def close(self) -> None:
        """Close the files."""
        for follower in self._followers.values():
            follower.close()

    def _read_meta(self) -> None:
        """Hand meta.json on where it is new: it is replaced whole, so it is never half there."""
        path = self.run_dir / "meta.json"
        try:
            found = path.stat()
            stamp = (found.st_ino, found.st_mtime_ns, found.st_size)
            if stamp == self._meta_stamp:
                return
            text = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise RunFilesError(
                f"{path}: expected a file that can be read; got {error.strerror}: give read permission"
            ) from error
        try:
            meta = json.loads(text)
        except (ValueError, RecursionError):
            meta = None
        schema = meta.get("schema") if isinstance(meta, dict) else None
        if not isinstance(meta, dict) or schema != SCHEMA_VERSION:
            got = f"schema {schema!r}" if isinstance(meta, dict) else repr(text[:80].decode(errors="replace"))
            raise RunFilesError(
                f"{path}: expected an object with schema {SCHEMA_VERSION}; got {got}: look at it with the version of "
                "staticmoe that wrote it"
            )
        self._meta_stamp = stamp
        self._receiver.take_meta(meta)
