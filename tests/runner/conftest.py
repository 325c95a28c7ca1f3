"""What the runner's tests share: the ways to capture, and bitwise comparison of whatever a run leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

CAPTURES = ["emulate", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=CAPTURES)
def captured(request: pytest.FixtureRequest) -> str:
    """A capture mode that replays; its device is the CPU for "emulate", the GPU for "cuda"."""
    return request.param


def _differences(one: Any, other: Any, where: str) -> list[str]:
    if isinstance(one, Tensor):
        return [] if torch.equal(one, other) else [where]
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [f"keys of {where}"]
        return [found for key in one for found in _differences(one[key], other[key], f"{where}.{key}")]
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return [f"length of {where}"]
        pairs = enumerate(zip(one, other, strict=True))
        return [found for n, (a, b) in pairs for found in _differences(a, b, f"{where}[{n}]")]
    return [] if one == other or (one != one and other != other) else [f"{where}: {one!r} against {other!r}"]


@pytest.fixture
def assert_same() -> Callable[[Any, Any], None]:
    """Bitwise equality of nested results; NaN equals NaN."""

    def check(one: Any, other: Any) -> None:
        found = _differences(one, other, "result")
        assert not found, found[:5]

    return check
