"""Host tensor descriptors (TMA): plain ones of weights, and ragged ones that end where a segment of rows ends.

A ragged descriptor views a buffer [S,G,W] of rows, each of G groups (gate and up, or one) of W columns, in five
dimensions: (far, end, group, row, column), where the strides of the first two cancel modulo 2^64. The coordinates
(2^30, first + count, group, 2^30 - count, column) then point at row `first`, and the row dimension ends after `count`
rows: a load gives zeros past the segment, a store writes nothing there, and one descriptor serves every segment.
Columns end at W in every group. Rows and columns come last, so that a box is an operand of a product where it lies.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_ALIGN_BYTES = 16
_FAR_ROWS = 1 << 30
# The largest size of a dimension that a descriptor takes, less what a box may stick out.
_MOST = 0x7FFF0000
_FAR = tl.constexpr(_FAR_ROWS)


def plain_descriptor(tensor: Tensor, box: list[int]) -> TensorDescriptor:
    """Return a descriptor of `tensor`, loaded in boxes of `box`; loads out of bounds give zeros.

    Shapes:
        tensor: 2 to 5 dimensions, the last of stride 1, start and other strides multiples of 16 bytes.
    Graph-safe: yes; a host object that holds the address.
    """
    return TensorDescriptor(tensor, list(tensor.shape), _strides(tensor), box)


def ragged_descriptor(rows: Tensor, groups: int, box: list[int]) -> TensorDescriptor:
    """Return a descriptor of `rows` that `load_rows` and `store_rows` cut at any segment.

    Shapes:
        rows [S,G*W] with G = `groups`, column stride 1, start, row stride and W multiples of 16 bytes; box: rows and
        columns, the latter within a group.
    Graph-safe: yes; a host object that holds the address.
    """
    row, group, column = _strides(rows.unflatten(1, (groups, -1)))
    shape = [_MOST, _MOST, groups, _FAR_ROWS, rows.shape[1] // groups]
    # 2^30 * (2^34 - row) elements of any size are a multiple of 2^64 bytes, less the 2^30 rows that the others add.
    return TensorDescriptor(rows, shape, [(1 << 34) - row, row, group, row, column], [1, 1, 1, *box])


@triton.jit
def load_rows(descriptor, first, count, group, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return rows [first, first + ROWS), columns [column, column + COLUMNS) of `group`; zeros from `count` rows on."""
    return tl.reshape(descriptor.load([_FAR, first + count, group, -count + _FAR, column]), (ROWS, COLUMNS))


@triton.jit
def store_rows(descriptor, first, count, group, column, values):
    """Store `values` from row `first` and `column` of `group` on; only the first `count` rows are written."""
    rows: tl.constexpr = values.shape[0]
    columns: tl.constexpr = values.shape[1]
    descriptor.store([_FAR, first + count, group, -count + _FAR, column], tl.reshape(values, (1, 1, 1, rows, columns)))


def _strides(tensor: Tensor) -> list[int]:
    """The strides in elements; the stride of a dimension of size 1 may be anything and must only be aligned."""
    aligned = max(1, _ALIGN_BYTES // tensor.element_size())
    last = tensor.dim() - 1
    return [
        step if size > 1 or d == last else -(-max(step, 1) // aligned) * aligned
        for d, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    ]
