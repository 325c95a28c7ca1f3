"""The garbage collector's lists, which are where Python tells what is alive."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

# Python freezes some hundred objects of its own when it starts; where torch is imported, a user's call freezes 100,000.
_PYTHONS_OWN = 10_000


def has_frozen() -> bool:
    """Whether the user has frozen objects. Counts them all: tens of milliseconds for a million."""
    return gc.get_freeze_count() >= _PYTHONS_OWN


@contextlib.contextmanager
def thawed() -> Iterator[None]:
    """Within: what the user took out of the lists with `gc.freeze()` is in them.

    Afterwards all that is alive is frozen, as by the user's own call: which objects were cannot be told any more.
    """
    if not has_frozen():
        yield
        return
    collecting = gc.isenabled()
    # A collection within would walk through all that should be spared it.
    gc.disable()
    gc.unfreeze()
    try:
        yield
    finally:
        gc.freeze()
        if collecting:
            gc.enable()
