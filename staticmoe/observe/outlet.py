"""Telemetry never stops training: a sink that fails is reported once and gets nothing more."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

Sink = Callable[[dict[str, Any]], None]
# Takes more than the record, which is for it alone to know.
_AnySink = Callable[..., None]


class Outlet:
    """Hands records to a sink until it fails.

    Args:
        sink: called with one dictionary of host values a record.
        name: of the sink, for the log.
    """

    def __init__(self, sink: _AnySink, name: str) -> None:
        self._sink: _AnySink | None = sink
        self._name = name

    @property
    def open(self) -> bool:
        """Whether it still gets records."""
        return self._sink is not None

    def __call__(self, record: dict[str, Any], *more: Any) -> None:
        """Hand on `record`, and what else the sink takes."""
        if self._sink is None:
            return
        try:
            self._sink(record, *more)
        except Exception:
            log.exception("%s failed at step %s and gets no more records", self._name, record.get("step"))
            self._sink = None
