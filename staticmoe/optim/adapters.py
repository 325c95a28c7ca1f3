"""Which adapter runs the user's optimizer inside a captured iteration."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from staticmoe.errors import OptimizerError
from staticmoe.optim import adamw
from staticmoe.optim.adapter import OptimizerAdapter
from staticmoe.optim.fused import FUSED, FusedAdapter
from staticmoe.optim.selecting import SELECTABLE, SelectAdapter
from staticmoe.reference.adamw import ADAMW_COLUMNS


def adapter_for(optimizer: Optimizer, *, replayed: bool = True) -> OptimizerAdapter:
    """Return the adapter that runs `optimizer`; `replayed`: in a graph, not as Python at every step.

    Raises:
        OptimizerError: there is none, or the optimizer has an option that its adapter lacks.
    """
    # Exactly these types: a subclass may do anything in its step.
    if type(optimizer) is adamw.AdamW:
        return TableAdapter(optimizer)
    if type(optimizer) in FUSED:
        return FusedAdapter(optimizer)
    if type(optimizer) in SELECTABLE:
        return SelectAdapter(optimizer, replayed=replayed)
    names = ", ".join(kind.__name__ for kind in (*FUSED, *SELECTABLE))
    raise OptimizerError(
        f"optimizer {type(optimizer).__name__}: expected staticmoe.optim.AdamW or one of torch's {names}; got "
        f"{type(optimizer).__module__}.{type(optimizer).__qualname__}; with capture_scope='forward_backward' any "
        "optimizer steps outside the graph"
    )


class TableAdapter(OptimizerAdapter):
    """`staticmoe.optim.AdamW`, which reads all its hyper-parameters and the veto from the device by itself."""

    width = len(ADAMW_COLUMNS)
    staged = frozenset({"lr", "betas", "eps", "weight_decay"})

    def __init__(self, optimizer: adamw.AdamW) -> None:
        super().__init__(optimizer)
        self._adamw = optimizer

    def _create(self, parameter: Tensor, group: dict[str, Any]) -> None:
        self._adamw.create_state(parameter)

    def hyper_parameters(self) -> list[list[float | Tensor]]:
        """[G][5]; see `staticmoe.reference.adamw.ADAMW_COLUMNS`."""
        return self._adamw.hyper_parameters()

    def step(self, gradients: list[Tensor], table: Tensor, veto: Tensor) -> None:
        """Apply `gradients` where `veto` is 0; see `OptimizerAdapter.step`."""
        groups = [n for n, group in enumerate(self.optimizer.param_groups) for p in group["params"] if p.requires_grad]
        self._adamw.update(list(zip(groups, self.parameters, gradients, strict=True)), table, veto)
