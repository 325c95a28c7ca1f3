"""nsys is found where it may be; a tool that fails or hangs says what was run and what it said."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from staticmoe.profiling.errors import ProfileError
from staticmoe.profiling.tools import find_importer, find_nsys, library_environment, run_tool


def script(path: Path, text: str = "exit 0") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_where_nsys_is_found(tmp_path: Path) -> None:
    """The variable, then PATH, then installations, of several the newest, Nsight Systems before Nsight Compute."""
    root = tmp_path / "root"
    named, on_path = script(tmp_path / "named"), script(tmp_path / "bin/nsys")
    assert find_nsys({}, root) is None
    bundle = script(root / "opt/nvidia/nsight-compute/2025.3.1/host/target-linux-x64/nsys")
    assert find_nsys({}, root) == bundle
    script(root / "opt/nvidia/nsight-systems/2024.9.1/target-linux-x64/nsys")
    newest = script(root / "opt/nvidia/nsight-systems/2024.10.1/target-linux-x64/nsys")
    (root / "opt/nvidia/nsight-systems/2025.1.1/target-linux-x64").mkdir(parents=True)
    (root / "opt/nvidia/nsight-systems/2025.1.1/target-linux-x64/nsys").touch()
    assert find_nsys({}, root) == newest
    assert find_nsys({"PATH": str(on_path.parent)}, root) == on_path
    assert find_nsys({"PATH": str(on_path.parent), "STATICMOE_NSYS": str(named)}, root) == named
    with pytest.raises(ProfileError, match="STATICMOE_NSYS: expected a program that can be run; got /no/nsys"):
        find_nsys({"PATH": str(on_path.parent), "STATICMOE_NSYS": "/no/nsys"}, root)


@pytest.mark.parametrize("folder", ["linux-desktop-glibc_2_11_3-x64", "host-linux-x64"])
def test_where_the_importer_is_found(tmp_path: Path, folder: str) -> None:
    """Beside the folder of nsys, which PATH may show by a link."""
    nsys = script(tmp_path / "host/target-linux-x64/nsys")
    assert find_importer(nsys) is None
    importer = script(tmp_path / "host" / folder / "QdstrmImporter")
    link = tmp_path / "bin/nsys"
    link.parent.mkdir()
    link.symlink_to(nsys)
    assert find_importer(link) == importer


def test_libraries_of_the_importer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATICMOE_NSYS_LIBS", "/extra:/more")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/own")
    assert library_environment(Path("/q"))["LD_LIBRARY_PATH"] == "/q:/extra:/more:/own"
    monkeypatch.delenv("STATICMOE_NSYS_LIBS")
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert library_environment(Path("/q"))["LD_LIBRARY_PATH"] == "/q"


def test_every_line_is_given_on(tmp_path: Path) -> None:
    lines: list[str] = []
    tool = script(tmp_path / "tool", 'echo "out $1 $X"; echo err >&2; exit 3')
    done = run_tool([str(tool), "a"], timeout_s=10, say=lines.append, environment={**os.environ, "X": "y"})
    assert (done.code, done.last) == (3, ("out a y", "err")) and lines == ["out a y", "err"]
    said = str(done.failed("export", "do this"))
    assert said.startswith("export: expected it to work; got exit code 3 from") and f"{tool} a" in said
    assert said.endswith("out a y\n  err\ndo this")


def test_only_the_last_lines_are_kept(tmp_path: Path) -> None:
    done = run_tool([str(script(tmp_path / "tool", "seq 1 500"))], timeout_s=10)
    assert done.last == tuple(str(number) for number in range(489, 501))


def test_a_tool_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    tool = script(tmp_path / "tool", "sleep 600 &\necho $!\nsleep 600")
    lines: list[str] = []
    with pytest.raises(ProfileError, match=r"expected an end within 3 s; it was stopped, and wrote last\n  \d+\n"):
        run_tool([str(tool)], timeout_s=3, say=lines.append)
    (child,) = lines
    deadline = time.monotonic() + 60
    while _runs(child):
        assert time.monotonic() < deadline, "the tool's child goes on"
        time.sleep(0.01)


def _runs(process: str) -> bool:
    """Whether a process is there and no zombie, which nobody may have waited for."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_tool_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="no-tool x: expected a program that can be run; got No such file"):
        run_tool([str(tmp_path / "no-tool"), "x"], timeout_s=1)
