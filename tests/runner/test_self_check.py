"""The self-check, the recheck and the watch: three nets under a replay that is not the iteration any more."""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from staticmoe import CaptureError, ReplayError, RunnerConfig, SelfCheckError, StaticMoE, StaticMoERunner
from staticmoe.capture import EmulatedCapture, Tape
from staticmoe.observe.record import Reason, Record
from staticmoe.runner.self_check import Outcome, compare


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = StaticMoE(8, 4, 4, 2)
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x.mean() + 0 * self.moe(x).sum()


def wrap(loss_fn: Any, **options: Any) -> StaticMoERunner:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return StaticMoERunner(
        model, optimizer, example_batch={"x": torch.ones(2, 8)}, loss_fn=loss_fn, config=RunnerConfig(**options)
    )


ONES = {"x": torch.ones(2, 8)}


def iterator_loss() -> Any:
    """A factor that changes on every call, where nothing but running it again can see it."""
    factors = iter(range(1, 1000))
    return lambda model, batch: model(batch["x"]) * next(factors)


def test_the_self_check_finds_what_no_watch_can_see() -> None:
    """Uncaptured runs differ from each other, replays do not: a host value is frozen."""
    with pytest.raises(SelfCheckError, match="frozen"):
        wrap(iterator_loss())


def test_an_error_while_a_runner_is_built_holds_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NCCL a graph that a traceback holds would keep `destroy_process_group` waiting, and the error unseen."""
    tapes: list[Tape] = []
    capture = EmulatedCapture.capture
    monkeypatch.setattr(EmulatedCapture, "capture", lambda *given: tapes.append(capture(*given)) or tapes[-1])
    with pytest.raises(SelfCheckError) as caught:
        wrap(iterator_loss())
    assert [(tape.entries, tape.owned_bytes) for tape in tapes] == [([], 0)] and caught.tb is not None


def test_without_it_the_recheck_finds_it_in_the_run() -> None:
    """recheck_every compares in the middle of a run, without disturbing it."""
    runner = wrap(iterator_loss(), self_check=False, recheck_every=3)
    runner.step(ONES)
    runner.step(ONES)
    with pytest.raises(SelfCheckError, match="frozen"):
        runner.step(ONES)
    clean = wrap(lambda model, batch: model(batch["x"]), recheck_every=2)
    assert [float(clean.step(ONES).loss) for _ in range(5)] == [1.0] * 5
    assert clean.telemetry()["committed"] == 5


class Trainer:
    """A user's object: the loss reads two of its attributes, its loop moves another."""

    def __init__(self) -> None:
        self.scale, self.inner, self.count = 1.0, 1.0, 0

    def _inner(self) -> float:
        return self.inner

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"]) * self.scale * self._inner()


def closure_loss(held: Any) -> Any:
    return lambda model, batch: (
        model(batch["x"]) * held["factor"] if isinstance(held, dict) else model(batch["x"]) * held[0]
    )


def test_values_that_the_loss_reads_are_followed() -> None:
    """Attribute, attribute read by a helper method, dict, list, partial keyword, global: never the old value."""
    trainer, by_name, by_position = Trainer(), {"factor": 1.0}, [1.0]

    def keyword(model: nn.Module, batch: dict[str, Tensor], *, factor: float) -> Tensor:
        return model(batch["x"]) * factor

    partial = functools.partial(keyword, factor=1.0)
    runners = {
        "attribute": (wrap(trainer.loss), lambda v: setattr(trainer, "scale", v)),
        "dict": (wrap(closure_loss(by_name)), lambda v: by_name.update(factor=v)),
        "list": (wrap(closure_loss(by_position)), lambda v: by_position.__setitem__(0, v)),
        "partial": (wrap(partial), lambda v: partial.keywords.update(factor=v)),
    }
    for what, (runner, change) in runners.items():
        assert float(runner.step(ONES).loss) == 1.0, what
        change(3.0)
        assert float(runner.step(ONES).loss) == 3.0, what
    trainer.inner = 2.0
    assert float(runners["attribute"][0].step(ONES).loss) == 6.0


