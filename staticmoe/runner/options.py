"""Options and parameters of the optimizer, as a graph holds them."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from staticmoe.capture.change import Change, is_same
from staticmoe.errors import OptimizerError

# Options that do not enter a step: which form of it torch takes, and the books of schedulers.
_FREE = frozenset(
    {"params", "param_names", "foreach", "fused", "capturable", "initial_lr", "max_lr", "min_lr", "swa_lr"}
    | {"max_momentum", "min_momentum", "base_momentum"}
)


class OptimizerState:
    """Options and parameters of an optimizer as they were when an iteration was recorded.

    Args:
        optimizer: the user's.
        model: that its parameters should belong to.
        staged: keys of the options that are device values; None where no option is part of the graph.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module, staged: frozenset[str] | None) -> None:
        self._optimizer = optimizer
        self._model = model
        self._groups = [list(map(id, group["params"])) for group in optimizer.param_groups]
        self._free = None if staged is None else _FREE | staged
        self._options = [self._frozen(group) for group in optimizer.param_groups]

    def check_groups(self) -> None:
        """Refuse an optimizer with other parameters than were captured.

        Raises:
            OptimizerError: a group or parameter was added or removed.
        """
        groups = [list(map(id, group["params"])) for group in self._optimizer.param_groups]
        if groups != self._groups:
            expected, got = list(map(len, self._groups)), list(map(len, groups))
            raise OptimizerError(
                f"optimizer: expected the {len(expected)} captured parameter groups of sizes {expected}, got "
                f"{len(got)} of sizes {got}; add_param_group after wrapping is not seen by the graph: build the "
                "optimizer with all groups and wrap again"
            )

    def check_members(self) -> None:
        """Refuse an optimizer whose parameters the model no longer has.

        Raises:
            OptimizerError: the model's parameters were replaced.
        """
        known = {id(parameter) for parameter in self._model.parameters()}
        lost = sum(1 for group in self._groups for parameter in group if parameter not in known)
        if lost:
            raise OptimizerError(
                f"optimizer: expected parameters of the model, got {lost} that the model no longer has; they were "
                "replaced (load_state_dict(assign=True) does that): load with assign=False, or build optimizer and "
                "runner again"
            )

    def changes(self) -> list[Change]:
        """Every option that is no device value and differs from what the graph holds."""
        found = []
        for number, (old, group) in enumerate(zip(self._options, self._optimizer.param_groups, strict=True)):
            for key, value in self._frozen(group).items():
                if not is_same(old.get(key), value):
                    found.append(Change("option", f"optimizer group {number}", key, old.get(key), value))
        return found

    def _frozen(self, group: dict[str, Any]) -> dict[str, Any]:
        """The options that enter the graph as they are, in a form that can be compared."""
        return {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in group.items()
            if self._free is not None and key not in self._free
        }
