"""Imports go down only, captured code asks the host nothing, capture and runner know no mixture-of-experts word."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "staticmoe"

# Lowest first. A room may import from itself and from lower ranks.
RANKS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("config", "shapes", "phases"),
    ("reference",),
    ("kernels",),
    ("ops",),
    ("functional",),
    ("parallel",),
    ("moe",),
    ("capture",),
    ("optim",),
    ("observe",),
    ("runner",),
    ("audit", "tune", "profiling", "bench", "integrations", "demo"),
    ("cli",),
)
RANK = {room: rank for rank, rooms in enumerate(RANKS) for room in rooms}
# The protocol between layers and runner lies in the runner's room and is read by layers: it is nearly as low as config.
LOW_FILES = {"staticmoe.runner.participants"}
LOW_RANK = RANK["config"] + 0.5
# What `from staticmoe import X` may be written by: rooms above everything that the package's front exports.
ABOVE_FRONT = {"audit", "tune", "profiling", "bench", "integrations", "demo", "cli"}

CAPTURED = ("moe", "ops", "reference", "kernels")
HOST_READS = {"item", "cpu", "tolist", "nonzero", "masked_select", "bincount", "repeat_interleave"}


def sources(*rooms: str) -> list[Path]:
    """Python files of these rooms; of the whole package without an argument. `kernels` is read where it lies."""
    found: list[Path] = []
    for room in rooms or ("",):
        folder = ROOT / "kernels" if room == "kernels" else PACKAGE / room if room else PACKAGE
        found += sorted(folder.rglob("*.py")) if folder.is_dir() else []
        found += [path for path in [PACKAGE / f"{room}.py"] if room and path.is_file()]
    return [path for path in found if "__pycache__" not in path.parts]


def dotted(path: Path) -> str:
    """The module name of a file below the package, or of a kernel."""
    base = (
        Path("staticmoe") / path.relative_to(ROOT) if path.is_relative_to(ROOT / "kernels") else path.relative_to(ROOT)
    )
    parts = list(base.with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def runtime_imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, imported module) for every import of the package that runs, at any depth."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and is_type_checking(node.test):
            stack.extend(node.orelse)
            continue
        stack.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".") if is_package else module.split(".")[:-1]
                anchor = ".".join(parts[: len(parts) - node.level + 1])
                base = f"{anchor}.{base}" if base else anchor
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                file = ROOT / Path(*inner.split("."))
                yield node.lineno, inner if file.is_dir() or file.with_suffix(".py").is_file() else base


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def rank_of(module: str) -> float:
    return LOW_RANK if module in LOW_FILES else RANK[room_of(module)]


def violations(path: Path, text: str) -> list[str]:
    module, found = dotted(path), []
    for line, imported in runtime_imports(ast.parse(text), module, path.name == "__init__.py"):
        if imported == "kernels" or imported.startswith("kernels."):
            found.append(f"{path.relative_to(ROOT)}:{line}: `import kernels`; write staticmoe.kernels")
        if imported.split(".")[0] != "staticmoe" or module == "staticmoe":
            continue
        if imported == "staticmoe":
            if room_of(module) not in ABOVE_FRONT:
                found.append(f"{path.relative_to(ROOT)}:{line}: imports the package's front; name the module")
            continue
        same_room = room_of(imported) == room_of(module) and module not in LOW_FILES
        if not same_room and rank_of(imported) >= rank_of(module):
            found.append(f"{path.relative_to(ROOT)}:{line}: {room_of(module)} imports {imported}, which is not lower")
    return found


def test_every_room_has_a_rank() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    rooms |= {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert rooms - RANK.keys() == set()


def test_imports_go_down_only() -> None:
    files = sources()
    assert len(files) >= 4
    found = [line for path in [*files, *sources("kernels")] for line in violations(path, path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    ("file", "text", "count"),
    [
        ("ops/plan.py", "from staticmoe.moe import StaticMoE", 1),
        ("ops/plan.py", "def f():\n    import staticmoe.runner.runner", 1),
        ("ops/plan.py", "from ..runner import runner", 1),
        ("ops/plan.py", "from staticmoe import runner, errors", 1),
        ("ops/plan.py", "from staticmoe import StaticMoE", 1),
        ("ops/plan.py", "import kernels.plan", 1),
        ("demo/model.py", "from staticmoe.audit import rules", 1),
        ("runner/participants.py", "from staticmoe.capture import tape", 1),
        ("runner/participants.py", "from staticmoe.runner import guard", 1),
        ("moe/layer.py", "from staticmoe.runner.participants import Reason", 0),
        ("moe/layer.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import staticmoe.cli", 0),
        ("moe/layer.py", "from staticmoe.ops import plan\nfrom . import router", 0),
        ("demo/model.py", "from staticmoe import StaticMoE", 0),
        ("runner/runner.py", "from staticmoe.config import RunnerConfig\nimport staticmoe.optim.veto", 0),
    ],
)
def test_the_import_rule_bites(file: str, text: str, count: int) -> None:
    assert len(violations(PACKAGE / file, text)) == count


def test_a_room_with_a_low_file_has_a_light_front() -> None:
    """Importing the protocol runs its room's `__init__`, which must therefore not pull in the room."""
    for module in LOW_FILES:
        front = ROOT / Path(*module.split(".")[:-1]) / "__init__.py"
        if front.is_file():
            imports = runtime_imports(ast.parse(front.read_text()), module.rsplit(".", 1)[0], True)
            assert [name for _, name in imports if name != "__future__"] == []


