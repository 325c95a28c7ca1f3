"""The Python around an observed iteration: state that it changes, and results that it keeps.

Both stand still in a replay: it runs the operations, and none of the Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from staticmoe.capture.change import Change
from staticmoe.capture.draws import HostDraws
from staticmoe.capture.findings import Finding, Findings
from staticmoe.capture.holders import Held, Lines, describe, held

_MEND = "keep such state in a buffer that is updated in place, or in runner.scalars"
_MEND_REBOUND = "register a buffer and write it in place: self.x.mul_(0.9).add_(y), self.x.copy_(y)"
_MEND_KEPT = "return it as a metric of the loss function, or copy it into a buffer in place"
# What a replay holds and an iteration can change beside its operations; submodules and hooks it only reads.
_STATE = frozenset({"attribute", "variable", "entry", "parameter", "buffer", "storage", "requires_grad"})
_MEND_COPY = (
    "compute it in every iteration, or keep such weights as one parameter from the start; where a frozen copy is "
    "meant, make it a buffer"
)


class Surroundings:
    """What observed iterations of one program do beside their operations.

    Args:
        model: whose attributes count.
        functions: loss function and the like, whose variables count.
        modules: id(module) -> dotted path, for messages.
        findings: takes what is found.

    Attributes:
        draws: watches the host's random states; each observed iteration runs within its `watch`.
    """

    def __init__(
        self,
        model: nn.Module,
        functions: tuple[Callable[..., Any], ...],
        modules: Mapping[int, str],
        findings: Findings,
    ) -> None:
        self.draws = HostDraws(findings, modules)
        self._model = model
        self._functions = functions
        self._findings = findings
        self._lines = Lines(model, functions)

    def judge(self, changes: Sequence[Change]) -> None:
        """Add what the latest iteration changed, as a `HostState` found it, and what containers kept of it."""
        for change in changes:
            if change.kind in _STATE:
                self._add(change)
        self.add_copies()
        for one in held(self._model, self._functions):
            if one.inside and one.tensor.layout == torch.strided and self._findings.is_fresh(one.tensor):
                self._add_kept(one)

    def _add(self, change: Change) -> None:
        name = change.name
        if change.kind == "entry" and change.module is None:
            # The line that stores it names the entry, not the container.
            name = str(change.entry)
        if change.is_number and change.kind != "requires_grad":
            inside = "SM203" if change.kind == "entry" else "SM201"
            code, mend = ("SM202" if change.kind != "entry" and change.module is None else inside), _MEND
        else:
            code, mend = self._of_tensor(name, change.module)
        why = f"the iteration changes Python state that a replay would not change: {change}"
        self._findings.add(Finding(code, why, mend, self._lines.storing(name, change.module)))

    def _of_tensor(self, name: str, module: str | None) -> tuple[str, str]:
        """Code and mend of a name bound to another tensor: state that is read again, or a result that is kept."""
        stale = self._findings.take_stale(describe(name, module))
        if stale is not None or self._lines.reads(name, module):
            return "SM301", _MEND_REBOUND
        return "SM303", _MEND_KEPT

    def add_copies(self) -> None:
        """Add constants that are weights of before: certain ones stop a capture, others may be meant so."""
        for copy in self._findings.copies.found():
            why = f"this reads a tensor that was there before the iteration and holds the values of '{copy.parameter}'"
            why += ", computed from it" if copy.tracked else ""
            why += ": a replay would go on with the weights of then"
            severity = "error" if copy.certain else "warning"
            self._findings.add(Finding("SM403", why, _MEND_COPY, copy.source, severity=severity))

    def _add_kept(self, one: Held) -> None:
        why = f"{one} keeps a result of the iteration, which the next replay overwrites"
        source = self._lines.storing(one.name, one.module)
        self._findings.add(Finding("SM303", why, _MEND_KEPT, source, severity="warning"))
