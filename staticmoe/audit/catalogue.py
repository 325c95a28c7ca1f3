"""All kinds of faults by code: the texts of `staticmoe explain`."""

from __future__ import annotations

import re

from staticmoe.audit.entry import Entry
from staticmoe.audit.rules import (
    compiled,
    host_reads,
    host_values,
    memory,
    refused,
    sizes,
    state,
    weight_caches,
)
from staticmoe.errors import ConfigError

FAMILIES = {
    "SM1": "host reads, and sizes that depend on values",
    "SM2": "host values that a replay holds frozen",
    "SM3": "state bound anew, and what outlives an iteration",
    "SM4": "weight banks and their caches",
    "SM5": "memory and operations that a replay cannot follow",
    "SM6": "torch.compile",
    "SM7": "what the runner refuses",
    "SM9": "what stopped the audit",
}
_ROOMS = (host_reads, sizes, host_values, state, weight_caches, memory, compiled, refused)
CATALOGUE: dict[str, Entry] = {
    entry.code: entry for entry in sorted((e for room in _ROOMS for e in room.ENTRIES), key=lambda entry: entry.code)
}


def lookup(code: str) -> Entry:
    """The entry of `code`, in any case, the letters left out if you like.

    Raises:
        ConfigError: there is none, with those that are near.
    """
    wanted = re.sub(r"^(?:SM)?", "SM", code.strip().upper())
    if wanted not in CATALOGUE:
        near = [known for known in CATALOGUE if known[:3] == wanted[:3]] or list(FAMILIES)
        raise ConfigError(f"code: expected one of {', '.join(near)}; got {code!r}: `staticmoe explain` lists all")
    return CATALOGUE[wanted]
