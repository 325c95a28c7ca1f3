"""Dense regions: the largest parts of a model in which nothing takes part in the step, compiled each for itself.

What takes part keeps books in Python, which a compiler cannot hold; attention, norms and dense blocks keep none. A
region is compiled whole, or not: where the compiler would fall back without a word, the region is named. Each has a
code object of its own, so that the compiler's limit on forms, which counts by code object, is one for each region.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
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
# The compiler keeps global books: two threads that fill them corrupt each other's.
_compiling = threading.Lock()


@dataclasses.dataclass
class Region:
    """A module that is compiled.

    Attributes:
        name: its path in the model.
        eager: its own forward.
        function: what is compiled, a function with a code object of its own.
        compiled: that, compiled; the module's own forward where it stays uncompiled.
        known: how many compiled forms there were when a graph was last built.
        modes: whether gradients were on, of the calls so far: each is compiled apart.
        seconds: what its first calls took.
    """

    name: str
    module: nn.Module
    eager: Callable[..., Any]
    function: FunctionType
    compiled: Callable[..., Any]
    known: int = 0
    modes: set[bool] = dataclasses.field(default_factory=set)
    seconds: float = 0.0

    @property
    def entries(self) -> int:
        """How many compiled forms of it there are."""
        return entries_of(self.function.__code__)


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
            if torch.is_grad_enabled() in one.modes:
                return one.compiled(*args, **kwargs)
            return self._first_call(one, args, kwargs)

        return forward

    def _first_call(self, one: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compile, by calling it.

        Raises:
            CompileError: it cannot be compiled whole, and is not to stay as it is.
        """
        if self._spent > self._limit_s and one.compiled is not one.eager:
            log.warning("region %s stays uncompiled: compiling has taken %.0f s", one.name, self._spent)
            one.compiled = one.eager
        start = time.perf_counter()
        with _compiling:
            try:
                result = one.compiled(*args, **kwargs)
            except (torch._dynamo.exc.TorchDynamoException, AssertionError) as error:
                if isinstance(error, AssertionError) and not _is_dynamos(error):
                    raise
                reason = str(error).strip().splitlines()[0]
                self._refuse(one, f"{reason} ({type(error).__name__})", error)
                result = one.eager(*args, **kwargs)
        seconds = time.perf_counter() - start
        one.modes.add(torch.is_grad_enabled())
        one.seconds += seconds
        self._spent += seconds
        log.info("%s: compiled in %.1f s; %d of %d", one.name, seconds, self._reached, len(self.regions))
        return result

    @property
    def _reached(self) -> int:
        return sum(bool(one.modes) for one in self.regions)

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
            if not one.modes or one.compiled is one.eager:
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


def _is_dynamos(error: BaseException) -> bool:
    """Whether the compiler raised it: it refuses some calls (mark_dynamic) with an error that users raise as well."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename.startswith(_DYNAMO)
