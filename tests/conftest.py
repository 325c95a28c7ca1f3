"""Fixtures of the whole suite: devices, seeds, and memory that is poisoned before it is handed out."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, settings

# Read when triton is imported, which dynamo does. Without a GPU the kernels run in its interpreter, on CPU tensors.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import torch._dynamo  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

# A machine that is busy is no fault of the code.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# Small models: a second thread costs more than it brings, and the runs of one machine stay comparable.
torch.set_num_threads(1)

POISON_BYTES = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28)


# Each of these waits for the device, or makes a shape from a value.
ASKS_THE_HOST = {
    "_local_scalar_dense", "item", "nonzero", "masked_select", "bincount", "repeat_interleave", "unique", "_unique2",
    "equal", "is_nonzero", "lift_fresh", "index.Tensor.bool",
}  # fmt: skip


class Dispatched(TorchDispatchMode):
    """Collects the names of the ops that run, and marks indexing by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        if any(index is not None and index.dtype == torch.bool for index in indices):
            name = "index.Tensor.bool"
        self.names.add(name)
        return func(*args, **(kwargs or {}))

    @property
    def asking(self) -> set[str]:
        """Those that wait for the device, or make a shape from a value."""
        return self.names & ASKS_THE_HOST


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Whatever is compiled is so for the first time; for files of tests that count it."""
    torch._dynamo.reset()
    # torch 2.11 on a CPU crashes where another thread is the first to compile.
    torch.compile(lambda x: 2 * x, backend="eager")(torch.ones(1))
    yield
    torch._dynamo.reset()


@pytest.fixture
def dispatched() -> type[Dispatched]:
    """A context manager that notes which torch ops run within it."""
    return Dispatched


def pytest_unconfigure() -> None:
    """Give back what was frozen, so that the interpreter can take it down."""
    gc.unfreeze()


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device there is: a CPU always, a GPU where there is one."""
    return torch.device(request.param)


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    """Take what imports and earlier files made out of the collector's lists, and let no runner look for it there.

    A runner looks at every tensor that is alive when it is built: with all of the suite's objects its construction
    takes twice as long. So a tensor or closure that it must find is made by the test, not by the file.
    """
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("staticmoe.capture.collector.has_frozen", lambda: False)
        yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random state."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_empties(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fill every `torch.empty` with NaN (integers: the largest value), so that reading what was not written shows.

    Not on a GPU: deterministic algorithms would put other kernels into the graph than a user runs.
    """
    callspec = getattr(request.node, "callspec", None)
    on_gpu = "cuda" in [str(value) for value in callspec.params.values()] if callspec else False
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(not on_gpu, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture
def poison() -> Callable[..., None]:
    """POISON: a call allocates tensors of 1 KiB to `limit` bytes, fills them with NaN and frees them."""

    def fill(device: torch.device | str = "cpu", limit: int = 1 << 22) -> None:
        held = [
            torch.full((size // 4,), float("nan"), dtype=torch.float32, device=device)
            for size in POISON_BYTES
            if size <= limit
            for _ in range(4 if size <= 1 << 20 else 1)
        ]
        del held

    return fill


class Turns:
    """Stands for the lock by which iterations of all threads take turns.

    Attributes:
        settled: set once a second thread has to wait for its turn, or says itself that it need not.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.settled = threading.Event()
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.settled.set()
            self._lock.acquire()

    def __exit__(self, *raised: object) -> None:
        self._lock.release()

    def meanwhile(self, work: Callable[[], Any]) -> Future[Any]:
        """Start `work` in another thread; returns as soon as that is settled."""
        future = self._pool.submit(work)
        future.add_done_callback(lambda _: self.settled.set())
        assert self.settled.wait(120), "neither waits nor works"
        return future


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    """Put in place of staticmoe's lock."""
    stand_in, name = Turns(), "ONE_AT_A_TIME"
    for module in [module for path, module in sys.modules.items() if path.startswith("staticmoe.")]:
        if hasattr(module, name):
            monkeypatch.setattr(module, name, stand_in)
    return stand_in
