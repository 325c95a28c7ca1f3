"""Dense regions: the largest parts of a model in which nothing takes part in the step, compiled each for itself.

What takes part keeps books in Python, which a compiler cannot hold; attention, norms and dense blocks keep none. A
region is compiled whole, or not: where the compiler would fall back without a word, the region is named. Each has a
code object of its own, so that the compiler's limit on forms, which counts by code object, is one for each region.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn

from staticmoe.capture.change import Change
from staticmoe.capture.dynamo import entries_of, is_compiled
from staticmoe.errors import CompileError
from staticmoe.runner.participants import participant_of, runs_uncompiled
from staticmoe.runner.unrolled import counted

log = logging.getLogger(__name__)

BACKEND = "inductor"
# torch gives up on a function, in silence, with 8 entries; training and evaluation of one shape take two.
_MOST_ENTRIES = 6
_DYNAMO = str(Path(torch.__file__).parent / "_dynamo")
# Modules that only hold others have no forward of their own.
_HOLDERS = (nn.ModuleList, nn.ModuleDict)


@dataclasses.dataclass
class Region:
    """A module that is compiled.

    Attributes:
        name: its path in the model.
        eager: its own forward.
        function: what is compiled, a function with a code object of its own.
        compiled: that, compiled; the module's own forward where it does not compile whole.
        calls: whether gradients are on -> what is called then, once it has been: each is compiled apart.
        known: how many compiled forms there were when a graph was last built.
    """

    name: str
    module: nn.Module
    eager: Callable[..., Any]
    function: FunctionType
    compiled: Callable[..., Any]
    calls: dict[bool, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    known: int = 0

    @property
    def entries(self) -> int:
        """How many compiled forms of it there are."""
        return entries_of(self.function.__code__)

    @property
    def is_called_compiled(self) -> bool:
        """Whether it is in one of the modes at least."""
        return self.compiled is not self.eager and self.compiled in self.calls.values()


def dense_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Path -> module of the regions of `model`, in module order, each once.

    Left alone is a single layer of torch's, such as a Linear: it is one kernel already.
    """
    found: dict[str, nn.Module] = {}
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, name: str) -> None:
        if module in seen:
            return
        seen.add(module)
        takes_part = any(participant_of(one) is not None for one in module.modules())
        if takes_part or isinstance(module, _HOLDERS):
            if participant_of(module) is None:
                for child, part in module.named_children():
                    visit(part, f"{name}.{child}".lstrip("."))
        elif is_compiled(module):
            # The user's own doing.
            return
        elif not type(module).__module__.startswith("torch.") or list(module.children()):
            found[name] = module

    visit(model, "")
    return found


