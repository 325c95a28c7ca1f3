"""What an iteration does beside its operations: host reads that leave no operation, and random state.

`.tolist()`, `.cpu()` or printing leave nothing in a recording of operations, and reading or setting the
generator's state is no operation either. Both are caught here, while an iteration is watched.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from staticmoe.capture.rules import _MEND_READ

_HOST_READS = {
    Tensor.item: "Tensor.item()",
    Tensor.tolist: "Tensor.tolist()",
    Tensor.cpu: "Tensor.cpu()",
    Tensor.numpy: "Tensor.numpy()",
    Tensor.__array__: "a conversion to numpy",
    Tensor.__repr__: "printing a tensor",
    Tensor.__format__: "formatting a tensor",
    Tensor.__bool__: "bool(tensor), a Python branch on a tensor",
    Tensor.__int__: "int(tensor)",
    Tensor.__float__: "float(tensor)",
    Tensor.__index__: "a tensor used as a Python index",
    Tensor.__contains__: "'in' on a tensor",
}


class HostReadGuard(TorchFunctionMode):
    """Reports calls that bring a device value to the host.

    Args:
        fault: takes what is wrong with the running call, and raises if that is to stop it.
    """

    def __init__(self, fault: Callable[[str], None]) -> None:
        super().__init__()
        self._fault = fault

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = _HOST_READS.get(func) if func.__hash__ is not None else None
        if read is not None:
            self._fault(f"{read} reads a device value on the host; {_MEND_READ}")
        if func is torch.nn.functional.one_hot:
            return _one_hot(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """one_hot as a GPU computes it: on a CPU torch checks the range of the values, which reads them."""
    if num_classes < 0:
        return torch.nn.functional.one_hot(tensor, num_classes)
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).to(torch.int64)


@contextlib.contextmanager
def random_state_hooks(
    get_state: Callable[[Callable[[], Tensor]], Tensor],
    set_state: Callable[[Callable[[Tensor], None], Tensor], None],
    seed: Callable[[object], torch.Generator],
) -> Iterator[None]:
    """Send this thread's reads, writes and seedings of the CPU generator's state through the given functions.

    Activation checkpointing saves and restores that state around its recomputation; torch dispatches
    neither, so a recording of operations alone would give the recomputation other random numbers.
    """
    original_get, original_set, original_seed = torch.get_rng_state, torch.set_rng_state, torch.manual_seed
    watched = threading.get_ident()

    def elsewhere() -> bool:
        return threading.get_ident() != watched

    def get() -> Tensor:
        return original_get() if elsewhere() else get_state(original_get)

    def put(new_state: Tensor) -> None:
        if elsewhere():
            original_set(new_state)
        else:
            set_state(original_set, new_state)

    def reseed(number: Any) -> torch.Generator:
        return original_seed(number) if elsewhere() else seed(number)

    def install(read: Any, write: Any, start: Any) -> None:
        torch.get_rng_state = torch.random.get_rng_state = read
        torch.set_rng_state = torch.random.set_rng_state = write
        torch.manual_seed = torch.random.manual_seed = start

    install(get, put, reseed)
    try:
        yield
    finally:
        install(original_get, original_set, original_seed)
