"""Losses and metrics that are memory of something else, by owner and line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from staticmoe.audit import audit


def of_the_batch(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    if not batch:
        return model(**batch), {}
    return model(**batch), {"first": batch["x"][0, 0]}


def of_a_buffer(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    return model(**batch), {"mean": model.block.running_mean[0]}


def computed(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    return model(**batch), {"mean": model.block.running_mean.mean()}


@pytest.mark.parametrize(
    ("loss_fn", "why"),
    [
        (of_the_batch, "first is memory of the batch"),
        (of_a_buffer, "mean is memory of 'block.running_mean' of the model"),
        (computed, ""),
    ],
)
def test_memory_of_something_else_is_named(loss_fn: Any, why: str, built: Callable[..., dict[str, Any]]) -> None:
    """A note, at the last line that returns."""
    report = audit({**built(nn.BatchNorm1d(8)), "loss_fn": loss_fn})
    assert [(one.code, one.severity, one.why) for one in report.findings] == ([("SM304", "note", why)] if why else [])
    assert all(one.source.text.startswith("return model(**batch), {") for one in report.findings)
    assert all(one.source.line > loss_fn.__code__.co_firstlineno + 2 for one in report.findings if why[:5] == "first")


def test_what_is_no_loss_is_left_to_the_runner(built: Callable[..., dict[str, Any]]) -> None:
    report = audit({**built(), "loss_fn": lambda model, batch: (model(**batch), {}, torch.ones(()))})
    assert [one.code for one in report.findings] == ["SM701"] and "unpack" not in report.findings[0].why
