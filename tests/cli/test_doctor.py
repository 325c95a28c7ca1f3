"""The doctor: each thing that can be wrong with a machine is a line with verdict and fix; exit code 1 on fail."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from staticmoe.cli import doctor as command
from staticmoe.cli.doctor import Line, judge, shown
from staticmoe.cli.doctor_machine import Gpu, Machine, look

GIB = 1 << 30
H200 = Gpu("NVIDIA H200", (9, 0), 0, 130 * GIB, 140 * GIB)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine that is fit in every respect."""
    (tmp_path / "plan.py").touch()
    packages = {"torch": "2.11.0+cu130", "triton": "3.6.0", "numpy": "2.3.5", "nvtx": "0.2.17", "nvidia-ml-py": "13.5"}
    return Machine(
        python=(3, 12, 1),
        packages=packages,
        nsys="NVIDIA Nsight Systems version 2026.1",
        torch_cuda="13.0",
        driver="580.1",
        driver_cuda=(13, 0),
        nvml="",
        gpus=(H200,),
        environment={},
        kernels=tmp_path,
        folders={"temporary files": (Path("/tmp"), 50 * GIB), "Triton's cache": (Path("/cache"), 50 * GIB)},
    )


def verdicts(machine: Machine, **changed: Any) -> dict[str, str]:
    """What is not fine, by name."""
    lines = judge(dataclasses.replace(machine, **changed))
    return {line.name: line.verdict for line in lines if line.verdict != "ok"}


def test_a_fit_machine_is_fit(machine: Machine) -> None:
    assert verdicts(machine) == {}
    assert [line.name for line in judge(machine)] == [
        "python", "torch", "triton", "numpy", "nvtx", "nvidia-ml-py", "nsys", "driver", "CUDA", "GPU 0", "kernels",
        "allocator", "TRITON_INTERPRET", "temporary files", "Triton's cache",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"python": (3, 10, 9)}, {"python": "fail"}),
        ({"packages": {"torch": "2.10.1"}}, {"torch": "fail"}),
        ({"packages": {"torch": "3.0.0"}}, {}),
        ({"packages": {"triton": None}}, {"triton": "fail"}),
        ({"packages": {"triton": None}, "gpus": ()}, {"triton": "warn", "GPU": "warn"}),
        ({"packages": {"numpy": None}, "gpus": ()}, {"numpy": "fail", "GPU": "warn"}),
        ({"nsys": None}, {"nsys": "warn"}),
        ({"nsys": "found at /x, does not answer (OSError)"}, {"nsys": "warn"}),
        ({"driver": None, "gpus": (), "nvml": "no library"}, {"driver": "warn", "GPU": "warn"}),
        ({"torch_cuda": None}, {"CUDA": "fail"}),
        ({"driver_cuda": (12, 8)}, {"CUDA": "fail"}),
        ({"torch_cuda": "12.8"}, {}),
        ({"gpus": (dataclasses.replace(H200, capability=(7, 5)),)}, {"GPU 0": "fail"}),
        ({"gpus": (dataclasses.replace(H200, capability=(8, 0)),)}, {"GPU 0": "warn"}),
        ({"gpus": (H200, dataclasses.replace(H200, others=2))}, {"GPU 1": "warn"}),
        ({"kernels": Path("/nowhere")}, {"kernels": "fail"}),
        ({"environment": {"PYTORCH_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:128"}}, {}),
        ({"environment": {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}}, {"allocator": "fail"}),
        ({"environment": {"PYTORCH_ALLOC_CONF": "nonsense"}}, {"allocator": "warn"}),
        ({"environment": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}}, {"allocator": "fail"}),
        ({"environment": {"TRITON_INTERPRET": "1"}}, {"TRITON_INTERPRET": "fail"}),
        ({"environment": {"TRITON_INTERPRET": "0"}}, {}),
        ({"environment": {"TRITON_INTERPRET": "1"}, "gpus": ()}, {"TRITON_INTERPRET": "warn", "GPU": "warn"}),
        ({"folders": {"temporary files": (Path("/tmp"), GIB)}}, {"temporary files": "warn"}),
        ({"folders": {"temporary files": (Path("/tmp"), GIB // 100)}}, {"temporary files": "fail"}),
        ({"folders": {"Triton's cache": (Path("/cache"), None)}}, {"Triton's cache": "fail"}),
    ],
)
def test_what_is_wrong_is_said(machine: Machine, changed: dict[str, Any], expected: dict[str, str]) -> None:
    if "packages" in changed:
        changed = {**changed, "packages": {**machine.packages, **changed["packages"]}}
    assert verdicts(machine, **changed) == expected
    for line in judge(dataclasses.replace(machine, **changed)):
        # What fails says what to do.
        assert line.verdict != "fail" or line.fix
        assert all(len(text) <= 80 for text in shown(line))


def test_the_symlink_that_leads_nowhere_is_told_from_a_missing_folder(machine: Machine, tmp_path: Path) -> None:
    link = tmp_path / "kernels"
    link.symlink_to("gone")
    (lost,) = [line for line in judge(dataclasses.replace(machine, kernels=link)) if line.name == "kernels"]
    assert "leads nowhere" in lost.what and "core.symlinks" in lost.fix


def test_lines_are_wrapped() -> None:
    lines = shown(Line("allocator", "fail", "what " * 30, "fix " * 30))
    assert lines[0].startswith("fail allocator         what what") and all(len(line) <= 80 for line in lines)
    assert sum(line.split().count("what") for line in lines) == 30 and sum(line.count("->") for line in lines) == 1


def test_this_machine_is_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "deep" / "cache"))
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    machine = look()
    assert machine.packages["torch"] is not None and machine.packages["numpy"] is not None
    assert machine.folders["Triton's cache"][0] == tmp_path / "deep" / "cache"
    free = machine.folders["Triton's cache"][1]
    assert free is not None and free > 0 and not (tmp_path / "deep").exists()
    assert machine.environment["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64"
    assert (machine.kernels / "plan.py").is_file() and machine.nvml != "" or machine.gpus


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert look().folders["Triton's cache"] == (tmp_path, None)


@pytest.mark.parametrize(("python", "code"), [((3, 12, 0), 0), ((3, 9, 0), 1)])
def test_the_command(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, python: tuple[int, int, int], code: int
) -> None:
    monkeypatch.setattr(command, "look", lambda: dataclasses.replace(machine, python=python))
    app = typer.Typer(rich_markup_mode=None)
    app.command()(command.doctor)
    result = CliRunner().invoke(app, [])
    assert result.exit_code == code, result.output
    assert result.stdout.splitlines()[-1] == ("15 ok, 0 warn, 0 fail" if code == 0 else "14 ok, 0 warn, 1 fail")
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
