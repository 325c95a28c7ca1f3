"""Checkpoints: at any instant an old or a new whole file, and refused in words where they do not belong."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from staticmoe.demo.checkpoint import (
    BINDING_OPTIONS,
    CHECKPOINT_NAME,
    CheckpointError,
    check_options,
    load_checkpoint,
    rng_state,
    save_checkpoint,
    set_rng_state,
)


def save(path: Path, value: float) -> None:
    save_checkpoint(path, {"model": {"w": torch.full((1000,), value)}, "step": int(value)})


def test_what_is_saved_comes_back_from_the_file_and_from_its_directory(tmp_path: Path) -> None:
    path = tmp_path / "new" / CHECKPOINT_NAME
    save(path, 3.0)
    for source in (path, path.parent):
        payload = load_checkpoint(source)
        assert payload["step"] == 3 and torch.equal(payload["model"]["w"], torch.full((1000,), 3.0))
    assert [entry.name for entry in path.parent.iterdir()] == [CHECKPOINT_NAME]


@pytest.mark.parametrize("where", ["replace", "fsync"])
def test_a_failing_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    path = tmp_path / CHECKPOINT_NAME
    save(path, 1.0)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, where, fail)
    with pytest.raises(OSError, match="disk full"):
        save(path, 2.0)
    assert load_checkpoint(path)["step"] == 1
    assert [entry.name for entry in tmp_path.iterdir()] == [CHECKPOINT_NAME]


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from staticmoe.demo.checkpoint import save_checkpoint
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
save_checkpoint(Path(sys.argv[1]), {"model": {"w": torch.zeros(1000)}, "step": 2})
"""


def test_a_process_killed_between_write_and_rename_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / CHECKPOINT_NAME
    save(path, 1.0)
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert load_checkpoint(path)["step"] == 1
    assert len(list(tmp_path.iterdir())) == 2
    # The next save takes the killed one's temporary file over.
    save(path, 3.0)
    assert load_checkpoint(path)["step"] == 3
    assert [entry.name for entry in tmp_path.iterdir()] == [CHECKPOINT_NAME]


def test_a_missing_unreadable_or_foreign_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        load_checkpoint(tmp_path)
    torn = tmp_path / "torn.pt"
    save(torn, 1.0)
    torn.write_bytes(torn.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(torn)
    foreign = tmp_path / "foreign.pt"
    torch.save({"format": 99}, foreign)
    with pytest.raises(CheckpointError, match="format 1; got 99"):
        load_checkpoint(foreign)
    torch.save(torch.zeros(3), foreign)
    with pytest.raises(CheckpointError, match="format 1; got None"):
        load_checkpoint(foreign)


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("pwned",)


def test_a_file_cannot_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"format": 1, "model": Bomb()}, "bomb.pt")
    assert b"mkdir" in pickle.dumps(Bomb())
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(Path("bomb.pt"))
    assert not Path("pwned").exists()


OPTIONS = {name: index for index, name in enumerate(BINDING_OPTIONS)} | {"threads": 1, "eval_every": 10}


def test_equal_options_pass_and_harmless_ones_are_noted() -> None:
    assert check_options(OPTIONS, dict(OPTIONS)) == []
    notes = check_options(OPTIONS, {**OPTIONS, "threads": 4, "eval_every": 0})
    assert notes == ["eval-every: 10 before, 0 from here on", "threads: 1 before, 4 from here on"]


@pytest.mark.parametrize("name", sorted(BINDING_OPTIONS))
def test_an_option_that_decides_the_run_is_refused_with_both_values(name: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_options({**OPTIONS, name: "old"}, {**OPTIONS, name: "new"})
    message = str(caught.value)
    assert f"{name.replace('_', '-')}: the checkpoint has 'old', asked for 'new'" in message
    assert "without --resume" in message


def test_the_random_state_continues() -> None:
    state = rng_state()
    first = torch.randn(5)
    torch.randn(7)
    set_rng_state(state)
    assert torch.equal(torch.randn(5), first)
