"""What a graph holds frozen and the user can still change: found before the next step, never silently ignored.

Watched: Python numbers, strings and tensors that are attributes of modules; numbers in the closure and the
globals of the loss function and of the modules' forwards; optimizer options; which parameters there are.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from staticmoe.errors import OptimizerError

_VALUES = (int, float, bool, str, complex, type(None))
_MISSING = object()
# Objects of these packages keep books of their own: the runner's binding counts the entries of a forward.
_OWN = ("torch", "builtins", "staticmoe")
# What a variable may refer to without being data that a loss function reads.
_NOT_DATA = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, nn.Module)


def _is_value(value: object) -> bool:
    return type(value) in _VALUES or (type(value) is tuple and all(_is_value(item) for item in value))


def _same(old: Any, new: Any) -> bool:
    """Equal, or both NaN. A tensor is the same only as the same object."""
    if old is new:
        return True
    return _is_value(old) and _is_value(new) and type(old) is type(new) and (old == new or (old != old and new != new))


class _Cells(Mapping[str, Any]):
    """The closure of a function as a mapping from variable name to value."""

    def __init__(self, function: FunctionType) -> None:
        self._cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def __getitem__(self, name: str) -> Any:
        try:
            return self._cells[name].cell_contents
        except ValueError:
            return _MISSING

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


def _names_in(code: CodeType) -> set[str]:
    """Global and attribute names that `code` and the functions inside it use."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names


def _names_through(code: CodeType, owner: type) -> set[str]:
    """Those of `code` and of the methods of `owner` that it reaches by name."""
    names = _names_in(code)
    waiting = set(names)
    while waiting:
        method = getattr(owner, waiting.pop(), None)
        found = _names_in(method.__code__) if isinstance(method, FunctionType) else set()
        waiting |= found - names
        names |= found
    return names


class HostState:
    """Python values that a recorded iteration may have read, as they were when this was made.

    Attributes of modules and what containers among them hold; of functions, the variables of the closure, the
    globals and the attributes of their object that their code names.

    Args:
        model: its modules' attributes and its forwards' globals.
        functions: loss function and the like.
        ignored: names of attributes that the iteration sets itself.
    """

    def __init__(
        self, model: nn.Module, functions: tuple[Callable[..., Any], ...], ignored: frozenset[str] = frozenset()
    ) -> None:
        self._ignored = ignored
        self._items: list[tuple[Mapping[Any, Any], Any, Any, str]] = []
        self._seen: set[int] = set()
        forwards = {
            type(module).forward for module in model.modules() if not type(module).__module__.startswith("torch.")
        }
        for name, module in model.named_modules():
            self._watch(vars(module), f"module '{name}' attribute")
        for function in itertools.chain(functions, forwards):
            self._watch_function(function)
        self._parameters = [
            (
                module._parameters if key in module._parameters else module._buffers,
                key,
                tensor,
                _identity(tensor),
                prefix,
            )
            for prefix, module in model.named_modules()
            for key, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        ]

    def _watch(
        self, mapping: Mapping[Any, Any], what: str, *, names: set[str] | None = None, inside: bool = True
    ) -> None:
        """Note the values of `mapping`, and what its containers and objects hold, one level deep."""
        for name in list(mapping):
            if name in self._ignored or (names is not None and name not in names):
                continue
            value = mapping[name]
            if _is_value(value) or isinstance(value, Tensor):
                self._items.append((mapping, name, value, what))
            elif inside and id(value) not in self._seen:
                self._seen.add(id(value))
                self._watch_inside(value, f"{what} '{name}' entry", names)

    def _watch_inside(self, value: Any, what: str, names: set[str] | None) -> None:
        if type(value) is dict:
            self._watch(value, what, inside=False)
        elif type(value) is list:
            self._watch(_Positions(value), what, inside=False)
        elif not isinstance(value, _NOT_DATA) and type(value).__module__.split(".")[0] not in _OWN:
            self._watch(getattr(value, "__dict__", {}), what, names=names, inside=False)

    def _watch_function(self, function: Any) -> None:
        if isinstance(function, functools.partial):
            self._watch(function.keywords, "keyword of the partial loss function")
            self._watch_function(function.func)
        elif isinstance(function, MethodType):
            self._watch_object(function.__self__, function.__func__)
            self._watch_function(function.__func__)
        elif isinstance(function, FunctionType):
            names = _names_in(function.__code__)
            self._watch(_Cells(function), f"closure of {function.__qualname__}: variable")
            self._watch(function.__globals__, f"global of {function.__module__}:", names=names)
        elif not isinstance(function, nn.Module):
            call = vars(type(function)).get("__call__")
            if isinstance(call, FunctionType):
                self._watch_object(function, call)
                self._watch_function(call)

    def _watch_object(self, owner: Any, function: Any) -> None:
        """Attributes of `owner` that `function`, a method of it, may read: a trainer also counts steps and the like."""
        if not isinstance(owner, nn.Module) and hasattr(owner, "__dict__"):
            self._watch(
                vars(owner), f"{type(owner).__name__} attribute", names=_names_through(function.__code__, type(owner))
            )

    def changes(self) -> list[str]:
        """Describe every value that is no longer as it was, parameters' storage and flags included."""
        found = []
        for mapping, name, old, what in self._items:
            new = mapping.get(name, _MISSING)
            if new is not old and not _same(old, new):
                found.append(f"{what} '{name}'{_arrow(old, new)}")
        for mapping, key, tensor, identity, prefix in self._parameters:
            now = mapping.get(key)
            if now is not tensor:
                found.append(f"{prefix}.{key}".lstrip(".") + " was replaced by another tensor")
            elif _identity(tensor) != identity:
                found.append(f"{prefix}.{key}".lstrip(".") + " has other storage, dtype or requires_grad")
        return found


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.requires_grad


