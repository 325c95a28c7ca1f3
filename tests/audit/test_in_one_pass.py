"""One pass names every fault of a model with all of them, and none of a model with all their mended twins."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from staticmoe import RunnerConfig, StaticMoERunner
from staticmoe.audit import audit
from staticmoe.errors import AuditError

# The pass ends with these, or they change what comes after them.
ALONE = {"Resized", "sparse", "broken", "Reentrant", "Autocast", "seeded", "Restored", "FloatKeyBank"}


def blocks(plants: list[Any]) -> list[Any]:
    return [plant for plant in plants if plant.module == "block" and plant.file and plant.name not in ALONE]


def expected(chosen: list[Any]) -> set[tuple[str, str, str, int]]:
    return {(plant.code, f"block.each.{plant.faulty.__name__}_block", plant.file, plant.line) for plant in chosen}


def test_all_faults_of_a_model_are_named_in_one_pass(plants: list[Any], several: Callable[[Any], Any]) -> None:
    chosen = blocks(plants)
    assert len(chosen) >= 40
    report = audit(several([plant.faulty for plant in chosen]))
    found = {(f.code, f.source.module, f.source.file, f.source.line) for f in report.findings}
    assert found == expected(chosen)
    severities = [finding.severity for finding in report.findings]
    assert severities == sorted(severities, key=("error", "warning", "note").index)


def test_the_mended_twins_together_are_clean(plants: list[Any], several: Callable[[Any], Any]) -> None:
    twins = [plant.mended for plant in plants if plant.module == "block" and plant.file and plant.name != "Autocast"]
    assert [str(finding) for finding in audit(several(twins)).findings] == []


def test_the_runner_refuses_with_all_of_them(plants: list[Any], several: Callable[[Any], Any]) -> None:
    """One error, which the footgun suite knows as CaptureError, shows twenty of them and holds all."""
    # A warning, and what only an audit watches, or compiles where a capture is emulated.
    chosen = [plant for plant in blocks(plants) if plant.name not in ("Hooked", "Aliased", "given_up")]
    with pytest.raises(AuditError) as caught:
        StaticMoERunner(**several([plant.faulty for plant in chosen]))
    found = {(f.code, f.source.module, f.source.file, f.source.line) for f in caught.value.findings}
    assert found == expected(chosen)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"{len(chosen)} things") and len(lines) == 22
    assert lines[-1].startswith(f"  and {len(chosen) - 20} more")


def test_an_error_behind_findings_is_listed_with_them(several: Callable[[Any], Any]) -> None:
    def reads(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()

    def breaks(x: torch.Tensor) -> torch.Tensor:
        return x @ torch.ones(3, 3)

    with pytest.raises(AuditError) as caught:
        StaticMoERunner(**several([reads, breaks]))
    assert [(f.code, f.source.module) for f in caught.value.findings] == [
        ("SM101", "block.each.reads_block"),
        ("SM901", "block.each.breaks_block"),
    ]
    assert isinstance(caught.value.__cause__, RuntimeError)
    # Alone it comes out as it is.
    with pytest.raises(RuntimeError, match="cannot be multiplied") as alone:
        StaticMoERunner(**several([breaks]))
    assert not isinstance(alone.value, AuditError)


class Looked(nn.Module):
    """A table whose gradient is sparse: the fault is in an operation of the backward, which has no line."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(x.argmax(1), self.table, sparse=True)


def test_a_fault_of_the_backward_names_its_node_and_no_line_of_a_stranger(given: Callable[[Any], Any]) -> None:
    (finding,) = audit(given(Looked)).findings
    assert (finding.code, finding.source.node) == ("SM502", "EmbeddingBackward0")
    assert (finding.source.file, finding.source.line, finding.source.text) == ("", 0, "")
    # The runner's own error names the line that builds it.
    with pytest.raises(AuditError, match=r"test_in_one_pass.*in the backward of EmbeddingBackward0"):
        StaticMoERunner(**given(Looked))


def test_warnings_are_logged_once_and_do_not_stop(
    several: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    def reads(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()

    given = several([reads])
    with caplog.at_level(logging.WARNING), StaticMoERunner(**given, config=RunnerConfig(audit="warn")) as runner:
        runner.step(given["example_batch"])
    assert sum("[SM101]" in record.getMessage() for record in caplog.records) == 1
    caplog.clear()
    with caplog.at_level(logging.WARNING), StaticMoERunner(**several([reads]), config=RunnerConfig(audit="off")):
        pass
    assert "SM101" not in caplog.text


def test_a_kept_result_in_a_list_is_a_warning(
    plants: list[Any], given: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    (hooked,) = [plant for plant in plants if plant.name == "Hooked"]
    assert [finding.severity for finding in audit(given(hooked.faulty)).findings] == ["warning"]
    with caplog.at_level(logging.WARNING), StaticMoERunner(**given(hooked.faulty)):
        pass
    assert sum("[SM303]" in record.getMessage() for record in caplog.records) == 1


def test_what_runs_outside_of_the_recording_is_not_judged(given: Callable[[Any], Any]) -> None:
    """As our adapters of foreign models do, to compare constants; the same comparison inside is a fault."""
    table = torch.arange(8.0)

    def compares(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if torch.allclose(table, table + 1) else x

    def compares_outside(x: torch.Tensor) -> torch.Tensor:
        with _disable_current_modes():
            same = torch.allclose(table, table + 1)
        return x * 2 if same else x

    assert [finding.code for finding in audit(given(compares)).findings] == ["SM109"]
    assert audit(given(compares_outside)).findings == ()
