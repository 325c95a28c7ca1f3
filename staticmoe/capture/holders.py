"""What holds tensors between two iterations, and the line that puts them there.

An iteration's results live in the memory of its graph: what Python keeps of them is overwritten by the next replay.
"""

from __future__ import annotations

import collections
import dataclasses
import dis
import functools
import linecache
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from staticmoe.capture.provenance import storage_key
from staticmoe.capture.source import Source

# torch's own books of a module: hooks, children, flags.
_INTERNAL = frozenset(vars(nn.Module()))
_CONTAINERS = (dict, list, tuple, set, collections.deque)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TORCH = torch.__name__ + "."


@dataclasses.dataclass(frozen=True)
class Held:
    """A tensor and what holds it.

    Attributes:
        name: of the attribute or variable.
        module: dotted path of the module whose attribute it is; None for a variable of a function.
        inside: whether it lies in a container there.
        tensor: the tensor.
    """

    name: str
    module: str | None
    inside: bool
    tensor: Tensor

    def __str__(self) -> str:
        return describe(self.name, self.module)


def describe(name: str, module: str | None) -> str:
    """A holder in words."""
    return f"variable '{name}'" if module is None else f"attribute '{name}' of module '{module or '(the model)'}'"


def held(model: nn.Module, functions: Iterable[Callable[..., Any]]) -> Iterator[Held]:
    """Tensors in attributes and buffers of the modules and in the closures of `functions`, one container deep."""
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield Held(name, path, False, buffer)
        for name, value in list(vars(module).items()):
            if name not in _INTERNAL:
                yield from _inside(name, path, value)
    for function in map(plain, functions):
        code = getattr(function, "__code__", None)
        if code is None:
            continue
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:
                # A variable that is not bound yet.
                continue
            yield from _inside(name, None, value)


def holder_of(tensor: Tensor, model: nn.Module, functions: Iterable[Callable[..., Any]]) -> str:
    """What holds the memory of `tensor`, in words; "" where nothing does that is known here."""
    key = storage_key(tensor)
    return next((str(one) for one in held(model, functions) if _key_of(one.tensor) == key), "")


def plain(function: Any) -> Any:
    """The Python function behind partials and methods."""
    while isinstance(function, (functools.partial, MethodType)):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    return function


def _inside(name: str, module: str | None, value: Any) -> Iterator[Held]:
    # type(), not isinstance(): lazy proxies import whole packages when asked for their class.
    kind = type(value)
    if issubclass(kind, Tensor):
        yield Held(name, module, False, value)
    elif issubclass(kind, _CONTAINERS):
        for item in list(value.values()) if issubclass(kind, dict) else list(value):
            if issubclass(type(item), Tensor):
                yield Held(name, module, True, item)


def _key_of(tensor: Tensor) -> int | None:
    try:
        return storage_key(tensor)
    except (RuntimeError, NotImplementedError):
        return None


class Lines:
    """Finds where the user's code names an attribute or variable.

    Args:
        model: methods of its modules and their hooks are looked through.
        functions: loss function and the like.
    """

    def __init__(self, model: nn.Module, functions: Iterable[Callable[..., Any]]) -> None:
        self._model = model
        self._functions = [plain(function) for function in functions]

    def storing(self, name: str, module: str | None) -> Source:
        """The line that binds `name`, else one that names it; no line where none is found."""
        codes, path = list(self._codes(module)), "(the model)" if module == "" else module or ""
        for wanted in ("STORE_", "LOAD_"):
            for code in codes:
                for line, operation, argument in _instructions(code):
                    if argument == name and operation.startswith(wanted):
                        text = linecache.getline(code.co_filename, line).strip()
                        return Source(file=code.co_filename, line=line, text=text, module=path)
        return Source(module=path)

    def reads(self, name: str, module: str | None) -> bool:
        """Whether the code takes the value of `name` anywhere."""
        every = (each for code in self._codes(module) for each in _instructions(code))
        return any(argument == name and operation.startswith("LOAD_") for _, operation, argument in every)

    def _codes(self, module: str | None) -> Iterator[CodeType]:
        """Code that may run in an iteration, what is nearest to `module` first; no constructors."""
        modules = dict(self._model.named_modules())
        first = [modules[module]] if module in modules else []
        owners = [*first, *(one for one in modules.values() if not any(one is other for other in first))]
        forwards = [type(one).forward for one in first]
        hooks = [hook for one in owners for kind in _HOOKS for hook in getattr(one, kind).values()]
        methods = [
            method
            for kind in dict.fromkeys(kind for one in owners for kind in type(one).__mro__)
            if not kind.__module__.startswith(_TORCH)
            for name, method in vars(kind).items()
            if name != "__init__"
        ]
        for function in (*forwards, *self._functions, *map(plain, hooks), *methods):
            if isinstance(function, FunctionType) and not function.__module__.startswith(_TORCH):
                yield from _with_inner(function.__code__)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def _instructions(code: CodeType) -> Iterator[tuple[int, str, Any]]:
    """Line, name and argument of each instruction."""
    for instruction in dis.get_instructions(code):
        position = instruction.positions
        if position is not None and position.lineno is not None:
            yield position.lineno, instruction.opname, instruction.argval
