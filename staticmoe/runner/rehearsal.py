"""An iteration run on tensors without memory, to learn what it would allocate; afterwards nothing has happened.

The iteration's own Python runs, the user's loss function in it, but every operation meets fake tensors: real ones
that it reads are replaced by twins of their shape as they come. What Python keeps (attributes, lists, closures),
version counters and random states are put back, so that the run leaves neither a trace nor a fake tensor behind.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from staticmoe.capture.attention import is_flex, stand_in
from staticmoe.capture.dynamo import Observer
from staticmoe.capture.provenance import storage_key, tensors_in
from staticmoe.capture.seeding import ONE_AT_A_TIME
from staticmoe.capture.source import locate
from staticmoe.ops.scratch import SCRATCH
from staticmoe.runner.fakes import FakeOperations
from staticmoe.runner.segments import allocated
from staticmoe.runner.shortage import Ledger

# Turn what Python made of host values into fake tensors, and remember the values.
_LIFTS = {torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift.default}
_UNCOUNTED = -1
# How deep containers and objects in each other are looked at, and how many values of one.
_DEPTH, _MOST_VALUES = 4, 100_000
_CONTAINERS = (dict, list, set, collections.deque)
# What has attributes that no iteration changes, or that are not its own.
_NO_OWNERS = (type, ModuleType, FunctionType)


def sizes_of(tensors: Iterable[Tensor]) -> list[int]:
    """Bytes allocated for each of `tensors`; memory that several of them share counts once."""
    return list({storage_key(tensor): allocated(tensor.untyped_storage().nbytes()) for tensor in tensors}.values())


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Their sum."""
    return sum(sizes_of(tensors))


