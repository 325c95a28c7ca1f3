"""Functions of torch's that an observed iteration replaces: another thread's are its own, and all come back."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from staticmoe.capture.host_reads import random_state_hooks

PLACES = [(room, name) for room in (torch, torch.random) for name in ("manual_seed", "get_rng_state", "set_rng_state")]


def functions() -> list[Any]:
    return [getattr(room, name) for room, name in PLACES]


def hooks(asked: list[str]) -> Any:
    def get(read: Any) -> Tensor:
        asked.append("get")
        return read()

    return random_state_hooks(get, lambda write, state: asked.append("set"), lambda seed: asked.append("seed"))


def test_two_that_watch_at_once_leave_no_function_of_theirs_in_torch(
    turns: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first to begin is the first to end; each is asked by its own thread."""
    before, left = functions(), threading.Event()
    for (room, name), function in zip(PLACES, before, strict=True):
        # So that a fault stays in this test.
        monkeypatch.setattr(room, name, function)
    # As torch 2.11 does, which wraps one of them for its compiler.
    monkeypatch.setattr(torch, "manual_seed", lambda seed: torch.default_generator.manual_seed(seed))
    before = functions()
    asked: dict[str, list[str]] = {"one": [], "two": []}

    def second() -> None:
        with hooks(asked["two"]):
            turns.settled.set()
            left.wait(60)
            torch.get_rng_state()

    with hooks(asked["one"]):
        other = turns.meanwhile(second)
        torch.random.manual_seed(1)
        torch.set_rng_state(torch.get_rng_state())
    left.set()
    other.result()
    assert functions() == before, "a function of a hook was left in torch"
    assert asked == {"one": ["seed", "get", "set"], "two": ["get"]}
