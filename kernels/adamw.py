"""AdamW in one pass over a parameter, hyper-parameters and veto read on the device.

Dimensions: N elements of the parameter.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_TILES = 4


@triton.jit
def staticmoe_optimizer_adamw(
    p_ptr,
    gradient_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    step_ptr,
    row_ptr,
    veto_ptr,
    count,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """Update parameter and moments in place; N = `count` elements in memory order, all four tensors alike.

    Grid: ceil(N / (BLOCK * TILES)) programs. Program i owns elements [i * BLOCK * TILES, (i + 1) * BLOCK * TILES).
    Reads: row [5] (lr, 1 - beta1, 1 - beta2, eps, weight_decay), step (this update included) and veto, each fp32.
    Unwritten: everything where the veto is not 0; `step` always.
    Deterministic: each element is written once, by the program that owns it, from itself alone.
    """
    if tl.load(veto_ptr) != 0:
        return
    dtype = exp_avg_ptr.dtype.element_ty
    step = tl.load(step_ptr).to(tl.float64)
    lr = tl.load(row_ptr).to(tl.float64)
    left1 = tl.load(row_ptr + 1)
    left2 = tl.load(row_ptr + 2)
    eps = tl.load(row_ptr + 3).to(dtype)
    decay = tl.load(row_ptr + 4).to(tl.float64)
    # In fp64, because 1 - beta ** step loses digits where step is small; once for TILES blocks, because some GPUs
    # have little of it. beta = 0 gives log(0) = -inf and a correction of exactly 1.
    beta1 = 1 - left1.to(tl.float64)
    beta2 = 1 - left2.to(tl.float64)
    correction1 = 1 - tl.exp(step * tl.log(beta1))
    correction2 = 1 - tl.exp(step * tl.log(beta2))
    kept = (1 - lr * decay).to(dtype)
    step_size = (lr / correction1).to(dtype)
    root = tl.sqrt(correction2).to(dtype)
    left1, left2 = left1.to(dtype), left2.to(dtype)
    beta1, beta2 = beta1.to(dtype), beta2.to(dtype)

    first = tl.program_id(0).to(tl.int64) * (BLOCK * TILES)
    for tile in range(TILES):
        at = first + tile * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        g = tl.load(gradient_ptr + at, mask=inside, other=0.0).to(dtype)
        p = tl.load(p_ptr + at, mask=inside, other=0.0).to(dtype)
        m = tl.load(exp_avg_ptr + at, mask=inside, other=0.0)
        v = tl.load(exp_avg_sq_ptr + at, mask=inside, other=0.0)
        m = m * beta1 + g * left1
        v = v * beta2 + g * g * left2
        # The plain forms are approximate in fp32; the exact ones exist in fp32 only.
        if dtype == tl.float64:
            p = p * kept - step_size * (m / (tl.sqrt(v) / root + eps))
        else:
            p = p * kept - step_size * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
        tl.store(exp_avg_ptr + at, m, mask=inside)
        tl.store(exp_avg_sq_ptr + at, v, mask=inside)
        tl.store(p_ptr + at, p.to(p_ptr.dtype.element_ty), mask=inside)


def adamw_(
    p: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, row: Tensor, veto: Tensor
) -> None:
    """Launch the update of one parameter; see `staticmoe.reference.adamw_update`.

    Shapes:
        p, gradient [N] of any floating dtype; exp_avg, exp_avg_sq [N] fp32, or fp64 for a p of fp64. All four dense and
        with the same strides. step, veto fp32 0-dim; row fp32 [5], contiguous.
    Graph-safe: yes.
    """
    count = p.numel()
    if count:
        grid = (triton.cdiv(count, _BLOCK * _TILES),)
        staticmoe_optimizer_adamw[grid](
            p, gradient, exp_avg, exp_avg_sq, step, row, veto, count, BLOCK=_BLOCK, TILES=_TILES
        )
