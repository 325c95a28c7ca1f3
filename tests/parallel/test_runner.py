"""A runner on two ranks: their steps are one step, whatever happens on one of them alone."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from staticmoe import MicroBatches, Reason, RunnerConfig, StaticMoE, StaticMoEError, StaticMoERunner

STEPS = 28
NARROW = {"capacity_factor": 2.6, "capacity_scope": "expert"}
# Of the time that it takes to build a runner, audit and self-check are more than half.
UNCHECKED = {"audit": "off", "self_check": False}


class Model(nn.Module):
    """Two layers, dropout and a balancing bias: what a rank could come to hold otherwise than the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.first = StaticMoE(16, 24, 4, 2, balancing_bias_rate=1e-2, router_aux_loss_coef=0.01)
        self.second = StaticMoE(16, 24, 4, 1, norm_topk_prob=False)
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x).flatten(0, 1)
        h = h + self.dropout(self.first(h))
        return self.head(h + self.second(h))


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    labels = batch["labels"].flatten()
    losses = F.cross_entropy(model(batch["x"]), labels, reduction="sum") * batch.get("scale", 1.0)
    return losses / (labels != -100).sum().clamp(min=1), {"largest": labels.max().float()}


def skewed(step: int) -> bool:
    """The first step, the last, every seventh, and four in a row."""
    return step in (0, STEPS - 1) or step % 7 == 3 or 18 <= step < 22


def batch_of(step: int, rank: int, micro: int = 0, *, skew: bool = True) -> dict[str, Tensor]:
    """On rank 0 one token over and over where the step is skewed, so that all of it goes to the same experts."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    x = torch.randint(32, (4, 8), generator=generator)
    if skew and rank == 0 and skewed(step):
        x[:, 2:] = step % 32
    labels = (x * 3 + 1) % 32
    # Ranks differ in how many labels count.
    labels[:, : 1 + 4 * rank] = -100
    return {"x": x, "labels": labels}


def build(*, sgd: bool = False) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    if sgd:
        return model, torch.optim.SGD(model.parameters(), lr=0.1)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def left(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": copy.deepcopy(model.state_dict()), "optimizer": copy.deepcopy(optimizer.state_dict()["state"])}


def train(
    micro: int = 1, read: bool = False, late: bool = False, checked: bool = False, **options: Any
) -> dict[str, Any]:
    """28 steps.

    `read`: rank 0 alone reads each result, or saves; at times all meet; `late`: rank 1 comes seconds late.
    """
    rank, (model, optimizer) = dist.get_rank(), build()
    options = options if checked else UNCHECKED | options
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.05 * step))
    config = RunnerConfig(
        max_grad_norm=1.0, gradient_accumulation_steps=micro, max_rerun_fraction=1.0, capture_warmup_iters=1, **options
    )

    def given(step: int) -> Any:
        batches = MicroBatches([batch_of(step, rank, number) for number in range(micro)])
        return batches if micro > 1 else batches[0]

    if late and rank == 1:
        time.sleep(2)
    with StaticMoERunner(
        model, optimizer, example_batch=given(1), loss_fn=loss_fn, config=config, process_group=dist.group.WORLD
    ) as runner:
        results = []
        for step in range(STEPS):
            if late and rank == 1 and step in (3, 10, 19):
                time.sleep(1)
            results.append(runner.step(given(step)))
            schedule.step()
            if read and rank == 0:
                float(results[-1].loss) if step % 3 else model.state_dict()
            if read and step % 5 == 0:
                runner.synchronize()
                dist.barrier()
        runner.synchronize()
        totals = runner.telemetry()
        return {
            **left(model, optimizer),
            "attempts": [result.attempt for result in results],
            "losses": [(r.loss, r.grad_norm, r.metrics, r.skipped, r.reasons) for r in results],
            "loads": [[(load.routed, load.kept) for load in result.moe.values()] for result in results],
            "committed": totals["committed"],
        }


def same(one: Any, other: Any) -> bool:
    """Bitwise equality of nested results; NaN equals NaN."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (one != one and other != other)


JOINT = ("model", "optimizer", "losses", "attempts", "committed")


def agree(runs: list[dict[str, Any]], what: tuple[str, ...] = JOINT) -> list[str]:
    """What two ranks differ in of what must be the same."""
    return [key for key in what if not same(runs[0][key], runs[1][key])]


