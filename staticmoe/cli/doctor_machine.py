"""What `staticmoe doctor` looks at, gathered in one place; judging it needs none of it at hand."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import staticmoe

# In the order in which they are shown.
PACKAGES = ("torch", "triton", "numpy", "nvtx", "nvidia-ml-py")
ENVIRONMENT = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TRITON_CACHE_DIR",
    "TRITON_INTERPRET",
)
_NSYS_SECONDS = 20


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        name: of the product.
        capability: (major, minor).
        others: processes on it beside this one.
        free, total: bytes of its memory.
    """

    name: str
    capability: tuple[int, int]
    others: int
    free: int
    total: int


@dataclasses.dataclass(frozen=True)
class Machine:
    """What there is.

    Attributes:
        python: version.
        packages: distribution -> version, None where it is not installed.
        nsys: what `nsys --version` says; None without nsys.
        torch_cuda: CUDA version that torch was built for, None for a CPU build.
        driver: version of the NVIDIA driver, None without one.
        driver_cuda: (major, minor) of the newest CUDA that the driver runs, None without one.
        nvml: why NVML does not answer, "" where it does.
        gpus: that NVML sees.
        environment: variables that matter and are set.
        kernels: folder of the device code as the package knows it.
        folders: purpose -> (path, free bytes), None bytes where it cannot be written.
    """

    python: tuple[int, int, int]
    packages: Mapping[str, str | None]
    nsys: str | None
    torch_cuda: str | None
    driver: str | None
    driver_cuda: tuple[int, int] | None
    nvml: str
    gpus: tuple[Gpu, ...]
    environment: Mapping[str, str]
    kernels: Path
    folders: Mapping[str, tuple[Path, int | None]]


def look() -> Machine:
    """Gather everything; creates no CUDA context."""
    nvml, driver, driver_cuda, gpus = _ask_nvml()
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    temporary = Path(tempfile.gettempdir())
    version = sys.version_info
    return Machine(
        python=(version.major, version.minor, version.micro),
        packages={name: _version(name) for name in PACKAGES},
        nsys=_ask_nsys(),
        torch_cuda=torch.version.cuda,
        driver=driver,
        driver_cuda=driver_cuda,
        nvml=nvml,
        gpus=gpus,
        environment={name: os.environ[name] for name in ENVIRONMENT if os.environ.get(name)},
        kernels=Path(staticmoe.__file__).parent / "kernels",
        folders={"temporary files": (temporary, _free(temporary)), "Triton's cache": (cache, _free(cache))},
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _ask_nsys() -> str | None:
    path = shutil.which("nsys")
    if path is None:
        return None
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_NSYS_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"found at {path}, does not answer ({type(error).__name__})"
    return said.stdout.strip() or f"found at {path}, says no version"


def _free(folder: Path) -> int | None:
    """Free bytes where `folder` is, or would be made; None where it cannot be written."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free if os.access(folder, os.W_OK) else None


def _ask_nvml() -> tuple[str, str | None, tuple[int, int] | None, tuple[Gpu, ...]]:
    """Why it does not answer, driver, CUDA of the driver, GPUs."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        return "nvidia-ml-py is not installed", None, None, ()
    except Exception as error:  # NVML's own error type is known only where the import worked
        return str(error), None, None, ()
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        gpus = tuple(_gpu(pynvml, handle) for handle in handles)
        return "", str(pynvml.nvmlSystemGetDriverVersion()), (cuda // 1000, cuda % 1000 // 10), gpus
    except pynvml.NVMLError as error:
        return str(error), None, None, ()
    finally:
        pynvml.nvmlShutdown()


def _gpu(library: Any, handle: Any) -> Gpu:
    memory = library.nvmlDeviceGetMemoryInfo(handle)
    processes = library.nvmlDeviceGetComputeRunningProcesses(handle)
    major, minor = library.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        name=str(library.nvmlDeviceGetName(handle)),
        capability=(major, minor),
        others=sum(1 for process in processes if process.pid != os.getpid()),
        free=memory.free,
        total=memory.total,
    )
