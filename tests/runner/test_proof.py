"""What a runner makes of functions that the user compiled: proven by the compiler's entries before it captures."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from staticmoe import RunnerConfig, StaticMoE, StaticMoERunner
from staticmoe.capture.dynamo import entries_of
from staticmoe.errors import AuditError
from staticmoe.runner import regions

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Steady(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Counting(nn.Module):
    """A number of Python's is a constant of each compiled form."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x / self.calls


class Model(nn.Module):
    def __init__(self, part: Any) -> None:
        super().__init__()
        self.moe, self.part = StaticMoE(8, 4, 2, 2), part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.moe(x)).square().mean()


def wrapped(part: Any, **options: Any) -> StaticMoERunner:
    model = Model(part)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = RunnerConfig(**{"capture": "off", **options})
    loss_fn: Callable[..., Any] = lambda model, batch: model(batch["x"])  # noqa: E731
    return StaticMoERunner(model, optimizer, example_batch={"x": torch.randn(4, 8)}, loss_fn=loss_fn, config=config)


def compiled(part: nn.Module) -> nn.Module:
    part.compile(backend="eager")
    return part


# What is proven, and the code of it.
PARTS: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: compiled(Steady()), ""),
    (lambda: compiled(Counting()), "SM604"),
    (lambda: compiled(nn.Sequential(nn.GELU())), "SM603"),
]


@pytest.mark.parametrize(("part", "code"), PARTS, ids=["steady", "counting", "of torch's"])
def test_what_does_not_stay_compiled_is_refused(
    part: Callable[[], nn.Module], code: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By default; with "warn" it is logged once, with "off" it is not looked for."""
    if code:
        with pytest.raises(AuditError, match=rf"module 'part'.*\[{code}\]"):
            wrapped(part())
    else:
        wrapped(part()).close()
        assert entries_of(Steady.forward.__code__) == 1
    for audit, count in (("warn", 1), ("off", 0)):
        torch._dynamo.reset()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            wrapped(part(), audit=audit).close()
        assert caplog.text.count("[SM60") == (count if code else 0)


def test_an_emulated_capture_says_what_it_runs_as_it_was_written(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        wrapped(compiled(Steady()), capture="emulate").close()
    assert "an emulated capture runs what is compiled as it was written: Steady" in caplog.text
    assert entries_of(Steady.forward.__code__) == 0


class Within(nn.Module):
    """Calls a function that was compiled by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.function = torch.compile(Steady().forward, backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) + 1


@pytest.mark.parametrize("broken", [False, True])
def test_what_a_region_holds_is_proven_with_it(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a part of the region's compiled form; where the region stays as it is, it has one of its own."""
    monkeypatch.setattr(regions, "BACKEND", "eager")

    class Part(Within):
        def forward(self, x: Tensor) -> Tensor:
            if broken:
                torch._dynamo.graph_break()
            return super().forward(x)

    with wrapped(Part(), compile="blocks", compile_fallback=True) as runner:
        [region] = runner._parts._regions.regions
        assert (region.entries, entries_of(Steady.forward.__code__)) == ((0, 1) if broken else (1, 0))
    torch._dynamo.reset()
    at_limit = torch._dynamo.config.patch(recompile_limit=1)
    refused = pytest.raises(AuditError, match=r"1 compiled forms, at which torch gives up.*\[SM603\]")
    with at_limit, refused if broken else contextlib.nullcontext():
        wrapped(Part(), compile="blocks", compile_fallback=True).close()


class Attending(nn.Module):
    """Attends where no gradient is needed: on a CPU torch has no backward of it."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return x
        row = x.repeat(32, 2)[None, None]
        return self.attend(row, row, row)


def without_scores(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """Stands for a compiler's kernel."""
    return lambda *args: (torch.ones_like(next(arg for arg in args if isinstance(arg, Tensor))),)


@pytest.mark.parametrize("capture", ["emulate", "off"])
@pytest.mark.parametrize("how", ["compiled", "dense"])
def test_flex_attention_runs_compiled_or_not_at_all(how: str, capture: str, caplog: pytest.LogCaptureFixture) -> None:
    """With audit="warn" it is said once and goes on; an emulated capture has no compiled kernels."""
    attend = torch.compile(flex_attention, backend=without_scores) if how == "compiled" else flex_attention
    batch, refused = {"x": torch.randn(4, 8)}, f"would allocate {128 * 128 * 4} bytes of scores"
    with wrapped(Attending(attend), capture=capture) as runner:
        if how == "compiled" and capture == "off":
            assert float(runner.evaluate(batch).loss) == 1 and entries_of(flex_attention.__code__) == 1
            return
        with pytest.raises(AuditError, match=rf"{refused}.*\[SM606\]"):
            runner.evaluate(batch)
    uncompiled = torch.compiler.set_stance("force_eager")
    with uncompiled, wrapped(Attending(attend), capture="off", audit="warn") as runner:
        runner.evaluate(batch)
    assert caplog.text.count(refused) == 1
