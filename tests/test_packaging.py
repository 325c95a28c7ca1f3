"""What is built from the tree: wheel and sdist hold the kernels, the command exists, no foreign package is shadowed."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
IN_GIT = (ROOT / ".git").exists()


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def run(code: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str], str]:
    """Names in the wheel, names in the sdist, and the wheel's entry points, of a copy that holds a probe kernel."""
    tree = tmp_path_factory.mktemp("tree") / "copy"
    skip = shutil.ignore_patterns(".git", ".venv", "*.egg-info", "build", "dist", "runs", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, tree, symlinks=True, ignore=skip)
    for folder in ("", "hopper"):
        (tree / "kernels" / folder / "probe_kernel.py").write_text('"""Probe."""\n')
    out = tree.parent / "out"
    out.mkdir()
    build = "import sys, setuptools.build_meta as b; print(b.build_{kind}({out!r}))"
    wheel = run(build.format(kind="wheel", out=str(out)), tree).splitlines()[-1]
    sdist = run(build.format(kind="sdist", out=str(out)), tree).splitlines()[-1]
    with zipfile.ZipFile(out / wheel) as archive:
        in_wheel = archive.namelist()
        entry_points = archive.read(next(name for name in in_wheel if name.endswith("entry_points.txt"))).decode()
    with tarfile.open(out / sdist) as archive:
        in_sdist = [name.split("/", 1)[1] for name in archive.getnames() if "/" in name]
    return in_wheel, in_sdist, entry_points


def test_wheel_and_sdist_hold_the_kernels(built: tuple[list[str], list[str], str]) -> None:
    """A wheel without its kernels imports fine and fails at the first step."""
    in_wheel, in_sdist, _ = built
    assert in_wheel.count("staticmoe/kernels/tile_table.json") == 1
    for file in ("probe_kernel.py", "hopper/probe_kernel.py", "hopper/weight_grad.py"):
        assert in_wheel.count(f"staticmoe/kernels/{file}") == 1
        assert in_sdist.count(f"staticmoe/kernels/{file}") == 1
    assert "staticmoe/py.typed" in in_wheel and "staticmoe/config.py" in in_wheel


def test_wheel_holds_the_package_and_nothing_else(built: tuple[list[str], list[str], str]) -> None:
    in_wheel, _, _ = built
    assert {name.split("/")[0] for name in in_wheel} == {"staticmoe", "staticmoe-0.1.0.dist-info"}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "staticmoe").rglob("*.py")}
    assert sources - set(in_wheel) == set()


def test_wheel_has_the_command(built: tuple[list[str], list[str], str]) -> None:
    assert "staticmoe = staticmoe.cli.app:main" in built[2]


def test_the_command_exists() -> None:
    """An entry point that names what is not there installs without a word."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, name = scripts["staticmoe"].split(":")
    assert run(f"import {module} as m; print(callable(m.{name}))", ROOT) == "True"


@pytest.mark.skipif(not IN_GIT, reason="not a git checkout: nothing to ask about what is tracked")
def test_the_kernels_symlink_is_tracked_as_a_symlink() -> None:
    """Tracked as a folder, or not at all, a clone has no staticmoe.kernels."""
    lines = git("ls-files", "-s", "staticmoe/kernels")
    assert len(lines) == 1 and lines[0].startswith("120000 ")
    assert git("ls-files", "kernels/__init__.py") == []


def test_kernels_are_reached_through_the_symlink() -> None:
    code = "import importlib.util as u; print(*u.find_spec('staticmoe.kernels').submodule_search_locations)"
    assert run(code, ROOT) == str(ROOT / "staticmoe" / "kernels")


def test_our_folder_is_no_regular_package_called_kernels() -> None:
    """From the root of the repository, `kernels` is Hugging Face's package or nothing that can shadow it."""
    code = "import importlib.util as u; spec = u.find_spec('kernels'); print(spec.origin if spec else None)"
    origin = run(code, ROOT)
    assert origin == "None" or not Path(origin).is_relative_to(ROOT)


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers (extra `hf`) is not installed"
)
def test_transformers_imports_from_the_root() -> None:
    assert run("import transformers; print(transformers.AutoModelForCausalLM.__name__)", ROOT) == "AutoModelForCausalLM"


def test_importing_the_package_has_no_side_effect() -> None:
    """No CUDA initialisation, no thread count, no default dtype, no seed."""
    code = (
        "import torch; before = torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype()\n"
        "import staticmoe\n"
        "after = torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype()\n"
        "print(torch.equal(before[0], after[0]), before[1:] == after[1:], torch.cuda.is_initialized())"
    )
    assert run(code, ROOT) == "True True False"
