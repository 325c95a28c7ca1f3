"""Watches calls of compiled functions while an audit runs them uncompiled: what they take, and what they return.

A compiled function that returns a view of an argument makes it anew from that argument, at the offset that was
compiled. One that does not begin at a multiple of 16 bytes was copied before: with torch 2.13 and dynamic shapes the
view that comes back is then of other memory.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from staticmoe.audit.arguments import Arguments
from staticmoe.capture.dynamo import is_compiled_call
from staticmoe.capture.findings import Finding
from staticmoe.capture.provenance import storage_key
from staticmoe.capture.source import locate

_ALIGNMENT = 16
_MEND = "hand it in contiguous: ids[:, :, layer].contiguous(), or keep layers apart from the start: [L, B, S, K]"
UNWATCHED = "arguments of compiled functions: another profile function is at work"


class ReturnedViews:
    """Finds SM607.

    Args:
        given: whose modules findings name.

    Attributes:
        findings: what was found.
    """

    def __init__(self, given: Arguments) -> None:
        self.findings: list[Finding] = []
        self._modules = given.paths if given.usable else {}

    @contextlib.contextmanager
    def watch(self) -> Iterator[bool]:
        """Within: calls of this thread are looked at as they return; False where another profile function works."""
        if sys.getprofile() is not None:
            yield False
            return
        sys.setprofile(self._event)
        try:
            yield True
        finally:
            sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "return" and is_compiled_call(frame):
            taken = (frame.f_locals.get("args", ()), frame.f_locals.get("kwargs", {}))
            self._look(_tensors(taken), _tensors(argument))

    def _look(self, taken: list[Tensor], returned: list[Tensor]) -> None:
        keys = {storage_key(tensor) for tensor in returned}
        for tensor in taken:
            offset = tensor.storage_offset() * tensor.element_size()
            if offset % _ALIGNMENT and storage_key(tensor) in keys:
                why = (
                    f"a compiled function takes a view of shape {tuple(tensor.shape)}, strides {tensor.stride()}, that "
                    f"begins {offset} bytes into its memory, and returns a view of it: compiled, that may be of other "
                    "memory"
                )
                self.findings.append(Finding("SM607", why, _MEND, locate(self._modules)))


def _tensors(tree: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout == torch.strided]
