"""The mode of torch in which a runner works, whatever the mode of who calls it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def outside_inference(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """`function` with `torch.inference_mode` off.

    A graph may be built, and a step run again, where a result is read, and an evaluation where somebody evaluates:
    tensors made in that mode could neither be differentiated nor be written outside of it.
    """

    @functools.wraps(function)
    def run(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False):
            return function(*args, **kwargs)

    return run
