"""The audit: names what a captured iteration could not hold before it bites, and changes nothing."""

from __future__ import annotations

from staticmoe.audit.findings import Report
from staticmoe.audit.run import audit
from staticmoe.capture.findings import Finding

__all__ = ["Finding", "Report", "audit"]