@pytest.mark.parametrize(
    "options",
    [
        NARROW | {"checked": True},
        NARROW | {"micro": 2},
        NARROW | {"max_in_flight": 1, "read": True},
        NARROW | {"max_in_flight": 3, "read": True},
        NARROW | {"max_in_flight": 4, "late": True},
        NARROW | {"capacity_ladder": (2.8, 3.0, 3.6)},
        NARROW | {"capacity_ladder": (2.8, 3.0, 3.6), "capacity_forecast": True, "read": True},
        NARROW | {"capture": "off"},
    ],
    ids=[
        "plain",
        "accumulation",
        "one rank reads, one in flight",
        "one rank reads, three in flight",
        "one rank is late",
        "ladder",
        "forecast",
        "uncaptured",
    ],
)
def test_an_overflow_on_one_rank_runs_both_again_and_loses_nothing(
    on_ranks: Callable[..., list[Any]], once_on_ranks: Callable[..., list[Any]], options: dict[str, Any]
) -> None:
    """Rank 0 overflows in the skewed steps, and rank 1 has no such: bitwise the dropless run of the two."""
    narrow = on_ranks("train", **options)
    wide = once_on_ranks("train", micro=options.get("micro", 1))
    assert agree(narrow) == agree(wide) == []
    for one, other in zip(narrow, wide, strict=True):
        assert not agree([one, other], ("model", "optimizer", "loads"))
        assert same([loss[:4] for loss in one["losses"]], [loss[:4] for loss in other["losses"]])
    again = {step for step, attempt in enumerate(narrow[0]["attempts"]) if attempt}
    assert len(again) < STEPS and narrow[0]["committed"] == STEPS and sum(wide[0]["attempts"]) == 0
    if "capacity_forecast" not in options:
        assert {step for step in range(STEPS) if skewed(step)} <= again, "skewed steps overflow"
    assert agree(narrow, ("loads",)) != [], "each rank's counts are its own"


def few(steps: int = 6, poisoned: int | None = None, capture: str = "auto", **options: Any) -> dict[str, Any]:
    """A few steps of which rank 0's is spoiled, and a seventh after an error; says what came of each."""
    rank, (model, optimizer) = dist.get_rank(), build()
    config = RunnerConfig(capture=capture, **UNCHECKED, **options)
    example = {**batch_of(1, rank), "scale": torch.ones(())}
    runner = StaticMoERunner(
        model, optimizer, example_batch=example, loss_fn=loss_fn, config=config, process_group=dist.group.WORLD
    )
    found, errors = [], []
    for step in range(steps):
        bad = float("nan") if rank == 0 and step == poisoned else 1.0
        try:
            found.append(runner.step({**batch_of(step, rank), "scale": torch.tensor(bad)}))
            runner.flush()
        except StaticMoEError as error:
            errors.append((step, type(error).__name__, str(error)))
    with runner:
        return {
            **left(model, optimizer),
            "skipped": [result.skipped for result in found],
            "reasons": [result.reasons for result in found],
            "dropped": [sum(sum(load.dropped) for load in result.moe.values()) for result in found],
            "errors": errors,
        }


FEW = ("model", "optimizer", "skipped", "reasons")


def test_a_value_that_is_not_finite_on_one_rank_vetoes_both(on_ranks: Callable[..., list[Any]]) -> None:
    runs = on_ranks("few", poisoned=2)
    assert not agree(runs, FEW)
    assert runs[1]["skipped"] == [step == 2 for step in range(6)]
    assert runs[1]["reasons"][2] & Reason.NONFINITE_LOSS and runs[1]["errors"] == []
    assert all(value.isfinite().all() for value in runs[1]["model"].values())


def test_a_value_that_is_not_finite_stops_both(on_ranks: Callable[..., list[Any]]) -> None:
    runs = on_ranks("few", poisoned=2, nonfinite="raise")
    assert not agree(runs, ("model", "optimizer"))
    for run in runs:
        assert [(step, name) for step, name, _ in run["errors"]] == [(2, "NonFiniteError")]


