"""Custom op `staticmoe::adamw_`: the update of one parameter in place; shape contract. Nothing differentiates it.

Dimensions: N elements of the parameter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from staticmoe import reference
from staticmoe.ops.precision import as_given


@torch.library.custom_op(
    "staticmoe::adamw_",
    mutates_args=("p", "exp_avg", "exp_avg_sq"),
    schema=(
        "(Tensor(a!) p, Tensor gradient, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor step, Tensor row, "
        "Tensor veto) -> ()"
    ),
)
@as_given
def adamw_(
    p: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, row: Tensor, veto: Tensor
) -> None:
    """Update parameter and moments where `veto` is 0, elsewhere not one bit; see `staticmoe.reference.adamw_update`.

    Shapes:
        p, gradient [N] of any floating dtype and shape; exp_avg, exp_avg_sq [N] fp32, or fp64 for a p of fp64;
        step fp32 0-dim, this update included; row [5]; veto fp32 0-dim, exactly 0 or 1.
    Graph-safe: yes, `step` is the caller's to advance.
    """
    new, m, v = reference.adamw_update(p, gradient, exp_avg, exp_avg_sq, step, row, veto)
    p.copy_(new)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)


@adamw_.register_kernel("cuda")
@as_given
def _(
    p: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, row: Tensor, veto: Tensor
) -> None:
    # Here, because a machine without a GPU need not have triton.
    from staticmoe.kernels import adamw as kernel

    if not _walk_alike(p, exp_avg, exp_avg_sq):
        adamw_._init_fn(p, gradient, exp_avg, exp_avg_sq, step, row, veto)
        return
    if gradient.stride() != p.stride():
        gradient = torch.empty_like(p, dtype=gradient.dtype).copy_(gradient)
    kernel.adamw_(p, gradient, exp_avg, exp_avg_sq, step, row, veto)


def _walk_alike(p: Tensor, *others: Tensor) -> bool:
    """Whether one index walks all of them: `p` has no gaps and the others its strides."""
    dense = torch.empty_like(p, device="meta").stride()
    return all(tensor.stride() == dense for tensor in (p, *others))
