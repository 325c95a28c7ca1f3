"""Weights whose rows lie side by side, brought into rows for the grouped products, and their gradients brought back.

torch's copy of such a view reads or writes single elements, each in a line of memory of its own.

Dimensions: E experts, G parts of a row index (gate and up that alternate: 2, else 1), I rows of a part, W columns;
C = G·I rows, those of a part G apart; BC x BW the rows and columns of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_TILE = 64
_WARPS = 4
# Of bytes; larger elements would be moved as well by torch.
_SIZES = (2, 4)


@triton.jit
def staticmoe_layout_transpose(
    source_ptr,
    out_ptr,
    source_expert,
    source_part,
    source_row,
    source_column,
    out_expert,
    out_part,
    out_row,
    out_column,
    rows,
    width,
    G: tl.constexpr,
    FROM_COLUMNS: tl.constexpr,
    BC: tl.constexpr,
    BW: tl.constexpr,
):
    """out[e,g,i,w] = source[e,g,i,w]; one of the two has consecutive rows side by side, the other its columns.

    FROM_COLUMNS: the source has rows side by side, c = i·G + g; else `out` has.
    Grid: (ceil(C / BC), ceil(W / BW), E); each program owns one tile of one expert.
    Deterministic: each element once.
    """
    row = tl.program_id(0) * BC + tl.arange(0, BC)
    column = tl.program_id(1) * BW + tl.arange(0, BW)
    expert = tl.program_id(2).to(tl.int64)
    part, of_part = (row % G).to(tl.int64), (row // G).to(tl.int64)
    real_row, real_column = row < rows, column < width
    if FROM_COLUMNS:
        # [BW,BC]: rows side by side, as they lie.
        at = source_ptr + expert * source_expert + row[None, :] + column.to(tl.int64)[:, None] * source_column
        values = tl.trans(tl.load(at, mask=real_column[:, None] & real_row[None, :], other=0.0))
        to = out_ptr + expert * out_expert + (part * out_part + of_part * out_row)[:, None] + column[None, :]
        tl.store(to, values, mask=real_row[:, None] & real_column[None, :])
    else:
        at = source_ptr + expert * source_expert + (part * source_part + of_part * source_row)[:, None]
        values = tl.load(at + column[None, :], mask=real_row[:, None] & real_column[None, :], other=0.0)
        to = out_ptr + expert * out_expert + row[None, :] + column.to(tl.int64)[:, None] * out_column
        tl.store(to, tl.trans(values), mask=real_column[:, None] & real_row[None, :])


def has_rows_side_by_side(tensor: Tensor) -> bool:
    """Whether [E,I,W] or [E,G,I,W] has row c = i·G + g next to row c + 1, and its columns apart."""
    if tensor.dim() not in (3, 4) or tensor.element_size() not in _SIZES or 0 in tensor.shape:
        return False
    four = _in_parts(tensor)
    parts, apart = four.shape[1], four.stride()
    return apart[2] == parts and (parts == 1 or apart[1] == 1) and apart[3] != 1


def _in_parts(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(1) if tensor.dim() == 3 else tensor


def transpose(source: Tensor, out: Tensor) -> None:
    """Launch the copy of `source` into `out`, one of which has its rows side by side and the other its columns.

    Shapes:
        source, out: [E,I,W] or [E,G,I,W], of one dtype of 2 or 4 bytes; written: out.
    Graph-safe: yes, one launch.
    """
    source, out = _in_parts(source), _in_parts(out)
    experts, parts, rows, width = source.shape
    from_columns = has_rows_side_by_side(source)
    assert from_columns != has_rows_side_by_side(out) and (out if from_columns else source).stride(3) == 1
    staticmoe_layout_transpose[(triton.cdiv(parts * rows, _TILE), triton.cdiv(width, _TILE), experts)](
        source,
        out,
        *source.stride(),
        *out.stride(),
        parts * rows,
        width,
        G=parts,
        FROM_COLUMNS=from_columns,
        BC=_TILE,
        BW=_TILE,
        num_warps=_WARPS,
    )
