"""Products of packed rows with per-expert weights, and the ways between tokens and rows.

Rows past `expert_offsets[E]` are empty: they are selected away, never multiplied by zero, because what they hold
was not written by anyone.

Dimensions: T tokens, K top_k, E experts, R capacity rows, A and B widths in and out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from staticmoe.reference.routing import compute_dtype

# What grouped_mm wants of the strides of its operands.
_ALIGN_BYTES = 16
# grouped_mm on CUDA builds its problem list in one block of threads.
_CUDA_MAX_EXPERTS = 1023


def row_experts(expert_offsets: Tensor, capacity_rows: int) -> Tensor:
    """Return [R] int64, the expert of each row; E for an empty row."""
    rows = torch.arange(capacity_rows, dtype=torch.int32, device=expert_offsets.device)
    return torch.searchsorted(expert_offsets[1:], rows, right=True)


def occupied_rows(expert_offsets: Tensor, capacity_rows: int) -> Tensor:
    """Return [R,1] bool, True for rows in use."""
    rows = torch.arange(capacity_rows, dtype=torch.int32, device=expert_offsets.device)
    return (rows < expert_offsets[-1])[:, None]


def gather_rows(tokens: Tensor, row_assignment: Tensor, top_k: int) -> Tensor:
    """Dispatch: return each row's token, zeros for empty rows.

    Shapes:
        tokens [T,A]; row_assignment [R] int32. Returns [R,A].
    Graph-safe: yes.
    """
    token = row_assignment.clamp(min=0).to(torch.int64) // top_k
    return torch.where((row_assignment >= 0)[:, None], tokens.index_select(0, token), 0.0)


def gather_weights(topk_weights: Tensor, row_assignment: Tensor) -> Tensor:
    """Return [R,1], the routing weight of each row, zero for empty rows. `topk_weights` is [T,K]."""
    picked = topk_weights.reshape(-1).index_select(0, row_assignment.clamp(min=0).to(torch.int64))
    return torch.where(row_assignment >= 0, picked, 0.0)[:, None]


def gather_to_tokens(rows: Tensor, assignment_row: Tensor, topk_weights: Tensor | None = None) -> Tensor:
    """Sum each token's rows, weighted if weights are given, in fp32 and in slot order.

    A dropped assignment adds exactly nothing, whatever its weight or the row it would have read.

    Shapes:
        rows [R,A]; assignment_row [T,K] int32; topk_weights [T,K]. Returns [T,A] in the dtype of `rows`.
    Graph-safe: yes; a fixed order of additions, no atomics.
    """
    dtype = compute_dtype(rows.dtype)
    tokens, top_k = assignment_row.shape
    total = torch.zeros(tokens, rows.shape[1], dtype=dtype, device=rows.device)
    for slot in range(top_k):
        row = assignment_row[:, slot]
        kept = (row >= 0)[:, None]
        part = torch.where(kept, rows.index_select(0, row.clamp(min=0).to(torch.int64)).to(dtype), 0.0)
        if topk_weights is not None:
            part = part * torch.where(kept, topk_weights[:, slot, None].to(dtype), 0.0)
        total = total + part
    return total.to(rows.dtype)


def grouped_mm(rows: Tensor, weight: Tensor, expert_offsets: Tensor) -> Tensor:
    """Multiply each row with the weight of its expert; empty rows come out as zeros.

    Shapes:
        rows [R,A]; weight [E,B,A], possibly a transposed view; expert_offsets [E+1] int32 exclusive. Returns [R,B].
    Graph-safe: yes.
    """
    num_experts = weight.shape[0]
    if _has_grouped_mm(rows, num_experts):
        rows, weight = _aligned_pair(rows, weight)
        product = F.grouped_mm(rows, weight.transpose(1, 2), offs=expert_offsets[1:])
    else:
        expert = row_experts(expert_offsets, rows.shape[0])[:, None]
        product = rows.new_zeros(rows.shape[0], weight.shape[1])
        for e in range(num_experts):
            product = torch.where(expert == e, rows @ weight[e].t(), product)
    # grouped_mm leaves rows past the last offset unwritten.
    return torch.where(occupied_rows(expert_offsets, rows.shape[0]), product, 0.0)


def grouped_weight_grad(grad_rows: Tensor, rows: Tensor, expert_offsets: Tensor) -> Tensor:
    """Return, for each expert, the sum over its rows of grad_row ⊗ row: exactly zero for an expert without rows.

    Shapes:
        grad_rows [R,B]; rows [R,A]; expert_offsets [E+1] int32 exclusive. Returns [E,B,A].
    Graph-safe: yes.
    """
    num_experts = expert_offsets.shape[0] - 1
    width_out, width_in = grad_rows.shape[1], rows.shape[1]
    if _has_grouped_mm(rows, num_experts):
        left, right = _aligned_rows(grad_rows), _aligned_rows(rows)
        grad = F.grouped_mm(left.t(), right, offs=expert_offsets[1:])
        return grad[:, :width_out, :width_in].contiguous()
    expert = row_experts(expert_offsets, rows.shape[0])[:, None]
    return torch.stack(
        [torch.where(expert == e, grad_rows, 0.0).t() @ torch.where(expert == e, rows, 0.0) for e in range(num_experts)]
    )


def grouped_sum(rows: Tensor, expert_offsets: Tensor) -> Tensor:
    """Return the sum of each expert's rows, accumulated in fp32 or fp64, in the dtype of `rows`.

    Shapes:
        rows [R,B]; expert_offsets [E+1] int32 exclusive. Returns [E,B].
    Graph-safe: yes.
    """
    wide = rows.to(compute_dtype(rows.dtype))
    ones = torch.ones(rows.shape[0], 1, dtype=wide.dtype, device=rows.device)
    return grouped_weight_grad(wide, ones, expert_offsets).squeeze(2).to(rows.dtype)


def add_expert_bias(rows: Tensor, bias: Tensor | None, expert_offsets: Tensor) -> Tensor:
    """Return `rows` [R,B] plus the bias [E,B] of each row's expert; empty rows stay zero."""
    if bias is None:
        return rows
    dtype = compute_dtype(rows.dtype)
    expert = row_experts(expert_offsets, rows.shape[0]).clamp(max=bias.shape[0] - 1)
    total = (rows.to(dtype) + bias.index_select(0, expert).to(dtype)).to(rows.dtype)
    return torch.where(occupied_rows(expert_offsets, rows.shape[0]), total, 0.0)


