"""State dicts of a wrapped model and optimizer: saved after a flush, loaded into the tensors that the graph knows."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer


class Flushable(Protocol):
    """What the hooks need of a runner."""

    def flush(self) -> None:
        """Return when every launched step has committed."""


class _FlushHook:
    """Flushes a runner when called; a copied or pickled model carries one that does nothing."""

    def __init__(self, runner: Flushable | None) -> None:
        self._runner = weakref.ref(runner) if runner is not None else None

    def __call__(self, *_: Any, **__: Any) -> None:
        runner = self._runner() if self._runner is not None else None
        if runner is not None:
            runner.flush()

    def __reduce__(self) -> tuple[type, tuple[None]]:
        return (_FlushHook, (None,))


class StateHooks:
    """Hooks on one model and optimizer.

    torch's `Optimizer.load_state_dict` puts new tensors in place of the state; a graph would go on with the old
    ones. So the loaded values are copied into the old tensors, which are put back.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, runner: Flushable) -> None:
        self._before: dict[Any, dict[str, Any]] = {}
        flush = _FlushHook(runner)
        self._handles = [
            model.register_state_dict_pre_hook(flush),
            model.register_load_state_dict_pre_hook(flush),
            optimizer.register_state_dict_pre_hook(flush),
            optimizer.register_load_state_dict_pre_hook(_Remember(self, flush)),
            optimizer.register_load_state_dict_post_hook(_Restore(self)),
        ]

    def remember(self, optimizer: Optimizer) -> None:
        """Keep the state tensors that the graph knows."""
        self._before = {parameter: dict(state) for parameter, state in optimizer.state.items()}

    def restore(self, optimizer: Optimizer) -> None:
        """Copy the loaded values into the kept tensors and put those back."""
        for parameter, state in self._before.items():
            loaded = optimizer.state[parameter]
            for key, old in state.items():
                new = loaded.get(key)
                if isinstance(old, Tensor) and isinstance(new, Tensor) and old.shape == new.shape:
                    old.copy_(new)
                    loaded[key] = old
        self._before = {}

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()


class _Remember:
    def __init__(self, hooks: StateHooks, flush: _FlushHook) -> None:
        self._hooks, self._flush = hooks, flush

    def __call__(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self._flush()
        self._hooks.remember(optimizer)


class _Restore:
    def __init__(self, hooks: StateHooks) -> None:
        self._hooks = hooks

    def __call__(self, optimizer: Optimizer) -> None:
        self._hooks.restore(optimizer)
