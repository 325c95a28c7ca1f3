"""Dense regions: which they are, that they are compiled and stay within their number of forms, and what is refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from staticmoe import RunnerConfig, StaticMoE, StaticMoERunner
from staticmoe.capture import EmulatedCapture
from staticmoe.errors import CompileError, ConfigError
from staticmoe.runner import regions
from staticmoe.runner.beside import Beside
from staticmoe.runner.regions import Regions, dense_modules


class Norm(nn.Module):
    """Root mean square norm, several kernels uncompiled."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale


class Mixer(nn.Module):
    """Stands for attention: a number of its own, as `layer_idx`, and a child."""

    def __init__(self, size: int, number: int) -> None:
        super().__init__()
        self.number, self.proj = number, nn.Linear(size, size)

    def forward(self, x: Tensor, *, shift: Tensor) -> Tensor:
        return F.silu(self.proj(x)) * (1 + self.number) + shift


class Layer(nn.Module):
    def __init__(self, size: int, number: int) -> None:
        super().__init__()
        self.norm, self.mixer, self.moe = Norm(size), Mixer(size, number), StaticMoE(size, 16, 4, 2)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return x + self.moe(x + self.mixer(self.norm(x), shift=shift))


class Model(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.layers = nn.ModuleList(Layer(8, number) for number in range(layers))
        self.dense = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        self.last = self.layers[0].norm

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, torch.ones_like(x))
        return self.head(self.last(self.dense(x)))


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["tokens"].flatten())


def batch(number: int, size: int = 3) -> dict[str, Tensor]:
    return {"tokens": torch.randint(16, (size, 7), generator=torch.Generator().manual_seed(number))}


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced and differentiated as ever; without a compiler for CPUs, which this is no test of."""
    monkeypatch.setattr(regions, "BACKEND", "aot_eager")


def wrapped(
    model: nn.Module, device: torch.device | str = "cpu", loss: Any = loss_fn, **options: Any
) -> StaticMoERunner:
    capture = "cuda" if torch.device(device).type == "cuda" else "off"
    config = RunnerConfig(**{"capture": capture, "compile": "blocks", "max_grad_norm": 1.0, **options})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return StaticMoERunner(model, optimizer, example_batch=batch(0), loss_fn=loss, config=config)


def test_regions_are_what_holds_no_participant() -> None:
    """The largest such modules, each once under its first name; what is one kernel already is left alone."""
    model = Model()
    assert list(dense_modules(model)) == [
        "layers.0.norm", "layers.0.mixer", "layers.1.norm", "layers.1.mixer", "dense",
    ]  # fmt: skip
    model.several = nn.ModuleList([Norm(8)])
    assert list(dense_modules(model))[-1] == "several.0"
    del model.several
    # What the user compiled is theirs.
    model.layers[1].mixer.compile(backend="eager")
    model.dense = torch.compile(model.dense, backend="eager")
    assert list(dense_modules(model)) == ["layers.0.norm", "layers.0.mixer", "layers.1.norm"]


@torch._dynamo.config.patch(recompile_limit=3)
def test_a_compiled_run_is_the_uncompiled_one(device: torch.device) -> None:
    """Losses and parameters, in fp64; each region is compiled, and many layers come no nearer to torch's limit."""
    results = []
    for options in ({}, {"compile": "off"}):
        torch.manual_seed(0)
        model = Model().to(device, torch.float64)
        with wrapped(model, device, **options) as runner:
            found = runner._parts._regions
            losses = [float(runner.step(batch(number)).loss) for number in range(6)]
            losses.append(float(runner.evaluate(batch(9)).loss))
            losses += [float(runner.step(batch(number)).loss) for number in range(6, 9)]
        results.append((losses, [p.detach().clone() for p in model.parameters()]))
        if not options:
            assert found is not None and len(found.regions) == 5
            # Training and evaluation.
            assert {one.entries for one in found.regions} == {2}
        assert all("forward" not in vars(module) for module in model.modules())
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-10)


class Turned(nn.Module):
    """Takes a module that is a region as well, as attention does the table of its rotations."""

    def forward(self, x: Tensor, norm: nn.Module) -> Tensor:
        return norm(x.flip(-1))