class Tally(Observer):
    """Counts the memory that is alive, as operations on fake tensors make it and Python lets go of it.

    Args:
        device: whose memory counts.
        fake: gives the real tensors that an operation is handed their twins.
        modules: id(module) -> dotted path, to name lines by.

    Attributes:
        live, peak: bytes now, and at most so far, since the last `begin`.
        ledger: which these are.
        events: what was allocated and let go of, in order, as `Segments.play` takes it.
    """

    def __init__(self, device: torch.device, fake: FakeTensorMode, modules: Mapping[int, str]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.ledger = Ledger()
        self.events: list[tuple[int, int]] = []
        self._modules = modules
        self._device = device
        self._fake = fake
        self._operations = FakeOperations(fake)
        self._twins: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._outside: set[int] = set()
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._run = 0

    def begin(self) -> None:
        """Count from 0: what has been made so far counts no more, whenever it is let go of."""
        self.live = self.peak = 0
        self.ledger = Ledger()
        self.events = []
        self._run += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            # Each look at the device of a fake tensor comes by.
            return args[0].fake_device
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._run_higher(func, args)
        if func not in _LIFTS:
            # Not left to the fake mode: it runs an operation on real tensors and numbers alone as it is.
            args, kwargs = self._twins_in(args), self._twins_in(kwargs)
        if not func._schema.returns:
            # It makes nothing, and not all of torch's fused optimizers have a fake.
            return None
        if func.namespace == "c10d":
            # No other rank is asked; what comes of it lies in memory that was given.
            done = torch._C._distributed_c10d.FakeWork().boxed()
            return (args[0], done) if len(func._schema.returns) > 1 else done
        result = func(*args, **kwargs) if func in _LIFTS else self._operations(func, args, kwargs)
        scratch = SCRATCH.get(func) if self._device.type == "cuda" else None
        if scratch is not None:
            for phase in scratch(*args):
                self._pass_by([allocated(nbytes) for nbytes in phase])
        for tensor in tensors_in(result):
            self._enter(tensor)
        return result

    def _run_higher(self, func: HigherOrderOperator, args: Any) -> Any:
        """Flex attention makes its results and, compiled, nothing else; uncompiled it is refused before it runs."""
        if not is_flex(func):
            raise NotImplementedError(f"{func.name()} is no operation that a rehearsal can count")
        with self:
            return stand_in(func, self._twins_in(args))

    def twin(self, tensor: Tensor) -> Tensor:
        """The fake tensor that stands for a real one; views of one memory have twins of one memory."""
        if isinstance(tensor, FakeTensor):
            return tensor
        known = self._twins.get(id(tensor))
        if known is None:
            version = _UNCOUNTED if tensor.is_inference() else tensor._version
            with _disable_current_modes():
                # Detached: a twin of a parameter would bring one of its gradient along.
                fake = self._fake.from_tensor(tensor.detach())
            self._outside.add(storage_key(fake))
            known = self._twins[id(tensor)] = tensor, version, fake
        return known[2]

    def _twins_in(self, tree: Any) -> Any:
        if isinstance(tree, Tensor):
            return self.twin(tree)
        if isinstance(tree, (list, tuple)):
            return [self._twins_in(item) for item in tree]
        if isinstance(tree, dict):
            return {name: self._twins_in(item) for name, item in tree.items()}
        return tree

    def finish(self) -> None:
        """Set the version counters of the real tensors, which rise though nothing is written; let go of everything."""
        counted = [(tensor, version) for tensor, version, _ in self._twins.values() if version != _UNCOUNTED]
        tensors, versions = [list(column) for column in zip(*counted, strict=True)] if counted else ([], [])
        torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))
        self._twins.clear()
        self._alive.clear()

    def _enter(self, tensor: Tensor) -> None:
        key = storage_key(tensor)
        if tensor.device.type != self._device.type or key in self._alive or key in self._outside:
            return
        storage = tensor.untyped_storage()
        size, run = allocated(storage.nbytes()), self._run
        self.live += size
        self.events.append((key, size))
        self.ledger.made(key, size, locate(self._modules))
        self._rise(self.live)
        self._alive[key] = weakref.ref(storage, lambda _: self._leave(key, size, run))

    def _pass_by(self, sizes: Sequence[int]) -> None:
        """Memory of a kernel's own, gone when it has run."""
        self._rise(self.live + sum(sizes))
        self.events += [(-1 - number, size) for number, size in enumerate(sizes)]
        self.events += [(-1 - number, -1) for number in range(len(sizes))]

    def _rise(self, total: int) -> None:
        if total > self.peak:
            self.peak = total
            self.ledger.at_peak()

    def _leave(self, key: int, size: int, run: int) -> None:
        self._alive.pop(key, None)
        if run == self._run:
            self.live -= size
            self.events.append((key, -1))
            self.ledger.gone(key)