def _arrow(old: Any, new: Any) -> str:
    if new is _MISSING:
        return " was removed"
    return f": {old!r} -> {new!r}" if _is_value(old) and _is_value(new) else " was rebound to another object"


def cause_of(change: str) -> str:
    """The part of a change that stays the same when the value changes again."""
    return change.split(": ")[0] if " -> " in change else change


# Options that do not enter a step: which form of it torch takes, and the books of schedulers.
_FREE = frozenset(
    {"params", "param_names", "foreach", "fused", "capturable", "initial_lr", "max_lr", "min_lr", "swa_lr"}
    | {"max_momentum", "min_momentum", "base_momentum"}
)


class OptimizerState:
    """Options and parameters of an optimizer as they were when an iteration was recorded.

    Args:
        optimizer: the user's.
        model: that its parameters should belong to.
        staged: keys of the options that are device values; None where no option is part of the graph.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module, staged: frozenset[str] | None) -> None:
        self._optimizer = optimizer
        self._model = model
        self._groups = [list(map(id, group["params"])) for group in optimizer.param_groups]
        self._free = None if staged is None else _FREE | staged
        self._options = [self._frozen(group) for group in optimizer.param_groups]

    def check_groups(self) -> None:
        """Refuse an optimizer with other parameters than were captured.

        Raises:
            OptimizerError: a group or parameter was added or removed.
        """
        groups = [list(map(id, group["params"])) for group in self._optimizer.param_groups]
        if groups != self._groups:
            expected, got = list(map(len, self._groups)), list(map(len, groups))
            raise OptimizerError(
                f"optimizer: expected the {len(expected)} captured parameter groups of sizes {expected}, got "
                f"{len(got)} of sizes {got}; add_param_group after wrapping is not seen by the graph: build the "
                "optimizer with all groups and wrap again"
            )

    def check_members(self) -> None:
        """Refuse an optimizer whose parameters the model no longer has.

        Raises:
            OptimizerError: the model's parameters were replaced.
        """
        known = {id(parameter) for parameter in self._model.parameters()}
        lost = sum(1 for group in self._groups for parameter in group if parameter not in known)
        if lost:
            raise OptimizerError(
                f"optimizer: expected parameters of the model, got {lost} that the model no longer has; they were "
                "replaced (load_state_dict(assign=True) does that): load with assign=False, or build optimizer and "
                "runner again"
            )

    def changes(self) -> list[str]:
        """Describe every option that is no device value and differs from what the graph holds."""
        found = []
        for number, (old, group) in enumerate(zip(self._options, self._optimizer.param_groups, strict=True)):
            for key, value in self._frozen(group).items():
                if not _same(old.get(key), value):
                    found.append(f"optimizer group {number} option '{key}': {old.get(key)!r} -> {value!r}")
        return found

    def _frozen(self, group: dict[str, Any]) -> dict[str, Any]:
        """The options that enter the graph as they are, in a form that can be compared."""
        return {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in group.items()
            if self._free is not None and key not in self._free
        }