def docstrings(tree: ast.AST) -> set[int]:
    """Ids of the constants that are documentation: any string that is a statement of its own."""
    statements = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    return {id(value) for value in statements if isinstance(value, ast.Constant)}


def host_reads(path: Path, text: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr in HOST_READS:
            found.append(f"{path.relative_to(ROOT)}:{node.lineno}: .{node.attr}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.tensor":
            found.append(f"{path.relative_to(ROOT)}:{node.lineno}: torch.tensor(")
        elif isinstance(node, ast.ImportFrom):
            found += [f"{path}:{node.lineno}: {alias.name}" for alias in node.names if alias.name in HOST_READS]
    return found


def test_captured_code_asks_the_host_nothing() -> None:
    """Each of these waits for the device or copies from pageable memory: it ends a capture, or slows it silently."""
    assert [line for path in sources(*CAPTURED) for line in host_reads(path, path.read_text())] == []


@pytest.mark.parametrize(
    "text",
    ["n = counts.item()", "y = x.to(1).cpu()", "torch.bincount(ids)", "m = mask.nonzero", "t = torch.tensor(3)"],
)
def test_the_host_read_rule_bites(text: str) -> None:
    assert len(host_reads(PACKAGE / "ops/plan.py", text)) == 1


def words_of(text: str) -> set[str]:
    """Lower-case words of an identifier or a string: snake_case and CamelCase are taken apart, MoE stays whole."""
    spaced = re.sub(r"MoE|MOE", " moe ", text)
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", spaced)
    return {word.lower().removesuffix("s") for word in re.split(r"[^A-Za-z]+", spaced) if word}


FOREIGN_WORDS = {"moe", "expert", "router", "gate"}
PUBLIC_NAMES = re.compile(r"\b(StaticMoERunner|StaticMoEError|staticmoe)\b")


def foreign_words(path: Path, text: str) -> list[str]:
    tree = ast.parse(text)
    skip = docstrings(tree)
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skip:
            names = [node.value]
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names = [node.name]
        elif isinstance(node, (ast.Name, ast.Attribute, ast.arg, ast.keyword)):
            names = [getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None) or ""]
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
        for name in names:
            # `result.moe` is the pinned name of a result's view by layer: that identifier alone is free.
            if name != "moe" and words_of(PUBLIC_NAMES.sub(" ", name)) & FOREIGN_WORDS:
                found.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}: {name!r}")
    return found


def test_capture_and_runner_know_no_mixture_of_experts_word() -> None:
    """Layers take part through the protocol alone; documentation may explain, code may not know."""
    assert [line for path in sources("capture", "runner") for line in foreign_words(path, path.read_text())] == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("num_experts = 3", 1),
        ("x = 'no router was entered'", 1),
        ("from staticmoe.moe import StaticMoE", 2),
        ("class MoEView:\n    pass", 1),
        ("self.gate_up = 1", 1),
        ("def moe(self):\n    return self.aggregate", 0),
        ("raise StaticMoEError('staticmoe: delegate, propagate')", 0),
        ("'''experts and routers'''", 0),
    ],
)
def test_the_word_rule_bites(text: str, count: int) -> None:
    assert len(foreign_words(PACKAGE / "runner/runner.py", text)) == count


def test_kernels_is_no_package_of_its_own() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert (PACKAGE / "kernels").is_symlink() and (PACKAGE / "kernels").readlink() == Path("../kernels")


def test_nobody_imports_kernels_by_its_bare_name() -> None:
    pattern = re.compile(r"^\s*(import kernels\b|from kernels\b)", re.MULTILINE)
    files = [path for folder in ("staticmoe", "kernels", "tests", "profiles") for path in (ROOT / folder).rglob("*.py")]
    assert [path for path in files if pattern.search(path.read_text())] == []