class Untouched:
    """What Python keeps, as it was: attributes, containers in them, variables of functions. Tensors are not copied.

    Args:
        owners: objects whose attributes are put back, with the containers among them.
        functions: whose variables, and objects reachable from them, are put back where a fake tensor is left in them.
            Not elsewhere: a thread of the user's may be at work on them.
    """

    def __init__(self, owners: Iterable[object], functions: Iterable[Callable[..., Any]]) -> None:
        self._kept: dict[int, tuple[Any, Any, bool]] = {}
        self._cells: list[tuple[Any, Any]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        for owner in owners:
            self._keep(vars(owner), own=True)
        for function in functions:
            self._keep_variables(function)

    def restore(self) -> None:
        """Put everything back; what has not changed is not written."""
        for container, before, own in self._kept.values():
            if _differs(container, before) and (own or _holds_fake(container)):
                container.clear()
                container.extend(before) if hasattr(container, "extend") else container.update(before)
        for cell, value in self._cells:
            if _holds_fake(cell.cell_contents):
                cell.cell_contents = value
        for variables, name, value in self._globals:
            if _holds_fake(variables.get(name)):
                variables[name] = value

    def _keep(self, container: Any, *, own: bool, depth: int = 0) -> None:
        """Copy a container and those in it; the attributes of an object are one."""
        if id(container) in self._kept or depth > _DEPTH:
            return
        named = issubclass(type(container), dict)
        values = list(container.values()) if named else list(container)
        self._kept[id(container)] = container, dict(container) if named else values, own
        if len(values) <= _MOST_VALUES:
            for value in values:
                self._keep_value(value, own=own, depth=depth + 1)

    def _keep_value(self, value: Any, *, own: bool = False, depth: int = 0) -> None:
        # type(), not isinstance(): lazy proxies import whole packages when asked for their class.
        kind = type(value)
        if issubclass(kind, _CONTAINERS):
            self._keep(value, own=own, depth=depth)
        elif issubclass(kind, nn.Module):
            for module in value.modules():
                self._keep(vars(module), own=own, depth=depth)
        elif not issubclass(kind, _NO_OWNERS) and kind.__module__.split(".")[0] != "torch" and kind.__dictoffset__:
            self._keep(vars(value), own=False, depth=depth)

    def _keep_variables(self, function: Any) -> None:
        if isinstance(function, functools.partial):
            self._keep_value(function.keywords)
            return self._keep_variables(function.func)
        if isinstance(function, MethodType):
            self._keep_value(function.__self__)
            function = function.__func__
        if not isinstance(function, FunctionType):
            return self._keep_value(function)
        for cell in function.__closure__ or ():
            # A variable that is not bound yet has no contents.
            with contextlib.suppress(ValueError):
                self._cells.append((cell, cell.cell_contents))
                self._keep_value(cell.cell_contents)
        for name in function.__code__.co_names:
            if name in function.__globals__:
                self._globals.append((function.__globals__, name, function.__globals__[name]))
                self._keep_value(function.__globals__[name])


def _differs(container: Any, before: Any) -> bool:
    """Whether other objects are in `container`, or in another order."""
    if len(container) != len(before):
        return True
    if isinstance(before, dict):
        pairs = zip(container.items(), before.items(), strict=True)
        return any(one[0] is not other[0] or one[1] is not other[1] for one, other in pairs)
    return any(one is not other for one, other in zip(container, before, strict=True))


def _holds_fake(value: Any, depth: int = 0) -> bool:
    """Whether `value` is a fake tensor, or a container with one."""
    if issubclass(type(value), (*_CONTAINERS, tuple)) and depth <= _DEPTH:
        values = list(value.values()) if issubclass(type(value), dict) else list(value)
        return any(_holds_fake(item, depth + 1) for item in values)
    return type(value) is FakeTensor


@contextlib.contextmanager
def rehearsal(
    device: torch.device,
    owners: Iterable[object],
    functions: Iterable[Callable[..., Any]],
    tensors: Iterable[Tensor],
    modules: Mapping[int, str],
) -> Iterator[Tally]:
    """Within: nothing is computed, and no memory allocated; afterwards nothing has happened.

    Args:
        device: whose memory is counted.
        owners, functions: what may change while the iteration runs; see `Untouched`.
        tensors: real ones that may be written.
        modules: id(module) -> dotted path.

    Raises:
        Exception: whatever the Python within raises, and what torch does where a value or its memory is asked for.
    """
    untouched = Untouched(owners, functions)
    # Else a fake tensor has the address 0, and a kernel that is no torch operation would be launched on it.
    with torch._functorch.config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
        fake = FakeTensorMode(allow_fallback_kernels=False)
    tally = Tally(device, fake, modules)
    for tensor in tensors:
        tally.twin(tensor)
    try:
        # Two that put their functions into torch at once would leave one's there.
        with ONE_AT_A_TIME, _random_state_left_alone(tally), fake, tally:
            yield tally
    finally:
        untouched.restore()
        tally.finish()


@contextlib.contextmanager
def _random_state_left_alone(tally: Tally) -> Iterator[None]:
    """Seed and set no generator where `tally` counts: fake random operations draw nothing that would be repeated."""
    modules = (torch, torch.random, torch.cuda, torch.cuda.random)
    originals = [(m, name, getattr(m, name)) for m in modules for name in ("set_rng_state", "manual_seed")]

    def unless_counting(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            # Also in the threads of autograd, which take the modes over.
            if tally in _get_current_dispatch_mode_stack():
                return torch.default_generator
            return original(*args, **kwargs)

        return call

    try:
        for module, name, original in originals:
            setattr(module, name, unless_counting(original))
        yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)