class Regions:
    """The regions of one model.

    The compiler's books are global, and two threads that fill them corrupt each other's: iterations, in which alone
    anything is compiled, take turns (`staticmoe.capture.seeding`).

    Args:
        model: the user's; its forwards are replaced while an iteration runs, and at no other time.
        fallback: a region that cannot be compiled whole stays as it is and is logged; else it is an error.
        limit_s: once compiling has taken so long, regions that have not been reached stay as they are; logged.
    """

    def __init__(self, model: nn.Module, *, fallback: bool, limit_s: float) -> None:
        self._fallback, self._limit_s = fallback, limit_s
        self._spent = 0.0
        self.regions = [self._region(name, module) for name, module in dense_modules(model).items()]
        log.info("compiling %d dense regions: %s", len(self.regions), ", ".join(one.name for one in self.regions))

    def _region(self, name: str, module: nn.Module) -> Region:
        forward = module.forward

        def region(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        code = region.__code__.replace(co_name=f"region_{name.replace('.', '_')}")
        function = FunctionType(code, region.__globals__, code.co_name, None, region.__closure__)
        compiled = torch.compile(function, fullgraph=True, dynamic=False, backend=BACKEND)
        return Region(name, module, forward, function, compiled)

    def around(self, iteration: Callable[[], None]) -> Callable[[], None]:
        """`iteration` with the regions compiled."""

        def run() -> None:
            with self._installed():
                iteration()

        return run

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        before = [(one.module, vars(one.module).get("forward")) for one in self.regions]
        for one in self.regions:
            vars(one.module)["forward"] = self._entry(one)
        try:
            yield
        finally:
            for module, forward in before:
                if forward is None:
                    del vars(module)["forward"]
                else:
                    vars(module)["forward"] = forward

    def _entry(self, one: Region) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            # A region that another one is given, as a module among its arguments, becomes a part of that one.
            if torch.compiler.is_compiling() or runs_uncompiled():
                return one.eager(*args, **kwargs)
            call = one.calls.get(torch.is_grad_enabled())
            return call(*args, **kwargs) if call is not None else self._first_call(one, args, kwargs)

        return forward

    def _first_call(self, one: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compile for the grad mode that is on, by calling it, unless that has taken too long already.

        Raises:
            CompileError: it cannot be compiled whole, and is not to stay as it is.
        """
        mode, start = torch.is_grad_enabled(), time.perf_counter()
        if self._spent > self._limit_s:
            words = "" if mode else " where gradients are off"
            log.warning("region %s stays uncompiled%s: compiling has taken %.0f s", one.name, words, self._spent)
            one.calls[mode] = one.eager
            return one.eager(*args, **kwargs)
        try:
            result = one.compiled(*args, **kwargs)
        except (torch._dynamo.exc.TorchDynamoException, AssertionError) as error:
            if isinstance(error, AssertionError) and not _is_dynamos(error):
                raise
            reason = str(error).strip().splitlines()[0]
            self._refuse(one, f"{reason} ({type(error).__name__})", error)
            result = one.eager(*args, **kwargs)
        one.calls[mode] = one.compiled
        seconds = time.perf_counter() - start
        self._spent += seconds
        if one.compiled is not one.eager:
            reached = sum(bool(region.calls) for region in self.regions)
            log.info("region %s: compiled in %.1f s; %d of %d", one.name, seconds, reached, len(self.regions))
        return result

    def settle(self) -> None:
        """Take the compiled forms that there are as those of the graphs."""
        for one in self.regions:
            one.known = one.entries

    def recompiled(self) -> list[Change]:
        """Regions that were compiled again since: something that their graphs hold has changed, or a shape."""
        counts = ((one, one.entries) for one in self.regions)
        return [
            Change("compiled", f"module '{one.name}'", "compiled forms", one.known, now, module=one.name)
            for one, now in counts
            if now > one.known
        ]

    def prove(self) -> None:
        """Look for regions that were called and run uncompiled: a compiler that gives up says nothing, its entries do.

        Raises:
            CompileError: there is one, and it is not to stay as it is.
        """
        for one in self.regions:
            if not one.is_called_compiled:
                continue
            entries = one.entries
            if not entries:
                self._refuse(one, "torch ran it uncompiled: is TORCHDYNAMO_DISABLE set, or torch.compiler disabled?")
            elif entries > _MOST_ENTRIES:
                log.warning(
                    "region %s has %d compiled forms, and torch gives up in silence at %d: a Python value or a shape "
                    "in it changes between steps; keep it in a buffer",
                    one.name,
                    entries,
                    torch._dynamo.config.recompile_limit,
                )

    def hold_compiled(self, path: str) -> bool:
        """Whether the module at `path` is, or lies in, a region that is called compiled."""
        return any(f"{path}.".startswith(f"{one.name}.") for one in self.regions if one.is_called_compiled)

    def counting(self) -> contextlib.AbstractContextManager[None]:
        """Within: an iteration runs as it was written; loops that compiling would unroll are warned of."""
        return counted({one.name: one.module for one in self.regions})

    def _refuse(self, one: Region, reason: str, error: Exception | None = None) -> None:
        words = f"region '{one.name}' ({type(one.module).__name__}): expected one that compiles whole, got: {reason}"
        if not self._fallback:
            raise CompileError(
                f"{words}; take what the compiler cannot hold out of it (torch.compiler.disable on a module beside it, "
                "or a custom op), or leave it uncompiled with RunnerConfig(compile_fallback=True)"
            ) from error
        log.warning("%s; it stays uncompiled (compile_fallback)", words)
        one.compiled = one.eager
        one.calls = dict.fromkeys((False, True), one.eager)


def _is_dynamos(error: BaseException) -> bool:
    """Whether the compiler raised it: it refuses some calls (mark_dynamic) with an error that users raise as well."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename.startswith(_DYNAMO)