def test_what_the_loss_does_not_read_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A trainer that counts its steps is no reason to capture again."""
    trainer = Trainer()
    runner = wrap(trainer.loss)
    with caplog.at_level(logging.WARNING):
        for _ in range(6):
            runner.step(ONES)
            trainer.count += 1
    assert "recapturing" not in caplog.text


def test_a_value_that_changes_every_step_is_an_error_that_says_so() -> None:
    """Capturing at each step would be slower than not capturing."""
    trainer = Trainer()
    runner = wrap(trainer.loss)
    with pytest.raises(ReplayError, match=r"'scale' has changed 3 times"):
        for _ in range(6):
            trainer.scale += 1.0
            runner.step(ONES)
    trainer.scale = 1.0
    assert float(runner.step(ONES).loss) == 1.0, "usable afterwards"


def test_the_audit_can_be_overruled(caplog: pytest.LogCaptureFixture) -> None:
    """A host read is refused, logged, or passed over, as the option says; overruled, its value is frozen."""

    def reads(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"]) * batch["x"].sum().item() / 16

    with pytest.raises(CaptureError, match=r"test_self_check.py.*item\(\)"):
        wrap(reads)
    for audit in ("warn", "off"):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            runner = wrap(reads, audit=audit)
        assert ("item()" in caplog.text) is (audit == "warn")
        assert float(runner.step({"x": 3 * ONES["x"]}).loss) == 3.0, "times 3 / 3: the factor of the capture"


class Runs:
    """Outcomes of runs by a script: (loss, gradient) of each, the last one over and over."""

    def __init__(self, *script: tuple[float, float]) -> None:
        self.script = list(script)
        self.gradient = torch.zeros(())

    def __call__(self) -> Outcome:
        loss, gradient = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        self.gradient.fill_(gradient)  # as the replays of one graph do
        record = Record(0, 0, False, Reason(0), False, 0, {"loss": loss}, {})
        return Outcome(record, ["weight"], [self.gradient])


class OwnRuns(Runs):
    def __call__(self) -> Outcome:
        return super().__call__().kept()


A, B = (2.0, 1.0), (2.0, 1.0 + 1e-7)
FAR, FARTHER = (2.5, 1.0), (2.9, 1.0)
# The same loss, and a gradient that is off.
TURNED, TURNED_MORE = (2.0, 1.2), (2.0, 1.5)


@pytest.mark.parametrize(
    ("uncaptured", "replays", "exact", "says"),
    [
        ([A], [A], False, ""),
        ([(math.nan, math.nan)], [(math.nan, math.nan)], True, ""),
        ([A, B], [B], False, "gradient of weight"),
        # Additions that come in the same order for a while: seen in the third, or only among replays.
        ([A, A, A, B], [B], False, "gradient of weight"),
        ([A], [B, B, B, A, B], False, "gradient of weight"),
        # Operations whose noise moves a token to another expert.
        ([A, FAR], [FARTHER, FARTHER, FAR], False, "loss"),
        ([A, B], [FAR, A, FAR], False, "gradient of weight"),
        # A gradient that would be zero but for the order of its sums.
        ([A, TURNED], [TURNED_MORE, A, A, (2.0, 1.03)], False, "gradient of weight"),
    ],
)  # fmt: skip
def test_noise_is_told_from_a_frozen_value(uncaptured: list, replays: list, exact: bool, says: str) -> None:
    """Where the operations vary a runner goes on, and names what varies."""
    found = compare(OwnRuns(*uncaptured), Runs(*replays), bool, exact=exact)
    assert found[:1] == [] if not says else says in found[0]


@pytest.mark.parametrize(
    ("uncaptured", "replays", "exact"),
    [
        ([A], [FAR], False),
        ([A], [FAR, FARTHER, FAR], False),  # a graph that races, beside an iteration that does not
        ([A], [B], False),  # deterministic, each in its way
        ([A], [B, A], True),  # a processor repeats its bits
        ([A, B], [B], True),
        ([A, FAR], [FARTHER], False),  # a host value of its own in each uncaptured run
        ([A, FAR], [(2.9, 1.0), (2.9, 1.0 + 1e-7), (2.9, 1.0)], False),  # the same, and atomic additions
        ([A, B], [FAR, (2.5, 1.0 + 1e-7), FAR], False),  # frozen, and atomic additions everywhere
        ([A, B], [TURNED, (2.0, 1.2 + 1e-7), TURNED], False),  # the same in what one gradient alone shows
    ],
)  # fmt: skip
def test_no_noise_hides_a_frozen_value(uncaptured: list, replays: list, exact: bool) -> None:
    """What only uncaptured runs vary in, or vary less in than the replay is off, is no noise."""
    with pytest.raises(SelfCheckError, match=r"frozen in the graph"):
        compare(OwnRuns(*uncaptured), Runs(*replays), bool, exact=exact)


def test_other_ranks_are_heard_in_every_round() -> None:
    """A rank that sees nothing runs as often as one that sees a difference, and comes to the same end."""
    for answers, ends in (([True, False, True, False], "another rank"), ([True, *[False] * 20], "SelfCheckError")):
        said = iter(answers)
        try:
            found = compare(OwnRuns(A), Runs(A), lambda mine, said=said: next(said) or mine, exact=False)
        except SelfCheckError as error:
            found = [f"SelfCheckError: {error}"]
            assert next(said) is False
        assert ends in found[0]
