"""Custom op `staticmoe::adamw_`: the update of many parameters in place; shape contract. Nothing differentiates it.

Dimensions: N elements of one parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from staticmoe import reference
from staticmoe.ops.precision import as_given


@torch.library.custom_op(
    "staticmoe::adamw_",
    mutates_args=("p", "exp_avg", "exp_avg_sq"),
    schema=(
        "(Tensor(a!)[] p, Tensor[] gradient, Tensor(b!)[] exp_avg, Tensor(c!)[] exp_avg_sq, Tensor[] step, "
        "Tensor[] row, Tensor veto) -> ()"
    ),
)
@as_given
def adamw_(
    p: Sequence[Tensor],
    gradient: Sequence[Tensor],
    exp_avg: Sequence[Tensor],
    exp_avg_sq: Sequence[Tensor],
    step: Sequence[Tensor],
    row: Sequence[Tensor],
    veto: Tensor,
) -> None:
    """Update parameters and moments where `veto` is 0, elsewhere not one bit; see `staticmoe.reference.adamw_update`.

    Shapes:
        of each: p, gradient [N] of any floating dtype and shape; exp_avg, exp_avg_sq [N] fp32, or fp64 for a p of
        fp64; step fp32 0-dim, this update included; row [5]. veto fp32 0-dim, exactly 0 or 1, for all.
    Graph-safe: yes, `step` is the caller's to advance.
    """
    for one in zip(p, gradient, exp_avg, exp_avg_sq, step, row, strict=True):
        _update(*one, veto)


def _update(p: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *rest: Tensor) -> None:
    new, m, v = reference.adamw_update(p, gradient, exp_avg, exp_avg_sq, *rest)
    p.copy_(new)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)


@adamw_.register_kernel("cuda")
@as_given
def _(
    p: Sequence[Tensor],
    gradient: Sequence[Tensor],
    exp_avg: Sequence[Tensor],
    exp_avg_sq: Sequence[Tensor],
    step: Sequence[Tensor],
    row: Sequence[Tensor],
    veto: Tensor,
) -> None:
    # Here, because a machine without a GPU need not have triton.
    from staticmoe.kernels import adamw as kernel

    alike: dict[tuple[torch.dtype, ...], list[tuple[Tensor, ...]]] = {}
    for one in zip(p, gradient, exp_avg, exp_avg_sq, step, row, strict=True):
        parameter, grad, m, v, *rest = one
        if not _walk_alike(parameter, m, v):
            _update(*one, veto)
            continue
        if grad.stride() != parameter.stride():
            grad = torch.empty_like(parameter, dtype=grad.dtype).copy_(grad)
        alike.setdefault((parameter.dtype, grad.dtype, m.dtype), []).append((parameter, grad, m, v, *rest))
    for group in alike.values():
        columns = [list(column) for column in zip(*group, strict=True)]
        kernel.adamw_(columns[0], columns[1], columns[2], columns[3], columns[4], columns[5], veto)


def _walk_alike(p: Tensor, *others: Tensor) -> bool:
    """Whether one index walks all of them: `p` has no gaps and the others its strides."""
    dense = torch.empty_like(p, device="meta").stride()
    return all(tensor.stride() == dense for tensor in (p, *others))
