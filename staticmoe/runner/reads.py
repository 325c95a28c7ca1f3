"""Where Python keeps what an iteration can have read: attributes, closures, globals, entries of containers.

Each is a mapping and a key in it. Containers and objects are looked into one level deep.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from staticmoe.capture.change import MISSING, Change, is_same, is_value
from staticmoe.capture.ran import Names, RanCode

# Objects of these packages keep books of their own: the runner's binding counts the entries of a forward.
_OWN = ("torch", "builtins", "staticmoe")
# What a variable may refer to without being data that a loss function reads.
_NOT_DATA = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, nn.Module)
# torch's own books of a module: hooks, children, parameters. They are compared apart.
_BOOKS = frozenset(vars(nn.Module())) - {"training"}
_Wanted = Callable[[Any], bool]


class _Cells(Mapping[str, Any]):
    """The closure of a function as a mapping from variable name to value."""

    def __init__(self, function: FunctionType) -> None:
        self._cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def __getitem__(self, name: str) -> Any:
        try:
            return self._cells[name].cell_contents
        except ValueError:
            return MISSING

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)


class _Positions(Mapping[int, Any]):
    """A list as a mapping from position to value."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def __getitem__(self, position: int) -> Any:
        if position >= len(self._values):
            raise KeyError(position)
        return self._values[position]

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._values)))

    def __len__(self) -> int:
        return len(self._values)


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """One thing that was read: `mapping[key]`, which was `old`, and how a change of it is told."""

    mapping: Mapping[Any, Any]
    key: Any
    old: Any
    told: Change

    def change(self) -> Change | None:
        """The change, or None where it still is what it was."""
        new = self.mapping.get(self.key, MISSING)
        if new is self.old or is_same(self.old, new):
            return None
        return dataclasses.replace(self.told, old=self.old, new=new)


