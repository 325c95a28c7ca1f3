"""Where every tensor that an iteration reads comes from.

A graph replays operations on fixed storages. What it reads must therefore be persistent (a parameter, a
buffer, optimizer state, a static input), made by the same iteration, or a constant. Everything else holds
the value of the capture for ever: a cast cached by autocast, a bank cached by an earlier iteration, a
tensor built from host values, the result of an operation in another thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from staticmoe.capture.collector import thawed
from staticmoe.capture.source import Source


def storage_key(tensor: Tensor) -> int:
    """Identity of the memory behind `tensor`; two views of one storage have one key."""
    return tensor.untyped_storage()._cdata


def live_tensors() -> list[Tensor]:
    """Every tensor that some Python object refers to now. Strong references: drop the list soon."""
    tensors = []
    tensor_types: dict[type, bool] = {}
    with thawed():
        candidates = gc.get_objects()
    for candidate in candidates:
        # type(), not isinstance(): lazy proxies import whole packages when asked for their class.
        kind = type(candidate)
        if kind not in tensor_types:
            tensor_types[kind] = issubclass(kind, Tensor)
        if tensor_types[kind]:
            try:
                storage_key(candidate)
            except (RuntimeError, NotImplementedError):
                continue
            tensors.append(candidate)
    return tensors


def raw_bytes(tensor: Tensor) -> Tensor:
    """The whole memory behind `tensor` as uint8 [bytes], sharing it."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@dataclasses.dataclass
class _Made:
    """A storage made by an operation that was seen. The weak reference keeps its key from being used again."""

    storage: StorageWeakRef
    epoch: int
    derived: bool
    written: bool
    source: Source
    of_weights: bool


@dataclasses.dataclass(frozen=True)
class Mutation:
    """Memory that outlives an iteration and is written by it.

    Attributes:
        name: declared name, or "" for a tensor known only from being alive.
        raw: the memory, uint8 [bytes].
        before: its content before the first write, uint8 [bytes].
    """

    name: str
    raw: Tensor
    before: Tensor


