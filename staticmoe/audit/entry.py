"""One kind of fault in words: what `staticmoe explain` prints and what every finding of its code means."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Entry:
    """A kind of fault.

    Attributes:
        code: stable name, "SM" and three digits; the first digit is the family.
        severity: "error", "warning" or "note"; only errors stop a capture.
        title: a few words.
        why: what goes wrong in a replay, and what the audit cannot see of it.
        mend: what to do.
        before, after: the fault in code, and the same mended.
    """

    code: str
    severity: str
    title: str
    why: str
    mend: str
    before: str
    after: str
