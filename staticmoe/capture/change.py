"""One thing that a recorded iteration took as it was and that is different now, in fields and in words."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

_VALUES = (int, float, bool, str, complex, type(None))
MISSING = object()


def is_value(value: object) -> bool:
    """Whether `value` is a constant of Python: a number, a string, None, or a tuple of such."""
    return type(value) in _VALUES or (type(value) is tuple and all(is_value(item) for item in value))


def is_same(old: Any, new: Any) -> bool:
    """Equal and of one type, or both NaN. A tensor is the same only as the same object."""
    if old is new:
        return True
    return is_value(old) and is_value(new) and type(old) is type(new) and (old == new or (old != old and new != new))


@dataclasses.dataclass(frozen=True, eq=False)
class Change:
    """What changed.

    Attributes:
        kind: "attribute" of a module or object, "variable" of a function, "entry" of a container, "parameter",
            "buffer", "submodule", "storage", "requires_grad", "hook", "option" of an optimizer, "compiled" or "memory".
        owner: what it belongs to, in words, such as "module 'layers.0'" or "closure of loss_fn".
        name: of the attribute, variable, parameter and so on.
        old, new: values, or objects, of then and of now; `MISSING` where there is none.
        module: dotted path of the module that owns it, "" for the model; None where no module does.
        entry: of a container, which entry.
    """

    kind: str
    owner: str
    name: str
    old: Any = None
    new: Any = None
    module: str | None = None
    entry: Any = None

    @property
    def cause(self) -> str:
        """The part that stays the same when the value changes again."""
        entry = f" entry {self.entry!r}" if self.kind == "entry" else ""
        noun = {"storage": "parameter or buffer", "requires_grad": "requires_grad of", "entry": "attribute"}
        if self.kind in ("hook", "compiled", "memory"):
            return f"{self.owner} {self.name}"
        if self.module is None and self.kind in ("attribute", "variable", "entry"):
            return f"{self.owner} '{self.name}'{entry}"
        return f"{self.owner} {noun.get(self.kind, self.kind)} '{self.name}'{entry}"

    @property
    def is_number(self) -> bool:
        """Whether one constant of Python took the place of another."""
        return is_value(self.old) and is_value(self.new)

    def __str__(self) -> str:
        return self.cause + self._how()

    def _how(self) -> str:
        if self.new is MISSING:
            return " was removed"
        if self.old is MISSING:
            return " was added"
        if self.kind == "storage":
            return " has other storage, dtype or shape"
        if self.kind == "hook" and self.old == self.new:
            return ": others than before"
        if self.is_number:
            return f": {self.old!r} -> {self.new!r}"
        if isinstance(self.old, Tensor) and isinstance(self.new, Tensor):
            return " was replaced by another tensor"
        return " was replaced by another object"
