"""Random numbers that an iteration draws on the host, from `random` or numpy: a replay would repeat the first ones.

An iteration that moved one of their states is watched line by line the next time, which names the line.
"""

from __future__ import annotations

import contextlib
import linecache
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import numpy

from staticmoe.capture.findings import Finding, Findings
from staticmoe.capture.source import Source, is_users

_MEND = "draw with torch on the device, or draw outside and hand the number in with the batch or by runner.scalars"


def _state_of_random() -> object:
    return random.getstate()


def _state_of_numpy() -> object:
    return pickle.dumps(numpy.random.get_state(legacy=False))


# Code, name and state of each.
_GENERATORS: tuple[tuple[str, str, Callable[[], object]], ...] = (
    ("SM204", "random", _state_of_random),
    ("SM205", "numpy.random", _state_of_numpy),
)


class HostDraws:
    """Watches the states over the observed iterations of a program.

    Args:
        findings: takes what is found.
        modules: id(module) -> dotted path, for messages.
    """

    def __init__(self, findings: Findings, modules: Mapping[int, str]) -> None:
        self._findings = findings
        self._modules = modules
        self._moved: list[tuple[str, str, Callable[[], object]]] = []
        # Code -> name, and the line of each iteration in which it was seen; without a file where no line can be told.
        self._seen: dict[str, tuple[str, list[Source]]] = {}

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Context of one iteration."""
        states = [read() for _, _, read in _GENERATORS]
        watched = [_Line(self._modules, read) for _, _, read in self._moved]
        blind = sys.gettrace() is not None
        with _traced(watched):
            yield
        for (code, name, _), line in zip(self._moved, watched, strict=True):
            if line.found is not None:
                self._seen.setdefault(code, (name, []))[1].append(line.found)
            elif blind and line.moved:
                self._seen.setdefault(code, (name, []))[1].append(Source())
        self._moved = [one for one, state in zip(_GENERATORS, states, strict=True) if one[2]() != state]

    def report(self) -> None:
        """Add what was seen: an error where it was one line each time; else, as if another thread drew, a warning."""
        for code, (name, places) in self._seen.items():
            why = f"{name} draws a number on the host, and a replay would repeat that of the capture"
            sure = places[0].file and len({(place.file, place.line) for place in places}) == 1
            self._findings.add(Finding(code, why, _MEND, places[0], severity="error" if sure else "warning"))
        self._seen = {}


class _Line:
    """The first line of the user's in which a state moves."""

    def __init__(self, modules: Mapping[int, str], read: Callable[[], object]) -> None:
        self.found: Source | None = None
        self._modules = modules
        self._read = read
        self._state = read()
        self._last: tuple[FrameType, int] | None = None

    @property
    def moved(self) -> bool:
        """Whether the state is another one now."""
        return self._read() != self._state

    def see(self, frame: FrameType, *, leaving: bool) -> None:
        """Called before each line of the user's, and at the end of each function."""
        if self.found is not None:
            return
        if self._last is not None and self.moved:
            last, line = self._last
            file = last.f_code.co_filename
            text = linecache.getline(file, line).strip()
            self.found = Source(file=file, line=line, text=text, module=self._module(last))
            return
        # What follows a call belongs to the line that called.
        now = frame.f_back if leaving and frame.f_back is not None and _is_users(frame.f_back) else frame
        self._last = now, now.f_lineno

    def _module(self, frame: FrameType | None) -> str:
        while frame is not None:
            module = self._modules.get(id(frame.f_locals.get("self")))
            if module is not None:
                return module
            frame = frame.f_back
        return ""


def _is_users(frame: FrameType) -> bool:
    """Whether a frame is of the user's: random.sample, say, draws in a line of Python's own library."""
    return is_users(frame.f_code.co_filename)


@contextlib.contextmanager
def _traced(lines: list[_Line]) -> Iterator[None]:
    """Show this thread's lines in the user's files to `lines`; without any, and under a debugger, nothing happens."""
    if not lines or sys.gettrace() is not None:
        yield
        return

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        if event in ("line", "return"):
            for line in lines:
                line.see(frame, leaving=event == "return")
        return local

    def entered(frame: FrameType, event: str, argument: Any) -> Any:
        return local if _is_users(frame) else None

    sys.settrace(entered)
    try:
        yield
    finally:
        sys.settrace(None)
