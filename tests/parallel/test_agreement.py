"""Ranks that differ, or of which one fails: an error on all of them, naming what, and no hang."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from staticmoe import RunnerConfig, StaticMoE, StaticMoEError, StaticMoERunner
from staticmoe.parallel import agreement
from staticmoe.parallel.replicas import _buckets
from staticmoe.tune import Arrivals, read_run

FACTOR = 1.5


class Model(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(8, 8), StaticMoE(8, width, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.first(x))


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


def differ(what: str) -> str:
    """The error of a runner of which rank 1 is given something else than rank 0."""
    other = dist.get_rank() == 1
    torch.manual_seed(0)
    model = Model(width=12 if other and what == "width" else 8)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(
        model.parameters(), lr=2e-3 if other and what == "lr" else 1e-3
    )
    batch: Any = {"x": torch.ones(5 if other and what == "shape" else 4, 8)}
    config = RunnerConfig(max_grad_norm=2.0 if other and what == "option" else 1.0)
    if other and what == "value":
        model.layer.experts.down_proj.data[3, 2, 1] += 1e-7
        model.first.bias.data.zero_()
    if other and what == "failure":
        batch = {"x": "a text"}
    if other and what == "optimizer":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if other and what == "state":
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    group = None if what == "no group" else dist.group.WORLD
    try:
        with StaticMoERunner(
            model, optimizer, example_batch=batch, loss_fn=loss_fn, config=config, process_group=group
        ) as runner:
            runner.step(batch)
    except StaticMoEError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("shape", ["ReplicaError", "example_batch", "(4, 8)", "(5, 8)", "rank 1"]),
        ("option", ["ReplicaError", "max_grad_norm", "1.0 on rank 0", "2.0 on rank 1"]),
        ("width", ["ReplicaError", "layer.experts", "rank 1"]),
        ("lr", ["ReplicaError", "lr of optimizer group 0", "0.002"]),
        ("optimizer", ["ReplicaError", "AdamW on rank 0", "SGD on rank 1"]),
        ("value", ["ReplicaError", "rank 1", "first in first.bias"]),
        ("state", ["ReplicaError", "optimizer state"]),
        ("no group", ["ConfigError", "process_group", "group.WORLD"]),
    ],
)
def test_ranks_that_differ_are_refused_on_both(on_ranks: Callable[..., list[Any]], what: str, words: list[str]) -> None:
    for message in on_ranks("differ", what=what):
        assert all(word in message for word in words), message


def test_a_failure_on_one_rank_is_an_error_on_both(on_ranks: Callable[..., list[Any]]) -> None:
    first, second = on_ranks("differ", what="failure")
    assert "ReplicaError" in first and "rank 1: BatchError" in first and "a text" in first
    assert second.startswith("BatchError: batch['x']")


def alike() -> str:
    return differ("nothing")


def test_ranks_that_are_alike_are_not_refused(on_ranks: Callable[..., list[Any]]) -> None:
    assert on_ranks("alike") == ["", ""]


def alone_in_a_capture() -> tuple[str, float]:
    """Rank 0 captures again and rank 1 does not."""
    torch.manual_seed(0)
    model, batch = Model(), {"x": torch.ones(4, 8)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runner = StaticMoERunner(model, optimizer, example_batch=batch, loss_fn=loss_fn, process_group=dist.group.WORLD)
    runner.step(batch)
    runner.synchronize()
    start, message = time.monotonic(), ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "PATIENCE", datetime.timedelta(seconds=2))
        if dist.get_rank() == 0:
            try:
                runner.set_capacity_factor(1.5)
            except StaticMoEError as error:
                message = f"{type(error).__name__}: {error}"
    waited = time.monotonic() - start
    dist.barrier()
    return message, waited


def test_a_rank_that_is_alone_in_a_capture_is_told_so(on_ranks: Callable[..., list[Any]]) -> None:
    (message, waited), _ = on_ranks("alone_in_a_capture")
    assert "ReplicaError" in message and "every rank" in message and "1" in message
    assert waited < 20


def files(folder: str, all_write: bool) -> tuple[list[str], list[bool]]:
    """What a rank writes, and which steps ran again."""
    torch.manual_seed(0)
    model, rank = Model(), dist.get_rank()
    batches = [{"x": x} for x in torch.randn(2, 12, 32, 8)[rank]]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = RunnerConfig(
        run_dir=folder, rank_files=all_write, experts_every=1, capture="off",
        capacity_factor=FACTOR, capacity_scope="expert", max_rerun_fraction=1.0,
    )  # fmt: skip
    with StaticMoERunner(
        model, optimizer, example_batch=batches[0], loss_fn=loss_fn, config=config, process_group=dist.group.WORLD
    ) as runner:
        results = [runner.step(batch) for batch in batches]
    path = Path(folder) / (f"rank{rank}" if rank else "") / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else [], [result.attempt > 0 for result in results]


@pytest.mark.parametrize("all_write", [False, True])
def test_ranks_with_one_folder_keep_their_files_apart(
    on_ranks: Callable[..., list[Any]], tmp_path: Path, all_write: bool
) -> None:
    """And where all write, their loads tell which steps of the run were run again; those of one rank do not."""
    (first, again), (second, also) = on_ranks("files", folder=str(tmp_path), all_write=all_write)
    found = [sum('"kind": "train"' in line for line in lines) for lines in (first, second)]
    assert found == ([12, 12] if all_write else [12, 0])
    loads = read_run(tmp_path)
    outcome = Arrivals(loads, "expert").at(FACTOR)
    assert again == also and 0 < sum(again) < 12
    assert (outcome.overflowed.tolist() == again) == all_write == (not loads.notes)


def test_buckets_keep_dtypes_apart_and_a_bound() -> None:
    """Small ones of one dtype travel together, in order; one that is larger than the bound travels alone."""
    meta = {"device": "meta"}
    sizes = [
        (3, torch.float32),
        (1 << 25, torch.bfloat16),
        (5, torch.bfloat16),
        (7, torch.float32),
        (9, torch.bfloat16),
    ]
    tensors = [torch.empty(size, dtype=dtype, **meta) for size, dtype in sizes]
    assert _buckets(tensors) == [[0, 3], [1], [2, 4]]
    assert _buckets([torch.empty(1 << 26, **meta)] * 2) == [[0], [1]]
