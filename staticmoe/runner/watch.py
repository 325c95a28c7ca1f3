"""What a graph holds frozen and the user can still change: found before the next step, never silently ignored.

Watched: what the code that was recorded can have read (see `reads`), the parameters and buffers, their memory and
whether they are trained, the submodules, and the hooks. A step first compares everything at once, in C, by identity;
only where that finds a difference is looked at what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter, getitem, is_
from typing import Any

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
    """

    def __init__(
        self,
        model: nn.Module,
        functions: tuple[Callable[..., Any], ...],
        ignored: frozenset[str] = frozenset(),
        ran: RanCode | None = None,
    ) -> None:
        self._reads = Reads(model, functions, ran, ignored)
        self._modules = list(model.named_modules())
        self._tensors = _Tensors(self._modules)
        self._hooks = _Hooks(self._modules) if ran is not None else None
        # A module is equal to itself alone, so that one comparison of dicts tells.
        self._parents = [(path, module) for path, module in self._modules if module._modules]
        self._children = [module._modules for _, module in self._parents]
        self._children_then = [dict(children) for children in self._children]
        self._maps = [read.mapping for read in self._reads.found]
        self._keys = [read.key for read in self._reads.found]
        self._values = [read.old for read in self._reads.found]
        self._sizes = list(map(len, self._reads.homes))

    def changes(self) -> list[Change]:
        """Everything that is no longer as it was."""
        if self._is_untouched():
            return []
        found = list(self._differences())
        if not found:
            # Equal, and other objects: the next comparison by identity is to pass.
            self._values = [read.mapping[read.key] for read in self._reads.found]
            self._sizes = list(map(len, self._reads.homes))
            if self._hooks is not None:
                self._hooks.settle()
        return found

    def _is_untouched(self) -> bool:
        """Whether all is the very same: never true of what has changed; false may also be for a new object as good."""
        try:
            return (
                (self._hooks is None or self._hooks.are_untouched())
                and all(map(is_, map(getitem, self._maps, self._keys), self._values))
                and list(map(len, self._reads.homes)) == self._sizes
                and self._children == self._children_then
                and self._tensors.are_untouched()
            )
        except KeyError:
            return False

    def _differences(self) -> Iterator[Change]:
        yield from filter(None, (read.change() for read in self._reads.found))
        yield from self._reads.hiding()
        yield from self._tensors.differences()
        for (path, module), then in zip(self._parents, self._children_then, strict=True):
            for name in dict.fromkeys([*then, *module._modules]):
                old, new = then.get(name, MISSING), module._modules.get(name, MISSING)
                if old is not new:
                    yield Change("submodule", f"module '{path}'", name, old, new, module=path)
        if self._hooks is not None:
            yield from self._hooks.differences()


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
        self._trained = list(map(_requires_grad, self._tensors))
        self._forms = {id(tensor): _form(tensor) for tensor in self._tensors}

    def are_untouched(self) -> bool:
        """Whether nothing was replaced, moved, or frozen."""
        return (
            all(map(is_, map(getitem, self._books, self._names), self._then))
            and list(map(Tensor.data_ptr, self._tensors)) == self._pointers
            and list(map(_requires_grad, self._tensors)) == self._trained
        )

    def differences(self) -> Iterator[Change]:
        """What was."""
        trained = iter(self._trained)
        for (path, kind, name), book, old in zip(self._places, self._books, self._then, strict=True):
            new, owner = book.get(name, MISSING), f"module '{path}'"
            required = next(trained) if old is not None else None
            if new is not old:
                yield Change(kind, owner, name, old, new, module=path)
            elif old is not None:
                if _form(old) != self._forms[id(old)]:
                    yield Change("storage", owner, name, self._forms[id(old)], _form(old), module=path)
                if old.requires_grad != required:
                    yield Change("requires_grad", owner, name, required, old.requires_grad, module=path)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


class _Hooks:
    """Hooks on modules and their parameters, and those on every module.

    torch numbers each hook that is added, anywhere; so an addition shows in one number, and only where there are hooks
    already can one go.
    """

    def __init__(self, modules: list[tuple[str, nn.Module]]) -> None:
        self._modules = modules
        self.settle()

    def settle(self) -> None:
        """Take the hooks as they are now."""
        self._number = RemovableHandle.next_id
        self._then = {place: dict(hooks) for place, hooks in self._all()}
        self._some = [hooks for _, hooks in self._all() if hooks]
        self._counts = list(map(len, self._some))

    def are_untouched(self) -> bool:
        """Whether none was added or removed."""
        return RemovableHandle.next_id == self._number and list(map(len, self._some)) == self._counts

    def differences(self) -> Iterator[Change]:
        """Where some were."""
        for place, hooks in self._all():
            then = self._then.get(place, {})
            if dict(hooks) != then:
                path, owner, what = place
                yield Change("hook", owner, what, len(then), len(hooks), module=path)

    def _all(self) -> Iterator[tuple[tuple[str | None, str, str], Mapping[int, Any]]]:
        for what, name in _HOOKS.items():
            yield (None, "every module", what), getattr(torch_module, f"_global{name}", {})
            for path, module in self._modules:
                yield (path, f"module '{path}'", what), getattr(module, name)
        for path, module in self._modules:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    yield (path, f"module '{path}'", f"hooks of {name}"), parameter._backward_hooks or {}
