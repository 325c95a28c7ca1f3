"""What the kernels of an op allocate beside its results, in bytes: a fake says what comes out, not what it took.

Each entry follows the launches in `staticmoe.ops.launch`, phase by phase: a phase lists the allocations that are alive
together, those results included that have been made by then. Integers of a schedule or a plan are left out.

Dimensions: T tokens, K top_k, E experts, H hidden, I intermediate, R capacity rows. Where an activation has no
gate, read I for 2I.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from staticmoe.ops.experts import experts, experts_backward
from staticmoe.ops.grouped_linear import grouped_linear_backward

# Columns of a tile of the d-activation kernel, each of which leaves one part of a routing weight's gradient.
_PART_COLUMNS = 64
_FP32_BYTES = 4


def _bytes(tensor: Tensor, *, dtype: torch.dtype | None = None, needed: bool = True) -> int:
    return tensor.numel() * (tensor.element_size() if dtype is None else dtype.itemsize) if needed else 0


def _copies_rows(intermediate: int) -> bool:
    # Here, because a machine without a GPU need not have triton.
    from staticmoe.ops.launch.experts import _COPY_FROM

    return intermediate >= _COPY_FROM


def _on_hopper(x: Tensor) -> bool:
    from staticmoe.ops.launch.operands import takes_hopper_kernels

    return x.dtype in (torch.bfloat16, torch.float16) and takes_hopper_kernels(x.device)


def _overwrites_pre(x: Tensor, activation: str, rows_per_expert: float) -> bool:
    """Whether the gradient of the pre-activation takes its place; see `staticmoe.kernels.hopper.dact.serves`."""
    if not _on_hopper(x):
        return False
    from staticmoe.kernels.hopper import dact

    return activation in dact._SHORT_EPILOGUES and rows_per_expert >= dact._ROWS_FROM


def _experts(*args: Any) -> list[list[int]]:
    x, topk_weights, gate_up, down, _, _, _, row_assignment, *_ = args
    rows, (hidden, intermediate) = row_assignment.shape[0], down.shape[1:]
    size = x.element_size()
    made = [
        *(_bytes(weight, dtype=x.dtype, needed=weight.dtype != x.dtype) for weight in (gate_up, down)),
        rows * gate_up.shape[1:-1].numel() * size,
        rows * intermediate * size,
    ]
    products = rows * hidden * size
    return [
        [*made, products if _copies_rows(intermediate) else 0],
        [*made, products, _bytes(x), _bytes(topk_weights, needed=topk_weights.dtype != torch.float32)],
    ]


def _experts_backward(*args: Any) -> list[list[int]]:
    _, pre, x, topk_weights, gate_up, down, _, _, _, row_assignment, _, activation, needs, dtype, *rest = args
    _, main_gate_up, main_down, _ = rest
    rows, (hidden, intermediate) = row_assignment.shape[0], down.shape[1:]
    of_rows = rows * hidden * x.element_size()
    copy = of_rows if _copies_rows(intermediate) else 0
    kept = [
        _bytes(pre, needed=not _overwrites_pre(x, activation, topk_weights.numel() / down.shape[0])),
        _bytes(topk_weights, needed=needs[1]),
        _bytes(down, dtype=dtype, needed=needs[3] and main_down is None),
    ]
    weighted = rows * intermediate * x.element_size()
    parts = rows * -(-intermediate // _PART_COLUMNS) * _FP32_BYTES
    d_x = _bytes(x, needed=needs[0])
    d_gate_up = _bytes(gate_up, dtype=dtype, needed=needs[2] and main_gate_up is None)
    return [
        [*kept, copy, weighted, parts],
        [*kept, d_x, of_rows if needs[0] else 0],
        [*kept, d_x, d_gate_up, 0 if _on_hopper(x) else copy],
    ]


def _grouped_linear_backward(*args: Any) -> list[list[int]]:
    grad, inputs, weight, _, row_assignment, _, gather, needs = args
    rows = row_assignment.shape[0] * weight.shape[2] * grad.element_size()
    d_inputs, d_weight = _bytes(inputs, needed=needs[0]), _bytes(weight, needed=needs[1])
    return [[d_inputs, d_weight, rows if needs[0] and gather else 0]]


SCRATCH: dict[Any, Callable[..., list[list[int]]]] = {
    experts._opoverload: _experts,
    experts_backward._opoverload: _experts_backward,
    grouped_linear_backward._opoverload: _grouped_linear_backward,
}
