"""One rank does what the other does not: both hear of it, in words, and neither waits for ever."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from staticmoe import ReplicaError, RunnerConfig, StaticMoE, StaticMoERunner
from staticmoe.capture.cuda_graph import CudaStream
from staticmoe.parallel import agreement
from staticmoe.parallel.replicas import Replicas
from staticmoe.runner.alike import wait_for

# With a rank that does not come; the other one has nothing to do meanwhile that could take longer.
SHORT = datetime.timedelta(seconds=1)
BATCH = {"x": torch.ones(4, 8)}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.scale = nn.Linear(8, 8), StaticMoE(8, 8, 4, 2), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.first(x)) * self.scale


def plain(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


def with_a_metric(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    loss = plain(model, batch)
    return loss, {"twice": loss * 2}


def with_a_host_read(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss = plain(model, batch)
    float(loss.detach())
    return loss


def that_raises(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    plain(model, batch)
    raise KeyError("no such column")


def build(loss_fn: Callable[..., Any] = plain, eval_fn: Callable[..., Any] = plain, **options: Any) -> StaticMoERunner:
    torch.manual_seed(0)
    model = Model()
    return StaticMoERunner(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        example_batch=BATCH,
        loss_fn=loss_fn,
        eval_fn=eval_fn,
        config=RunnerConfig(capture_warmup_iters=1, **options),
        process_group=dist.group.WORLD,
    )


def told(work: Callable[[], Any]) -> str:
    """The error of `work`."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def differ(name: str, capture: str, training: bool) -> str:
    """Rank 1 has another loss function, for its steps or for its evaluations."""
    other = globals()[name] if dist.get_rank() == 1 else plain
    if training:
        return told(lambda: build(other, capture=capture))
    with build(eval_fn=other, capture=capture) as runner:
        return told(lambda: runner.evaluate(BATCH))


@pytest.mark.parametrize(
    ("name", "capture", "training", "first", "second"),
    [
        ("with_a_metric", "emulate", True, "ReplicaError: the first run", "twice, lr on rank 1"),
        ("with_a_metric", "off", False, "ReplicaError: the first run", "got loss on rank 0 and loss, twice on rank 1"),
        ("with_a_host_read", "emulate", True, "an error on rank 1: AuditError", "AuditError: "),
        ("with_a_host_read", "emulate", False, "an error on rank 1: AuditError", "AuditError: "),
        ("that_raises", "off", True, "an error on rank 1: KeyError", "KeyError: 'no such column'"),
        ("that_raises", "emulate", False, "an error on rank 1: KeyError", "KeyError: 'no such column'"),
    ],
)
def test_a_loss_function_that_one_rank_has_otherwise_is_an_error_on_both(
    on_ranks: Callable[..., list[Any]], name: str, capture: str, training: bool, first: str, second: str
) -> None:
    """A metric, a host read, an error of one rank alone: without a word the other would exchange with nobody."""
    messages = on_ranks("differ", name=name, capture=capture, training=training)
    assert "ReplicaError" in messages[0] and first in messages[0] and second in messages[1], messages


def leaves(runner: StaticMoERunner) -> None:
    """Rank 0 has one batch more."""
    if dist.get_rank() == 0:
        float(runner.step(BATCH).loss)


def evaluates(runner: StaticMoERunner) -> None:
    """Rank 0 evaluates, and rank 1 steps."""
    float((runner.step if dist.get_rank() else runner.evaluate)(BATCH).loss)


def changes(runner: StaticMoERunner) -> None:
    """Rank 0 finds changed what its graph holds."""
    if dist.get_rank() == 0:
        runner._parts._model.scale = 2.0  # type: ignore[assignment]
    float(runner.step(BATCH).loss)


def builds(runner: StaticMoERunner) -> None:
    """Rank 1 captures again where rank 0 evaluates: each finds the other, at something else."""
    if dist.get_rank() == 1:
        runner.recapture()
    evaluates(runner)


