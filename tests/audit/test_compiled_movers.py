"""What makes a compiled function move: six ways to keep a bank of weights, each by its order of compiler entries.

A bank is one tensor stacked of the weights of many modules. Orders are numbers of entries after each step, as torch
2.11 and 2.13 count them; torch gives a function up at the eighth. The audit names each that moves, and no other.
"""

from __future__ import annotations

import linecache
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from staticmoe.audit import audit
from staticmoe.capture.dynamo import entries_of, last_move

STEPS = 10
MOVES, STAYS, SETTLES = [1, 2, 3, 4, 5, 6, 7, 8, 8, 8], [1] * STEPS, [1] + [2] * (STEPS - 1)
SINCE_2_13 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


class Bank(nn.Module):
    """y = sum over weights of x @ w: what is stacked is looked up by `key`, or stacked each time."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
        self.kept: Tensor | None = None
        self.key: Any = None
        self.calls, self.temperature = 0, 1.0

    def stack(self) -> Tensor:
        return torch.stack([part.weight for part in self.parts])

    def product(self, x: Tensor, bank: Tensor) -> Tensor:
        return torch.einsum("ti,koi->to", x, bank)

    def advance(self) -> None:
        """What happens between two steps."""


class FloatInKey(Bank):
    """A schedule's float decides whether the bank is stacked anew."""

    def forward(self, x: Tensor) -> Tensor:
        if self.key != (self.temperature,):  # <- guard
            self.key, self.kept = (self.temperature,), self.stack()
        return self.product(x, self.kept)

    def advance(self) -> None:
        self.temperature = self.temperature / 2


class IntAttribute(Bank):
    """A counter of a module is a constant of the compiled function."""

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.stack()) / (1 + self.calls)  # <- guard

    def advance(self) -> None:
        self.calls += 1


class VersionInKey(Bank):
    """A tensor's version counts its writes: one or more a step."""

    def forward(self, x: Tensor) -> Tensor:
        key = tuple(part.weight._version for part in self.parts)
        if self.key != key:  # <- guard
            self.key, self.kept = key, self.stack()
        return self.product(x, self.kept)


class StableKey(Bank):
    """The key is the same for ever, and who steps empties the cache."""

    def forward(self, x: Tensor) -> Tensor:
        if self.key != ("bank",):
            self.key, self.kept = ("bank",), self.stack()
        return self.product(x, self.kept)

    def advance(self) -> None:
        self.key = self.kept = None


class NoCache(Bank):
    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.stack())


class DisabledHelper(Bank):
    """The compiler does not look into what decides."""

    @torch.compiler.disable
    def bank(self) -> Tensor:
        key = tuple(part.weight._version for part in self.parts)
        if self.key != key:
            self.key, self.kept = key, self.stack()
        return self.kept

    def forward(self, x: Tensor) -> Tensor:
        return self.product(2 * x, self.bank())


class SettlesLate(IntAttribute):
    """Counts no further than it takes the audit to see that."""

    def advance(self) -> None:
        self.calls = min(self.calls + 1, 5)


ORDERS: dict[type[Bank], list[int]] = {
    FloatInKey: MOVES,
    IntAttribute: MOVES,
    # 2.11 leaves the comparison to Python, and goes on compiled behind it.
    VersionInKey: MOVES if SINCE_2_13 else SETTLES,
    SettlesLate: [1, 2, 3, 4, 5, 6, 6, 6, 6, 6],
    StableKey: STAYS,
    NoCache: STAYS,
    DisabledHelper: STAYS,
}
MOVERS = [kind for kind, order in ORDERS.items() if order is MOVES]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Each class is compiled as if for the first time; what the compiler says of giving up is not shown."""
    logging.getLogger("torch._dynamo").setLevel(logging.CRITICAL)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    logging.getLogger("torch._dynamo").setLevel(logging.WARNING)


@pytest.mark.parametrize("kind", ORDERS, ids=lambda kind: kind.__name__)
def test_the_order_of_entries(kind: type[Bank]) -> None:
    """Over ten steps of training."""
    model, order = kind(), []
    model.compile(backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        model.advance()
        order.append(entries_of(kind.forward.__code__))
    assert order == ORDERS[kind]


@pytest.mark.parametrize("kind", MOVERS, ids=lambda kind: kind.__name__)
def test_what_moved_is_told(kind: type[Bank]) -> None:
    """The guard and its line, from the compiler's own books."""
    model = kind()
    model.compile(backend="eager")
    for _ in range(3):
        model(torch.ones(4, 8)).sum().backward()
        model.advance()
        with torch.no_grad():
            model.parts[0].weight.add_(1)
    guard, line = last_move(kind.forward.__code__)
    assert ("self.key" in guard or "self.calls" in guard) and "# <- guard" in linecache.getline(__file__, line)


def test_the_last_move_of_a_function_is_told() -> None:
    """Not an earlier one, nor that of another function."""
    held = [1.5, "a"]

    def one(x: Tensor) -> Tensor:
        return x * (2 if held[1] == "a" else 3) * (held[0] > 2)  # <- guards

    def other(x: Tensor) -> Tensor:
        return x - held[0]

    functions = [torch.compile(function, backend="eager") for function in (one, other)]
    for held[:] in ([1.5, "a"], [1.5, "b"], [2.5, "b"]):
        for function in functions:
            function(torch.ones(3))
    guard, line = last_move(one.__code__)
    assert "[0]" in guard and "# <- guards" in linecache.getline(__file__, line)


class Stepping(nn.Module):
    """Advances a bank as a training loop would, from inside the iteration."""

    def __init__(self, bank: Bank) -> None:
        super().__init__()
        self.bank = bank

    def forward(self, x: Tensor) -> Tensor:
        y = self.bank(x)
        self.bank.advance()
        return y


@pytest.mark.parametrize("kind", ORDERS, ids=lambda kind: kind.__name__)
def test_the_audit_names_what_moves_and_nothing_else(kind: type[Bank], built: Callable[..., dict[str, Any]]) -> None:
    """By the line of the guard; the compiler's books are afterwards as before."""
    bank = kind()
    bank.compile(backend="inductor")
    found = [finding for finding in audit(built(Stepping(bank))).findings if finding.code.startswith("SM6")]
    if ORDERS[kind] is MOVES:
        assert [finding.code for finding in found] == ["SM604"]
        assert found[0].source.text.endswith("# <- guard") and found[0].source.module == "block.bank"
        assert "compiled anew in each iteration (1, " in found[0].why
        assert "torch.compiler.disable" in found[0].mend
    else:
        assert found == []
    assert entries_of(kind.forward.__code__) == 0
