"""The exact command lines, and torchrun taken apart so that each rank runs under its own nsys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from staticmoe.profiling.commands import (
    TORCHRUN_FLAGS,
    Recording,
    export_command,
    import_command,
    kineto_path,
    record_command,
    split_torchrun,
)
from staticmoe.profiling.errors import ProfileError

NSYS, FOLDER = Path("/opt/nsys"), Path("/out/.partial-x")
OPTIONS = (
    "/opt/nsys profile -t cuda,nvtx --cuda-graph-trace={level} --sample=none --cpuctxsw=none "
    "-c cudaProfilerApi --capture-range-end=stop -o /out/.partial-x/{name}"
)


def recording(command: str, **options: Any) -> Recording:
    return Recording(command=tuple(command.split()), folder=Path("/out"), **options)


def test_one_process() -> None:
    asked = recording("python train.py --lr 1")
    for level, name in (("node", "profile"), ("graph", "profile-timing")):
        found = " ".join(record_command(asked, NSYS, FOLDER, level))
        assert found == f"{OPTIONS.format(level=level, name=name)} python train.py --lr 1"
    assert kineto_path(asked, FOLDER) == FOLDER / "profile.json"
    assert asked.window == "10:10:0"


def test_every_rank_under_its_own_nsys() -> None:
    asked = recording("/no/torchrun --standalone --nproc-per-node 2 train.py --lr 1", start=3, count=4, ranks="all")
    for level, name in (("node", "rank%q{RANK}"), ("graph", "rank%q{RANK}-timing")):
        found = " ".join(record_command(asked, NSYS, FOLDER, level))
        begin = "/no/torchrun --standalone --nproc-per-node 2 --no-python"
        assert found == f"{begin} {OPTIONS.format(level=level, name=name)} python -u train.py --lr 1"
    assert kineto_path(asked, FOLDER) == FOLDER / "rank{rank}.json"
    assert asked.window == "3:4:all"


def test_export_and_import() -> None:
    assert " ".join(export_command(NSYS, Path("a.nsys-rep"), Path("b.sqlite"))) == (
        "/opt/nsys export --type sqlite --lazy=false --output b.sqlite a.nsys-rep"
    )
    assert import_command(Path("/q"), Path("a.qdstrm"), Path("b.nsys-rep")) == [
        "/q",
        "-i",
        "a.qdstrm",
        "-o",
        "b.nsys-rep",
    ]


@pytest.mark.parametrize(
    ("command", "launcher", "program"),
    [
        ("torchrun --nnodes=2 -m pack.train -x", "torchrun --nnodes=2 --no-python", "python -u -m pack.train -x"),
        ("torchrun --no-python --nnodes 2 ./go 1", "torchrun --nnodes 2 --no-python", "./go 1"),
        ("torchrun --nnodes 2 -- train.py -- y", "torchrun --nnodes 2 --no-python", "python -u train.py -- y"),
        (
            "/v/python3 -u -m torch.distributed.run --standalone t.py",
            "/v/python3 -u -m torch.distributed.run --standalone --no-python",
            "/v/python3 -u t.py",
        ),
    ],
)  # fmt: skip
def test_torchrun_taken_apart(
    command: str, launcher: str, program: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Where PATH shows no torchrun, whatever Python it shows has to do.
    monkeypatch.setenv("PATH", str(tmp_path))
    found = split_torchrun(command.split())
    assert found is not None and (" ".join(found[0]), " ".join(found[1])) == (launcher, program)


@pytest.mark.parametrize(
    "command", ["python train.py", "python train.py -m torch.distributed.run", "./go torchrun", "python -m pack.train"]
)
def test_what_is_no_torchrun(command: str) -> None:
    assert split_torchrun(command.split()) is None


def test_ranks_run_the_python_beside_torchrun(tmp_path: Path) -> None:
    for name in ("torchrun", "python"):
        (tmp_path / name).touch(mode=0o755)
    found = split_torchrun([str(tmp_path / "torchrun"), "train.py"])
    assert found is not None and found[1] == (str(tmp_path / "python"), "-u", "train.py")


def test_torchrun_has_no_other_flags() -> None:
    """Of the torch that is installed: an option taken for a flag would lose its value to the program."""
    flags = {name for action in get_args_parser()._actions if action.nargs == 0 for name in action.option_strings}
    assert flags <= TORCHRUN_FLAGS
    values = {name for action in get_args_parser()._actions if action.nargs != 0 for name in action.option_strings}
    assert len(values) > 10 and not values & TORCHRUN_FLAGS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"command": ()}, "command: expected a program after `--`; got none"),
        ({"start": 0}, "--start: expected a step of at least 1; got 0"),
        ({"count": 0}, "--count: expected at least 1 step; got 0"),
        ({"ranks": "0;1"}, "--ranks: expected `all` or numbers like 0,3; got '0;1'"),
        ({"ranks": ""}, "--ranks: expected"),
        ({"timeout_s": 0.0}, "--timeout: expected more than 0 s; got 0"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError) as error:
        Recording(**{"command": ("x",), "folder": Path("/out"), **options})
    assert message in str(error.value)


def test_torchrun_without_a_program() -> None:
    with pytest.raises(ProfileError, match="name the script"):
        split_torchrun(["torchrun", "--nproc-per-node", "2"])
