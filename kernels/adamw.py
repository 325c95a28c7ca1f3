"""AdamW in one pass over many parameters, hyper-parameters and veto read on the device.

Dimensions: N elements of one parameter, C parameters of one launch.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_TILES = 4
# Parameters of one launch: as many as keep the search for a program's own among them short.
_CHUNK = 16


def _odd(number: int) -> int:
    """A code of `number` >= 0 that is odd and above 1.

    Triton compiles a kernel anew for each pattern of ones and multiples of 16 among the integers of a tuple.
    """
    return 2 * number + 3


@triton.jit
def _number(code):
    """What `_odd` was given."""
    return (code >> 1) - 1


@triton.jit
def staticmoe_optimizer_adamw(
    p_ptrs,
    gradient_ptrs,
    exp_avg_ptrs,
    exp_avg_sq_ptrs,
    step_ptrs,
    row_ptrs,
    veto_ptr,
    counts,
    firsts,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Update C = CHUNK parameters and their moments in place; N = `counts[c]` elements each, in memory order.

    `counts` and `firsts` are codes of `_odd`.

    Grid: the sum over c of ceil(N / (BLOCK * TILES)) programs; those of parameter c start at `firsts[c]`. Its program
    i owns elements [i * BLOCK * TILES, (i + 1) * BLOCK * TILES).
    Reads: row [5] (lr, 1 - beta1, 1 - beta2, eps, weight_decay), step (this update included) and veto, each fp32.
    Unwritten: everything where the veto is not 0; `step` always.
    Deterministic: each element is written once, by the program that owns it, from itself alone.
    """
    if tl.load(veto_ptr) != 0:
        return
    program = tl.program_id(0)
    p_ptr, gradient_ptr, exp_avg_ptr, exp_avg_sq_ptr = p_ptrs[0], gradient_ptrs[0], exp_avg_ptrs[0], exp_avg_sq_ptrs[0]
    step_ptr, row_ptr = step_ptrs[0], row_ptrs[0]
    count = _number(counts[0]).to(tl.int64)
    start = _number(firsts[0])
    for c in tl.static_range(1, CHUNK):
        first = _number(firsts[c])
        mine = program >= first
        p_ptr = tl.where(mine, p_ptrs[c], p_ptr)
        gradient_ptr = tl.where(mine, gradient_ptrs[c], gradient_ptr)
        exp_avg_ptr = tl.where(mine, exp_avg_ptrs[c], exp_avg_ptr)
        exp_avg_sq_ptr = tl.where(mine, exp_avg_sq_ptrs[c], exp_avg_sq_ptr)
        step_ptr = tl.where(mine, step_ptrs[c], step_ptr)
        row_ptr = tl.where(mine, row_ptrs[c], row_ptr)
        count = tl.where(mine, _number(counts[c]).to(tl.int64), count)
        start = tl.where(mine, first, start)
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

    begin = (program - start).to(tl.int64) * (BLOCK * TILES)
    for tile in range(TILES):
        at = begin + tile * BLOCK + tl.arange(0, BLOCK)
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
    p: Sequence[Tensor],
    gradient: Sequence[Tensor],
    exp_avg: Sequence[Tensor],
    exp_avg_sq: Sequence[Tensor],
    step: Sequence[Tensor],
    row: Sequence[Tensor],
    veto: Tensor,
) -> None:
    """Launch the update of parameters that share their dtypes; see `staticmoe.reference.adamw_update`.

    Shapes:
        of each: p, gradient [N] of any floating dtype; exp_avg, exp_avg_sq [N] fp32, or fp64 for a p of fp64, all four
        dense and with the same strides; step fp32 0-dim; row fp32 [5], contiguous. veto fp32 0-dim for all.
    Graph-safe: yes.
    """
    kept = [n for n, parameter in enumerate(p) if parameter.numel()]
    for begin in range(0, len(kept), _CHUNK):
        chosen = kept[begin : begin + _CHUNK]
        counts = [p[n].numel() for n in chosen]
        firsts = [0]
        for count in counts:
            firsts.append(firsts[-1] + triton.cdiv(count, _BLOCK * _TILES))
        programs = firsts.pop()
        # One kernel for every number of parameters: what is missing repeats the last one and owns no program.
        missing = _CHUNK - len(chosen)
        chosen += [chosen[-1]] * missing
        counts += [counts[-1]] * missing
        firsts += [programs] * missing
        lists = (p, gradient, exp_avg, exp_avg_sq, step, row)
        arguments = [tuple(tensors[n] for n in chosen) for tensors in lists]
        staticmoe_optimizer_adamw[(programs,)](
            *arguments,
            veto,
            tuple(map(_odd, counts)),
            tuple(map(_odd, firsts)),
            BLOCK=_BLOCK,
            TILES=_TILES,
            CHUNK=_CHUNK,
        )
