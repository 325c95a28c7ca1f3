"""What a graph holds frozen and the user can still change: found before the next step, never silently ignored.

Watched: what the code that was recorded can have read (see `reads`), the parameters and buffers, their memory and
whether they are trained, the submodules, and the hooks. A step first compares by identity, all of a kind in one call
that runs in C; only where that finds a difference is looked at what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter, getitem, is_
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from staticmoe.capture.change import MISSING, Change
from staticmoe.capture.ran import RanCode
from staticmoe.runner.reads import Reads

_HOOKS = {
    "forward hooks": "_forward_hooks",
    "forward pre-hooks": "_forward_pre_hooks",
    "backward hooks": "_backward_hooks",
    "backward pre-hooks": "_backward_pre_hooks",
}
_requires_grad = attrgetter("requires_grad")


class HostState:
    """Python state that a recorded iteration may have read, as it was when this was made.

    Args:
        model: whose modules count.
        functions: loss function and the like.
        ignored: names of attributes that the iteration sets itself.
        ran: the code that was recorded; None: every attribute of a module counts, and no hook.

    Attributes:
        reads: attributes, variables and entries that count.
    """

    def __init__(
        self,
        model: nn.Module,
        functions: tuple[Callable[..., Any], ...],
        ignored: frozenset[str] = frozenset(),
        ran: RanCode | None = None,
    ) -> None:
        modules, reads = list(model.named_modules()), Reads(model, functions, ran, ignored)
        self.reads = reads.found
        self._parts: list[_Part] = [
            _Values(reads),
            _Tensors(modules),
            _Children(modules),
        ]
        if ran is not None:
            self._parts.append(_Hooks(modules))

    def changes(self) -> list[Change]:
        """Everything that is no longer as it was."""
        found: list[Change] = []
        for part in self._parts:
            if not part.is_untouched():
                differences = list(part.differences())
                if not differences:
                    part.settle()
                found += differences
        return found


class _Part(Protocol):
    """One kind of what is watched."""

    def is_untouched(self) -> bool:
        """Whether all is the very same: never true of what has changed; false may also be of what is as good."""

    def differences(self) -> Iterable[Change]:
        """What has changed."""

    def settle(self) -> None:
        """Take what is as good for what it was, so that the next comparison passes."""


class _Values:
    """Attributes, variables and entries."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads
        self._maps = [read.mapping for read in reads.found]
        self._keys = [read.key for read in reads.found]
        self.settle()

    def settle(self) -> None:
        self._now = list(map(getitem, self._maps, self._keys))
        self._sizes = list(map(len, self._reads.homes))

    def is_untouched(self) -> bool:
        try:
            same = all(map(is_, map(getitem, self._maps, self._keys), self._now))
        except KeyError:
            return False
        return same and list(map(len, self._reads.homes)) == self._sizes

    def differences(self) -> Iterator[Change]:
        yield from filter(None, (read.change() for read in self._reads.found))
        yield from self._reads.hiding()


class _Children:
    """Which module has which submodules. A module is equal to itself alone, so that comparing dicts tells."""

    def __init__(self, modules: list[tuple[str, nn.Module]]) -> None:
        self._parents = [(path, module) for path, module in modules if module._modules]
        self._dicts = [module._modules for _, module in self._parents]
        self._then = [dict(children) for children in self._dicts]

    def settle(self) -> None:
        """Nothing is as good as the same module."""

    def is_untouched(self) -> bool:
        return self._dicts == self._then

    def differences(self) -> Iterator[Change]:
        for (path, module), then in zip(self._parents, self._then, strict=True):
            for name in dict.fromkeys([*then, *module._modules]):
                old, new = then.get(name, MISSING), module._modules.get(name, MISSING)
                if old is not new:
                    yield Change("submodule", f"module '{path}'", name, old, new, module=path)


class _Tensors:
    """The parameters and buffers of modules: which they are, where they lie, and whether they are trained."""

    def __init__(self, modules: list[tuple[str, nn.Module]]) -> None:
        slots = [
            (path, kind, book, name)
            for path, module in modules
            for kind, book in (("parameter", module._parameters), ("buffer", module._buffers))
            for name in book
        ]
        self._places = [(path, kind, name) for path, kind, _, name in slots]
        self._books = [book for _, _, book, _ in slots]
        self._names = [name for _, _, _, name in slots]
        self._then = [book[name] for _, _, book, name in slots]
        self._tensors = [tensor for tensor in self._then if tensor is not None]
        self._pointers = list(map(Tensor.data_ptr, self._tensors))
        self._parameters = [tensor for tensor in self._tensors if isinstance(tensor, nn.Parameter)]
        self._trained = list(map(_requires_grad, self._parameters))
        self._forms = {id(tensor): _form(tensor) for tensor in self._tensors}

    def settle(self) -> None:
        """Nothing is as good as the same tensor."""

    def is_untouched(self) -> bool:
        try:
            same = all(map(is_, map(getitem, self._books, self._names), self._then))
        except KeyError:
            return False
        return (
            same
            and list(map(Tensor.data_ptr, self._tensors)) == self._pointers
            and list(map(_requires_grad, self._parameters)) == self._trained
        )

    def differences(self) -> Iterator[Change]:
        trained = {id(parameter): flag for parameter, flag in zip(self._parameters, self._trained, strict=True)}
        for (path, kind, name), book, old in zip(self._places, self._books, self._then, strict=True):
            new, owner = book.get(name, MISSING), f"module '{path}'"
            if new is not old:
                yield Change(kind, owner, name, old, new, module=path)
            elif old is not None:
                if _form(old) != self._forms[id(old)]:
                    yield Change("storage", owner, name, self._forms[id(old)], _form(old), module=path)
                if trained.get(id(old), old.requires_grad) != old.requires_grad:
                    yield Change("requires_grad", owner, name, trained[id(old)], old.requires_grad, module=path)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


class _Hooks:
    """Hooks on modules and their parameters, and those on every module.

    torch numbers each hook that is added, anywhere; so an addition shows in one number, and only where there are hooks
    already can one go.
    """

    def __init__(self, modules: list[tuple[str, nn.Module]]) -> None:
        self._places: list[tuple[str | None, str, str]] = []
        self._owners: list[tuple[Any, str]] = []
        for path, module in modules:
            for what, name in _HOOKS.items():
                self._enter(path, f"module '{path}'", what, module, name)
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    self._enter(path, f"module '{path}'", f"hooks of {key}", parameter, "_backward_hooks")
        for what, name in _HOOKS.items():
            self._enter(None, "every module", what, torch_module, f"_global{name}")
        self._then = [dict(hooks) for hooks in self._all()]
        self.settle()

    def _enter(self, path: str | None, owner: str, what: str, holder: Any, name: str) -> None:
        self._places.append((path, owner, what))
        self._owners.append((holder, name))

    def _all(self) -> list[Mapping[int, Any]]:
        return [getattr(holder, name, None) or {} for holder, name in self._owners]

    def settle(self) -> None:
        self._number = RemovableHandle.next_id
        self._some = [hooks for hooks in self._all() if hooks]
        self._counts = list(map(len, self._some))

    def is_untouched(self) -> bool:
        return RemovableHandle.next_id == self._number and list(map(len, self._some)) == self._counts

    def differences(self) -> Iterator[Change]:
        for (path, owner, what), then, hooks in zip(self._places, self._then, self._all(), strict=True):
            if hooks != then:
                yield Change("hook", owner, what, len(then), len(hooks), module=path)
