"""The outcome of an audit: findings, what was not looked at, and both as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from staticmoe.capture.findings import SEVERITIES, Finding, by_severity, key_of


@dataclasses.dataclass(frozen=True)
class Report:
    """What one audit found.

    Attributes:
        findings: most severe first.
        not_looked_at: what this audit does not see, one sentence each.
        seconds: that it took.
    """

    findings: tuple[Finding, ...]
    not_looked_at: tuple[str, ...]
    seconds: float

    @classmethod
    def of(cls, findings: list[Finding], not_looked_at: list[str], seconds: float) -> Report:
        """A report of findings in any order; one that several iterations showed in one place is listed once."""
        by_place: dict[object, Finding] = {}
        for finding in findings:
            by_place.setdefault(key_of(finding), finding)
        return cls(tuple(by_severity(by_place.values())), tuple(not_looked_at), seconds)

    @property
    def counts(self) -> dict[str, int]:
        """Severity -> number of findings."""
        return {severity: sum(f.severity == severity for f in self.findings) for severity in SEVERITIES}

    def as_dict(self) -> dict[str, Any]:
        """What `--json` writes."""
        return {
            "version": 1,
            "counts": self.counts,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "not_looked_at": list(self.not_looked_at),
            "seconds": round(self.seconds, 3),
        }
