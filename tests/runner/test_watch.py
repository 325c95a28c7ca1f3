"""The watch after a capture: whatever the recording read and somebody changed is named, and nothing else is."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from staticmoe import ConfigError, ReplayError, RunnerConfig, SelfCheckError, StaticMoE, StaticMoERunner
from staticmoe.capture import collector
from staticmoe.capture.change import MISSING, Change
from staticmoe.capture.ran import RanCode
from staticmoe.runner import beside
from staticmoe.runner.beside import Beside
from staticmoe.runner.watch import HostState

LEVEL = 1.0


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient * ctx.saved_tensors[0] * STRENGTH


STRENGTH = 1.0


def levelled(x: Tensor, module: nn.Module) -> Tensor:
    """Reads a global and an attribute of another's: no method of the module names either."""
    return Square.apply(x) * LEVEL * module.shift


class Base(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Block(Base):
    rate = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))
        self.register_buffer("offset", torch.zeros(1))
        self.gain, self.shift, self.size_0, self.unread = 2.0, 1.0, 1.0, 0
        self.options = {"a": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.weight * self.gain * self.rate + self.offset * self.options["a"]
        for number in range(1):
            x = x * getattr(self, f"size_{number}")
        return levelled(x if self.training else -x, self)

    def idle(self) -> int:
        return self.unread


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.drop, self.head = nn.Dropout(0.0), nn.Linear(3, 3)
        self.blocks[0].register_forward_hook(nothing)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.drop(self.head(x)).sum()


def nothing(*_: Any) -> None:
    """A hook that leaves everything as it is."""


def scaled_by(factor: float) -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    def scale(x: Tensor) -> Tensor:
        return x * factor

    def change(new: float) -> None:
        nonlocal factor
        factor = new

    return scale, change


scaled, rescale = scaled_by(1.0)


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return scaled(model(batch))


def watched() -> tuple[Model, HostState]:
    """A model, and the watch over what its loss has just run; its backward unseen, as in a thread of a GPU's."""
    model, ran = Model(), RanCode()
    with ran.watch():
        loss_fn(model, torch.ones(2, 3))
    return model, HostState(model, (loss_fn,), ran=ran)


def global_of(name: str, value: Any) -> Callable[[Model], None]:
    return lambda model: globals().__setitem__(name, value)


HERE = __name__.rpartition(".")[2]
PLANTS: dict[str, tuple[Callable[[Model], Any], str]] = {
    "attribute": (lambda m: setattr(m.blocks[1], "gain", 3.0), "module 'blocks.1' attribute 'gain': 2.0 -> 3.0"),
    "type": (lambda m: setattr(m.blocks[1], "gain", 2), "module 'blocks.1' attribute 'gain': 2.0 -> 2"),
    "by another's code": (
        lambda m: setattr(m.blocks[0], "shift", 2.0),
        "module 'blocks.0' attribute 'shift': 1.0 -> 2.0",
    ),
    "by a string": (lambda m: setattr(m.blocks[0], "size_0", 2.0), "module 'blocks.0' attribute 'size_0': 1.0 -> 2.0"),
    "of torch's": (lambda m: setattr(m.drop, "p", 0.5), "module 'drop' attribute 'p': 0.0 -> 0.5"),
    "deleted": (lambda m: delattr(m.blocks[1], "gain"), "module 'blocks.1' attribute 'gain' was removed"),
    "in a dict": (
        lambda m: m.blocks[0].options.update(a=2.0),
        "module 'blocks.0' attribute 'options' entry 'a': 1.0 -> 2.0",
    ),
    "class attribute": (lambda m: setattr(Block, "rate", 2.0), "class Block attribute 'rate': 1.0 -> 2.0"),
    "hidden class attribute": (
        lambda m: setattr(m.blocks[0], "rate", 2.0),
        "module 'blocks.0' attribute 'rate' was added",
    ),
    "forward": (lambda m: setattr(m.blocks[0], "forward", nothing), "module 'blocks.0' attribute 'forward' was added"),
    "global of a helper": (global_of("LEVEL", 2.0), f"{HERE}: 'LEVEL': 1.0 -> 2.0"),
    "global of a backward": (global_of("STRENGTH", 2.0), f"{HERE}: 'STRENGTH': 1.0 -> 2.0"),
    "closure of a helper": (
        lambda m: rescale(2.0),
        "closure of scaled_by.<locals>.scale: variable 'factor': 1.0 -> 2.0",
    ),
    "eval": (lambda m: m.blocks[1].eval(), "module 'blocks.1' attribute 'training': True -> False"),
    "eval of torch's": (lambda m: m.drop.eval(), "module 'drop' attribute 'training': True -> False"),
    "requires_grad": (
        lambda m: m.blocks[1].weight.requires_grad_(False),
        "module 'blocks.1' requires_grad of 'weight': True -> False",
    ),
    "moved": (
        lambda m: setattr(m.head.bias, "data", torch.zeros(3)),
        "module 'head' parameter or buffer 'bias' has other storage, dtype or shape",
    ),
    "parameter": (
        lambda m: setattr(m.head, "bias", nn.Parameter(m.head.bias.detach().clone())),
        "module 'head' parameter 'bias' was replaced by another tensor",
    ),
    "parameter taken away": (
        lambda m: setattr(m.head, "bias", None),
        "module 'head' parameter 'bias' was replaced by another object",
    ),
    # Equal to the old one: only by identity are they different.
    "buffer": (
        lambda m: setattr(m.blocks[0], "offset", torch.zeros(1)),
        "module 'blocks.0' buffer 'offset' was replaced by another tensor",
    ),
    "buffer behind torch's back": (
        lambda m: m.blocks[0]._buffers.update(offset=torch.zeros(1)),
        "module 'blocks.0' buffer 'offset' was replaced by another tensor",
    ),
    "submodule": (lambda m: setattr(m, "drop", nn.Dropout(0.0)), "module '' submodule 'drop' was replaced by another"),
    "submodule added": (lambda m: m.blocks.append(nn.Identity()), "module 'blocks' submodule '2' was added"),
    "submodule removed": (lambda m: m.blocks.__delitem__(1), "module 'blocks' submodule '1' was removed"),
    "forward hook": (
        lambda m: m.blocks[1].register_forward_hook(nothing),
        "module 'blocks.1' forward hooks: 0 -> 1",
    ),
    "forward pre-hook": (
        lambda m: m.head.register_forward_pre_hook(nothing),
        "module 'head' forward pre-hooks: 0 -> 1",
    ),
    "backward hook": (lambda m: m.head.register_full_backward_hook(nothing), "module 'head' backward hooks: 0 -> 1"),
    "backward pre-hook": (
        lambda m: m.head.register_full_backward_pre_hook(nothing),
        "module 'head' backward pre-hooks: 0 -> 1",
    ),
    "hook of a parameter": (lambda m: m.head.weight.register_hook(nothing), "module 'head' hooks of weight: 0 -> 1"),
    "hook removed": (lambda m: m.blocks[0]._forward_hooks.clear(), "module 'blocks.0' forward hooks: 1 -> 0"),
    "hook exchanged": (
        lambda m: (m.blocks[0]._forward_hooks.clear(), m.blocks[0].register_forward_hook(nothing)),
        "module 'blocks.0' forward hooks: others than before",
    ),
}


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Globals, closures and classes as before. The closures are this file's, which the suite has frozen."""
    monkeypatch.setattr(collector, "has_frozen", lambda: True)
    before = LEVEL, STRENGTH, Block.rate
    yield
    globals().update(LEVEL=before[0], STRENGTH=before[1])
    Block.rate = before[2]
    rescale(1.0)


@pytest.mark.parametrize("plant", PLANTS)
def test_a_change_is_named(plant: str, restored: None) -> None:
    """Each by itself, with the module; and again at the next look, since nobody has followed it."""
    model, state = watched()
    assert state.changes() == []
    change, words = PLANTS[plant]
    change(model)
    for _ in range(2):
        found = state.changes()
        assert len(found) == 1, [str(one) for one in found]
        assert words in str(found[0])


def test_a_global_hook_is_named() -> None:
    """It runs for every module of the process."""
    _, state = watched()
    handle = nn.modules.module.register_module_forward_hook(nothing)
    try:
        assert [str(change) for change in state.changes()] == ["every module forward hooks: 0 -> 1"]
    finally:
        handle.remove()
    assert state.changes() == []


def frozen_and_back(model: Model) -> None:
    model.requires_grad_(False)
    model.requires_grad_(True)


BENIGN: dict[str, Callable[[Model], Any]] = {
    "an attribute that nothing read": lambda m: setattr(m.blocks[0], "unread", m.blocks[0].unread + 1),
    "a new attribute": lambda m: setattr(m, "epoch", 1),
    "the mode of a Linear": lambda m: m.head.eval(),
    "eval and back": lambda m: (m.eval(), m(torch.ones(1, 3)), m.train()),
    "frozen and back": frozen_and_back,
    "a hook and its removal": lambda m: m.blocks[1].register_forward_hook(nothing).remove(),
    "the same value": lambda m: setattr(m.blocks[0], "gain", float("2.0")),
    "a write in place": lambda m: m.head.weight.data.add_(1.0),
    "state dicts": lambda m: m.load_state_dict(copy.deepcopy(m.state_dict())),
    "another model with hooks": lambda m: Model().head.register_forward_hook(nothing),
    "a hook on a state dict": lambda m: m.register_state_dict_pre_hook(nothing),
    "a gradient": lambda m: m(torch.ones(1, 3)).backward(),
    "another closure of the same code": lambda m: scaled_by(1.5)[1](3.0),
}


@pytest.mark.parametrize("act", BENIGN)
def test_what_the_recording_does_not_depend_on_is_no_change(act: str) -> None:
    """And once looked at, it costs no second look."""
    model, state = watched()
    BENIGN[act](model)
    assert [str(change) for change in state.changes()] == []
    assert all(part.is_untouched() for part in state._parts)


def test_a_change_has_fields() -> None:
    """Whoever works with it reads no text."""
    model, state = watched()
    model.blocks[1].gain = 3.0
    (change,) = state.changes()
    assert (change.kind, change.module, change.name, change.old, change.new) == (
        "attribute",
        "blocks.1",
        "gain",
        2.0,
        3.0,
    )
    assert change.cause == "module 'blocks.1' attribute 'gain'" and change.is_number
    assert str(Change("attribute", "module ''", "x", 1, MISSING, module="")) == "module '' attribute 'x' was removed"


def test_a_pool_that_grows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted; only on a GPU has a backend a pool. Asking it is dear, so that it is seen late."""

    class Pool:
        size = 100

        def pool_bytes(self) -> int:
            return self.size

    monkeypatch.setattr(beside, "_POOL_EVERY", 3)
    pool: Any = Pool()
    watch = Beside(None, pool)
    watch.settle()
    assert [watch.changes() for _ in range(3)] == [[]] * 3
    pool.size = 164
    looks = [[str(change) for change in watch.changes()] for _ in range(3)]
    assert looks == [[], [], ["memory pool of the graphs: bytes: 100 -> 164"]]
    watch.settle()
    assert [watch.changes() for _ in range(3)] == [[]] * 3


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe, self.inner = StaticMoE(8, 4, 4, 2), nn.Sequential(nn.Identity(), nn.LeakyReLU(0.5))
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.inner(x.mean()) + 0 * self.moe(x).sum()


ONES = {"x": torch.ones(2, 8)}


def wrap(model: nn.Module, **options: Any) -> StaticMoERunner:
    return StaticMoERunner(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        example_batch=ONES,
        loss_fn=lambda model, batch: model(batch["x"]),
        config=RunnerConfig(capture="emulate", **options),
    )


def test_a_hook_that_is_added_runs_at_the_next_step(caplog: pytest.LogCaptureFixture) -> None:
    """Captured anew, named in the log, and again when it is gone; each recapture is rechecked."""
    with wrap(Trained(), recheck_every=1) as runner, caplog.at_level(logging.WARNING):
        model = runner._parts._model
        losses = [float(runner.step(ONES).loss)]
        handle = model.inner[0].register_forward_hook(lambda module, args, output: 3 * output)
        losses.append(float(runner.step(ONES).loss))
        handle.remove()
        losses.append(float(runner.step(ONES).loss))
        assert losses == [1.0, 3.0, 1.0]
        assert "recapturing the training graph: module 'inner.0' forward hooks: 0 -> 1" in caplog.text
        assert "module 'inner.0' forward hooks: 1 -> 0" in caplog.text
        assert runner.telemetry()["recaptures"] == 2
        # Past torch's own way to add one, no watch sees it; the recheck does.
        model.inner[0]._forward_hooks[-1] = lambda module, args, output: 3 * output
        with pytest.raises(SelfCheckError, match="frozen"):
            runner.step(ONES)


def test_a_change_is_an_error_where_it_is_to_be() -> None:
    """Named, at each step until it is put back or taken over; the step that was refused is no step."""
    model = Trained()
    with wrap(model, on_change="raise") as runner:
        assert float(runner.step(ONES).loss) == 1.0
        model.inner[1].negative_slope = 0.25
        for _ in range(4):
            with pytest.raises(ReplayError, match=r"module 'inner\.1' attribute 'negative_slope': 0\.5 -> 0\.25.*put"):
                runner.step(ONES)
        model.inner[1].negative_slope = 0.5
        assert float(runner.step({"x": -ONES["x"]}).loss) == -0.5
        model.inner[1].negative_slope = 0.25
        runner.recapture()
        result = runner.step({"x": -ONES["x"]})
        assert (float(result.loss), result.step) == (-0.25, 3)
    with pytest.raises(ConfigError, match="on_change: expected one of recapture, raise; got 'ignore'"):
        RunnerConfig(on_change="ignore")


def test_what_happens_between_steps_is_no_change(caplog: pytest.LogCaptureFixture) -> None:
    """Evaluation, generation, checkpoints, schedulers, telemetry, a counter of the user's: one graph for all."""
    model = Trained()
    with wrap(model, on_change="raise") as runner, caplog.at_level(logging.INFO):
        scheduler = torch.optim.lr_scheduler.LambdaLR(runner._parts.optimizer, lambda epoch: 0.5)
        for count in range(3):
            runner.step(ONES)
            scheduler.step()
            runner.evaluate(ONES)
            model.eval()
            with torch.inference_mode():
                model(ONES["x"])
                runner.evaluate(ONES)
            model.train()
            model.load_state_dict(model.state_dict())
            runner.load_state_dict(runner.state_dict())
            runner.telemetry()
            model.count = count
        assert runner.telemetry()["recaptures"] == 0


def test_what_the_collector_calls_in_the_middle_of_an_iteration_was_not_read_by_it() -> None:
    """As hypothesis does: a callback of the collector's that counts in a global."""
    collected: dict[str, Any] = {"collected": 0}
    code = "def callback(phase, info):\n    global collected\n    collected += 1\n"
    exec(compile(code, str(Path(__file__).with_name("somebody.py")), "exec"), collected)

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        cycles: list[Any] = [[] for _ in range(2000)]
        for one in cycles:
            one.append(one)
        return model(batch["x"]).square().mean()

    model, before = StaticMoE(8, 8, 4, 2), gc.get_threshold()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = RunnerConfig(capture="emulate", on_change="raise")
    batch = {"x": torch.randn(2, 8)}
    gc.callbacks.append(collected["callback"])
    gc.set_threshold(100)
    try:
        with StaticMoERunner(model, optimizer, example_batch=batch, loss_fn=loss_fn, config=config) as runner:
            for _ in range(3):
                runner.step(batch)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(collected["callback"])
    assert collected["collected"] > 0