@pytest.mark.parametrize("overflow", ["skip", "drop", "raise"])
def test_an_overflow_on_one_rank_meets_its_policy_on_both(on_ranks: Callable[..., list[Any]], overflow: str) -> None:
    runs = on_ranks("few", overflow=overflow, **NARROW)
    assert not agree(runs, FEW)
    assert sum(runs[0]["dropped"]) > sum(runs[1]["dropped"]) == 0, "rank 0 overflows alone"
    for run in runs:
        assert run["reasons"][0] == Reason.CAPACITY_OVERFLOW and not run["reasons"][1]
        assert run["skipped"] == [overflow != "drop" and bool(reason) for reason in run["reasons"]]
        assert bool(run["errors"]) == (overflow == "raise")
    if overflow == "raise":
        assert [error[:2] for error in runs[0]["errors"]] == [error[:2] for error in runs[1]["errors"]]
        assert "kept 27 of 32" in runs[0]["errors"][0][2] and "on another rank" in runs[1]["errors"][0][2]


def plain(reduction: str, micro: int, steps: int) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Some steps of plain SGD; on two ranks, and on rank 0 alone with the batches of both."""
    group = dist.new_subgroups(1)[0]
    joint = plain_steps(reduction, micro, steps, dist.group.WORLD)
    return joint, plain_steps(reduction, micro, steps, group) if dist.get_rank() == 0 else None


def plain_steps(reduction: str, micro: int, steps: int, group: dist.ProcessGroup) -> dict[str, Any]:
    joint = group is dist.group.WORLD
    rank, (model, optimizer) = dist.get_rank(), build(sgd=True)
    model.dropout.p = 0.0

    def given(step: int) -> MicroBatches:
        ranks = [rank] if joint else range(2)
        return MicroBatches([batch_of(step, one, number) for one in ranks for number in range(micro)])

    config = RunnerConfig(
        gradient_accumulation_steps=micro * (1 if joint else 2),
        loss_reduction=reduction,
        max_grad_norm=0.5,
        **UNCHECKED,
    )
    with StaticMoERunner(
        model, optimizer, example_batch=given(0), loss_fn=loss_fn, config=config, process_group=group
    ) as runner:
        results = [runner.step(given(step)) for step in range(steps)]
        evaluated = [runner.evaluate(batch_of(50, rank if joint else one)).loss for one in ([0] if joint else [0, 1])]
        return {
            "losses": [[r.loss, r.grad_norm, *r.metrics.values()] for r in results],
            "model": copy.deepcopy(model.state_dict()),
            "evaluated": evaluated,
        }


@pytest.mark.parametrize(("reduction", "micro"), [("mean", 1), ("mean", 2), ("sum", 1), ("tokens", 2)])
def test_two_ranks_do_what_one_does_with_the_micro_batches_of_both(
    on_ranks: Callable[..., list[Any]], reduction: str, micro: int
) -> None:
    """Loss, norm, metrics, parameters and balancing bias agree to fp32 rounding; so do labels counted over ranks."""
    (one, alone), (other, _) = on_ranks("plain", reduction=reduction, micro=micro, steps=8)
    assert not agree([one, other], ("model", "losses", "evaluated"))
    torch.testing.assert_close(torch.tensor(one["losses"]), torch.tensor(alone["losses"]), rtol=1e-5, atol=1e-6)
    for name, value in one["model"].items():
        torch.testing.assert_close(value, alone["model"][name], rtol=1e-4, atol=1e-6, msg=name)
    first, second = alone["evaluated"]
    expected = {"mean": (first + second) / 2, "sum": first + second, "tokens": (first * 28 + second * 12) / 40}
    assert one["evaluated"][0] == pytest.approx(expected[reduction], rel=1e-6)


def concatenated() -> list[dict[str, Tensor]]:
    """On two ranks, and on rank 0 alone."""
    alone = dist.new_subgroups(1)[0]
    return [concatenated_on(group) for group in ([dist.group.WORLD] if dist.get_rank() else [dist.group.WORLD, alone])]


def concatenated_on(group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Without what is a mean over tokens of its own: one batch of both ranks' tokens is the mean of the two."""
    rank, (model, optimizer), joint = dist.get_rank(), build(sgd=True), group is dist.group.WORLD
    model.dropout.p, model.first.router_aux_loss_coef = 0.0, 0.0

    def given(step: int) -> dict[str, Tensor]:
        both = [batch_of(step, one)["x"] for one in range(2)]
        return {"x": both[rank] if joint else torch.cat(both)}

    def mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]), (batch["x"].flatten() * 3 + 1) % 32)

    config = RunnerConfig(**UNCHECKED)
    with StaticMoERunner(
        model, optimizer, example_batch=given(0), loss_fn=mean, config=config, process_group=group
    ) as runner:
        for step in range(10):
            runner.step(given(step))
        return copy.deepcopy(model.state_dict())


