"""Which operands the kernels take, and how others are made fit.

An op that the kernels do not serve (fp64, odd widths, more experts than they take) runs the plain PyTorch of
`staticmoe.reference`, and one log line says so.
"""

from __future__ import annotations

import functools
import logging

import torch
import triton
from torch import Tensor

from staticmoe.kernels.transpose import has_rows_side_by_side, transpose

log = logging.getLogger(__name__)

MAX_EXPERTS = 4096
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ALIGN_BYTES = 16
# What the interpreter stands for: it has no GPU to ask.
_INTERPRETED = (4, (9, 0))
_HOPPER = (9, 0)
# Of Triton. Gluon changes with each one: these are what the kernels of `kernels/hopper` were checked with on a GPU.
_GLUON_VERSIONS = ("3.6.",)


@functools.cache
def gpu(device: torch.device) -> tuple[int, tuple[int, int]]:
    """Multiprocessors of a GPU, and its compute capability."""
    if device.type != "cuda":
        return _INTERPRETED
    return torch.cuda.get_device_properties(device).multi_processor_count, torch.cuda.get_device_capability(device)


@functools.cache
def takes_hopper_kernels(device: torch.device) -> bool:
    """Whether the kernels of `kernels/hopper` run on a device: compute capability 9.0, not the interpreter."""
    if device.type != "cuda" or triton.knobs.runtime.interpret or gpu(device)[1] != _HOPPER:
        return False
    if triton.__version__.startswith(_GLUON_VERSIONS):
        return True
    wanted = " or ".join(f"{version}*" for version in _GLUON_VERSIONS)
    log.warning("slower kernels: those for Hopper need Triton %s, and this is %s", wanted, triton.__version__)
    return False


@functools.cache
def _say_once(what: str) -> None:
    log.warning("plain PyTorch instead of the kernels: %s", what)


def serves(dtype: torch.dtype, num_experts: int, *widths: int) -> bool:
    """Whether the kernels take this dtype, number of experts and these widths; where not, one log line says why."""
    if dtype not in _DTYPES:
        # fp64 is for checking; nobody waits for it.
        return False
    quantum = _ALIGN_BYTES // dtype.itemsize
    odd = [width for width in widths if width % quantum]
    if odd:
        _say_once(f"widths {odd} are no multiples of {quantum}, what {dtype} needs for aligned rows")
    elif num_experts > MAX_EXPERTS:
        _say_once(f"{num_experts} experts, more than the {MAX_EXPERTS} that the kernels take")
    else:
        return True
    return False


def aligned(tensor: Tensor) -> Tensor:
    """`tensor`, or a contiguous copy where its last stride is not 1, or a row does not start at 16 bytes."""
    size = tensor.element_size()
    whole = tensor.stride(-1) == 1 and all(stride * size % _ALIGN_BYTES == 0 for stride in tensor.stride()[:-1])
    if whole and tensor.data_ptr() % _ALIGN_BYTES == 0:
        return tensor
    if has_rows_side_by_side(tensor):
        copy = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        transpose(tensor, copy)
        return copy
    return tensor.clone(memory_format=torch.contiguous_format)


def laid_out_like(given: Tensor, gradient: Tensor) -> Tensor:
    """`gradient` in the layout of the weight that was given, where that has its rows side by side; else as it is."""
    if not has_rows_side_by_side(given) or has_rows_side_by_side(gradient):
        return gradient
    like = torch.empty_strided(given.shape, given.stride(), dtype=gradient.dtype, device=gradient.device)
    transpose(gradient, like)
    return like


def whole_rows(tensor: Tensor) -> Tensor:
    """Rows without gaps between them, starting at 16 bytes."""
    return aligned(tensor.contiguous())


def wants_tf32() -> bool:
    """Whether torch's own fp32 products may run in tf32, by either of its two switches."""
    # The older switch raises where the newer one was used.
    return torch.backends.cuda.matmul.fp32_precision == "tf32"
