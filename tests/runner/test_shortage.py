"""Out of memory while a graph is made: an error with the forecast and the three largest allocations, by line."""

from __future__ import annotations

import contextlib
import re
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from staticmoe import MemoryLimitError, RunnerConfig, StaticMoE, StaticMoERunner
from staticmoe.capture.source import Source
from staticmoe.runner.rehearsal import rehearsal
from staticmoe.runner.shortage import Ledger

ROWS, WIDE = 64, 4096
MIB = ROWS * WIDE * 4 / 2**20


class Wide(nn.Module):
    """Three lines that keep one, two and four tensors of 1 MiB each until the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.spread = nn.Linear(8, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        y = self.spread(x)
        y = y.exp()  # <- 1
        y = y.sin().sin().cos()  # <- 2
        y = y.exp().exp().exp().exp()  # <- 4
        return y.mean()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe, self.wide = StaticMoE(8, 4, 2, 2), Wide()

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.moe(x))


class Full(TorchDispatchMode):
    """A device without memory for anything more; what has no memory needs none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(one, FakeTensor) for one in tree_leaves(args)):
            return func(*args, **(kwargs or {}))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def wrap(model: nn.Module, full: bool = False, made: list[Any] | None = None, **options: Any) -> StaticMoERunner:
    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = model(batch["x"])
        if made is not None:
            made.append(weakref.ref(loss))
        with Full() if full else contextlib.nullcontext():
            return 2 * loss

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = {"x": torch.randn(ROWS, 8)}
    config = RunnerConfig(**options)
    return StaticMoERunner(model, optimizer, example_batch=batch, loss_fn=loss_fn, config=config)


def shown(text: str) -> list[tuple[float, int, str, str]]:
    """MiB, tensors, marker of the line and module of each allocation that is named."""
    found = re.findall(r"  (\S+) MiB in (\d+) tensors? at \S+?\.py:\d+ \"(.*?)\"(?: in module '(.*?)')?", text)
    return [(float(size), int(count), line[line.find("# <-") :], module) for size, count, line, module in found]


EXPECTED = [(4 * MIB, 4, "# <- 4", "wide"), (2 * MIB, 2, "# <- 2", "wide"), (MIB, 1, "# <- 1", "wide")]


@pytest.mark.parametrize("capture", ["emulate", "off"])
def test_out_of_memory_names_the_largest_lines(capture: str) -> None:
    """In a warm-up; afterwards the model can be wrapped anew."""
    model, made = Model(), list[Any]()
    with pytest.raises(MemoryLimitError, match="expected an iteration that fits on cpu, got out of memory") as caught:
        wrap(model, full=True, made=made, capture=capture)
    assert made and all(loss() is None for loss in made), "the error keeps what the iteration had"
    text = str(caught.value)
    assert "Tried to allocate 2.00 GiB" in text and "lower capacity_factor" in text
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert shown(text) == EXPECTED
    wrap(model, capture=capture).close()


def test_a_limit_that_is_refused_names_them_too() -> None:
    with pytest.raises(MemoryLimitError, match="expected to need at most") as caught:
        wrap(Model(), memory_limit_bytes=1)
    assert shown(str(caught.value)) == EXPECTED


def test_what_cannot_be_rehearsed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then there is no forecast to name lines of."""
    monkeypatch.setattr("staticmoe.runner.forecast.Foresight.of", lambda self, shape: None)
    with pytest.raises(MemoryLimitError, match="Tried to allocate.*There is no forecast"):
        wrap(Model(), full=True, capture="off")


def test_a_count_knows_nothing_of_what_was_there_before() -> None:
    with rehearsal(torch.device("cpu"), (), (), (), {}) as tally:
        before = torch.ones(1000)
        tally.begin()
        after = torch.ones(128)
        assert [one.bytes for one in tally.ledger.largest()] == [512]
        del before, after


def test_the_peak_is_looked_at_and_not_the_end() -> None:
    """What was let go of before it, and what came after, does not count; memory of one line is taken together."""
    ledger, places = Ledger(), [Source(file="a.py", line=line, module=f"m{line}") for line in range(4)]
    ledger.made(1, 800, places[1])
    ledger.gone(1)
    ledger.made(2, 100, places[2])
    ledger.made(3, 150, places[3])
    ledger.made(4, 100, Source(file="a.py", line=2, module="other"))
    ledger.at_peak()
    ledger.gone(4)
    ledger.made(5, 900, places[0])
    assert [(one.bytes, one.tensors, one.place.split()[-1]) for one in ledger.largest()] == [
        (200, 2, "'m2'"), (150, 1, "'m3'"),
    ]  # fmt: skip