class Reads:
    """Finds what the code of an iteration can have read.

    Args:
        model: its modules' attributes, those of their classes, and what their forwards name.
        functions: loss function and the like.
        ran: the code that was seen to run; None: nothing is known, and every attribute of a module counts.
        ignored: names of attributes that the iteration sets itself.

    Attributes:
        found: all of it.
        homes: dicts of the modules in which an attribute may come to hide one of the class.
    """

    def __init__(
        self,
        model: nn.Module,
        functions: tuple[Callable[..., Any], ...],
        ran: RanCode | None,
        ignored: frozenset[str],
    ) -> None:
        self.found: list[Read] = []
        self.homes: list[dict[str, Any]] = []
        self._hiding: list[tuple[dict[str, Any], str, Change]] = []
        self._ignored = ignored
        self._seen: set[int] = set()
        self._taken: set[tuple[int, Any]] = set()
        self._named: _Wanted = _anything
        if ran is not None:
            names = Names()
            for code, _ in ran.codes:
                names.add(code)
            self._named = names.__contains__
        for path, module in model.named_modules():
            self._module(path, module)
            if ran is not None and not _is_torchs(type(module)):
                self._class(path, module)
        forwards = {type(m).forward for m in model.modules() if not _is_torchs(type(m))}
        for function in itertools.chain(functions, forwards):
            self._function(function)
        if ran is not None:
            self._ran(ran)

    def hiding(self) -> Iterator[Change]:
        """Attributes of classes, and forwards, that a module's own attribute has come to hide."""
        for home, name, told in self._hiding:
            if name in home:
                yield dataclasses.replace(told, old=MISSING, new=home[name])

    def _module(self, path: str, module: nn.Module) -> None:
        told = Change("attribute", f"module '{path}'", "", module=path)
        wanted = self._wanted_of(type(module))
        names = [name for name in vars(module) if name not in _BOOKS and wanted(name)]
        self._look(vars(module), names, told, self._named)

    def _class(self, path: str, module: nn.Module) -> None:
        """Attributes that `module` has of its class, save where it hides them."""
        wanted, home = self._wanted_of(type(module)), vars(module)
        told = Change("attribute", f"module '{path}'", "", module=path)
        hidden = set(home)
        self.homes.append(home)
        for base in itertools.takewhile(lambda one: not _is_torchs(one), type(module).__mro__):
            told_of_class = Change("attribute", f"class {base.__name__} attribute", "")
            for name, value in list(vars(base).items()):
                if name != "forward" and (name.startswith("__") or not wanted(name) or not _is_data(value)):
                    continue
                if name not in hidden:
                    hidden.add(name)
                    self._hiding.append((home, name, dataclasses.replace(told, name=name)))
                self._take(vars(base), name, value, dataclasses.replace(told_of_class, name=name), id(base))

    def _wanted_of(self, kind: type) -> _Wanted:
        """Which attributes may have been read of a module of this class."""
        if self._named is _anything:
            return _anything
        if kind.__module__.startswith("staticmoe."):
            # What a layer of this package reads is public; the rest are its own books.
            return lambda name: not name.startswith("_")
        forward = getattr(kind, "forward", None)
        own = names_through(forward.__code__, kind) if isinstance(forward, FunctionType) else set()
        # The mode of a Linear, say, is read by nobody, whatever the code around it names.
        modeless = _is_torchs(kind) and "training" not in own
        return lambda name: name in own or (self._named(name) and not (modeless and name == "training"))

    def _take(self, mapping: Mapping[Any, Any], key: Any, value: Any, told: Change, place: int = 0) -> None:
        """Add a read, once."""
        if (place or id(mapping), key) not in self._taken:
            self._taken.add((place or id(mapping), key))
            self.found.append(Read(mapping, key, value, told))

    def _look(self, mapping: Mapping[Any, Any], keys: Iterable[Any], told: Change, inner: _Wanted) -> None:
        """Take the values at `keys`, and what containers and objects there hold; of an object the names of `inner`."""
        for name in keys:
            value, here = mapping[name], dataclasses.replace(told, name=str(name))
            if name in self._ignored:
                continue
            if _is_data(value) or (name == "forward" and told.module is not None):
                self._take(mapping, name, value, here)
            elif id(value) not in self._seen:
                self._seen.add(id(value))
                self._look_inside(value, here, inner)

    def _look_inside(self, value: Any, told: Change, inner: _Wanted) -> None:
        entries: Mapping[Any, Any]
        if type(value) in (dict, list):
            entries, inner = value if type(value) is dict else _Positions(value), _anything
        elif not isinstance(value, _NOT_DATA) and type(value).__module__.split(".")[0] not in _OWN:
            entries = getattr(value, "__dict__", {})
        else:
            return
        for entry in list(entries):
            if entry not in self._ignored and inner(entry) and _is_data(entries[entry]):
                here = dataclasses.replace(told, kind="entry", entry=entry)
                self._take(entries, entry, entries[entry], here, id(value))

    def _function(self, function: Any) -> None:
        if isinstance(function, functools.partial):
            told = Change("variable", "keyword of the partial loss function", "")
            self._look(function.keywords, list(function.keywords), told, self._named)
            self._function(function.func)
        elif isinstance(function, MethodType):
            self._object(function.__self__, function.__func__)
            self._function(function.__func__)
        elif isinstance(function, FunctionType):
            self._closure(function)
            self._globals(function.__code__, function.__globals__)
        elif not isinstance(function, nn.Module):
            call = vars(type(function)).get("__call__")
            if isinstance(call, FunctionType):
                self._object(function, call)
                self._function(call)

    def _closure(self, function: FunctionType) -> None:
        if (id(function), None) not in self._taken:
            self._taken.add((id(function), None))
            told = Change("variable", f"closure of {function.__qualname__}: variable", "")
            self._look(_Cells(function), function.__code__.co_freevars, told, self._named)

    def _globals(self, code: CodeType, variables: dict[str, Any]) -> None:
        names = names_in(code)
        inner = names.__contains__ if self._named is _anything else self._named
        told = Change("variable", f"global of {variables.get('__name__', '?')}:", "")
        self._look(variables, sorted(names & variables.keys()), told, inner)

    def _object(self, owner: Any, function: Any) -> None:
        """Attributes of `owner` that `function`, a method of it, may read: a trainer also counts steps and the like."""
        if not isinstance(owner, nn.Module) and hasattr(owner, "__dict__"):
            names = names_through(function.__code__, type(owner))
            told = Change("attribute", f"{type(owner).__name__} attribute", "")
            self._look(vars(owner), sorted(names & vars(owner).keys()), told, names.__contains__)

    def _ran(self, ran: RanCode) -> None:
        """Globals and closures of the code that ran, wherever it was called from."""
        for code, variables in ran.codes:
            self._globals(code, variables)
        for function in ran.closures():
            self._closure(function)


def names_in(code: CodeType) -> set[str]:
    """Global and attribute names that `code` and the functions inside it use."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= names_in(constant)
    return names


def names_through(code: CodeType, owner: type) -> set[str]:
    """Those of `code` and of the methods of `owner` that it reaches by name."""
    names = names_in(code)
    waiting = set(names)
    while waiting:
        method = getattr(owner, waiting.pop(), None)
        found = names_in(method.__code__) if isinstance(method, FunctionType) else set()
        waiting |= found - names
        names |= found
    return names


def _anything(name: Any) -> bool:
    return True


def _is_data(value: object) -> bool:
    return is_value(value) or isinstance(value, Tensor)


def _is_torchs(kind: type) -> bool:
    return kind is object or kind.__module__.startswith("torch.")
