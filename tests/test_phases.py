"""Ranges and GPU facts are there where their packages are, and cost one log line where they are not."""

from __future__ import annotations

import ast
import builtins
import logging
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from staticmoe import phases
from staticmoe.observe.nvml import gpu_facts
from staticmoe.phases import HostPhase, host_range


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes importing a package fail."""

    def hide(name: str) -> None:
        original = builtins.__import__

        def refuse(module: str, *args: Any, **kwargs: Any) -> Any:
            if module.split(".")[0] == name:
                raise ImportError(f"{name} is hidden")
            return original(module, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", refuse)
        monkeypatch.setattr(phases, "_RANGES", {})

    return hide


def test_ranges_nest() -> None:
    """A range holds another, and the same one again."""
    with host_range(HostPhase.ITERATION), host_range(HostPhase.REPLAY), host_range(HostPhase.REPLAY):
        pass
    assert set(phases._RANGES) == {*HostPhase, *phases.DevicePhase}


class Domain:
    """What nvtx gives: with a tool that listens, and without."""

    def __init__(self, listens: bool) -> None:
        self.listens = listens
        self.seen: list[str] = []

    def get_event_attributes(self, message: str = "") -> Any:
        return [message] if self.listens else None

    def push_range(self, attributes: list[str]) -> None:
        self.seen += attributes

    def pop_range(self) -> None:
        self.seen.append("end")


@pytest.mark.parametrize("listens", [True, False])
def test_a_tool_that_listens_sees_every_range_and_none_costs_nothing(
    listens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a tool the ranges are one object that does nothing: two microseconds a step became less than one."""
    domain = Domain(listens)
    monkeypatch.setitem(sys.modules, "nvtx", types.SimpleNamespace(get_domain=lambda name: domain))
    monkeypatch.setattr(phases, "_RANGES", {})
    with host_range(HostPhase.ITERATION), phases.device_range(phases.DevicePhase.UP):
        pass
    assert domain.seen == (["iteration", "up", "end", "end"] if listens else [])
    assert len({id(one) for one in phases._RANGES.values()}) == (len(phases._RANGES) if listens else 1)


def test_without_nvtx_one_line_says_so(without: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The ranges do nothing."""
    without("nvtx")
    with caplog.at_level(logging.INFO, "staticmoe"):
        for _ in range(3):
            with host_range(HostPhase.REPLAY):
                pass
    assert caplog.text.count("nvtx is not installed") == 1


def test_without_nvml_there_are_no_facts(without: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Neither an import error nor a missing driver stops a run."""
    without("pynvml")
    with caplog.at_level(logging.INFO, "staticmoe"):
        assert gpu_facts() == []
    assert "nvidia-ml-py is not installed" in caplog.text


def test_kernel_names_carry_their_phase() -> None:
    """A profile attributes a kernel by its name: every function that is launched is called staticmoe_<phase>_..."""
    kernels = Path(phases.__file__).parent / "kernels"
    jitted: set[str] = set()
    launched: set[str] = set()
    for path in kernels.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(mark) for mark in node.decorator_list):
                jitted.add(node.name)
            # kernel[grid](...), and kernel = one if ... else other before it.
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                launched.add(ast.unparse(node.func.value))
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.IfExp):
                launched.update(ast.unparse(choice) for choice in (node.value.body, node.value.orelse))
    named = {name for name in jitted if name.startswith(tuple(f"staticmoe_{phase}_" for phase in phases.DevicePhase))}
    assert len(named) > 20
    # What a kernel calls is inlined into it and shows in no profile.
    assert named == jitted & launched
