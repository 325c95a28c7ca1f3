"""What the footgun suite shares: the ways to run, probes with a known gradient, forced routing, a plain reference.

Letters: T tokens, K top_k, E experts, H hidden size, I intermediate size, C rows of one expert.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from staticmoe import RunnerConfig, StaticMoE, StaticMoERunner
from staticmoe.errors import SelfCheckError, StaticMoEError

GPU = ["cuda"] if torch.cuda.is_available() else []


@dataclasses.dataclass(frozen=True)
class Way:
    """How a test runs: which capture, how many steps in flight, how many warm-up iterations (W of the reports)."""

    capture: str
    max_in_flight: int = 2
    capture_warmup_iters: int = 3

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if self.capture == "cuda" else "cpu")

    def config(self, **options: Any) -> RunnerConfig:
        return RunnerConfig(**{**dataclasses.asdict(self), **options})

    def __str__(self) -> str:
        return f"{self.capture}-in_flight{self.max_in_flight}-warmup{self.capture_warmup_iters}"


WAYS = [Way(capture) for capture in ["emulate", "off", *GPU]]
EVERY_WAY = [Way(capture, flight, warmup) for capture in ["emulate", *GPU] for flight in (1, 2) for warmup in (1, 3)]
EVERY_WAY += [Way("off", 2, 3)]


@pytest.fixture(params=WAYS, ids=lambda way: way.capture)
def way(request: pytest.FixtureRequest) -> Way:
    """Replayed and not: both must give the same right numbers."""
    return request.param


@pytest.fixture(params=EVERY_WAY, ids=str)
def every_way(request: pytest.FixtureRequest) -> Way:
    """As `way`, and with every number of calls between the first one and the first true replay."""
    return request.param


@pytest.fixture(params=[Way(capture) for capture in ["emulate", *GPU]], ids=lambda way: way.capture)
def captured_way(request: pytest.FixtureRequest) -> Way:
    """Only the ways that replay: for what nothing but a capture gets wrong."""
    return request.param


class Probe(nn.Module):
    """F-PROBE: loss = s * sum(b) + 0 * sum(moe), so that d loss / d b is the batch's s, exactly."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.ones(shape))
        self.moe = StaticMoE(8, 8, num_experts=4, top_k=1, norm_topk_prob=False)

    def forward(self, x: Tensor, s: Tensor) -> Tensor:
        return s * self.b.sum() + 0 * self.moe(x).sum()


class Routed(nn.Module):
    """A layer with forced routing behind a trainable scale; loss = scale * sum(moe(x))."""

    def __init__(self, moe: StaticMoE) -> None:
        super().__init__()
        self.moe = moe
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.moe(x).sum()


@pytest.fixture
def probe() -> Callable[..., Probe]:
    """Builder of F-PROBE: `probe(way, *shape_of_b)`."""
    return lambda way, *shape: Probe(*shape).to(way.device)


@pytest.fixture
def probe_batch() -> Callable[[Way, float], dict[str, Tensor]]:
    """A batch whose `s` is the gradient of b: `probe_batch(way, s)`. Every call draws new tokens."""
    return lambda way, s: {"x": torch.randn(4, 8, device=way.device), "s": torch.tensor(float(s), device=way.device)}