class Provenance:
    """Book of origins over the observed iterations of a runner's programs. Open while iterations are observed.

    Args:
        changing: name -> tensor whose value the iteration or the host changes from step to step (parameters,
            optimizer state, static inputs). What is computed from one of them is stale in the next iteration.
        steady: name -> tensor that lives as long as the program and normally keeps its value (module buffers).
    """

    def __init__(self, changing: Mapping[str, Tensor], steady: Mapping[str, Tensor]) -> None:
        self.mutated: dict[int, Mutation] = {}
        self._saving = False
        self._written: set[int] = set()
        self._epoch = 0
        self._names: dict[int, str] = {}
        self._declared: dict[int, Tensor] = {}
        self._changing: set[int] = set()
        self._constants: list[Tensor] = []
        self._constant_keys: set[int] = set()
        self._made: dict[int, _Made] = {}
        self._filled_from_weights: set[int] = set()
        self.declare(steady, changing=False)
        self.declare(changing, changing=True)

    def declare(self, tensors: Mapping[str, Tensor], *, changing: bool) -> None:
        """Add tensors that outlive an iteration; also those made after the book was opened."""
        for name, tensor in tensors.items():
            key = storage_key(tensor)
            self._names[key] = name
            self._declared[key] = tensor
            self._made.pop(key, None)
            if changing:
                self._changing.add(key)

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Let go of declared tensors that nothing uses any more."""
        for key in map(storage_key, tensors):
            self._declared.pop(key, None)
            self._names.pop(key, None)
            self._changing.discard(key)
            self._written.discard(key)
            self._filled_from_weights.discard(key)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Take what is alive now, and no observed operation made, as constants; let go of it at the end."""
        self.mutated = {}
        # Strong references, so that no later storage can take over a constant's key.
        self._constants = live_tensors()
        self._constant_keys = {storage_key(tensor) for tensor in self._constants} - self._made.keys()
        try:
            yield
        finally:
            self._constants = []
            self._constant_keys = set()

    @property
    def alive(self) -> list[Tensor]:
        """Every tensor that was there when the book was opened."""
        return self._constants

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Keep, in `mutated`, a copy of all memory that outlives the iteration and is about to be written."""
        self._saving = True
        try:
            yield
        finally:
            self._saving = False

    def begin_iteration(self) -> None:
        """Start an iteration: what earlier ones derived from changing tensors is stale from here on."""
        self._epoch += 1
        self._made = {key: made for key, made in self._made.items() if not made.storage.expired()}

    def outlives(self, tensor: Tensor) -> bool:
        """Whether `tensor` outlives an iteration: declared, or alive before the first one."""
        key = storage_key(tensor)
        return key in self._names or key in self._constant_keys

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether `tensor` was alive before, and is neither declared nor written since."""
        key = storage_key(tensor)
        return key in self._constant_keys and key not in self._names and key not in self._written

    def is_unknown(self, tensor: Tensor) -> bool:
        """Whether nothing was ever seen of `tensor`."""
        return not self.outlives(tensor) and storage_key(tensor) not in self._made

    def fault(self, tensor: Tensor, *, unseen_writes: bool = False) -> str | None:
        """Say why a replay could not read `tensor`, or None where its origin is known.

        Args:
            unseen_writes: a kernel that is no torch operation may have written it.
        """
        if self.outlives(tensor):
            return None
        made = self._made.get(storage_key(tensor))
        if made is None:
            return (
                "a tensor that no recorded operation made: it comes from host values (torch.tensor, numpy, tolist), "
                "from a cache inside torch, or from another thread, and a replay would read its value of now"
            )
        if not made.written and not unseen_writes:
            return f"memory that nothing has written yet, allocated at {made.source}"
        if made.epoch != self._epoch and made.derived:
            return (
                f"a tensor that an earlier iteration computed at {made.source} and kept: "
                "a replay would read that stale value"
            )
        return None

    def is_derived(self, tensors: Iterable[Tensor]) -> bool:
        """Whether any of `tensors` depends on something that changes from step to step."""
        for tensor in tensors:
            key = storage_key(tensor)
            made = self._made.get(key)
            if made.derived if made is not None else key in self._changing or key in self._written:
                return True
        return False

    def is_of_weights(self, tensor: Tensor) -> bool:
        """Whether the latest write into `tensor` took weights, or what was made of them, and else nothing changing."""
        key = storage_key(tensor)
        made = self._made.get(key)
        return made.of_weights if made is not None else key in self._filled_from_weights

    def made(self, tensor: Tensor, *, derived: bool, written: bool, source: Source, of_weights: bool = False) -> None:
        """Enter a fresh output."""
        weak = StorageWeakRef(tensor.untyped_storage())
        self._made[storage_key(tensor)] = _Made(weak, self._epoch, derived, written, source, of_weights)

    def will_write(self, tensor: Tensor, *, derived: bool, of_weights: bool = False) -> None:
        """Enter a write into existing memory, just before it happens."""
        key = storage_key(tensor)
        made = self._made.get(key)
        if made is not None:
            made.written = True
            made.derived = made.derived or derived
            made.of_weights = of_weights
        elif self.outlives(tensor):
            self._written.add(key)
            (self._filled_from_weights.add if of_weights else self._filled_from_weights.discard)(key)
            if self._saving and key not in self.mutated:
                raw = raw_bytes(tensor)
                self.mutated[key] = Mutation(self._names.get(key, ""), raw, raw.clone())


def tensors_in(*trees: object) -> list[Tensor]:
    """Flat list of the tensors in arguments or results of an operation (lists and tuples included)."""
    found: list[Tensor] = []
    for tree in trees:
        if isinstance(tree, Tensor):
            found.append(tree)
        elif isinstance(tree, (list, tuple)):
            found.extend(tensors_in(*tree))
        elif isinstance(tree, dict):
            found.extend(tensors_in(*tree.values()))
    return found
