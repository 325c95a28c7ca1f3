"""The commands `audit` and `explain`: factory and script, exit codes, what is written, what is said of a mistake."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from staticmoe import StaticMoERunner
from staticmoe.cli.audit import audit
from staticmoe.cli.explain import explain
from staticmoe.errors import ConfigError, StaticMoEError

app = typer.Typer(rich_markup_mode=None)
app.command("audit")(audit)
app.command("explain")(explain)

MODEL = """
import torch
from torch import nn
from staticmoe import RunnerConfig, StaticMoE, StaticMoERunner

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.moe = StaticMoE(8, 4, 4, 2)

    def forward(self, x):
        y = self.moe(x).square().mean()
        return {fault}

def loss_fn(model, batch):
    return model(batch["x"])

def arguments():
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    return dict(model=model, optimizer=optimizer, example_batch={{"x": torch.randn(4, 8)}}, loss_fn=loss_fn)
"""
SCRIPT = (
    MODEL
    + """
import argparse
import random
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--name", required=True)
options = parser.parse_args()
print("before", options.name, __name__)
try:
    runner = StaticMoERunner(**arguments(), config=RunnerConfig(run_dir="{folder}"))
except Exception:
    print("swallowed")
print("behind")
"""
)


def write(path: Path, text: str, fault: str = "y", **values: object) -> Path:
    path.write_text(text.format(fault=fault, **values))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(autouse=True)
def in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder, from which earlier tests have imported nothing."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.startswith("audited_")]:
        monkeypatch.delitem(sys.modules, name)


def test_a_factory_with_a_fault(tmp_path: Path) -> None:
    path = write(tmp_path / "audited_bad.py", MODEL, "y * y.item()")
    result = run("audit", "audited_bad:arguments", "--json", "found.json")
    assert result.exit_code == 2, result.output
    lines = result.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[0] == "SM101 error: Tensor.item()"
    number = path.read_text().splitlines().index("        return y * y.item()") + 1
    assert lines[1] == f"  at:   audited_bad.py:{number}, in (the model)"
    assert "not looked at:" in lines and "  - evaluation: pass eval_fn to have it looked at" in lines
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["counts"] == {"error": 1, "warning": 0, "note": 0}
    (finding,) = written["findings"]
    assert (finding["code"], finding["source"]["line"], finding["source"]["file"]) == ("SM101", number, str(path))
    assert str(tmp_path) not in sys.path


def test_a_clean_factory(tmp_path: Path) -> None:
    write(tmp_path / "audited_good.py", MODEL)
    result = run("audit", "audited_good:arguments")
    assert result.exit_code == 0, result.output
    assert "0 errors, 0 warnings, 0 notes" in result.stdout and "SM" not in result.stdout


def test_notes_are_no_failure(tmp_path: Path) -> None:
    text = MODEL.replace("return model(batch[", "return model(batch['x']), {{'w': model.moe.router.weight[0, 0]}}  # [")
    write(tmp_path / "audited_note.py", text)
    result = run("audit", "audited_note:arguments")
    assert result.exit_code == 0 and "SM304 note" in result.stdout, result.output


def test_a_script_is_stopped_at_construction(tmp_path: Path) -> None:
    folder, constructor = tmp_path / "runs", StaticMoERunner.__init__
    write(tmp_path / "train.py", SCRIPT, "y * y.item()", folder=folder)
    argv = list(sys.argv)
    result = run("audit", "train.py", "--json", "found.json", "--", "--name", "small")
    assert result.exit_code == 2, result.output
    assert "before small __main__" in result.stdout
    assert "behind" not in result.stdout and "swallowed" not in result.stdout
    assert "SM101 error" in result.stdout and not folder.exists()
    (finding,) = json.loads((tmp_path / "found.json").read_text())["findings"]
    assert finding["source"]["text"] == "return y * y.item()"
    assert StaticMoERunner.__init__ is constructor and sys.argv == argv and str(tmp_path) not in sys.path


def test_a_clean_script(tmp_path: Path) -> None:
    write(tmp_path / "train.py", SCRIPT, folder=tmp_path / "runs")
    result = run("audit", "train.py", "--", "--name", "small")
    assert result.exit_code == 0 and "0 errors" in result.stdout, result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("audited_none:arguments",), "a module that can be imported from .*'audited_none'"),
        (("audited_good:nothing",), "a function 'nothing' in audited_good, got NoneType"),
        (("audited_good",), "pkg.module:factory or a script"),
        (("audited_good:arguments", "--", "x"), "expected none for a factory; got x"),
        (("audited_odd:a_list",), "a dict of StaticMoERunner's arguments, got list"),
        (("audited_odd:misspelt",), "missing: optimizer; unknown: optimiser"),
        (("absent.py",), "'absent.py', which is no file"),
        (("train.py",), "exited with 2 before; give it its arguments behind --"),
        (("empty.py",), "ended without one"),
        (("audited_good:arguments", "--json", "no/such/folder.json"), "a folder that exists"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    write(tmp_path / "audited_good.py", MODEL)
    write(tmp_path / "train.py", SCRIPT, folder=tmp_path / "runs")
    (tmp_path / "empty.py").write_text("x = 1\n")
    (tmp_path / "audited_odd.py").write_text(
        textwrap.dedent("""
            def a_list():
                return []

            def misspelt():
                return {"model": 1, "optimiser": 2, "example_batch": 3}
        """)
    )
    result = run("audit", *arguments)
    assert isinstance(result.exception, ConfigError) and isinstance(result.exception, StaticMoEError)
    with pytest.raises(ConfigError, match=words):
        raise result.exception


def test_an_error_in_the_users_own_imports_is_theirs_to_see(tmp_path: Path) -> None:
    (tmp_path / "audited_broken.py").write_text("import no_such_module_anywhere\n")
    result = run("audit", "audited_broken:arguments")
    assert isinstance(result.exception, ModuleNotFoundError)
    assert result.exception.name == "no_such_module_anywhere"


def test_explain() -> None:
    one = run("explain", "SM112")
    assert one.exit_code == 0 and one.stdout.startswith("SM112 error: a boolean mask as an index\n")
    assert "losses[labels != -100].mean()" in one.stdout and "# staticmoe: allow SM112" in one.stdout
    every = run("explain")
    assert every.exit_code == 0 and every.stdout.count("  SM") >= 40
    assert "SM112  error    a boolean mask as an index" in every.stdout
    unknown = run("explain", "SM1")
    assert isinstance(unknown.exception, ConfigError) and "'SM1'" in str(unknown.exception)
