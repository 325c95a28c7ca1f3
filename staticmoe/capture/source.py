"""Where in the user's program an operation comes from: file, line and module path of the current call."""

from __future__ import annotations

import contextlib
import dataclasses
import linecache
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

import torch

_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = str(Path(__file__).parents[1])
_SKIPPED = (_TORCH, _PACKAGE, contextlib.__file__, "<frozen", "<string>", "<eval_with_key>")
_LIBRARY = str(Path(random.__file__).parent)


@dataclasses.dataclass(frozen=True)
class Source:
    """A place in the user's program.

    Attributes:
        file: path of the innermost file that is neither torch nor this package, "" if there is none.
        line: line number in it.
        text: that line, stripped.
        module: dotted path of the innermost known module whose method is running, "" if there is none.
        node: name of the autograd node that is running its backward, "" outside of a backward pass.
    """

    file: str = ""
    line: int = 0
    text: str = ""
    module: str = ""
    node: str = ""

    def __str__(self) -> str:
        where = f'{self.file}:{self.line} "{self.text}"' if self.file else "a place outside the user's files"
        if self.node:
            where += f" (in the backward of {self.node})"
        return f"{where} in module '{self.module}'" if self.module else where


def is_users(file: str) -> bool:
    """Whether code in `file` is neither torch's, this package's nor of Python's own library."""
    library = file.startswith(_LIBRARY) and "-packages" not in file[len(_LIBRARY) :]
    return not library and not file.startswith(_SKIPPED)


def locate(modules: Mapping[int, str]) -> Source:
    """Return the source of the call that is running now; `modules` maps id(module) to its dotted path."""
    frame: FrameType | None = sys._getframe(1)
    file, line, module = "", 0, ""
    while frame is not None:
        filename = frame.f_code.co_filename
        if not file and not filename.startswith(_SKIPPED):
            file, line = filename, frame.f_lineno
        if not module:
            module = modules.get(id(frame.f_locals.get("self")), "")
        if file and module:
            break
        frame = frame.f_back
    text = linecache.getline(file, line).strip() if file else ""
    return Source(file=file, line=line, text=text, module=module, node=_running_node())


def is_users_call() -> bool:
    """Whether the function call that a mode is looking at now was written by the user, not by torch or this package."""
    frame: FrameType | None = sys._getframe(1)
    # Modes on top of each other hand the call on.
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame is not None and is_users_file(frame.f_code.co_filename)


def is_users_file(name: str) -> bool:
    """Whether a file is neither torch's nor this package's."""
    return not name.startswith(_SKIPPED)


def _running_node() -> str:
    """Name of the autograd node in execution; torch tells it only through a private call, so probe for it."""
    current = getattr(torch._C, "_current_autograd_node", None)
    node = current() if current is not None else None
    return node.name() if node is not None else ""
