"""The grouped products of one op: the tiles, programs and schedules that its launches share.

Dimensions: T tokens, K top_k, E experts, R capacity rows, M row tiles at most.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from staticmoe.kernels.grouped_gemm import grouped_gemm
from staticmoe.kernels.schedule import tile_schedule
from staticmoe.kernels.tile_table import tile_for
from staticmoe.kernels.tiles import Tile
from staticmoe.kernels.weight_grad import Side, weight_grad
from staticmoe.ops.launch.operands import gpu, takes_hopper_kernels, wants_tf32


class Products:
    """The constants of the launches of one op: tiles by kernel, programs, schedules by the rows of a tile.

    Args:
        dtype: of the operands.
        expert_offsets: [E+1].
        row_assignment: [R].
        assignment_row: [T,K].

    Attributes:
        on_hopper: whether the kernels of `kernels/hopper` run here.
    """

    def __init__(
        self, dtype: torch.dtype, expert_offsets: Tensor, row_assignment: Tensor, assignment_row: Tensor
    ) -> None:
        self.offsets = expert_offsets
        self.row_assignment = row_assignment
        self.assignment_row = assignment_row
        self.top_k = assignment_row.shape[1]
        self.programs, self._capability = gpu(expert_offsets.device)
        self.allow_tf32 = wants_tf32()
        self._dtype = dtype
        self.on_hopper = takes_hopper_kernels(expert_offsets.device)
        self._experts, self._rows = expert_offsets.shape[0] - 1, row_assignment.shape[0]
        self._schedules: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def load(self) -> float:
        """Rows of an expert, balanced. What is chosen by it never depends on the capacity: variants agree bitwise."""
        return self.assignment_row.numel() / self._experts

    def tile(self, kernel: str) -> Tile:
        """Tile of a kernel."""
        return tile_for(kernel, dtype=self._dtype, rows_per_expert=self.load, capability=self._capability)

    def schedule(self, block_rows: int) -> tuple[Tensor, Tensor]:
        """Row tiles and their number for tiles of so many rows."""
        if block_rows not in self._schedules:
            # The bound is proved in `staticmoe.shapes.StaticShape.max_tiles`.
            most = (self._rows + min(self._experts, self._rows) * (block_rows - 1)) // block_rows
            schedule, count = self.offsets.new_empty(max(most, 1), 4), self.offsets.new_empty(1)
            tile_schedule(self.offsets, schedule, count, block_rows=block_rows)
            self._schedules[block_rows] = (schedule, count)
        return self._schedules[block_rows]

    def product(
        self, kernel: str, rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, transposed: bool,
        gather: bool = False, saved_rows: bool = False,
    ) -> Tensor:  # fmt: skip
        """`grouped_gemm` with the tile of `kernel`; returns `out`."""
        tile = self.tile(kernel)
        grouped_gemm(
            rows,
            weight,
            bias,
            out,
            *self.schedule(tile.rows),
            transposed=transposed,
            row_assignment=self.row_assignment if gather else None,
            top_k=self.top_k,
            saved_rows=saved_rows,
            tile=tile,
            programs=self.programs,
            allow_tf32=self.allow_tf32,
        )
        return out

    def takes_hopper_weight_grad(self, left: Tensor, right: Tensor, out: Tensor, *, gather: Side) -> bool:
        """Whether `weight_grad` takes the kernel of Hopper, which is as fast with gathered tokens as with rows."""
        if not self.on_hopper:
            return False
        # Imported here: nobody else has a use for Gluon.
        from staticmoe.kernels.hopper import weight_grad as hopper

        return hopper.serves(left, right, out, gather=gather)

    def weight_grad(
        self, kernel: str, left: Tensor, right: Tensor, out: Tensor, *, gather: Side, add: bool = False
    ) -> None:
        """`weight_grad`, stored or added: that of Hopper where it serves, else the one with the tile of `kernel`."""
        operands = left, right, self.offsets, self.row_assignment, out
        common: dict[str, Any] = {
            "gather": gather, "saved": None, "base_row": None, "top_k": self.top_k, "accumulate": add,
            "programs": self.programs,
        }  # fmt: skip
        if self.takes_hopper_weight_grad(left, right, out, gather=gather):
            from staticmoe.kernels.hopper import weight_grad as hopper

            hopper.weight_grad(*operands, pipeline=hopper.pipeline_for(self.load), **common)
            return
        weight_grad(*operands, tile=self.tile(kernel), allow_tf32=self.allow_tf32, **common)
