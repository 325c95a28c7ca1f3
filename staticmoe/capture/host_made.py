"""Tensors that an iteration makes on the host and then moves to the device: a GPU refuses that move in a capture.

On a CPU host and device are one, and nothing is copied. There a tensor counts as made on the host when a factory is not
told a device, or when it is computed from such tensors alone; and as moved by a conversion to where another tensor is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.utils.weak import WeakTensorKeyDictionary

from staticmoe.capture.provenance import tensors_in
from staticmoe.capture.rules import Refusal

# These make tensors of host values, which is looked at where an operation reads them.
_FROM_VALUES = {"tensor", "as_tensor", "asarray", "nested_tensor", "from_numpy"}
_FACTORIES = {function for function in _device_constructors() if function.__name__ not in _FROM_VALUES}
_CONVERSIONS = {Tensor.to, Tensor.cuda, Tensor.type_as}
_WHY = "copies a tensor that this iteration made on the host to the device, which a GPU refuses in a capture"
_MEND = "make it on the device: give the factory device=..., or keep it as a buffer"


class HostMade:
    """The tensors of one iteration that were made on the host."""

    def __init__(self) -> None:
        self._known = WeakTensorKeyDictionary()

    def refusal(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Refusal | None:
        """Why a call cannot be captured, or None where it moves nothing from host to device."""
        if not self._known or not args:
            return None
        moves = func in _CONVERSIONS and self._is(args[0]) and self._names_device(func, args[1:], kwargs)
        return Refusal("SM119", _WHY, _MEND) if moves else None

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Take in what a call returned."""
        if func in _FACTORIES:
            from_host = kwargs.get("device") is None
        else:
            inputs = tensors_in(args, kwargs) if self._known else []
            from_host = bool(inputs) and all(self._is(tensor) for tensor in inputs)
        for tensor in tensors_in(result) if from_host else ():
            if tensor.device.type == "cpu":
                self._known[tensor] = True

    def _is(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor in self._known

    def _names_device(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a conversion goes to a device, or to wherever another tensor is; "cpu" written out does not."""
        if func is Tensor.cuda:
            return True
        targets = [*args, *kwargs.values()]
        if any(isinstance(target, str) and target.startswith("cpu") for target in targets):
            return False
        return any(
            isinstance(target, (torch.device, str)) or (isinstance(target, Tensor) and not self._is(target))
            for target in targets
        )
