"""Loops over modules inside of what is to be compiled: a compiler unrolls them, a body for each module.

Counted while an iteration runs as it was written, so that they are known before anything is compiled.
"""

from __future__ import annotations

import collections
import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from staticmoe.capture.source import Source, locate

log = logging.getLogger(__name__)

# Compiling takes as long as its operations are many; a few bodies are no loop worth a word.
_FEW = 8
_LISTS = (nn.ModuleList, nn.ModuleDict)


@contextlib.contextmanager
def counted(regions: Mapping[str, nn.Module]) -> Iterator[None]:
    """Within, an iteration runs; afterwards loops that would be unrolled are logged: region, line and bodies.

    Args:
        regions: path -> module of what will be compiled, each whole.
    """
    most: dict[tuple[str, Source, type], int] = {}
    hooks = []
    for name, region in regions.items():
        parts = {part for holder in region.modules() if isinstance(holder, _LISTS) for part in holder.children()}
        paths = ((f"{name}.{path}".rstrip("."), module) for path, module in region.named_modules())
        # Without the parts, so that the module of the loop is found, not that of a body.
        modules = {id(module): path for path, module in paths if module not in parts}
        count: collections.Counter[tuple[Source, type]] = collections.Counter()
        hooks.append(region.register_forward_pre_hook(_clearing(count)))
        hooks.append(region.register_forward_hook(_closing(name, count, most)))
        for part in parts:
            hooks.append(part.register_forward_pre_hook(_counting(count, modules)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for (name, source, kind), number in most.items():
        if number >= _FEW:
            log.warning(
                "region %s: the loop at %s calls %d modules (%s), which the compiler unrolls into as many bodies and "
                "compiles as long; keep their weights as one parameter and use one grouped operation, or put the loop "
                "behind torch.compiler.disable with RunnerConfig(compile_fallback=True)",
                name, source, number, kind.__name__,
            )  # fmt: skip


def _clearing(count: collections.Counter[tuple[Source, type]]) -> Any:
    def hook(module: nn.Module, args: Any) -> None:
        count.clear()

    return hook


def _closing(
    name: str, count: collections.Counter[tuple[Source, type]], most: dict[tuple[str, Source, type], int]
) -> Any:
    """The most that one call of the region has in it."""

    def hook(module: nn.Module, args: Any, result: Any) -> None:
        for (source, kind), number in count.items():
            most[name, source, kind] = max(number, most.get((name, source, kind), 0))

    return hook


def _counting(count: collections.Counter[tuple[Source, type]], modules: Mapping[int, str]) -> Any:
    def hook(module: nn.Module, args: Any) -> None:
        count[locate(modules), type(module)] += 1

    return hook
