"""Looks at what a loss function returns: a loss or metric that is memory of the model, of the batch or of both."""

from __future__ import annotations

import dis
import linecache
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.optim import Optimizer

from staticmoe.capture.findings import Finding
from staticmoe.capture.holders import plain
from staticmoe.capture.provenance import storage_key
from staticmoe.capture.source import Source
from staticmoe.runner.iteration import LossFn

_MEND = "compute it, or clone() it, if its value of after the update is wanted or it is kept"


class Looking:
    """Finds SM304 while iterations run.

    Args:
        model, optimizer: whose tensors a result should not be.

    Attributes:
        findings: what was found.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.findings: list[Finding] = []
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._owned = {storage_key(tensor): f"'{name}' of the model" for name, tensor in named.items()}

    def at(self, loss_fn: LossFn) -> LossFn:
        """The same function, whose results are looked at."""

        def looked_at(model: nn.Module, batch: Any) -> Any:
            returned = loss_fn(model, batch)
            self._look(loss_fn, batch, returned)
            return returned

        return looked_at

    def _look(self, loss_fn: LossFn, batch: Any, returned: Any) -> None:
        loss, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
        inputs = {storage_key(leaf) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)}
        for name, value in {"the loss": loss, **(metrics if isinstance(metrics, dict) else {})}.items():
            if not isinstance(value, Tensor):
                continue
            key = storage_key(value)
            owner = "the batch" if key in inputs else self._owned.get(key)
            if owner is not None:
                self.findings.append(
                    Finding("SM304", f"{name} is memory of {owner}", _MEND, _last_line(loss_fn), severity="note")
                )


def _last_line(function: LossFn) -> Source:
    """The line of the last return of `function`."""
    code = getattr(plain(function), "__code__", None)
    if code is None:
        return Source()
    lines = [
        instruction.positions.lineno
        for instruction in dis.get_instructions(code)
        if instruction.opname.startswith("RETURN_") and instruction.positions and instruction.positions.lineno
    ]
    line = max(lines, default=code.co_firstlineno)
    return Source(file=code.co_filename, line=line, text=linecache.getline(code.co_filename, line).strip())
