"""Every peer is held against fp64 before it is timed; one that is wrong or fails is named, and the others go on.

A peer is checked on the user's own widths alone, fewer tokens and experts: most compile for every width anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from staticmoe.bench.blocks import Block, Candidate
from staticmoe.bench.check import check, forward_backward
from staticmoe.bench.measure import first_cause
from staticmoe.bench.peers.layout import Converted, concatenated
from staticmoe.bench.problems import Problem, Shape
from staticmoe.bench.timing import clean
from staticmoe.errors import SelfCheckError

# Of one result, against fp64, as in `check.TOLERANCE`. Peers round once or twice more than ours: rows before their
# weighted sum, routing weights and the sums of their gradients to 16 bits.
PEER_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}

Errors = dict[str, dict[str, float]]


def results(block: Block, p: Problem) -> tuple[Tensor, ...]:
    """The output and every gradient in the order of `NAMES`, gate and up as in the problem."""
    got = forward_backward(block, p)
    return (*got[:3], concatenated(got[3]), got[4]) if isinstance(block, Converted) else got


def hold(
    make: Callable[[Problem], Block], dtype: torch.dtype, device: torch.device, case: tuple[int, Shape]
) -> dict[str, float]:
    """Hold a peer's block against fp64 with every routing; return the largest error of each result.

    Raises:
        SelfCheckError: one is too large, or an expert without tokens has a weight gradient other than zero.
    """
    return check(
        make, dtype, device, case,
        results=results, tolerance=PEER_TOLERANCE, words=("allowed of a peer", "not timed"),
    )  # fmt: skip


def hold_all(
    candidates: Sequence[Candidate],
    dtype: torch.dtype,
    device: torch.device,
    case: tuple[int, Shape],
    *,
    say: Callable[[str], None] = lambda text: None,
    show: Callable[[dict[str, float], float], None] = lambda errors, allowed: None,
) -> tuple[Errors, dict[str, str]]:
    """Hold every package against fp64 once, captured or not.

    Returns the largest relative errors by package and dtype, and the packages that are not timed, with the reason.
    """
    errors: Errors = {}
    left_out: dict[str, str] = {}
    makers: dict[str, Candidate] = {one.package: one for one in candidates if one.package}
    for package, candidate in makers.items():
        if device.type not in candidate.devices:
            left_out[package] = f"needs {' or '.join(candidate.devices)}; this is {device.type}"
        else:
            say(f"check: {package} against fp64, {case[1]}, {case[0]} tokens")
            try:
                found: dict[str, Any] = hold(candidate.make, dtype, device, case)
            except SelfCheckError as error:
                left_out[package] = f"wrong: {error}"
            except Exception as error:  # whatever another package raises is a finding, not the end
                left_out[package] = f"does not run: {first_cause(error)}"
            else:
                errors[f"{package}, {dtype}".replace("torch.", "")] = found
                show(found, PEER_TOLERANCE[dtype])
            clean(device)
        if package in left_out:
            say(f"{package} is left out: {left_out[package]}")
    return errors, left_out