def by_name(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return model(**batch)


@pytest.fixture
def wrap() -> Iterator[Callable[..., StaticMoERunner]]:
    """Builder of a runner that is closed after the test: `wrap(way, model, optimizer, example_batch, **options)`.

    Options of the runner by their names, everything else goes to its config. Default loss: `model(**batch)`.
    """
    runners = []
    own = ("loss_fn", "eval_fn", "token_mask", "scalars")

    def build(way: Way, model: nn.Module, optimizer: Any, example_batch: Any, **options: Any) -> StaticMoERunner:
        arguments = {"loss_fn": by_name, **{name: options.pop(name) for name in own if name in options}}
        config = way.config(**options)
        runners.append(StaticMoERunner(model, optimizer, example_batch=example_batch, config=config, **arguments))
        return runners[-1]

    yield build
    for runner in runners:
        runner.close()


@pytest.fixture
def routed_layer() -> Callable[..., StaticMoE]:
    """F-ROUTE and F-CONST: token -> expert as `routed_tokens` says, and expert e outputs the constant e + 1."""

    def build(way: Way, *, num_experts: int = 4, top_k: int = 1, **options: Any) -> StaticMoE:
        options = {"norm_topk_prob": top_k > 1, **options}
        layer = StaticMoE(num_experts + 2, 3, num_experts, top_k, device=way.device, **options)
        with torch.no_grad():
            for parameter in (layer.router.weight, layer.experts.gate_up_proj, layer.experts.down_proj):
                parameter.zero_()
            layer.router.weight[:, :num_experts].copy_(8 * torch.eye(num_experts))
            layer.experts.gate_up_proj[:, 0, num_experts] = 16
            layer.experts.gate_up_proj[:, 3, num_experts] = 1
            layer.experts.down_proj[:, :, 0] = torch.arange(1.0, num_experts + 1, device=way.device)[:, None] / 16
        return layer

    return build


@pytest.fixture
def routed_tokens() -> Callable[..., Tensor]:
    """Tokens [T, E + 2] for `routed_layer`: an expert for each token, or a tuple of experts, first the heavier."""

    def build(way: Way, experts: Sequence[int | tuple[int, ...]], *, num_experts: int = 4) -> Tensor:
        x = torch.zeros(len(experts), num_experts + 2)
        x[:, num_experts] = 1
        for token, chosen in enumerate(experts):
            for weight, expert in zip((2, 1), (chosen,) if isinstance(chosen, int) else chosen, strict=False):
                x[token, expert] = weight
        return x.to(way.device)

    return build


@dataclasses.dataclass(frozen=True)
class Reference:
    """What REF says: output [T, H], experts of each token [T, K], probabilities [T, E], kept rows [E]."""

    output: Tensor
    ids: Tensor
    probabilities: Tensor
    kept: list[int]

    @property
    def aux_loss(self) -> Tensor:
        """E * sum(routed share * mean probability)."""
        share = torch.stack([(self.ids == expert).float().mean() for expert in range(self.probabilities.shape[1])])
        return self.probabilities.shape[1] * (share * self.probabilities.mean(0)).sum()


@pytest.fixture
def reference() -> Callable[..., Reference]:
    """REF: a loop over experts in plain PyTorch, differentiable; the lowest weights lose, ties the highest token."""

    def run(
        layer: StaticMoE, x: Tensor, *, top_k: int, renormalise: bool = False, capacity: int | None = None
    ) -> Reference:
        x = x.reshape(-1, x.shape[-1])
        probabilities = torch.softmax(x @ layer.router.weight.T, dim=-1)
        weights, ids = torch.sort(probabilities, dim=-1, descending=True, stable=True)
        weights, ids = weights[:, :top_k], ids[:, :top_k]
        if renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        output, kept = torch.zeros_like(x), []
        for expert in range(probabilities.shape[1]):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            best = sorted(range(len(token)), key=lambda i: (-float(weights[token[i], slot[i]]), int(token[i])))
            best = sorted(best[:capacity])
            token, slot = token[best], slot[best]
            gate, up = layer.experts.gate_up_proj[expert].chunk(2)
            rows = nn.functional.silu(x[token] @ gate.T) * (x[token] @ up.T) @ layer.experts.down_proj[expert].T
            output = output.index_add(0, token, weights[token, slot, None] * rows)
            kept.append(len(best))
        return Reference(output, ids, probabilities, kept)

    return run


@pytest.fixture
def routed_model(routed_layer: Callable[..., StaticMoE]) -> Callable[..., Routed]:
    """`Routed` around `routed_layer`, all arguments handed on."""
    return lambda way, **options: Routed(routed_layer(way, **options)).to(way.device)


def _declared() -> Any:
    """The declarations beside this file, which is in no package."""
    spec = importlib.util.spec_from_file_location("footguns_declared", Path(__file__).with_name("declared.py"))
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DECLARED = {footgun.test: footgun for footgun in _declared().FOOTGUNS}


@pytest.fixture(autouse=True)
def caught(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After a test that `declared.py` names: its runners did what is declared of that footgun."""
    name = getattr(request.node, "originalname", request.node.name)
    footgun = DECLARED.get(f"{request.node.path.name}::{name}")
    runners: list[StaticMoERunner] = []
    errors: list[tuple[str, Exception]] = []

    def watching(method: str, when: str) -> Callable[..., Any]:
        original = getattr(StaticMoERunner, method)

        @functools.wraps(original)
        def call(self: StaticMoERunner, *args: Any, **options: Any) -> Any:
            runners.append(self)
            try:
                return original(self, *args, **options)
            except StaticMoEError as error:
                errors.append((when, error))
                raise

        return call

    if footgun is not None:
        for method, when in (("__init__", "construction"), ("step", "call")):
            monkeypatch.setattr(StaticMoERunner, method, watching(method, when))
    yield
    way = next((value for value in request.node.funcargs.values() if isinstance(value, Way)), None)
    if footgun is None or way is None or way.capture == "off":
        return
    counts = [runner._publisher.counts for runner in runners if hasattr(runner, "_publisher")]
    assert _what_happened(errors, counts) == footgun.caught, f"declared.py says otherwise of {footgun.test}"


def _what_happened(errors: list[tuple[str, Exception]], counts: list[Any]) -> str:
    """A key of CAUGHT."""
    if any(isinstance(error, SelfCheckError) for _, error in errors):
        return "recheck"
    if errors:
        return errors[0][0]
    if any(count.recaptures for count in counts):
        return "watch"
    return "guard" if any(count.skipped for count in counts) else "right"
