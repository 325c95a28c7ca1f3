"""Small random models of transformers families, and one way to compare two experts implementations on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from staticmoe.errors import ModelError
from staticmoe.integrations.huggingface.specimens import FAMILIES, specimen


@pytest.fixture
def build(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Builds a random model: build(name, implementation, **config), on the test's device where it has one."""
    pytest.importorskip("transformers")
    where = request.getfixturevalue("device") if "device" in request.fixturenames else torch.device("cpu")

    def make(family: str, implementation: str = "eager", **over: Any) -> Any:
        try:
            return specimen(family, implementation, **over).to(where)
        except ModelError as error:
            pytest.skip(str(error))

    return make


@pytest.fixture
def captured(device: torch.device) -> str:
    """The capture that the device has."""
    return "cuda" if device.type == "cuda" else "emulate"


@pytest.fixture
def step() -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    """Runs a model forward and backward: step(model) -> output and every gradient by its parameter's name."""

    def run(model: Any, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        tokens = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(2)).to(model.device)
        model.zero_grad()
        out = model(input_ids=tokens, use_cache=False, **inputs)
        out = out.logits if hasattr(out, "logits") else out.last_hidden_state
        (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)).sum().backward()
        return out.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    return run


@pytest.fixture
def error() -> Callable[[Tensor, Tensor], float]:
    """Relative error against the largest wanted value; NaN anywhere is infinitely wrong."""

    def relative(got: Tensor, want: Tensor) -> float:
        assert got.shape == want.shape
        difference = (got.detach().double() - want.detach().double()).abs().max()
        scale = want.detach().double().abs().max().clamp(min=1e-30)
        return float(torch.nan_to_num(difference / scale, nan=float("inf")))

    return relative


@pytest.fixture
def layers() -> Callable[[nn.Module], dict[str, Any]]:
    """The experts modules of a model by name, told by a flag that transformers puts on them."""

    def of(model: nn.Module) -> dict[str, Any]:
        return {name: module for name, module in model.named_modules() if hasattr(module, "is_transposed")}

    return of


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `family` runs once for each."""
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", list(FAMILIES))


@pytest.fixture
def recognised() -> Callable[[str], str | None]:
    """The activation that a family's experts are known to have."""
    return lambda family: FAMILIES[family][2]
