"""The README keeps its word: its example runs, its commands are the ones that are checked, its tree is the tree."""

from __future__ import annotations

import contextlib
import io
import math
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)


def test_the_example_trains() -> None:
    (code,) = blocks("python")
    assert len(code.splitlines()) <= 30
    names: dict[str, Any] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "<example of the README>", "exec"), names)
    losses = [float(result.loss) for result in names["results"]]
    # Untrained: near the entropy of 64 symbols. 50 steps on one batch learn it.
    assert abs(losses[0] - math.log(64)) < 1.0
    assert losses[-1] < 0.5 * losses[0]
    # 4·32 tokens, 2 experts each, and every assignment is counted in every step.
    assert all(sum(result.moe["moe"].routed) == 256 for result in names["results"])
    # 8 experts of at most 48 rows each, and never more rows than assignments.
    assert names["results"][-1].moe["moe"].capacity_rows == min(256, 8 * 48)
    assert re.fullmatch(r"loss \d\.\d{3}, dropped \d+\.\d%\n", printed.getvalue())


def test_the_commands_are_single_lines_and_one_of_them_is_what_ci_runs() -> None:
    commands = blocks("sh")
    assert [len(command.splitlines()) for command in commands] == [1, 1, 1]
    train, test, existing = (command.strip() for command in commands)
    assert train.endswith("staticmoe train") and "-c constraints.txt -e '.[demo]'" in train
    assert test.endswith("python -m pytest -q") and "-c constraints.txt -e '.[test]'" in test
    assert "constraints" not in existing
    # .ci/run takes the newcomer's line from here by this pattern.
    (pattern,) = re.findall(r"grep -m1 -E '([^']*)' README.md", (ROOT / ".ci" / "run").read_text())
    assert re.findall(pattern, TEXT, flags=re.MULTILINE) and re.search(pattern, test)


def test_the_tree_is_true() -> None:
    tree = TEXT.split("## The tree")[1].split("## ")[0]
    top = re.findall(r"^    (\S+)", tree, flags=re.MULTILINE)
    inner = re.findall(r"^      (\S+)", tree, flags=re.MULTILINE)
    assert top[0] == "staticmoe/"
    missing = [name for name in top if not (ROOT / name).exists()]
    missing += [f"staticmoe/{name}" for name in inner if not (ROOT / "staticmoe" / name).exists()]
    assert missing == []
    rooms = {path.name for path in (ROOT / "staticmoe").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert rooms - {name.rstrip("/") for name in inner} == set()


def test_it_is_short_and_says_each_version_once() -> None:
    assert len(TEXT.splitlines()) <= 250
    constraints = (ROOT / "constraints.txt").read_text()
    assert re.search(r"^torch==2\.13\.0$", constraints, flags=re.MULTILINE)
    assert "torch>=2.11" in (ROOT / "pyproject.toml").read_text() and "2.11 or newer" in TEXT
