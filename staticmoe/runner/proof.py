"""Proof that what is compiled runs compiled, and stays so: by the compiler's entries after each iteration."""

from __future__ import annotations

import contextlib
import linecache
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from staticmoe.capture.attention import stood_in
from staticmoe.capture.dynamo import Compiled, CompiledCalls, last_move, most_entries
from staticmoe.capture.findings import Finding, Findings, audit_error
from staticmoe.capture.source import Source
from staticmoe.config import RunnerConfig
from staticmoe.runner.regions import Regions

log = logging.getLogger(__name__)

# The first iteration compiles, the second may find a cache filled or a number that has become a variable.
_SETTLED = 2
# Iterations of an audit that run compiled: two to settle, two that show whether it has.
_TRIALS = 4
# What costs least comes first.
WAYS_OUT = (
    "torch.compiler.disable what does it, hoist it out of the compiled function, or make it a custom op, in that order"
)
_MEND = "compile a function of your own that holds it, or leave it uncompiled; RunnerConfig(compile='blocks') proves it"


class Proof:
    """Compiled code of one program: the regions of `compile="blocks"`, and what the user compiled.

    Args:
        regions: None without any.
        config: options.
        findings: takes what is wrong.
        modules: id(module) -> dotted path.

    Attributes:
        calls: takes the compiled functions that the observed iterations call.
    """

    def __init__(
        self, regions: Regions | None, config: RunnerConfig, findings: Findings, modules: Mapping[int, str]
    ) -> None:
        self.calls = CompiledCalls(modules)
        self._regions, self._config, self._findings = regions, config, findings

    def refuse(self, finding: Finding) -> None:
        """Take what must not go on.

        Raises:
            AuditError: at once; with another `audit` it is logged, and goes on.
        """
        new = self._findings.add(finding)
        if self._config.audit == "error":
            raise audit_error(self._findings.items)
        if self._config.audit == "warn" and new:
            log.warning("%s", finding)

    def before_capture(self, run: Callable[[], None], *, emulated: bool) -> None:
        """Let what is compiled be compiled, and tuned, by warm-ups of `run`; refuse what then runs uncompiled.

        Raises:
            CompileError: a region does.
            AuditError: a function of the user's does, or is compiled anew each time.
        """
        if emulated:
            names = ", ".join(dict.fromkeys(one.name for one in self.calls.orders))
            if names:
                log.warning("an emulated capture runs what is compiled as it was written: %s", names)
            return
        if self._regions is None and not self.calls.orders:
            return
        for _ in range(self._config.capture_warmup_iters):
            run()
            self.calls.note()
        if self._regions is not None:
            self._regions.prove()
        audit = self._config.audit
        for finding in verdicts(self.calls) if audit != "off" else ():
            # What a region holds is a part of it, and proven with it.
            within = self._regions is not None and self._regions.hold_compiled(finding.source.module)
            if not within and self._findings.add(finding) and audit == "warn":
                log.warning("%s", finding)
        if audit == "error" and self._findings.errors:
            raise audit_error(self._findings.items)

    def on_trial(self, run: Callable[[], None], parameters: Sequence[Tensor]) -> None:
        """Find what of the user's does not stay compiled, and leave it as compiled as it was."""
        if not self.calls.orders:
            return
        with stood_in(), self.calls.on_trial(), _updates(parameters) as update:
            for _ in range(_TRIALS):
                run()
                self.calls.note()
                update()
            found = list(verdicts(self.calls))
        for finding in found:
            self._findings.add(finding)


@contextlib.contextmanager
def _updates(parameters: Sequence[Tensor]) -> Iterator[Callable[[], None]]:
    """Count the writes of an update that is withheld in the versions of `parameters`; they are put back."""
    written, before = tuple(parameters), tuple(parameter._version for parameter in parameters)
    count = torch._C._autograd._unsafe_set_version_counter
    try:
        yield lambda: count(written, tuple(parameter._version + 1 for parameter in written))
    finally:
        count(written, before)


def verdicts(calls: CompiledCalls) -> Iterator[Finding]:
    """What `calls` show after iterations that ran compiled: functions that did not, or that are compiled ever anew."""
    for one, order in calls.orders.items():
        if not order:
            continue
        moves = [later > earlier for earlier, later in zip(order[_SETTLED - 1 :], order[_SETTLED:], strict=False)]
        if not order[-1]:
            yield Finding("SM603", f"{one.name} is compiled, and ran as it was written: {_why()}", _MEND, one.source)
        elif order[-1] >= most_entries():
            words, source = _moved(one)
            why = f"{one.name} has {order[-1]} compiled forms, at which torch gives up in silence{words}"
            yield Finding("SM603", why, WAYS_OUT, source)
        elif moves and all(moves):
            words, source = _moved(one)
            why = f"{one.name} is compiled anew in each iteration ({', '.join(map(str, order))} forms){words}"
            yield Finding("SM604", why, WAYS_OUT, source)


def _why() -> str:
    if torch._dynamo.config.disable:
        return "torch has no compiled form of it, since TORCHDYNAMO_DISABLE is set"
    if torch._dynamo.config.suppress_errors:
        return "torch has no compiled form of it, and torch._dynamo.config.suppress_errors hides why"
    return "torch has no compiled form of it (it leaves alone what is made of its own modules, such as Sequential)"


def _moved(one: Compiled) -> tuple[str, Source]:
    """The guard that moved in words, and its line in the function; else the line of the call."""
    code = one.code
    guard, line = last_move(code) if code is not None else ("", 0)
    if code is None or not guard:
        return "", one.source
    source = one.source
    if line:
        text = linecache.getline(code.co_filename, line).strip()
        source = replace(source, file=code.co_filename, line=line, text=text)
    return f", as {guard} no longer held", source
