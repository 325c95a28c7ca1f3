"""Where a result comes from, and its file."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from staticmoe.bench.blocks import ABSENT
from staticmoe.bench.timing import REPLAYS, SETTLE_S, TIMED_S
from staticmoe.observe.nvml import gpu_facts


def source_commit() -> str:
    """Commit of this code where it is a checkout, else its version."""
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        try:
            done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
        except OSError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    # A checkout of something else may hold the environment that this is installed in: there this file is not tracked.
    if git("ls-files", Path(__file__).name):
        return git("rev-parse", "--short", "HEAD")
    try:
        return f"staticmoe {importlib.metadata.version('staticmoe')}"
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def provenance(device: torch.device, commit: str, absent: Sequence[str] = ABSENT) -> dict[str, Any]:
    """Where and with what this was measured."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return {
        "gpu": gpu_facts() or name,
        "torch": torch.__version__,
        "triton": triton_version,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": commit,
        "data": "normal; natural: normal logits; zipf: expert popularity 1/rank; one-hot: K experts take all tokens",
        "protocol": f"CUDA graphs replayed for {SETTLE_S} s, then median over {TIMED_S} s or {REPLAYS} replays",
        "absent_peers": list(absent),
    }


def write_result(result: dict[str, Any], path: Path) -> None:
    """Write JSON, and the folder that it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
