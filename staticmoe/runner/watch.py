"""What a graph holds frozen and the user can still change: found before the next step, never silently ignored.

Watched: Python numbers, strings and tensors that are attributes of modules; numbers in the closure and the
globals of the loss function and of the modules' forwards; optimizer options; which parameters there are.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, MutableMapping
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from staticmoe.errors import OptimizerError

_VALUES = (int, float, bool, str, complex, type(None))
_MISSING = object()


def _is_value(value: object) -> bool:
    return type(value) in _VALUES or (type(value) is tuple and all(_is_value(item) for item in value))


def _same(old: Any, new: Any) -> bool:
    """Equal, or both NaN. A tensor is the same only as the same object."""
    if old is new:
        return True
    return _is_value(old) and _is_value(new) and type(old) is type(new) and (old == new or (old != old and new != new))


class _Cells(MutableMapping[str, Any]):
    """The closure of a function as a mapping from variable name to value."""

    def __init__(self, function: FunctionType) -> None:
        self._cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def __getitem__(self, name: str) -> Any:
        try:
            return self._cells[name].cell_contents
        except ValueError:
            return _MISSING

    def __setitem__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        raise TypeError("a closure variable cannot be removed")

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)


def _global_names(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _global_names(constant)
    return names


class HostState:
    """Python values that a recorded iteration may have read, as they were when this was made.

    Args:
        model: its modules' attributes and its forwards' globals.
        functions: loss function and the like.
        ignored: names of attributes that the iteration sets itself.
    """

    def __init__(
        self, model: nn.Module, functions: tuple[Callable[..., Any], ...], ignored: frozenset[str] = frozenset()
    ) -> None:
        self._ignored = ignored
        self._items: list[tuple[MutableMapping[str, Any], str, Any, str]] = []
        forwards = {type(module).forward for module in model.modules() if not type(module).__module__.startswith("torch.")}
        for name, module in model.named_modules():
            self._watch(vars(module), f"module '{name}' attribute", tensors=True)
        for function in itertools.chain(functions, forwards):
            self._watch_function(function)
        self._parameters = [
            (module._parameters if key in module._parameters else module._buffers, key, tensor, _identity(tensor), prefix)
            for prefix, module in model.named_modules()
            for key, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        ]

    def _watch(self, mapping: Any, what: str, *, tensors: bool = False, names: set[str] | None = None) -> None:
        for name in (mapping.keys() if names is None else names & mapping.keys()) - self._ignored:
            value = mapping[name]
            if _is_value(value) or (tensors and isinstance(value, Tensor)):
                self._items.append((mapping, name, value, what))

    def _watch_function(self, function: Any) -> None:
        if isinstance(function, functools.partial):
            self._watch(function.keywords, "keyword of the partial loss function")
            return self._watch_function(function.func)
        if isinstance(function, MethodType):
            if not isinstance(function.__self__, nn.Module) and hasattr(function.__self__, "__dict__"):
                self._watch(vars(function.__self__), f"attribute of {type(function.__self__).__name__}", tensors=True)
            return self._watch_function(function.__func__)
        if isinstance(function, FunctionType):
            self._watch(_Cells(function), f"closure of {function.__qualname__}: variable", tensors=True)
            names = _global_names(function.__code__)
            self._watch(function.__globals__, f"global read by {function.__qualname__}:", names=names)
        elif not isinstance(function, nn.Module) and hasattr(type(function), "__call__") and hasattr(function, "__dict__"):
            self._watch(vars(function), f"attribute of {type(function).__name__}", tensors=True)
            self._watch_function(type(function).__call__)
        return None

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


class OptimizerState:
    """Options and parameters of an optimizer as they were when an iteration was recorded.

    Args:
        optimizer: the user's.
        model: that its parameters should belong to.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self._optimizer = optimizer
        self._model = model
        self._groups = [list(map(id, group["params"])) for group in optimizer.param_groups]
        self._options = [_options(group) for group in optimizer.param_groups]

    def check(self) -> None:
        """Refuse an optimizer whose parameters are no longer those that were captured, or those of the model.

        Raises:
            OptimizerError: a group or parameter was added or removed, or the model has other parameters now.
        """
        groups = [list(map(id, group["params"])) for group in self._optimizer.param_groups]
        if groups != self._groups:
            expected, got = list(map(len, self._groups)), list(map(len, groups))
            raise OptimizerError(
                f"optimizer: expected the {len(expected)} captured parameter groups of sizes {expected}, got {len(got)} of "
                f"sizes {got}; add_param_group after wrapping is not seen by the graph: build the optimizer with all "
                "groups and wrap again"
            )
        known = {id(parameter) for parameter in self._model.parameters()}
        lost = sum(1 for group in groups for parameter in group if parameter not in known)
        if lost:
            raise OptimizerError(
                f"optimizer: expected parameters of the model, got {lost} that the model no longer has; they were replaced "
                "(load_state_dict(assign=True) does that): load with assign=False, or build the optimizer and the runner again"
            )

    def changes(self) -> list[str]:
        """Describe every option besides the learning rate that differs from what the graph holds."""
        found = []
        for number, (old, group) in enumerate(zip(self._options, self._optimizer.param_groups, strict=True)):
            for key, value in _options(group).items():
                if not _same(old.get(key), value):
                    found.append(f"optimizer group {number} option '{key}': {old.get(key)!r} -> {value!r}")
        return found


# The learning rate is a device value; the rest of these do not enter the fused step.
_FREE = {"params", "param_names", "lr", "initial_lr", "foreach", "fused", "capturable", "max_lr", "min_lr", "swa_lr"}


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in group.items() if key not in _FREE}
