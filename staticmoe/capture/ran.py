"""Which code an iteration ran: what it names is what the iteration can have read.

Reading an attribute that a module has leaves no trace that Python would show; the code that did it does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import re
import sys
from collections.abc import Iterator
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any

import torch

from staticmoe.capture.collector import thawed
from staticmoe.capture.source import is_users

_NAME = re.compile(r"[A-Za-z_]\w*")
# What reads attributes by a string.
_BY_STRING = frozenset({"getattr", "vars", "__dict__", "__getattr__", "__getattribute__", "attrgetter"})


class Names:
    """Names of attributes and variables that code may read.

    Attributes:
        all: that the code has, strings among its constants included.
    """

    def __init__(self) -> None:
        self.all: set[str] = set()
        self._parts: set[str] = set()
        self._any = False

    def add(self, code: CodeType) -> None:
        """Take the names of `code` and of the functions inside it."""
        texts = [text for constant in code.co_consts for text in _strings(constant)]
        self.all.update(code.co_names, (text for text in texts if _NAME.fullmatch(text)))
        if not _BY_STRING.isdisjoint(code.co_names):
            # f"scale_{i}" leaves its fixed parts; where nothing is fixed, it may be any name.
            self._parts.update(text for text in texts if _NAME.fullmatch(text))
            self._any = self._any or not any(_NAME.fullmatch(text) for text in texts)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self.add(constant)

    def __contains__(self, name: object) -> bool:
        if self._any or name in self.all:
            return True
        # A letter or two are in most names; before a number they are the name of one of many.
        stem = name.rstrip("0123456789") if isinstance(name, str) else ""
        return stem in self._parts or any(part in stem for part in self._parts if len(part) > 2)


def _strings(constant: object) -> Iterator[str]:
    if isinstance(constant, str):
        yield constant
    elif isinstance(constant, tuple):
        for item in constant:
            yield from _strings(item)


@dataclasses.dataclass(frozen=True)
class _Ran:
    """Code that ran.

    Attributes:
        names: globals it ran under.
        closures: ids of what its free variables referred to, of each function that it was the code of.
    """

    code: CodeType
    names: dict[str, Any]
    closures: set[tuple[int, ...]]


class RanCode:
    """The user's code that observed iterations ran, in the thread that ran them.

    What a backward runs in a thread of the GPU's is taken from the classes of autograd functions that the code names.
    """

    def __init__(self) -> None:
        self._seen: dict[int, _Ran | None] = {}

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Context of an iteration. Somebody else's trace, as of a debugger, goes on.

        The garbage collector rests: what it calls, it calls in the middle of anything, and that is not the iteration's.
        """
        before, seen, collecting = sys.gettrace(), self._seen, gc.isenabled()

        def entered(frame: FrameType, event: Any, argument: Any) -> Any:
            code = frame.f_code
            if id(code) not in seen:
                seen[id(code)] = _Ran(code, frame.f_globals, set()) if is_users(code.co_filename) else None
            if code.co_freevars and (ran := seen[id(code)]) is not None:
                ran.closures.add(tuple(id(frame.f_locals.get(name)) for name in code.co_freevars))
            return before(frame, event, argument) if before is not None else None

        gc.disable()
        sys.settrace(entered)
        try:
            yield
        finally:
            sys.settrace(before)
            if collecting:
                gc.enable()

    def update(self, other: RanCode) -> None:
        """Take over what `other` has seen."""
        self._seen.update(other._seen)

    @property
    def codes(self) -> list[tuple[CodeType, dict[str, Any]]]:
        """Code of the user's, each with the globals it ran under."""
        found = [(ran.code, ran.names) for ran in self._seen.values() if ran is not None]
        kinds = {names[name] for code, names in found for name in code.co_names if _is_autograd(names.get(name))}
        backwards = [getattr(method, "__func__", method) for kind in kinds for method in vars(kind).values()]
        return [*found, *((one.__code__, one.__globals__) for one in backwards if isinstance(one, FunctionType))]

    def closures(self) -> list[FunctionType]:
        """The functions with variables of their own that ran and are still there.

        Code does not know its functions, of which there may be many: those are meant whose variables refer to what
        the running code's did.
        """
        nested = [ran for ran in self._seen.values() if ran is not None and ran.closures]
        known = {id(ran.code): ran.closures for ran in nested}
        with thawed():
            candidates = gc.get_referrers(*(ran.code for ran in nested)) if nested else []
        functions = [one for one in candidates if type(one) is FunctionType]
        return [one for one in functions if tuple(map(_content_id, one.__closure__ or ())) in known[id(one.__code__)]]


def _content_id(cell: CellType) -> int:
    try:
        return id(cell.cell_contents)
    except ValueError:
        return id(None)


def _is_autograd(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, torch.autograd.Function)
