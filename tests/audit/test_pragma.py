"""A comment silences one code on one line, in the audit and in the runner, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from staticmoe import StaticMoERunner
from staticmoe.audit import audit
from staticmoe.errors import AuditError


def on_the_line(x: Tensor) -> Tensor:
    return x * x.sum().item()  # staticmoe: allow SM101


def above(x: Tensor) -> Tensor:
    # staticmoe: allow SM102, SM101
    return x * x.sum().item()


def behind_the_code_above(x: Tensor) -> Tensor:
    y = x * 2  # staticmoe: allow SM101
    return y * x.sum().item()


def another_code(x: Tensor) -> Tensor:
    return x * x.sum().item()  # staticmoe: allow SM102


def one_of_two(x: Tensor) -> Tensor:
    return x * x.sum().item() + torch.nonzero(x).sum()  # staticmoe: allow SM110


def codes(given: Callable[[Any], Any], block: Any) -> list[str]:
    return [finding.code for finding in audit(given(block)).findings]


@pytest.mark.parametrize("block", [on_the_line, above])
def test_it_silences_audit_and_runner(given: Callable[[Any], Any], block: Any) -> None:
    assert codes(given, block) == []
    arguments = given(block)
    with StaticMoERunner(**arguments) as runner:
        assert runner.step(arguments["example_batch"]).step == 1


@pytest.mark.parametrize("block", [behind_the_code_above, another_code, one_of_two])
def test_it_silences_nothing_else(given: Callable[[Any], Any], block: Any) -> None:
    assert codes(given, block) == ["SM101"]
    with pytest.raises(AuditError) as caught:
        StaticMoERunner(**given(block))
    assert [finding.code for finding in caught.value.findings] == ["SM101"]


def test_python_state_is_silenced_where_it_is_changed(given: Callable[[Any], Any]) -> None:
    class Counting(torch.nn.Module):
        def __init__(self, allowed: bool) -> None:
            super().__init__()
            self.seen, self.allowed = 0, allowed

        def forward(self, x: Tensor) -> Tensor:
            if self.allowed:
                self.seen += 1  # staticmoe: allow SM201
            return x

    class Counted(Counting):
        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return x

    assert codes(given, lambda build: build(Counting(True))) == []
    assert codes(given, lambda build: build(Counted(True))) == ["SM201"]
