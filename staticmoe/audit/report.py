"""An audit in plain text of 80 columns, and the texts of `staticmoe explain`."""

from __future__ import annotations

import os
import textwrap

from staticmoe.audit.catalogue import CATALOGUE, FAMILIES
from staticmoe.audit.entry import Entry
from staticmoe.audit.findings import Report
from staticmoe.capture.findings import Finding
from staticmoe.capture.source import Source

WIDTH = 80


def report_lines(report: Report) -> list[str]:
    """All findings, most severe first, what was not looked at, and the sum."""
    lines: list[str] = []
    for finding in report.findings:
        lines += [*finding_lines(finding), ""]
    lines.append("not looked at:")
    for sentence in report.not_looked_at:
        lines += _wrapped(sentence, "  - ", "    ")
    counted = ", ".join(f"{count} {severity}{'s' * (count != 1)}" for severity, count in report.counts.items())
    lines += ["", f"{counted} in {report.seconds:.1f} s"]
    if report.findings:
        lines.append(f"more on one: staticmoe explain {report.findings[0].code}")
    return lines


def finding_lines(finding: Finding) -> list[str]:
    """One finding: code and title, place, line, why, mend."""
    entry = CATALOGUE.get(finding.code)
    title = f": {entry.title}" if entry is not None else ""
    lines = _wrapped(f"{finding.code} {finding.severity}{title}", "", "      ")
    lines += place_lines(finding.source)
    lines += _wrapped(finding.why, "  why:  ", "        ")
    return lines + _wrapped(finding.mend, "  mend: ", "        ")


def place_lines(source: Source) -> list[str]:
    """File, line and module, and the line itself."""
    where = f"{_short(source.file)}:{source.line}" if source.file else "no line"
    where += f", in {source.module}" if source.module else ""
    where += f", in the backward of {source.node}" if source.node else ""
    # A path is not torn apart, so that a terminal can open it.
    lines = [f"  at:   {where}"] if len(where) + 8 <= WIDTH else _wrapped(where, "  at:   ", "        ")
    if source.text:
        lines.append("          " + textwrap.shorten(source.text, WIDTH - 10, placeholder=" ..."))
    return lines


def catalogue_lines() -> list[str]:
    """All codes by family."""
    lines: list[str] = []
    for prefix, family in FAMILIES.items():
        lines += ["", family]
        for entry in CATALOGUE.values():
            if entry.code.startswith(prefix):
                lines.append(f"  {entry.code}  {entry.severity:<8} {entry.title}")
    return lines[1:]


def entry_lines(entry: Entry) -> list[str]:
    """Everything about one code."""
    lines = [f"{entry.code} {entry.severity}: {entry.title}", ""]
    lines += [*_wrapped(entry.why, "  ", "  "), "", *_wrapped(f"Mend: {entry.mend}", "  ", "  ")]
    for title, code in (("before", entry.before), ("after", entry.after)):
        lines += ["", f"  {title}:", *(f"    {line}" for line in code.splitlines())]
    return [*lines, "", *_wrapped(f"Silence it on one line: # staticmoe: allow {entry.code}", "  ", "  ")]


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def _short(path: str) -> str:
    """Relative to the working directory where that is shorter."""
    try:
        relative = os.path.relpath(path)
    except ValueError:
        return path
    return min(path, relative, key=len)
