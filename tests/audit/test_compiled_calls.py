"""Calls of compiled functions: the fault in torch that the rule is about, what it finds, and what it leaves alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from staticmoe.audit import audit

B, S, L, K = 2, 3, 4, 6


def inductor_like(module: Any, inputs: list[Tensor]) -> Callable[[list[Tensor]], Any]:
    """As Inductor does on a GPU: an input that does not begin at a multiple of 16 bytes is cloned, strides kept."""

    def run(arguments: list[Tensor]) -> Any:
        for place, value in enumerate(arguments):
            if isinstance(value, Tensor) and value.data_ptr() % 16:
                span = 1 + sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
                arguments[place] = value.as_strided((span,), (1,)).clone().as_strided(value.shape, value.stride())
        return module(*arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def flattened(ids: Tensor) -> tuple[Tensor, Tensor]:
    return ids.flatten(0, 1), ids + 1


@pytest.fixture
def compiled() -> Any:
    torch._dynamo.reset()
    yield torch.compile(flattened, backend=aot_autograd(fw_compiler=inductor_like), dynamic=True)
    torch._dynamo.reset()


def replayed(function: Callable[[Tensor], tuple[Tensor, Tensor]], *, contiguous: bool, top_k: int = K) -> list[int]:
    """The layer whose ids come back, for each layer, in the second of two steps."""
    for _ in range(2):
        ids = torch.randint(1 << 30, (B, S, L, top_k), dtype=torch.int32)
        slices = [ids[:, :, layer].contiguous() if contiguous else ids[:, :, layer] for layer in range(L)]
        returned = [function(one)[0] for one in slices]
    return [next(layer for layer in range(L) if torch.equal(flat, ids[:, :, layer].flatten(0, 1))) for flat in returned]


def test_the_fault_is_real_and_contiguous_slices_mend_it(compiled: Any) -> None:
    """Layers 1 and 3 begin 24 and 72 bytes in, and get layer 0's experts; with 8 experts a token all are aligned.

    Where this fails because slices give [0, 1, 2, 3] as well, torch has mended it, and SM607 can go.
    """
    assert replayed(compiled, contiguous=True) == [0, 1, 2, 3]
    assert replayed(compiled, contiguous=False, top_k=8) == [0, 1, 2, 3]
    assert replayed(compiled, contiguous=False) == [0, 0, 2, 0]


class Calling(nn.Module):
    """Hands the slices of all layers to a function."""

    def __init__(self, function: Callable[[Tensor], tuple[Tensor, ...]], top_k: int = K) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("ids", torch.randint(8, (B, S, L, top_k), dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        for layer in range(L):
            x = x + sum(tensor.sum() for tensor in self.call(self.ids[:, :, layer]))
        return x

    def call(self, ids: Tensor) -> tuple[Tensor, ...]:
        return self.function(ids)


class CallingByName(Calling):
    def call(self, ids: Tensor) -> tuple[Tensor, ...]:
        return self.function(ids=ids)


@pytest.mark.parametrize(
    ("function", "top_k", "codes"),
    [
        (flattened, 6, ["SM607"]),
        (flattened, 2, ["SM607"]),
        (flattened, 8, []),
        (lambda ids: (ids + 1, ids * 2), 6, []),
        (lambda ids: (ids.flatten(0, 1).clone(),), 6, []),
    ],
    ids=["6 experts", "2 experts", "8 experts", "no view", "a clone"],
)
def test_views_of_misaligned_arguments_are_found_and_nothing_else(
    built: Callable[..., dict[str, Any]], function: Any, top_k: int, codes: list[str]
) -> None:
    given = built(Calling(torch.compile(function, backend="eager"), top_k))
    report = audit(given)
    assert [finding.code for finding in report.findings] == codes
    for finding in report.findings:
        assert (finding.source.module, finding.source.text) == ("block", "return self.function(ids)")
    # The same function uncompiled is nobody's business.
    assert audit(built(Calling(function, top_k))).findings == ()


def test_arguments_by_name_are_looked_at_and_what_has_no_strides_is_not(built: Callable[..., dict[str, Any]]) -> None:
    """Nor is a function of the user's that is called as torch's."""
    report = audit(built(CallingByName(torch.compile(flattened, backend="eager"))))
    assert [finding.code for finding in report.findings] == ["SM607"]

    class Sparse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + doubled(x.to_sparse()).to_dense()

    doubled = torch.compile(lambda x: x * 2, backend="eager")
    assert {finding.code for finding in audit(built(Sparse())).findings} == {"SM502"}

    def compile_wrapper(*args: Tensor) -> tuple[Tensor, ...]:
        return whole(*args) and flattened(*args)

    whole = torch.compile(lambda ids: (ids + 1,), backend="eager")
    assert audit(built(Calling(compile_wrapper))).findings == ()


def test_another_profile_function_is_left_alone_and_said(built: Callable[..., dict[str, Any]]) -> None:
    given = built(Calling(torch.compile(flattened, backend="eager")))

    def theirs(*event: Any) -> None:
        pass

    sys.setprofile(theirs)
    try:
        report = audit(given)
        still = sys.getprofile()
    finally:
        sys.setprofile(None)
    assert still is theirs
    assert report.findings == () and any("profile function" in sentence for sentence in report.not_looked_at)
    assert not any("profile function" in sentence for sentence in audit(given).not_looked_at)
    assert sys.getprofile() is None
