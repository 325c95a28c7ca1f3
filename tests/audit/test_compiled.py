"""Compiled code in what is audited: parts that stay compiled are clean, what runs uncompiled is named by its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from staticmoe import StaticMoE
from staticmoe.audit import audit
from staticmoe.capture.dynamo import entries_of

pytestmark = pytest.mark.usefixtures("fresh_compiler")

Built = Callable[..., dict[str, Any]]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


class Broken(nn.Module):
    """No compiler can hold any of it."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
            x = 2 * x
        return x


class Calling(nn.Module):
    """Holds the part, and calls it."""

    def __init__(self, part: Any) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


def compiled(module: nn.Module) -> nn.Module:
    module.compile()
    return module


def found(arguments: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(f.code, f.source.module, f.source.text) for f in audit(arguments).findings]


@pytest.mark.parametrize(
    "part",
    [
        compiled,
        torch.compile,
        lambda part: torch.compile(part.forward),
        lambda part: torch.compile(part, fullgraph=True),
    ],
    ids=["in place", "wrapped", "its forward", "whole"],
)
def test_parts_that_compile_are_clean(part: Callable[[nn.Module], Any], built: Built) -> None:
    """And are afterwards as uncompiled as before: what a user has of the compiler's budget is theirs."""
    assert found(built(Calling(part(Mlp())))) == []
    assert entries_of(Mlp.forward.__code__) == 0


def test_modules_of_torch_stay_uncompiled_in_silence(built: Built) -> None:
    """`Sequential.compile()` compiles nothing where all that it holds is torch's own."""
    part = compiled(nn.Sequential(nn.Linear(8, 8), nn.GELU()))
    part(torch.ones(4, 8))
    assert found(built(Calling(part))) == [("SM603", "block.part", "return self.part(x)")]
    # One function of the user's inside, and torch compiles that; be it compiled already.
    assert found(built(Calling(compiled(nn.Sequential(Mlp(), nn.GELU()))))) == []
    inner = Mlp()
    inner.forward = torch.compile(inner.forward)
    assert found(built(Calling(compiled(nn.Sequential(inner, nn.GELU()))))) == []


def test_a_function_is_not_proven_by_what_it_calls(built: Built) -> None:
    """Torch gives it up, and compiles the module that it closes over."""
    inner = Mlp()

    def broken(x: Tensor) -> Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
            x = inner(x)
        return x

    assert found(built(Calling(torch.compile(broken)))) == [("SM603", "block", "return self.part(x)")]


def test_what_a_compiled_function_calls_is_a_part_of_it(built: Built) -> None:
    """Compiled by hand as well it has no form of its own; alone it is looked at."""
    inner = compiled(nn.Sequential(nn.GELU()))
    assert found(built(Calling(compiled(Calling(inner))))) == []
    assert [code for code, *_ in found(built(Calling(inner)))] == ["SM603"]

    class Nesting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                torch._dynamo.graph_break()
                x = tripled(torch.compiler.disable(tripled)(x))
            return x

    # One finding, by the line of the outermost call.
    tripled = torch.compile(lambda x: 3 * x, backend="eager")
    assert found(built(Calling(compiled(Nesting())))) == [("SM603", "block.part", "return self.part(x)")]


def test_a_compiler_that_is_switched_off_is_found(built: Built) -> None:
    for option, word in (({"disable": True}, "TORCHDYNAMO_DISABLE"), ({"suppress_errors": True}, "suppress_errors")):
        part = compiled(Mlp() if "disable" in option else Broken())
        with torch._dynamo.config.patch(**option):
            [finding] = audit(built(Calling(part))).findings
        assert (finding.code, finding.source.module) == ("SM603", "block.part")
        assert word in finding.why


def test_a_function_at_the_limit_is_found(built: Built) -> None:
    """Other shapes have used its forms up: at the batch's it runs uncompiled."""
    part = Mlp()
    part.compile(backend="eager")
    with torch._dynamo.config.patch(recompile_limit=2):
        for rows in ((3, 1), (2, 2, 2)):
            part(torch.ones(*rows, 8))
        [finding] = audit(built(Calling(part))).findings
    assert finding.code == "SM603" and "2 compiled forms, at which torch gives up in silence" in finding.why
    assert entries_of(Mlp.forward.__code__) == 2


def test_layers_of_the_step_are_not_compiled_by_hand(built: Built) -> None:
    """Nested or wrapped: one finding, and the rest is looked at as if it were not compiled."""

    class Faulty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = StaticMoE(8, 4, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.moe(x) * x.sum().item()

    for part in (compiled(Faulty()), torch.compile(Faulty()), compiled(nn.Sequential(compiled(Faulty())))):
        arguments = built(Calling(part))
        inner = "block.part.0" if isinstance(part, nn.Sequential) else "block.part"
        assert [one[:2] for one in found(arguments)] == [("SM601", "block.part"), ("SM101", inner)]
        assert arguments["model"].block.part is part, "put back"
    assert getattr(compiled(Faulty()), "_compiled_call_impl", None) is not None


@pytest.mark.parametrize(
    ("option", "value", "usual"),
    [
        ("capture_scalar_outputs", True, False),
        ("allow_unspec_int_on_nn_module", True, False),
        ("recompile_limit", 64, 8),
    ],
)
def test_options_that_make_no_capture_safe(option: str, value: Any, usual: Any, built: Built) -> None:
    """Each is said to hide the fault, with the three ways out in their order; the usual value is fine."""
    with torch._dynamo.config.patch(**{option: usual}):
        assert found(built()) == []
    with torch._dynamo.config.patch(**{option: value}):
        [finding] = audit(built()).findings
    assert (finding.code, finding.severity) == ("SM605", "warning") and f"{option} is {value}" in finding.why
    ways = [finding.mend.index(way) for way in ("torch.compiler.disable", "hoist", "custom op")]
    assert ways == sorted(ways)
