"""`overflow="rerun"`: a step whose rows do not fit is run again where they do, and nothing is lost."""

from __future__ import annotations

import collections
import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from staticmoe import CapacityError, MicroBatches, NonFiniteError, RunnerConfig, StaticMoE, StaticMoERunner
from staticmoe.errors import ClosedError, ConfigError
from staticmoe.runner.ladder import Ladder

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


@functools.cache
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


@functools.cache
def trained_wide(captured: str, **how: Any) -> dict[str, Any]:
    """The same without any bound, which several cases are held against."""
    return train(captured, **how)


NARROW = {"capacity_factor": 1.6, "capacity_scope": "expert"}
LADDER = {"capacity_ladder": (1.9, 2.2, 3.2)}


@pytest.mark.parametrize(
    ("options", "how"),
    [
        (NARROW, {}),
        (NARROW, {"max_in_flight": 1}),
        (NARROW, {"max_in_flight": 4}),
        (NARROW, {"micro": 2}),
        (NARROW, {"every": 5}),
        ({"capacity_factor": 0.9, "capacity_scope": "rank"}, {}),
        (NARROW | LADDER, {}),
        (NARROW | LADDER, {"micro": 2}),
        (NARROW | LADDER | {"capacity_forecast": True}, {}),
    ],
    ids=[
        "two in flight",
        "one in flight",
        "four in flight",
        "accumulation",
        "state dicts between",
        "every step",
        "ladder",
        "ladder, accumulation",
        "ladder, forecast",
    ],
)
def test_the_trajectory_is_that_of_the_wide_variant(
    captured: str, assert_same: Callable[[Any, Any], None], options: dict[str, Any], how: dict[str, Any]
) -> None:
    """Losses, norms, counts, parameters, buffers and optimizer state are bitwise those without any bound."""
    narrow = train(captured, **options, **how)
    wide = trained_wide(captured, **{key: value for key, value in how.items() if key != "max_in_flight"})
    for what in ("losses", "loads", "model", "optimizer"):
        assert_same(narrow[what], wide[what])
    assert all(routed == kept for step in narrow["loads"] for routed, kept in step), "nothing was dropped"
    again = [step for step, attempt in enumerate(narrow["attempts"]) if attempt]
    assert narrow["totals"]["reruns"] == len(again) and narrow["totals"]["committed"] == STEPS
    if "capacity_forecast" in options:
        assert 0 < len(again) < STEPS // 2, "one overflow widens what comes behind it"
    elif options["capacity_scope"] == "expert":
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


def test_a_step_climbs_to_the_lowest_variant_that_holds_it_and_that_may_overflow_again(
    captured: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What the second layer needs shows only once the first one fits: some steps take two attempts, some take one."""
    with caplog.at_level(logging.INFO, "staticmoe"):
        found = train.__wrapped__(captured, **NARROW, **LADDER)  # what is remembered logs nothing
    attempts = collections.Counter(found["attempts"])
    assert attempts[0] and attempts[1] and attempts[2], attempts
    built = sum("built the training graph" in record.message for record in caplog.records)
    assert 2 < built <= 2 + len(LADDER["capacity_ladder"]), "each is captured once, those between when needed"


def test_a_forecast_runs_fewer_steps_again() -> None:
    with_one = train("emulate", **NARROW, **LADDER, capacity_forecast=True)
    without = train("emulate", **NARROW, **LADDER)
    assert sum(map(bool, with_one["attempts"])) < sum(map(bool, without["attempts"]))


def test_a_variant_is_not_captured_with_what_changed_after_its_step(
    assert_same: Callable[[Any, Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The step in flight overflows; its model has changed since. It runs again on a variant that is older than that."""

    def scaled(model: Model, batch: dict[str, Tensor]) -> Tensor:
        return loss_fn(model, batch) * model.scale

    def run(**options: Any) -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(0)
        model = Model()
        model.scale = 1.0
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        config = RunnerConfig(max_rerun_fraction=1.0, **options)
        with StaticMoERunner(model, optimizer, example_batch=batch_of(1), loss_fn=scaled, config=config) as runner:
            first = runner.step(batch_of(0))
            model.scale = 0.5
            second = runner.step(batch_of(1))
            losses = [float(first.loss), float(second.loss)]
            assert (first.attempt == 1) == bool(options)
            return losses, copy.deepcopy(model.state_dict())

    for one, other in zip(run(**NARROW, **LADDER), run(), strict=True):
        assert_same(one, other)
    assert "not capturing the variant of capacity_factor=" in caplog.text


def test_a_variant_that_cannot_be_captured_ends_the_run_and_loses_no_result_silently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = RunnerConfig(**NARROW, **LADDER)
    with StaticMoERunner(model, optimizer, example_batch=batch_of(1), loss_fn=loss_fn, config=config) as runner:
        results = [runner.step(batch_of(step)) for step in (0, 1)]
        monkeypatch.setattr(Ladder, "_made", lambda self, rung: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
        with pytest.raises(torch.OutOfMemoryError, match="full"):
            runner.step(batch_of(2))
        for result in results:
            with pytest.raises(torch.OutOfMemoryError, match="full"):
                _ = result.loss
        with pytest.raises(ClosedError, match="restore a checkpoint"):
            runner.step(batch_of(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity_ladder": (2.0, 1.5)}, "expected ascending factors"),
        ({"capacity_ladder": (2.0, 2.0)}, "expected ascending factors"),
        ({"capacity_ladder": (2.0, None)}, "expected ascending factors"),
        ({"capacity_ladder": (0.0,)}, "capacity_ladder: expected None"),
        ({"capacity_ladder": (2.0,), "overflow": "drop"}, "expected overflow='rerun'"),
        ({"capacity_forecast": True, "overflow": "skip"}, "expected overflow='rerun'"),
    ],
)
def test_a_ladder_that_cannot_be_climbed_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunnerConfig(**options)


def test_another_factor_leaves_out_the_rungs_below_it(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    config = RunnerConfig(**NARROW, **LADDER, max_rerun_fraction=1.0)
    with StaticMoERunner(model, optimizer, example_batch=batch_of(1), loss_fn=loss_fn, config=config) as runner:
        with caplog.at_level(logging.INFO, "staticmoe"):
            runner.set_capacity_factor(3.0)
        assert "capacity_factor 1.6 -> 3.0: captured again in" in caplog.text
        factors = [rung.factor for rung in runner._parts.training.ladder(0)._rungs]
        assert factors == [3.0, 3.2, None]
        assert sum(runner.step(batch_of(step)).attempt for step in range(4)) > 0, "and they work"


def test_an_example_batch_that_overflows_is_checked_like_any_other() -> None:
    """Its trials halt nothing: else the one behind it would begin halted, and do none of the work in front."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = RunnerConfig(capacity_factor=1.3, capacity_scope="expert")
    with StaticMoERunner(model, optimizer, example_batch=batch_of(4), loss_fn=loss_fn, config=config) as runner:
        assert runner.step(batch_of(4)).attempt == 1, "the example does overflow"
