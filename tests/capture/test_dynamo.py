"""What is asked of torch's compiler while an iteration is looked at; afterwards its functions are as before."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from staticmoe.capture.dynamo import CompiledCalls, Observer, as_written, entries_of
from staticmoe.errors import CompileError

pytestmark = pytest.mark.usefixtures("fresh_compiler")

FRAMES = torch._dynamo.eval_frame


def doubled(x: Tensor) -> Tensor:
    return 2 * x


class Looking(Observer):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("look", [as_written, Looking])
def test_compiled_functions_run_as_written_while_somebody_looks(look: Callable[[], Any]) -> None:
    """In this thread alone; afterwards they compile, and torch has its own function back."""
    function, before = torch.compile(doubled, backend="eager", fullgraph=True), FRAMES._callback_from_stance
    counts: list[int] = []

    def call() -> None:
        assert torch.equal(function(torch.ones(3)), torch.full((3,), 2.0))
        counts.append(entries_of(doubled.__code__))

    with look(), look():
        call()
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert FRAMES._callback_from_stance is before
    torch._dynamo.reset()
    with look():
        with look():
            pass
        call()
    call()
    assert counts == [0, 1, 0, 1]
    assert FRAMES._callback_from_stance is before


def test_torch_has_its_function_back_when_the_last_has_looked() -> None:
    """Whichever thread that is."""
    before, inside, left = FRAMES._callback_from_stance, threading.Event(), threading.Event()

    def second() -> None:
        with as_written():
            inside.set()
            left.wait(60)

    thread = threading.Thread(target=second)
    with as_written():
        thread.start()
        assert inside.wait(60)
    during = FRAMES._callback_from_stance
    # This thread looks no more.
    torch.compile(doubled, backend="eager")(torch.ones(3))
    assert entries_of(doubled.__code__) == 1
    left.set()
    thread.join()
    assert during is not before and FRAMES._callback_from_stance is before


def test_a_torch_that_cannot_be_asked_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = re.escape(f"torch {torch.__version__}: expected _callback_from_stance")
    with monkeypatch.context() as patched, pytest.raises(CompileError, match=expected):
        patched.delattr(FRAMES, "_callback_from_stance")
        as_written().__enter__()
    test_torch_has_its_function_back_when_the_last_has_looked()


def test_trials_of_two_threads_leave_the_compiler_as_it_was(turns: Any) -> None:
    """A stance holds for all threads: the second to set one would put the first one's back."""
    before, left = FRAMES._stance, threading.Event()

    def second() -> None:
        with CompiledCalls({}).on_trial():
            turns.settled.set()
            left.wait(60)

    with CompiledCalls({}).on_trial():
        assert FRAMES._stance.backend == "eager"
        other = turns.meanwhile(second)
    left.set()
    other.result()
    after = FRAMES._stance
    FRAMES._set_stance(before)
    assert after is before