def strays(what: str) -> str:
    runner = build()
    for _ in range(2):
        runner.step(BATCH)
    float(runner.evaluate(BATCH).loss)
    runner.synchronize()
    dist.barrier()
    if what == "builds":
        # Both come, the one as late as its machine is busy.
        return told(lambda: builds(runner))
    dist.distributed_c10d._set_pg_timeout(SHORT, dist.group.WORLD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "PATIENCE", SHORT)
        return told(lambda: globals()[what](runner))


EVERY = "expected every rank of the process group"
STEP, MEETING = f"in a replay: {EVERY}", f"{EVERY} within"


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        ("leaves", STEP, ""),
        ("evaluates", f"evaluate: {MEETING}", STEP),
        ("changes", MEETING, STEP),
        (
            "builds",
            "the same call on every rank, got evaluate on rank 0",
            "the memory of the training graphs on rank 1",
        ),
    ],
)
def test_a_rank_that_does_something_alone_is_told_so(
    on_ranks: Callable[..., list[Any]], what: str, first: str, second: str
) -> None:
    messages = on_ranks("strays", what=what)
    for message, words in zip(messages, (first, second), strict=True):
        assert words in message and message.startswith("ReplicaError" if words else ""), messages


def constructs() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "PATIENCE", SHORT)
        return told(build) if dist.get_rank() == 0 else ""


def test_a_rank_that_constructs_a_runner_alone_is_told_so(on_ranks: Callable[..., list[Any]]) -> None:
    first, _ = on_ranks("constructs")
    assert first.startswith("ReplicaError: StaticMoERunner: expected every rank"), first


def drift(value: str) -> list[str]:
    """Rank 1 alone sets a learning rate or loads parameters; the fourth step compares."""
    with build(recheck_every=4) as runner:
        optimizer, model = runner._parts.optimizer, runner._parts._model
        messages = []
        for step in range(1, 5):
            if dist.get_rank() == 1 and step == 3:
                if value == "lr":
                    optimizer.param_groups[0]["lr"] = 0.2
                if value == "parameters":
                    model.load_state_dict({name: entry * 1.5 for name, entry in model.state_dict().items()})
            messages.append(told(lambda: runner.step(BATCH)))
        return messages


@pytest.mark.parametrize("value", ["nothing", "lr", "parameters"])
def test_a_recheck_finds_ranks_that_have_drifted_apart(on_ranks: Callable[..., list[Any]], value: str) -> None:
    for messages in on_ranks("drift", value=value):
        assert messages[:3] == ["", "", ""]
        if value == "nothing":
            assert messages[3] == ""
        else:
            assert messages[3].startswith("ReplicaError: replicas: expected bitwise the same values"), messages


class Never:
    """An event that does not come."""

    def query(self) -> bool:
        return False


class Impatient:
    """What of replicas tells how long to wait."""

    patience = datetime.timedelta(seconds=0.01)


def test_a_replay_on_a_gpu_is_waited_for_as_long_as_a_collective_may_take() -> None:
    """No watchdog of torch's knows of the collectives in a graph."""
    stream: Any = object.__new__(CudaStream)
    stream._events = {1: Never()}
    replicas: Any = Impatient()
    with pytest.raises(ReplicaError, match=r"within the 0.01 s .* every rank must launch the same steps"):
        wait_for(replicas, stream, 1)
    wait_for(replicas, stream, 2)


def patience() -> tuple[float, float]:
    replicas = Replicas.of(dist.new_group(timeout=datetime.timedelta(seconds=123)))
    assert replicas is not None
    replicas.connect(torch.device("cpu"))
    return replicas.patience.total_seconds(), 123.0


def test_it_is_the_timeout_of_the_process_group(on_ranks: Callable[..., list[Any]]) -> None:
    for found, given in on_ranks("patience"):
        assert found == given
