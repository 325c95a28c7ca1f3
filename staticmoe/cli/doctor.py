"""`staticmoe doctor`: whether this machine is fit to train on, a line for each thing, and what to do where it is not.

    staticmoe doctor

Exit code: 0, or 1 where a line says fail. Without a GPU most of it is warnings: captures are emulated there.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterator

import typer

from staticmoe.cli.doctor_machine import Machine, look

WIDTH = 80
GIB = 1 << 30
_PYTHON, _TORCH = (3, 11), (2, 11)
# Below sm_80 there is no bfloat16 and no asynchronous copy; from sm_90 on the kernels are tuned.
_LEAST, _TUNED = (8, 0), (9, 0)
# Compiled kernels and a profile take some hundred MB.
_LITTLE, _TOO_LITTLE = 2 * GIB, GIB // 16
_INSTALL = "pip install staticmoe, which brings it along"


@dataclasses.dataclass(frozen=True)
class Line:
    """One thing: its name, "ok", "warn" or "fail", what there is, and what to do ("" where it is fine)."""

    name: str
    verdict: str
    what: str
    fix: str = ""


def doctor() -> None:
    """Say whether this machine is fit to train on, and what to do where it is not."""
    lines = judge(look())
    for line in lines:
        for text in shown(line):
            typer.echo(text)
    counts = {verdict: sum(line.verdict == verdict for line in lines) for verdict in ("ok", "warn", "fail")}
    typer.echo("\n" + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if counts["fail"]:
        raise typer.Exit(1)


def shown(line: Line) -> list[str]:
    """A line of the report, wrapped at 80 columns."""
    first = f"{line.verdict:<5}{line.name:<18}"
    found = textwrap.wrap(line.what, WIDTH, initial_indent=first, subsequent_indent=" " * len(first))
    if line.fix:
        found += textwrap.wrap(line.fix, WIDTH, initial_indent=" " * 23 + "-> ", subsequent_indent=" " * 26)
    return found


def judge(machine: Machine) -> list[Line]:
    """All lines, in the order in which they are shown."""
    return [
        *_versions(machine),
        _nsys(machine),
        *_driver(machine),
        *_gpus(machine),
        _kernels(machine),
        *_allocator(machine),
        _interpreter(machine),
        *_folders(machine),
    ]


def _versions(machine: Machine) -> Iterator[Line]:
    python = ".".join(map(str, machine.python))
    old = machine.python[:2] < _PYTHON
    yield Line("python", "fail" if old else "ok", python, "install Python 3.11 or later" if old else "")
    for name, version in machine.packages.items():
        if version is None:
            # Where there is no GPU the kernels are not needed, and NVML has nothing to say.
            verdict = "fail" if name in ("torch", "numpy") or machine.gpus else "warn"
            yield Line(name, verdict, "not installed", _INSTALL)
        elif name == "torch" and _release(version) < _TORCH:
            yield Line(name, "fail", version, "install torch 2.11 or later")
        else:
            yield Line(name, "ok", version)


def _release(version: str) -> tuple[int, int]:
    numbers = re.findall(r"\d+", version)
    return int(numbers[0]), int(numbers[1])


def _nsys(machine: Machine) -> Line:
    if machine.nsys is None:
        return Line("nsys", "warn", "not found", "install Nsight Systems to take profiles; nothing else needs it")
    return Line("nsys", "warn" if "does not answer" in machine.nsys else "ok", machine.nsys)


def _driver(machine: Machine) -> Iterator[Line]:
    if machine.driver is None:
        fix = "to train on a GPU, install the NVIDIA driver; on a CPU captures are emulated"
        yield Line("driver", "warn", f"NVML does not answer: {machine.nvml}", fix)
        return
    yield Line("driver", "ok", machine.driver)
    runs = ".".join(map(str, machine.driver_cuda or ()))
    if machine.torch_cuda is None:
        yield Line("CUDA", "fail", "torch is a build for the CPU", "install a build of torch for CUDA from pytorch.org")
    elif machine.driver_cuda is not None and _release(machine.torch_cuda)[0] > machine.driver_cuda[0]:
        what = f"torch was built for {machine.torch_cuda}, the driver runs {runs} at most"
        yield Line("CUDA", "fail", what, "update the driver, or install torch for an earlier CUDA")
    else:
        yield Line("CUDA", "ok", f"torch was built for {machine.torch_cuda}, the driver runs up to {runs}")


def _gpus(machine: Machine) -> Iterator[Line]:
    if not machine.gpus:
        yield Line("GPU", "warn", "none: captures are emulated on the CPU", "fine for tests and small models")
    for number, gpu in enumerate(machine.gpus):
        name = f"GPU {number}"
        major, minor = gpu.capability
        what = f"{gpu.name}, sm_{major}{minor}, {gpu.free / GIB:.1f} of {gpu.total / GIB:.1f} GiB free"
        if gpu.capability < _LEAST:
            yield Line(name, "fail", what, "use a GPU of sm_80 (A100) or later")
        elif gpu.capability < _TUNED:
            yield Line(name, "warn", what, "works, with kernels that are tuned for sm_90 (H100, H200)")
        else:
            yield Line(name, "ok", what)
        if gpu.others:
            count = f"{gpu.others} other process{'es' * (gpu.others > 1)}"
            yield Line(
                name, "warn", f"{count} on it", "nvidia-smi lists them; timings and free memory are not yours alone"
            )


def _kernels(machine: Machine) -> Line:
    path = machine.kernels
    if (path / "plan.py").is_file():
        return Line("kernels", "ok", str(path))
    what = f"{path} leads nowhere" if path.is_symlink() else f"{path} is no folder of kernels"
    fix = "it is a symlink to ../kernels that the checkout lost: git config core.symlinks true, then git checkout ."
    return Line("kernels", "fail", what, fix)


def _allocator(machine: Machine) -> Iterator[Line]:
    environment = machine.environment
    settings = environment.get("PYTORCH_ALLOC_CONF") or environment.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    given = dict(part.split(":", 1) for part in re.split(r",(?![^\[]*\])", settings) if ":" in part)
    backend = given.get("backend", "native").strip()
    if environment.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        fix = "unset it: a graph needs memory that stays where it is"
        yield Line("allocator", "fail", "PYTORCH_NO_CUDA_MEMORY_CACHING is set", fix)
    if backend != "native":
        fix = "leave backend out: the graphs' memory is counted by torch's native allocator"
        yield Line("allocator", "fail", f"backend:{backend}", fix)
    elif settings and not given:
        yield Line("allocator", "warn", f"{settings}: not of the form name:value", "torch reads name:value,name:value")
    else:
        yield Line("allocator", "ok", settings or "torch's defaults")


def _interpreter(machine: Machine) -> Line:
    value = machine.environment.get("TRITON_INTERPRET", "")
    if value in ("", "0"):
        return Line("TRITON_INTERPRET", "ok", "not set")
    if machine.gpus:
        return Line("TRITON_INTERPRET", "fail", f"{value}: kernels are interpreted on the host", "unset it")
    return Line("TRITON_INTERPRET", "warn", f"{value}: kernels are interpreted", "fine for tests; unset it to train")


def _folders(machine: Machine) -> Iterator[Line]:
    for purpose, (path, free) in machine.folders.items():
        fix = "set TRITON_CACHE_DIR" if "Triton" in purpose else "set TMPDIR"
        if free is None:
            yield Line(purpose, "fail", f"{path} cannot be written", f"{fix} to a folder that can")
        elif free < _LITTLE:
            verdict = "fail" if free < _TOO_LITTLE else "warn"
            yield Line(purpose, verdict, f"{free / GIB:.2f} GiB free in {path}", f"make room, or {fix}")
        else:
            yield Line(purpose, "ok", f"{free / GIB:.1f} GiB free in {path}")