def test_a_region_among_the_arguments_of_another_is_a_part_of_it() -> None:
    class Handing(Model):
        def __init__(self) -> None:
            super().__init__(layers=1)
            self.turned, self.dense = Turned(), nn.Identity()

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.layers[0](self.turned(self.embed(tokens), self.last), torch.zeros(8)))

    torch.manual_seed(0)
    models = [Handing() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    losses = []
    for model, mode in zip(models, ("blocks", "off"), strict=True):
        with wrapped(model, compile=mode) as runner:
            losses.append([float(runner.step(batch(number)).loss) for number in range(3)])
            found = runner._parts._regions
        assert found is None or {one.name: one.entries for one in found.regions}["turned"] == 1
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_rates_and_grad_modes_compile_no_further() -> None:
    """O18: twenty steps under a schedule, with evaluations in between."""
    model = Model(layers=1)
    with wrapped(model, capture="off") as runner:
        found = runner._parts._regions
        assert found is not None
        counts = []
        for number in range(20):
            for group in runner._parts.optimizer.param_groups:
                group["lr"] = 0.1 / (1 + number)
            runner.step(batch(number))
            if number in (5, 11):
                runner.evaluate(batch(number))
            counts.append([one.entries for one in found.regions])
    assert counts[3] == [1] * 3 and counts[-1] == counts[6] == [2] * 3


class Reader(nn.Module):
    """Breaks a graph: no compiler can hold what it does."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return 2 * x


class Marking(nn.Module):
    """Asks for a dynamic size where it is compiled, which torch refuses by an AssertionError."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.mark_dynamic(x, 0)
        return 2 * x


class Switching(nn.Module):
    """Switches the compiler off for a part of itself."""

    @torch.compiler.disable
    def part(self, x: Tensor) -> Tensor:
        return 2 * x

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) + 1


