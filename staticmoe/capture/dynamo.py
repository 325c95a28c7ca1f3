"""What torch's compiler has made of functions: its books, read, and which compiled functions an iteration calls.

The compiler says nothing where it gives a function up; the entries of its cache do: there are none, or as many as it
keeps, or one more after each iteration. Under a mode that it does not know, such as the eye on an iteration, it gives a
function up for good; so there compiled functions run as they were written, and are compiled afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FrameType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from staticmoe.capture.seeding import ONE_AT_A_TIME
from staticmoe.capture.source import _TORCH, Source, locate
from staticmoe.errors import CompileError

# torch's function around a compiled one, and its variable for that one.
_WRAPPER, _WRAPPED = "compile_wrapper", "fn"
# What torch itself compiles, with a backend that compiles nothing, where flex attention is called uncompiled.
_UNCOMPILED_FLEX = "_flex_attention_hop_wrapper"
# The reason of a recompilation: "0/3: guard  # line  # file:12 in forward".
_REASON = re.compile(r"^\d+/\d+: (.*?)\s+# .*?:(\d+) in ", re.DOTALL)

_installing = threading.Lock()
# How many are looking on now, in all threads.
_asked_for = 0
_here = threading.local()


def entries_of(code: CodeType) -> int:
    """How many compiled forms there are of functions with `code`."""
    return len(torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code))


def most_entries() -> int:
    """As many forms of one function torch keeps, and gives it up then without a word."""
    return torch._dynamo.config.recompile_limit


def is_compiled(module: object) -> bool:
    """Whether torch.compile wrapped `module`, or its compile() was called."""
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def is_compiled_call(frame: FrameType) -> bool:
    """Whether `frame` is that of torch's function around a compiled one."""
    return frame.f_code.co_name == _WRAPPER and frame.f_code.co_filename.startswith(_TORCH)


def compiled_callers() -> list[Any]:
    """The functions that a user had compiled whose calls are running in this thread, innermost first."""
    found, frame = [], sys._getframe(1)
    while frame is not None:
        if is_compiled_call(frame):
            found.append(frame.f_locals[_WRAPPED])
        frame = frame.f_back  # type: ignore[assignment]
    return [function for function in found if getattr(function, "__name__", "") != _UNCOMPILED_FLEX]


def last_move(code: CodeType) -> tuple[str, int]:
    """The guard that made torch compile `code` anew the last time, and its line; "" and 0 where it tells neither."""
    for event in reversed(torch._dynamo.utils.get_compilation_metrics()):
        place = event.co_filename, event.co_firstlineno
        if event.recompile_reason and place == (code.co_filename, code.co_firstlineno):
            found = _REASON.match(event.recompile_reason)
            return (found[1], int(found[2])) if found is not None else (event.recompile_reason.splitlines()[0], 0)
    return "", 0


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled function that was called.

    Attributes:
        name: qualified name of the function, or class of the module.
        codes: code objects that torch may keep the forms by: its own; of a module its forward and those inside it.
        source: the line that calls it.
    """

    name: str
    codes: tuple[CodeType, ...]
    source: Source

    @classmethod
    def of(cls, function: Any, modules: Mapping[int, str]) -> Compiled:
        """From what torch calls in the wrapper that is running; `modules` maps id(module) to its path."""
        source, owner = locate(modules), _module_of(function)
        own = _code(function)
        if owner is None:
            return cls(getattr(function, "__qualname__", type(function).__name__), own, source)
        forwards = (code for module in owner.modules() for code in _code(module.forward))
        path = modules.get(id(owner), source.module)
        return cls(
            type(owner).__name__, tuple(dict.fromkeys((*own, *forwards))), dataclasses.replace(source, module=path)
        )

    @property
    def code(self) -> CodeType | None:
        """The outermost code object with a compiled form."""
        return next((code for code in self.codes if entries_of(code)), None)

    @property
    def entries(self) -> int:
        """Compiled forms of that."""
        return entries_of(self.code) if self.code is not None else 0


class CompiledCalls:
    """The compiled functions that observed iterations have called.

    Args:
        modules: id(module) -> dotted path.

    Attributes:
        orders: function -> its number of compiled forms after each iteration that was noted.
    """

    def __init__(self, modules: Mapping[int, str]) -> None:
        self._modules = modules
        self.orders: dict[Compiled, list[int]] = {}

    def add(self, function: Any) -> None:
        """Enter a call that is being made."""
        self.orders.setdefault(Compiled.of(function, self._modules), [])

    def note(self) -> None:
        """Enter the numbers of forms after an iteration that ran compiled."""
        for one, order in self.orders.items():
            order.append(one.entries)

    @contextlib.contextmanager
    def on_trial(self) -> Iterator[None]:
        """Within: compiled code is made, without code for the device; afterwards what was not compiled is not."""
        # A stance holds for all threads, and two that set one in turn leave it set.
        with ONE_AT_A_TIME:
            fresh = [code for one in self.orders for code in one.codes if not entries_of(code)]
            try:
                with torch.compiler.set_stance("default", force_backend="eager"):
                    yield
            finally:
                for code in fresh:
                    torch._dynamo.eval_frame.reset_code(code)


class Observer(TorchDispatchMode):
    """A mode under which compiled functions run as they were written, so that the compiler does not give them up.

    Attributes:
        calls: takes those that are called.
    """

    calls: CompiledCalls | None = None
    supports_higher_order_operators = True

    def __enter__(self) -> Any:
        _begin()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        _end()


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Within: compiled functions run as they were written, in this thread."""
    _begin()
    _here.depth = getattr(_here, "depth", 0) + 1
    try:
        yield
    finally:
        _here.depth -= 1
        _end()


