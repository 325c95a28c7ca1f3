"""What the plants of the audit are: blocks in a small model, each with one fault, and the same block mended."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from staticmoe import DeviceScalars
from staticmoe.audit import audit
from staticmoe.runner.participants import StepBinding

PLANTS = Path(__file__).parent / "plants"
_MARKER = re.compile(r"# <- (SM\d+) (\w+)\s*$")


@dataclasses.dataclass(frozen=True)
class Plant:
    """A fault: what is wrong with it, where, and what builds it and its mended twin."""

    name: str
    group: str
    code: str
    module: str
    file: str
    line: int
    faulty: Any
    mended: Any

    def __str__(self) -> str:
        return f"{self.code}-{self.name}"


class Called(nn.Module):
    """A function as a block."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Several(nn.Module):
    """Blocks by name, side by side."""

    def __init__(self, blocks: dict[str, nn.Module]) -> None:
        super().__init__()
        # Not "cpu" or "float": a module has attributes of such names.
        self.each = nn.ModuleDict({f"{name}_block": block for name, block in blocks.items()})

    def forward(self, x: Tensor) -> Tensor:
        return sum((block(x) for block in self.each.values()), x)


class Entered(nn.Module):
    """Takes part in the step and does nothing there: a layer of experts would make each of many audits slow."""

    binding: StepBinding | None = None

    def step_fields(self) -> dict[str, tuple[int, ...]]:
        return {}

    def bind_step(self, binding: StepBinding | None) -> None:
        self.binding = binding

    def commit_step(self, veto: Tensor) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        if self.binding is not None:
            self.binding.entered += 1
        return x


class Model(nn.Module):
    """loss = mean((scale * x + block(x))^2), x [4, 8]."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.entered = Entered()
        self.scale = nn.Parameter(torch.ones(()))
        self.block = block

    def forward(self, x: Tensor, **others: Any) -> Tensor:
        return (self.scale * self.entered(x) + self.block(x)).square().mean()


def by_name(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch)


def build(block: nn.Module | None = None) -> dict[str, Any]:
    """The runner's arguments for a model around `block`."""
    torch.manual_seed(0)
    model = Model(block if block is not None else nn.Identity())
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "example_batch": {"x": torch.randn(4, 8)},
        "loss_fn": by_name,
        "scalars": DeviceScalars(scale=1.0),
    }


def arguments(plant: Any) -> dict[str, Any]:
    """The runner's arguments for a block class, a function of x, or a function of `build`."""
    return build(block_of(plant)) if is_block(plant) else plant(build)


def is_block(plant: Any) -> bool:
    """Whether it is a block, not the whole of the arguments."""
    return isinstance(plant, type) or "x" in inspect.signature(plant).parameters


def block_of(plant: Any) -> nn.Module:
    """The module of a block."""
    return plant() if isinstance(plant, type) else Called(plant)


def _load(path: Path) -> ModuleType:
    name = f"audit_plants_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _plants_of(path: Path) -> list[Plant]:
    module, found = _load(path), []

    def add(name: str, code: str, where: str, file: str, line: int) -> None:
        faulty, mended = getattr(module, name), getattr(module, f"{name}_mended")
        found.append(Plant(name, path.stem, code, where, file, line, faulty, mended))

    for number, text in enumerate(path.read_text().splitlines(), start=1):
        marker = _MARKER.search(text)
        if marker is not None:
            where = "block" if is_block(getattr(module, marker[2])) else ""
            add(marker[2], marker[1], where, str(path), number)
    for name, (code, where) in getattr(module, "WITHOUT_LINE", {}).items():
        add(name, code, where, "", 0)
    return found


ALL = [plant for path in sorted(PLANTS.glob("*.py")) for plant in _plants_of(path)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test file says by PLANTS which files of plants are its."""
    if "plant" in metafunc.fixturenames:
        files = metafunc.module.PLANTS
        metafunc.parametrize("plant", [plant for plant in ALL if plant.group in files], ids=str)


@pytest.fixture
def given() -> Callable[[Any], dict[str, Any]]:
    """Builder of the runner's arguments around a block, a function of x, or a function of `build`."""
    return arguments


@pytest.fixture
def several() -> Callable[[list[Any]], dict[str, Any]]:
    """The runner's arguments around many blocks at once: block class or function by the name of its module."""
    return lambda blocks: build(Several({block.__name__: block_of(block) for block in blocks}))


@pytest.fixture
def built() -> Callable[..., dict[str, Any]]:
    """Builder of the runner's arguments around a block module."""
    return build


@pytest.fixture
def plants() -> list[Plant]:
    """All of them."""
    return ALL


@pytest.fixture
def assert_found_alone() -> Callable[[Plant], None]:
    """The fault of a plant is found at its place, and nothing else."""

    def check(plant: Plant) -> None:
        given = arguments(plant.faulty)
        with around(plant):
            report = audit(given)
        found = {(f.code, f.source.module, f.source.file, f.source.line) for f in report.findings}
        # A fault may show in several lines, each with a marker of its own.
        marked = [other for other in ALL if (other.name, other.file) == (plant.name, plant.file)]
        assert found == {(one.code, one.module, one.file, one.line) for one in marked}, [*map(str, report.findings)]
        assert len(report.findings) == len(marked)

    return check


@pytest.fixture
def assert_mended() -> Callable[[Plant], None]:
    """Nothing is found in the mended twin of a plant."""

    def check(plant: Plant) -> None:
        given = arguments(plant.mended)
        with around(plant):
            report = audit(given)
        assert [str(finding) for finding in report.findings] == []

    return check


def around(plant: Plant) -> contextlib.AbstractContextManager[Any]:
    """A region of autocast that spans the iterations, for the fault that needs one."""
    return torch.autocast("cpu", torch.bfloat16) if plant.name == "Autocast" else contextlib.nullcontext()