def test_two_ranks_do_what_one_does_with_both_batches_in_one(on_ranks: Callable[..., list[Any]]) -> None:
    """No gradient is off by the number of ranks."""
    joint, alone = on_ranks("concatenated")[0]
    for name, value in joint.items():
        torch.testing.assert_close(value, alone[name], rtol=1e-4, atol=1e-6, msg=name)


def everything() -> dict[str, Any]:
    """The calls that all ranks must make, in one run."""
    rank, (model, optimizer) = dist.get_rank(), build()
    config = RunnerConfig(**NARROW, **UNCHECKED, max_rerun_fraction=1.0, recheck_every=4)
    with StaticMoERunner(
        model, optimizer, example_batch=batch_of(1, rank), loss_fn=loss_fn, config=config,
        process_group=dist.group.WORLD,
    ) as runner:  # fmt: skip
        results = [runner.step(batch_of(step, rank)) for step in range(4)]
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), runner.state_dict()))
        random_state = torch.get_rng_state()
        later = [runner.step(batch_of(step, rank)).loss for step in range(4, 8)]
        runner.synchronize()
        losses = [runner.evaluate(batch_of(20, rank)).loss]
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        runner.load_state_dict(saved[2])
        torch.set_rng_state(random_state)
        again = [runner.step(batch_of(step, rank)).loss for step in range(4, 8)]
        runner.recapture()
        runner.set_capacity_factor(None)
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.5
        losses += [runner.step(batch_of(step, rank)).loss for step in range(8, 11)]
        memory = runner.memory().forecast
        return {
            **left(model, optimizer),
            "losses": [*losses, *(result.loss for result in results)],
            "repeated": (later, again),
            "gradients": None if memory is None else memory.variants[0].gradients,
        }


def test_checkpoints_evaluations_and_recaptures(on_ranks: Callable[..., list[Any]]) -> None:
    runs = on_ranks("everything")
    assert not agree(runs, ("model", "optimizer", "losses"))
    later, again = runs[0]["repeated"]
    assert later == again, "from a checkpoint the run goes on as it had"
    assert runs[0]["gradients"], "the rehearsal knows what ranks exchange"


def read_before_a_barrier() -> list[float]:
    """Rank 0 reads each result before it comes to the barrier where rank 1 waits."""
    rank, (model, optimizer) = dist.get_rank(), build()
    with StaticMoERunner(
        model, optimizer, example_batch=batch_of(1, rank), loss_fn=loss_fn, process_group=dist.group.WORLD
    ) as runner:
        results = []
        for step in range(4):
            results.append(runner.step(batch_of(step, rank)))
            if rank == 0:
                float(results[-1].loss)
            dist.barrier()
        return [result.loss for result in results]


def test_a_step_goes_on_while_its_rank_waits_for_the_other(on_ranks: Callable[..., list[Any]]) -> None:
    """As on a GPU: launched is launched, whatever the host does behind it."""
    first, second = on_ranks("read_before_a_barrier")
    assert first == second


def outlived() -> bool:
    """A runner that nobody closes, whose group is destroyed under it."""
    rank, (model, optimizer) = dist.get_rank(), build()
    runner = StaticMoERunner(
        model, optimizer, example_batch=batch_of(1, rank), loss_fn=loss_fn, process_group=dist.group.WORLD
    )
    for step in range(3):
        runner.step(batch_of(step, rank))
    dist.destroy_process_group()
    # For as long as the process lives.
    StaticMoERunner.kept = runner  # type: ignore[attr-defined]
    return True


def test_a_process_ends_with_a_live_runner_and_its_group_destroyed(
    on_ranks: Callable[..., list[Any]], leave: Callable[[], list[int]]
) -> None:
    assert on_ranks("outlived") == [True, True]
    assert leave() == [0, 0]
