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

from staticmoe.capture.host_made import HostMade
from staticmoe.capture.rules import MEND_READ, Refusal
from staticmoe.capture.seeding import ONE_AT_A_TIME
from staticmoe.capture.source import is_users_call

# As the name of a getter, which is what a mode sees of a read attribute.
_VERSION = vars(torch._C.TensorBase)["_version"].__get__
_MEND_VERSION = (
    "compute what depends on the weights in every iteration, or keep weights that are used together as one parameter "
    "from the start"
)
_HOST_READS = {
    Tensor.item: ("SM101", "Tensor.item()"),
    Tensor.tolist: ("SM102", "Tensor.tolist()"),
    Tensor.cpu: ("SM103", "Tensor.cpu()"),
    Tensor.numpy: ("SM104", "Tensor.numpy()"),
    Tensor.__array__: ("SM104", "a conversion to numpy"),
    Tensor.__repr__: ("SM105", "printing a tensor"),
    Tensor.__format__: ("SM105", "formatting a tensor"),
    Tensor.__bool__: ("SM106", "bool(tensor), a Python branch on a tensor"),
    torch.is_nonzero: ("SM106", "torch.is_nonzero, a Python branch on a tensor"),
    Tensor.__contains__: ("SM106", "'in' on a tensor"),
    Tensor.__int__: ("SM107", "int(tensor)"),
    Tensor.__float__: ("SM107", "float(tensor)"),
    Tensor.__complex__: ("SM107", "complex(tensor)"),
    Tensor.__index__: ("SM108", "a tensor used as a Python index"),
}


class HostReadGuard(TorchFunctionMode):
    """Reports calls that bring a device value to the host, or to the device what was made on the host.

    Args:
        fault: takes what is wrong with the running call, and raises if that is to stop it.
        quiet: context within which the operations that such a call consists of are not reported again.
    """

    def __init__(
        self, fault: Callable[[Refusal], None], quiet: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        super().__init__()
        self._fault = fault
        self._quiet = quiet
        self._host_made = HostMade()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.__hash__ is None:
            return func(*args, **kwargs)
        read = _HOST_READS.get(func)
        if read is not None:
            self._fault(Refusal(read[0], f"{read[1]} reads a device value on the host", MEND_READ))
        elif func == _VERSION and isinstance(args[0], torch.nn.Parameter) and is_users_call():
            why = "reads a parameter's version counter, which a replay neither looks at nor counts on"
            self._fault(Refusal("SM404", why, _MEND_VERSION))
        elif func is torch.nn.functional.one_hot:
            if not _has_num_classes(*args, **kwargs):
                why = "one_hot without num_classes reads the largest value on the host"
                self._fault(Refusal("SM118", why, "pass num_classes="))
            else:
                return _one_hot(*args, **kwargs)
        else:
            return self._call(func, args, kwargs)
        with self._quiet():
            return func(*args, **kwargs)

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        moves = self._host_made.refusal(func, args, kwargs)
        if moves is not None:
            self._fault(moves)
        result = func(*args, **kwargs)
        self._host_made.note(func, args, kwargs, result)
        return result


def _has_num_classes(tensor: Tensor, num_classes: int = -1) -> bool:
    return num_classes >= 0


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """one_hot as a GPU computes it: on a CPU torch checks the range of the values, which reads them."""
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
    # Two that put their functions into torch at once would leave one's there.
    with ONE_AT_A_TIME:
        yield from _hooked(get_state, set_state, seed)


def _hooked(
    get_state: Callable[[Callable[[], Tensor]], Tensor],
    set_state: Callable[[Callable[[Tensor], None], Tensor], None],
    seed: Callable[[object], torch.Generator],
) -> Iterator[None]:
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

    hooks = {"get_rng_state": get, "set_rng_state": put, "manual_seed": reseed}
    # Not the same functions in both: torch 2.11 wraps one of them for its compiler.
    originals = [(room, name, getattr(room, name)) for room in (torch, torch.random) for name in hooks]
    try:
        for room, name, _ in originals:
            setattr(room, name, hooks[name])
        yield
    finally:
        for room, name, original in originals:
            setattr(room, name, original)
