"""The outcome of an audit: findings, what was not looked at, and both as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from staticmoe.capture.findings import SEVERITIES, Finding, by_severity


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
        """A report of findings in any order; one that was found twice is listed once."""
        return cls(tuple(by_severity(dict.fromkeys(findings))), tuple(not_looked_at), seconds)

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
