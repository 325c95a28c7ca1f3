"""`overflow="rerun"`: a step whose rows do not fit is run again where they do, and nothing is lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from staticmoe import CapacityError, MicroBatches, NonFiniteError, RunnerConfig, StaticMoE, StaticMoERunner

STEPS = 60


class Model(nn.Module):
    """Two layers, dropout, batch statistics and a balancing bias: whatever a void attempt could have left behind."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(32, 16), nn.BatchNorm1d(16)
        self.first = StaticMoE(16, 24, 4, 2, balancing_bias_rate=1e-2, router_aux_loss_coef=0.01)
        self.second = StaticMoE(16, 24, 4, 1, norm_topk_prob=False)
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.embedding(x).flatten(0, 1))
        h = h + self.dropout(self.first(h))
        return self.head(h + self.second(h))


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), (batch["x"].flatten() * 3 + 1) % 32)


def skewed(step: int) -> bool:
    """The first step, the last, every seventh, and four in a row."""
    return step in (0, STEPS - 1) or step % 7 == 3 or 30 <= step < 34


def batch_of(step: int, micro: int = 0, *, device: str = "cpu") -> dict[str, Tensor]:
    """One token over and over where the step is skewed: every assignment of it goes to the same experts."""
    generator = torch.Generator().manual_seed(100 * step + micro)
    x = torch.randint(32, (4, 8), generator=generator)
    if skewed(step):
        x[:, 2:] = step % 32
    return {"x": x.to(device)}


def train(capture: str, *, micro: int = 1, every: int = 0, **options: Any) -> dict[str, Any]:
    """Sixty steps; `every`: take state dicts in between and go on from them."""
    device = "cuda" if capture == "cuda" else "cpu"
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.05 * step))

    def step_input(step: int) -> Any:
        if micro == 1:
            return batch_of(step, device=device)
        return MicroBatches([batch_of(step, number, device=device) for number in range(micro)])

    config = RunnerConfig(
        capture=capture, max_grad_norm=1.0, gradient_accumulation_steps=micro, max_rerun_fraction=1.0, **options
    )
    with StaticMoERunner(model, optimizer, example_batch=step_input(1), loss_fn=loss_fn, config=config) as runner:
        results = []
        for step in range(STEPS):
            results.append(runner.step(step_input(step)))
            schedule.step()
            if every and step % every == 0:
                model.load_state_dict(copy.deepcopy(model.state_dict()))
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return {
            "attempts": [result.attempt for result in results],
            "losses": [(result.loss, result.grad_norm, result.metrics, result.skipped) for result in results],
            "loads": [[(load.routed, load.kept) for load in result.moe.values()] for result in results],
            "model": copy.deepcopy(model.state_dict()),
            "optimizer": copy.deepcopy(optimizer.state_dict()["state"]),
            "totals": runner.telemetry(),
        }


NARROW = {"capacity_factor": 1.6, "capacity_scope": "expert"}


@pytest.mark.parametrize(
    ("options", "how"),
    [
        (NARROW, {}),
        (NARROW, {"max_in_flight": 1}),
        (NARROW, {"max_in_flight": 4}),
        (NARROW, {"micro": 2}),
        (NARROW, {"every": 5}),
        ({"capacity_factor": 0.9, "capacity_scope": "rank"}, {}),
    ],
    ids=["two in flight", "one in flight", "four in flight", "accumulation", "state dicts between", "every step"],
)
def test_the_trajectory_is_that_of_the_wide_variant(
    captured: str, assert_same: Callable[[Any, Any], None], options: dict[str, Any], how: dict[str, Any]
) -> None:
    """Losses, norms, counts, parameters, buffers and optimizer state are bitwise those without any bound."""
    narrow = train(captured, **options, **how)
    wide = train(captured, **{key: value for key, value in how.items() if key != "max_in_flight"})
    for what in ("losses", "loads", "model", "optimizer"):
        assert_same(narrow[what], wide[what])
    assert all(routed == kept for step in narrow["loads"] for routed, kept in step), "nothing was dropped"
    again = [step for step, attempt in enumerate(narrow["attempts"]) if attempt]
    assert narrow["totals"]["reruns"] == len(again) and narrow["totals"]["committed"] == STEPS
    if options is NARROW:
        assert {step for step in range(STEPS) if skewed(step)} <= set(again), "the skewed steps overflow"
        assert len(again) < STEPS, "and others fit"
    else:
        assert len(again) == STEPS
    assert sum(wide["attempts"]) == 0


def test_uncaptured_runs_rerun_too(assert_same: Callable[[Any, Any], None]) -> None:
    """The same recovery without any graph."""
    one, other = train("off", **NARROW), train("emulate", **NARROW)
    for what in ("attempts", "losses", "loads", "model", "optimizer"):
        assert_same(one[what], other[what])


def test_a_rerun_that_is_not_finite_is_skipped() -> None:
    """The overflow hides what the narrow attempt computed; the wide one is judged like any step."""
    torch.manual_seed(0)
    model = Model()

    def spoiled(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return loss_fn(model, batch) * batch["s"]

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    example = {**batch_of(1), "s": torch.ones(())}
    with StaticMoERunner(model, optimizer, example_batch=example, loss_fn=spoiled, config=RunnerConfig(**NARROW)) as r:
        r.synchronize()
        before = copy.deepcopy(model.state_dict())
        result = r.step({**batch_of(0), "s": torch.tensor(float("nan"))})
        assert result.attempt == 1 and result.skipped
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert not r.step({**batch_of(0), "s": torch.ones(())}).skipped


def test_a_rerun_that_halts_says_so_and_not_that_there_were_many() -> None:
    """Fifty reruns and then a value that is not finite under nonfinite="raise": that step was not applied."""
    torch.manual_seed(0)
    model = Model()

    def spoiled(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return loss_fn(model, batch) * batch["s"]

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    one = torch.ones(())
    # The last step is the one over the limit as well: 0.99 * 51 < 51.
    config = RunnerConfig(**NARROW, nonfinite="raise", max_rerun_fraction=0.99)
    example = {**batch_of(1), "s": one}
    with StaticMoERunner(model, optimizer, example_batch=example, loss_fn=spoiled, config=config) as runner:
        for _ in range(49):
            runner.step({**batch_of(0), "s": one})
        runner.flush()
        with pytest.raises(NonFiniteError, match="was not applied"):
            runner.step({**batch_of(0), "s": torch.tensor(float("nan"))})
            runner.step({**batch_of(0), "s": one})
            runner.flush()
        before = runner.telemetry()["committed"]
        assert not runner.step({**batch_of(1), "s": one}).skipped, "usable afterwards"
        assert runner.telemetry()["committed"] == before + 1


def test_too_many_reruns_are_an_error_with_the_factor_that_would_do() -> None:
    """Every step is applied all the same; the error says what it costs."""
    torch.manual_seed(0)
    model = Model()
    config = RunnerConfig(**NARROW, max_rerun_fraction=0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with StaticMoERunner(model, optimizer, example_batch=batch_of(1), loss_fn=loss_fn, config=config) as runner:
        with pytest.raises(CapacityError, match=r"max_rerun_fraction=0\.2.*capacity_factor=(3|4|2)") as caught:
            for _ in range(60):
                runner.step(batch_of(0))
        assert "none was lost" in str(caught.value)
        committed = runner.telemetry()["committed"]
        assert committed >= 50
        assert runner.step(batch_of(0)).attempt == 1, "usable afterwards"
