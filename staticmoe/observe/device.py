"""What a run's device and model are, and what torch's allocator and NVML say of them. Never waits for the device."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import nn

from staticmoe.observe.nvml import GpuSampler

# Dense bf16 FLOPs a second by NVIDIA's data sheets, of the SXM boards for Hopper; other boards clock lower.
_PEAKS = ((r"\bH[12]00\b", 989e12), (r"\bA100\b", 312e12))
_OTHER_BOARDS = re.compile(r"\bMIG\b|\bH[12]00\b.*\b(PCIe|NVL)\b")


def peak_flops(name: str) -> float | None:
    """Return the dense bf16 peak of a GPU in FLOPs a second by its name; None where it is not known."""
    if _OTHER_BOARDS.search(name):
        return None
    return next((peak for pattern, peak in _PEAKS if re.search(pattern, name)), None)


def multiplying_weights(model: nn.Module) -> int | None:
    """Return the number of trained elements that multiply activations; None where a matrix is frozen.

    An embedding is looked up and does not count, unless a module of another kind uses the same parameter. A frozen
    matrix costs fewer FLOPs than a trained one, how many fewer depends on what lies before it.
    """
    used = {
        id(parameter): parameter
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    if any(parameter.dim() > 1 and not parameter.requires_grad for parameter in used.values()):
        return None
    return sum(parameter.numel() for parameter in used.values())


class Probe:
    """Samples memory and GPU.

    Args:
        device: of the run.
        model: whose weights work on it.
        pool_bytes: -> bytes that the graphs keep.

    Attributes:
        peak_flops: of the device, or None.
        weights: of the model that multiply, or None.
    """

    def __init__(self, device: torch.device, model: nn.Module, pool_bytes: Callable[[], int]) -> None:
        self._device = device
        self._pool_bytes = pool_bytes
        self.weights = multiplying_weights(model)
        self.peak_flops: float | None = None
        self._gpu: GpuSampler | None = None
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self.peak_flops = peak_flops(properties.name)
            self._gpu = GpuSampler(f"GPU-{properties.uuid}")

    def sample(self) -> dict[str, float]:
        """The "memory/" and "gpu/" metrics now; what this machine cannot tell is left out."""
        found: dict[str, float] = {"memory/pool": self._pool_bytes()}
        if self._device.type == "cuda":
            found["memory/allocated"] = torch.cuda.memory_allocated(self._device)
            calls = torch.cuda.memory_stats(self._device).get("num_device_alloc")
            if calls is not None:
                found["memory/cuda_malloc_calls"] = calls
        return {**found, **(self._gpu.sample() if self._gpu is not None else {})}

    def close(self) -> None:
        """Let go of NVML."""
        if self._gpu is not None:
            self._gpu.close()