def _begin() -> None:
    """Have torch ask here, at each call of a compiled function, what is to become of it; until as many have ended.

    Not `torch.compiler.set_stance`: that would speak for all threads.
    """
    global _asked_for
    with _installing:
        # Not imported, nothing is compiled.
        if "torch._dynamo" in sys.modules:
            frames = torch._dynamo.eval_frame
            original = getattr(frames, "_callback_from_stance", None)
            if original is None:
                raise CompileError(
                    f"torch {torch.__version__}: expected _callback_from_stance in torch._dynamo, got none; compiled "
                    "functions cannot be looked at with this version: use one that is tested"
                )
            if not hasattr(original, "original"):
                frames._callback_from_stance = _asking(original)  # type: ignore[assignment]
        _asked_for += 1


def _end() -> None:
    global _asked_for
    with _installing:
        _asked_for -= 1
        frames = sys.modules.get("torch._dynamo.eval_frame")
        original = getattr(getattr(frames, "_callback_from_stance", None), "original", None)
        if not _asked_for and original is not None:
            frames._callback_from_stance = original  # type: ignore[union-attr]


def _asking(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    # Since torch 2.13.
    count_frames = getattr(torch._dynamo.eval_frame, "set_fullgraph_compiled_frame_count", None)

    def callback(given: Any) -> Any:
        modes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Observer)]
        if not modes and not getattr(_here, "depth", 0):
            return original(given)
        calls, wrapper = modes[-1].calls if modes else None, sys._getframe(1)
        # What a compiled function calls in turn becomes a part of it.
        if calls is not None and is_compiled_call(wrapper) and compiled_callers() == [wrapper.f_locals[_WRAPPED]]:
            calls.add(wrapper.f_locals[_WRAPPED])
        if count_frames is not None:
            # What should compile whole is not counted for it, and not refused for having compiled nothing.
            count_frames(-1)
        return None

    callback.original = original  # type: ignore[attr-defined]
    return callback


def _module_of(function: Any) -> nn.Module | None:
    """The module whose call is compiled: by a method of torch's, or wrapped into a function of torch's."""
    code = getattr(function, "__code__", None)
    if code is None or not code.co_filename.startswith(_TORCH):
        return None
    owner = function.__self__ if isinstance(function, MethodType) else None
    closure = getattr(function, "__closure__", None) or ()
    held = [owner, *(cell.cell_contents for cell in closure)]
    return next((one for one in held if isinstance(one, nn.Module)), None)


def _code(function: Any) -> tuple[CodeType, ...]:
    while hasattr(function, "_torchdynamo_orig_callable"):
        function = function._torchdynamo_orig_callable
    code = getattr(function, "__code__", None)
    return () if code is None else (code,)
