"""Several ranks: what they must agree on, and what they exchange inside the captured step."""

from __future__ import annotations
