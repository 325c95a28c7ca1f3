"""AdamW with every hyper-parameter on the device, for one parameter: update, bias correction, veto.

Dimensions: N elements of the parameter.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Columns of a row of hyper-parameters. The betas come as 1 - beta: fp32 keeps 1 - 0.999 to 7 digits, but what is left
# of it after 0.999 was rounded only to 5.
ADAMW_COLUMNS = ("lr", "1 - beta1", "1 - beta2", "eps", "weight_decay")


def adamw_state_dtype(parameter: torch.dtype) -> torch.dtype:
    """Dtype of the moments, and of the arithmetic, for a parameter of dtype `parameter`: fp64 for fp64, else fp32."""
    return torch.float64 if parameter == torch.float64 else torch.float32


def adamw_update(
    p: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, row: Tensor, veto: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return parameter and moments after one update, or bitwise as they were where `veto` is not 0.

    A veto wins over everything: non-finite gradients, moments or hyper-parameters leave no trace then.

    Shapes:
        p, gradient [N], any floating dtype and any shape; exp_avg, exp_avg_sq [N] of `adamw_state_dtype`;
        step 0-dim, this update included; row [5] as in `ADAMW_COLUMNS`; veto 0-dim, exactly 0 or 1.
        Returns p, exp_avg, exp_avg_sq.
    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", algorithm 2, as torch.optim.AdamW does it.
    Graph-safe: yes.
    """
    dtype = exp_avg.dtype
    # Numbers of the whole parameter in fp64: 1 - beta ** step loses digits where step is small.
    lr, left1, left2, eps, decay = row.double().unbind()
    correction1 = 1 - (1 - left1) ** step
    correction2 = 1 - (1 - left2) ** step
    kept = (1 - lr * decay).to(dtype)
    step_size = (lr / correction1).to(dtype)
    root = correction2.sqrt().to(dtype)

    g = gradient.to(dtype)
    m = exp_avg * (1 - left1).to(dtype) + g * left1.to(dtype)
    v = exp_avg_sq * (1 - left2).to(dtype) + g * g * left2.to(dtype)
    new = p.to(dtype) * kept - step_size * (m / (v.sqrt() / root + eps.to(dtype)))
    held = veto != 0
    return (
        torch.where(held, p, new.to(p.dtype)),
        torch.where(held, exp_avg, m),
        torch.where(held, exp_avg_sq, v),
    )
