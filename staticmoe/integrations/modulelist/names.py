"""What the linear layers of an expert are called."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from staticmoe.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Names:
    """Attribute names of the linear layers of an expert: down(act(gate(x)) * up(x)).

    Attributes:
        gate: whose rows come first in a bank's gate_up_proj; None for an ungated expert, down(act(up(x))).
        up, down: the others.
    """

    gate: str | None
    up: str
    down: str

    @property
    def linears(self) -> tuple[str, ...]:
        """All of them, in the order in which they lie in a bank."""
        return (self.up, self.down) if self.gate is None else (self.gate, self.up, self.down)

    def __str__(self) -> str:
        return ", ".join(self.linears)


MIXTRAL = Names("w1", "w3", "w2")
LLAMA = Names("gate_proj", "up_proj", "down_proj")
UNGATED = Names(None, "up_proj", "down_proj")
_KNOWN = (MIXTRAL, LLAMA)


def names_among(found: Iterable[str], *, gated: bool, where: str) -> Names:
    """The names that are in use, where `found` are those of linear layers.

    Raises:
        ConfigError: none that are known here.
    """
    found = list(dict.fromkeys(found))
    for names in _KNOWN if gated else (UNGATED,):
        if sorted(names.linears) == sorted(found):
            return names
    known = " or ".join(f"({names})" for names in (_KNOWN if gated else (UNGATED,)))
    raise ConfigError(
        f"{where}: expected linear layers {known}; got ({', '.join(found)}): pass names=Names(gate=, up=, down=)"
    )
