"""Checkpoints of `staticmoe train`: whole or not there, and refused where they would continue another run.

A checkpoint holds everything that decides the next step, so a resumed run continues bitwise: model,
optimizer, scheduler, runner, random number generators, the step reached and the options of the run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from staticmoe.errors import StaticMoEError

FORMAT_VERSION = 1
CHECKPOINT_NAME = "checkpoint.pt"

# Options under which a continued run would no longer be the run that was begun, and why.
BINDING_OPTIONS: Mapping[str, str] = {
    "depth": "it sizes the model",
    "seq_len": "it sizes the windows and the rotary tables",
    "batch_size": "it decides which bytes a step reads",
    "accumulate": "it decides which bytes a step reads",
    "seed": "it decides the order of the data",
    "corpus": "the text would be another",
    "steps": "the learning rate's schedule ends there",
    "lr": "the schedule scales it",
    "dtype": "it decides the arithmetic",
    "compile": "it decides the arithmetic",
    "dropout": "it decides the arithmetic",
}


class CheckpointError(StaticMoEError, ValueError):
    """A checkpoint is missing, unreadable or belongs to another run. Names both sides and the fix."""


def save_checkpoint(path: Path, payload: Mapping[str, Any]) -> None:
    """Write `payload` (tensors and plain values) to `path`, which at any instant holds an old or a new whole file.

    Raises:
        OSError: it could not be written; an earlier file at `path` is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # One name, so that what a killed process left behind is overwritten by the next save.
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as stream:
            torch.save({"format": FORMAT_VERSION, **payload}, stream)
            stream.flush()
            # Without it the rename may reach the disk before the bytes do.
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    # The rename itself lives in the directory.
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Return the payload of a checkpoint file, or of the one in a run's directory, on the CPU.

    Only tensors and plain values are read: a file cannot run code.

    Raises:
        CheckpointError: there is none, or it is not one of this format.
    """
    file = path / CHECKPOINT_NAME if path.is_dir() else path
    if not file.is_file():
        raise CheckpointError(
            f"--resume {path}: expected a run's directory that holds {CHECKPOINT_NAME}, or a checkpoint file; "
            f"{file} does not exist. Start the run without --resume"
        )
    try:
        payload = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{file}: expected a checkpoint of `staticmoe train`; it cannot be read: {reason}. "
            "Start the run anew without --resume"
        ) from error
    found = payload.get("format") if isinstance(payload, dict) else None
    if found != FORMAT_VERSION:
        raise CheckpointError(
            f"{file}: expected checkpoint format {FORMAT_VERSION}; got {found!r}. Resume it with the version of "
            "staticmoe that wrote it, or start the run anew without --resume"
        )
    return payload


def check_options(saved: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """Compare the options of a checkpoint with those asked for; return those that may differ and do, in words.

    Raises:
        CheckpointError: an option differs that decides what run this is.
    """
    refused, noted = [], []
    for name in sorted(set(saved) | set(asked)):
        before, now = saved.get(name), asked.get(name)
        if before == now:
            continue
        flag = name.replace("_", "-")
        if name in BINDING_OPTIONS:
            refused.append(f"{flag}: the checkpoint has {before!r}, asked for {now!r} ({BINDING_OPTIONS[name]})")
        else:
            noted.append(f"{flag}: {before!r} before, {now!r} from here on")
    if refused:
        raise CheckpointError(
            "the checkpoint belongs to another run:\n  " + "\n  ".join(refused) + "\n"
            "Leave these options out (they are then taken from the checkpoint), or start a new run without --resume"
        )
    return noted


def rng_state() -> dict[str, Any]:
    """Return the states of torch's generators: the CPU's, and every GPU's where there is one."""
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Set what `rng_state` returned; GPUs that this machine does not have are left out."""
    torch.set_rng_state(state["cpu"])
    for index, cuda_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda_state, index)