def _has_grouped_mm(rows: Tensor, num_experts: int) -> bool:
    """Whether torch's grouped_mm takes these operands without asking the device for the offsets."""
    if rows.device.type == "cpu":
        return rows.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if rows.device.type != "cuda" or rows.dtype != torch.bfloat16 or num_experts > _CUDA_MAX_EXPERTS:
        return False
    # Elsewhere it copies the offsets to the host, which a capture refuses.
    return torch.cuda.get_device_capability(rows.device)[0] in (9, 10)


def _is_aligned(tensor: Tensor) -> bool:
    """Whether one of the last two dimensions has stride 1 and the other, like the start, a multiple of 16 bytes."""
    size = tensor.element_size()
    outer, inner = tensor.stride()[-2:]
    step = outer if inner == 1 else inner if outer == 1 else 1
    return step * size % _ALIGN_BYTES == 0 and tensor.storage_offset() * size % _ALIGN_BYTES == 0


def _padded(tensor: Tensor) -> Tensor:
    """Return a contiguous copy whose last dimension is filled up with zeros to a multiple of 16 bytes."""
    quantum = _ALIGN_BYTES // tensor.element_size()
    return F.pad(tensor, (0, -tensor.shape[-1] % quantum)).clone(memory_format=torch.contiguous_format)


def _aligned_rows(rows: Tensor) -> Tensor:
    return rows if rows.is_contiguous() and _is_aligned(rows) else _padded(rows)


def _aligned_pair(rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return both operands aligned; where one is not, both get the same zeros after their common last dimension."""
    if rows.is_contiguous() and _is_aligned(rows) and _is_aligned(weight):
        return rows, weight
    return _padded(rows), _padded(weight)