@pytest.mark.parametrize("kind", [Reader, Marking, Switching])
def test_a_block_that_cannot_be_whole_stays_eager_by_option_alone(
    kind: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    """Refused by name and way out; with the option reported, eager, equal to an uncompiled run, the others compiled."""
    losses = []
    model = Model(layers=1)
    model.dense.append(kind())
    with pytest.raises(
        CompileError, match=r"region 'dense' \(Sequential\): expected one that compiles whole.*fallback"
    ):
        wrapped(model, capture="off")
    assert all("forward" not in vars(module) for module in model.modules())
    for options in ({"compile_fallback": True}, {"compile": "off"}):
        torch.manual_seed(0)
        model = Model(layers=1)
        model.dense.append(kind())
        with wrapped(model, capture="off", **options) as runner:
            losses.append([float(runner.step(batch(number)).loss) for number in range(3)])
            found = runner._parts._regions
            if found is not None:
                assert [one.name for one in found.regions if one.compiled is one.eager] == ["dense"]
                assert [one.entries for one in found.regions] == [1, 1, 0]
    assert "region 'dense' (Sequential)" in caplog.text and "it stays uncompiled (compile_fallback)" in caplog.text
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_an_assertion_of_the_users_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """mark_dynamic is refused with an error of the same class."""

    class Asserting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("the user's own")

    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    model = Model()
    model.dense.append(Asserting())
    found = Regions(model, fallback=False, limit_s=60)
    with pytest.raises(AssertionError, match="the user's own"):
        found.around(lambda: model(batch(0)["tokens"]).sum().backward())()


class Looped(nn.Module):
    """One module after the other."""

    def __init__(self, parts: int, kind: type[nn.Module] = nn.ModuleList) -> None:
        super().__init__()
        each = [nn.Linear(8, 8) for _ in range(parts)]
        self.parts = (
            nn.ModuleList(each) if kind is nn.ModuleList else nn.ModuleDict({str(i): p for i, p in enumerate(each)})
        )
        # Held a second time, and no second body.
        self.first = nn.ModuleList(each[:1])

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for part in self.parts.children():
            y = y + part(x)
        return y


def test_loops_are_counted_before_anything_is_compiled(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By region, line and number, of one call; seven bodies are no loop worth a word, in however many calls."""

    class Twice(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens) + self.few(self.few(self.embed(tokens)))[..., :1]

    compiled: list[str] = []
    monkeypatch.setattr(
        Regions, "_first_call", lambda *given: compiled.append(caplog.text) or given[1].eager(*given[2], **given[3])
    )
    model = Twice(layers=1)
    model.dense.append(Looped(32))
    model.dense.append(Looped(8, nn.ModuleDict))
    model.few = Looped(7)
    with caplog.at_level(logging.WARNING):
        wrapped(model, capture="off").close()
    [text] = {text for text in compiled if text}
    assert text.count("the compiler unrolls into") == 2
    for place, number in (("dense.2", 32), ("dense.3", 8)):
        assert f"\"y = y + part(x)\" in module '{place}' calls {number} modules (Linear)" in text
    assert text.count("region dense: the loop at") == 2
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_a_compiler_that_gives_up_in_silence_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proof by the compiler's entries: it ran, and nothing was compiled."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    with pytest.raises(CompileError, match="torch ran it uncompiled"):
        wrapped(Model(), capture="off")


def test_a_value_that_changes_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Each new value of a Python number is another compiled form; six of torch's eight are let pass."""
    model = Model(layers=1)
    found = Regions(model, fallback=False, limit_s=60)
    for number in range(7):
        assert "compiled forms" not in caplog.text
        model.layers[0].mixer.number = 100 + number
        found.around(lambda: model.layers[0](torch.ones(3, 8), torch.zeros(8)).sum().backward())()
        found.prove()
    assert "region layers.0.mixer has 7 compiled forms" in caplog.text and "norm has" not in caplog.text
    # Shapes are constants.
    found.around(lambda: model.layers[0](torch.ones(5, 8), torch.zeros(8)))()
    assert found.regions[0].entries == 2


def test_compiling_is_told_and_has_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    """What is over takes the first region; the rest stays as it is, and that is said."""
    with caplog.at_level(logging.INFO), wrapped(Model(layers=1), capture="off", compile_limit_s=1e-6) as runner:
        found = runner._parts._regions
        assert found is not None
        assert [one.calls[True] is one.eager for one in found.regions] == [False, True, True]
        assert caplog.text.count("stays uncompiled: compiling has taken") == 2
        assert "compiling 3 dense regions: layers.0.norm, layers.0.mixer, dense" in caplog.text
        told = [record.getMessage() for record in caplog.records if "compiled in" in record.getMessage()]
        assert len(told) == 1 and told[0].startswith("region layers.0.norm: ") and told[0].endswith(" s; 1 of 3")
        # An evaluation that comes too late leaves what is compiled compiled.
        runner.evaluate(batch(1))
        assert [one.calls[False] is one.eager for one in found.regions] == [True, True, True]
        assert found.regions[0].calls[True] is found.regions[0].compiled is not found.regions[0].eager
        assert "layers.0.norm stays uncompiled where gradients are off" in caplog.text
    with pytest.raises(ConfigError, match="compile_limit_s.*above 0.*0"):
        RunnerConfig(compile_limit_s=0)


def test_the_emulated_capture_says_that_it_does_not_compile(caplog: pytest.LogCaptureFixture) -> None:
    """Its tape holds operations, and a compiled region is none."""
    with caplog.at_level(logging.WARNING), wrapped(Model(), capture="emulate") as runner:
        assert runner._parts._regions is None and float(runner.step(batch(1)).loss) > 0
    assert "an emulated capture runs the model uncompiled" in caplog.text


def test_two_threads_compile_one_after_the_other(monkeypatch: pytest.MonkeyPatch, turns: Any) -> None:
    """O18: while one compiles, no iteration of the other runs; both get what they get alone, uncompiled."""
    events: list[str] = []
    others = []

    def train(seed: int, mode: str) -> list[float]:
        def marked(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            events.append(f"{mode} {seed} runs")
            if mode == "blocks" and seed == 2:
                turns.settled.set()
            return loss_fn(model, batch)

        torch.manual_seed(seed)
        with wrapped(Model(layers=1), loss=marked, capture="off", compile=mode) as runner:
            return [float(runner.step(batch(number)).loss) for number in range(3)]

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        if not others:
            others.append(turns.meanwhile(lambda: train(2, "blocks")))
            events.append("blocks 1 has compiled")
        return module.forward

    monkeypatch.setattr(regions, "BACKEND", backend)
    alone = [train(1, "off"), train(2, "off")]
    assert [train(1, "blocks"), others[0].result()] == alone
    assert events.index("blocks 1 has compiled") < events.index("blocks 2 runs")


def test_a_region_that_is_compiled_again_is_named() -> None:
    """What its compiled form was made for has changed, and the graph holds that form; another mode is no change."""
    model = Model()
    parts = Regions(model, fallback=False, limit_s=600)
    run = parts.around(lambda: loss_fn(model, batch(0)))
    run()
    watch = Beside(parts, EmulatedCapture())
    watch.settle()
    run()
    assert watch.changes() == []
    model.layers[1].mixer.number = 5
    run()
    for _ in range(2):
        assert [str(change) for change in watch.changes()] == ["module 'layers.1.mixer' compiled forms: 1 -> 2"]
    watch.settle()
    assert watch.changes() == []
