"""What the eye on an iteration finds: a code, a place, why a replay could not repeat it, and what to write instead.

Findings are collected, each once, so that one pass names them all. A comment `# staticmoe: allow SM104` on the line,
or alone on the line above, silences that code there.
"""

from __future__ import annotations

import dataclasses
import linecache
import re
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from staticmoe.capture.provenance import storage_key
from staticmoe.capture.source import _SKIPPED, Source
from staticmoe.capture.weight_copies import WeightCopies
from staticmoe.errors import AuditError

# Most severe first. Only errors stop a capture.
SEVERITIES = ("error", "warning", "note")
_MOST_SHOWN = 20
_PRAGMA = re.compile(r"#\s*staticmoe:\s*allow\s+(SM\d+(?:\s*,\s*SM\d+)*)")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that a replay could not repeat.

    Attributes:
        code: stable name of the kind, such as "SM101".
        why: what happens, in one sentence without a full stop.
        mend: what to write instead.
        source: where in the user's program.
        severity: "error", "warning" or "note".
    """

    code: str
    why: str
    mend: str
    source: Source = Source()
    severity: str = "error"

    def __str__(self) -> str:
        return f"{self.source}: {self.why}; {self.mend} [{self.code}]"


def is_allowed(code: str, source: Source) -> bool:
    """Whether a comment in the user's file silences `code` at `source`."""
    if not source.file:
        return False
    above = linecache.getline(source.file, source.line - 1).strip()
    texts = [linecache.getline(source.file, source.line), above if above.startswith("#") else ""]
    return any(code in re.split(r"\s*,\s*", match[1]) for text in texts for match in _PRAGMA.finditer(text))


def source_of_error(error: BaseException, modules: Mapping[int, str]) -> Source:
    """The innermost line of the user's, and the innermost module, that `error` passed through."""
    source, trace = Source(), error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        module = modules.get(id(trace.tb_frame.f_locals.get("self")), source.module)
        if not file.startswith(_SKIPPED):
            text = linecache.getline(file, trace.tb_lineno).strip()
            source = Source(file=file, line=trace.tb_lineno, text=text, module=module)
        else:
            source = dataclasses.replace(source, module=module)
        trace = trace.tb_next
    return source


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Most severe first; of one severity in the order in which they were found."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def audit_error(findings: Sequence[Finding]) -> AuditError:
    """One error for all of `findings`, at most 20 of them shown."""
    found = by_severity(findings)
    if len(found) == 1:
        return AuditError(str(found[0]), found)
    lines = [f"{len(found)} things that a replay could not repeat"]
    lines += [f"  {finding}" for finding in found[:_MOST_SHOWN]]
    if len(found) > _MOST_SHOWN:
        lines.append(f"  and {len(found) - _MOST_SHOWN} more: mend these first, or see `staticmoe audit`")
    return AuditError("\n".join(lines), found)


class Findings:
    """What the observed iterations of one program have shown so far, a kind and a line once.

    Args:
        parameters: name -> parameter; what iterations compute from these alone is recognised when a later one reads it.

    Attributes:
        copies: what they read that was there before them.
    """

    def __init__(self, parameters: Mapping[str, Tensor] | None = None) -> None:
        self._found: dict[tuple[str, object, object], Finding] = {}
        self._stale: dict[str, tuple[str, object, object]] = {}
        parameters = parameters or {}
        self.copies = WeightCopies(parameters)
        self._parameters = frozenset(map(storage_key, parameters.values()))
        self._reported: dict[int, StorageWeakRef] = {}
        self._fresh: set[int] = set()

    @property
    def items(self) -> list[Finding]:
        """All of them, in the order in which they were found."""
        return list(self._found.values())

    @property
    def errors(self) -> list[Finding]:
        """Those that stop a capture."""
        return [finding for finding in self.items if finding.severity == "error"]

    def add(self, finding: Finding) -> bool:
        """Take a finding in; False where it is known, or silenced in the user's file."""
        key = key_of(finding)
        if key in self._found or is_allowed(finding.code, finding.source):
            return False
        self._found[key] = finding
        return True

    def begin_iteration(self) -> None:
        """Forget which memory the iteration before made."""
        self._fresh = set()

    def end(self) -> None:
        """Let go of what is known of tensors, and keep what was found."""
        self.copies.end()
        self._stale, self._reported, self._fresh = {}, {}, set()

    def made(self, tensor: Tensor) -> None:
        """Enter a fresh result."""
        self._fresh.add(storage_key(tensor))

    def is_fresh(self, tensor: Tensor) -> bool:
        """Whether this iteration made the memory of `tensor`."""
        return storage_key(tensor) in self._fresh

    def is_parameter(self, tensor: Tensor) -> bool:
        """Whether `tensor` is memory of a parameter."""
        return storage_key(tensor) in self._parameters

    def first_report(self, tensor: Tensor) -> bool:
        """Whether nothing was reported of the memory of `tensor` yet; it counts as reported from here on."""
        key = storage_key(tensor)
        known = key in self._reported
        if not known:
            # Held, so that the key cannot come to mean other memory.
            self._reported[key] = StorageWeakRef(tensor.untyped_storage())
        return not known

    def add_stale(self, holder: str, finding: Finding) -> bool:
        """Like `add`, for a read of what an earlier iteration left in `holder`."""
        self._stale.setdefault(holder, key_of(finding))
        return self.add(finding)

    def take_stale(self, holder: str) -> Finding | None:
        """Withdraw and return what was found of reading from `holder`, for a better name of the same fault."""
        key = self._stale.pop(holder, None)
        return self._found.pop(key, None) if key is not None else None


def key_of(finding: Finding) -> tuple[str, object, object]:
    """What makes two findings one: code and line; without a line, module and reason."""
    source = finding.source
    return (finding.code, source.file, source.line) if source.file else (finding.code, source.module, finding.why)
