"""What a runner would be given, for the audit to look at instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from staticmoe import DeviceScalars, RunnerConfig
from staticmoe.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Arguments of `StaticMoERunner`, by their names."""

    model: Any
    optimizer: Any
    example_batch: Any
    loss_fn: Any = None
    eval_fn: Any = None
    token_mask: Any = None
    scalars: DeviceScalars | None = None
    config: RunnerConfig | None = None

    @classmethod
    def of(cls, given: Any) -> Arguments:
        """Arguments from a dict.

        Raises:
            ConfigError: no dict, a name that the runner does not know, or a missing one.
        """
        if not isinstance(given, Mapping):
            raise ConfigError(f"factory: expected a dict of StaticMoERunner's arguments, got {type(given).__name__}")
        fields = {field.name: field for field in dataclasses.fields(cls)}
        unknown = sorted(map(str, given.keys() - fields.keys()))
        needed = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
        missing = sorted(needed - given.keys())
        if unknown or missing:
            raise ConfigError(
                f"factory: expected {', '.join(fields)}; "
                + "; ".join(
                    f"{what} {', '.join(names)}"
                    for what, names in (("missing:", missing), ("unknown:", unknown))
                    if names
                )
            )
        return cls(**given)

    @property
    def paths(self) -> dict[int, str]:
        """id(module) -> dotted path."""
        modules = self.model.named_modules() if isinstance(self.model, nn.Module) else ()
        return {id(module): path or "(the model)" for path, module in modules}

    @property
    def usable(self) -> bool:
        """Whether model and optimizer are what they should be, so that rules may look at them."""
        return isinstance(self.model, nn.Module) and isinstance(self.optimizer, Optimizer)
