"""The Python around an observed iteration: state that it changes, and results that it keeps.

Both stand still in a replay: it runs the operations, and none of the Python.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from staticmoe.capture.draws import HostDraws
from staticmoe.capture.findings import Finding, Findings
from staticmoe.capture.holders import Held, Lines, describe, held

_MEND = "keep such state in a buffer that is updated in place, or in runner.scalars"
_MEND_REBOUND = "register a buffer and write it in place: self.x.mul_(0.9).add_(y), self.x.copy_(y)"
_MEND_KEPT = "return it as a metric of the loss function, or copy it into a buffer in place"
_MODULE = re.compile(r"module '(.*?)' attribute '(.*?)'")
# Where torch keeps what reads like an attribute.
_BOOKS = ("_parameters", "_buffers")
_NAMED = re.compile(r"'([^']*)'(?=: | was |$)")
_REPLACED = re.compile(r"^(.*?)\.?([^.\s]+) (?:was replaced by another tensor|has other storage)")


@dataclasses.dataclass(frozen=True)
class _Change:
    """A described change, taken apart: name and module path (None: a variable), and whether a number changed."""

    text: str
    name: str
    module: str | None
    number: bool
    inside: bool

    @classmethod
    def of(cls, text: str) -> _Change:
        replaced = _REPLACED.match(text)
        if replaced is not None:
            return cls(text, replaced[2], replaced[1], False, False)
        number, inside = " -> " in text, "entry '" in text
        attribute = _MODULE.match(text)
        if attribute is not None and attribute[2] in _BOOKS:
            entry = _NAMED.search(text)
            return cls(text, entry[1] if entry is not None else "", attribute[1], number, False)
        if attribute is not None:
            return cls(text, attribute[2], attribute[1], number, inside)
        named = _NAMED.search(text)
        return cls(text, named[1] if named is not None else "", None, number, inside)

    @property
    def code(self) -> str:
        """Of a number: an attribute, a variable, or something in a container."""
        return "SM203" if self.inside else "SM202" if self.module is None else "SM201"


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

    def judge(self, changes: Sequence[str]) -> None:
        """Add what the latest iteration changed, as a `HostState` describes it, and what containers kept of it."""
        for change in map(_Change.of, changes):
            if change.number:
                self._add_number(change)
            else:
                self._add_tensor(change)
        for one in held(self._model, self._functions):
            if one.inside and one.tensor.layout == torch.strided and self._findings.is_fresh(one.tensor):
                self._add_kept(one)

    def _add_number(self, change: _Change) -> None:
        source = self._lines.storing(change.name, change.module)
        why = f"the iteration changes Python state that a replay would not change: {change.text}"
        self._findings.add(Finding(change.code, why, _MEND, source))

    def _add_tensor(self, change: _Change) -> None:
        """A name bound to another tensor: state that is read again, or a result that is kept."""
        stale = self._findings.take_stale(describe(change.name, change.module))
        if stale is not None or self._lines.reads(change.name, change.module):
            code, mend = "SM301", _MEND_REBOUND
        else:
            code, mend = "SM303", _MEND_KEPT
        why = f"the iteration changes Python state that a replay would not change: {change.text}"
        self._findings.add(Finding(code, why, mend, self._lines.storing(change.name, change.module)))

    def _add_kept(self, one: Held) -> None:
        why = f"{one} keeps a result of the iteration, which the next replay overwrites"
        source = self._lines.storing(one.name, one.module)
        self._findings.add(Finding("SM303", why, _MEND_KEPT, source, severity="warning"))
