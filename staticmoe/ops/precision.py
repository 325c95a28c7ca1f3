"""Keeps autocast out of the ops: an op computes in the dtypes that it was given."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


def as_given(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return `fn` with autocast off while it runs.

    Autocast passes by an op that it does not know and would then cast the products inside of it, so that the
    result had another dtype than the op's shape contract says.
    """

    @functools.wraps(fn)
    def inner(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        device = next(arg.device.type for arg in args if isinstance(arg, torch.Tensor))
        with torch.autocast(device_type=device, enabled=False):
            return fn(*args, **kwargs)

    return inner
