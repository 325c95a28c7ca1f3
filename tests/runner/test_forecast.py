"""The memory forecast: exact where memory is counted, without a trace, and a refusal before anything is captured."""

from __future__ import annotations

import collections
import dataclasses
import gc
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from staticmoe import CaptureError, MemoryLimitError, MicroBatches, RunnerConfig, StaticMoE, StaticMoERunner
from staticmoe.errors import ConfigError
from staticmoe.optim import AdamW
from staticmoe.runner.assembly import Assembly
from staticmoe.runner.batch_shape import BatchShape
from staticmoe.runner.commit import Shadow
from staticmoe.runner.fakes import FakeOperations
from staticmoe.runner.forecast import _NoRecord
from staticmoe.runner.inputs import InputRing
from staticmoe.runner.iteration import TrainIteration
from staticmoe.runner.memory import Checks, MemoryForecast, Variant, over_construction
from staticmoe.runner.participants import StepBinding
from staticmoe.runner.rehearsal import rehearsal

AMPLE = 1 << 50
VOCABULARY, WIDTH, TOKENS = 64, 32, 24


def rounded(tensor: Tensor) -> int:
    """Bytes of a tensor as torch's allocator on a GPU hands them out: in units of 512."""
    return (tensor.numel() * tensor.element_size() + 511) // 512 * 512


class Model(nn.Module):
    """Embedding, blocks of attention's shape and experts, and a head that may be the embedding."""

    def __init__(
        self, blocks: int = 3, *, checkpointed: bool = False, tied: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))
        self.layers = nn.ModuleList(StaticMoE(WIDTH, 48, 4, 2, dtype=dtype) for _ in range(blocks))
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def block(self, number: int, h: Tensor) -> Tensor:
        h = h + self.dropout(F.gelu(self.mix[number](h)))
        layer = self.layers[number]
        return h + layer(h.to(layer.experts.down_proj.dtype)).to(h.dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.embedding(x))
        for number in range(len(self.layers)):
            h = checkpoint(self.block, number, h, use_reentrant=False) if self.checkpointed else self.block(number, h)
        return self.head(h)


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["x"])


def a_batch(tokens: int = TOKENS) -> dict[str, Tensor]:
    return {"x": torch.arange(tokens) % VOCABULARY}


def assembled(
    model: nn.Module, *, loss: Callable[..., Any] = loss_fn, optimizer: Any = None, tokens: int = TOKENS, **options: Any
) -> tuple[Assembly, BatchShape]:
    """What a runner is put together from, with nothing captured."""
    optimizer = optimizer if optimizer is not None else torch.optim.AdamW(model.parameters())
    shape = BatchShape(a_batch(tokens))
    config = RunnerConfig(capture="emulate", **options)
    return Assembly(model, optimizer, [shape], loss, None, None, None, config, lambda: None), shape


def forecast(model: nn.Module, **options: Any) -> MemoryForecast:
    """The forecast, without a capture."""
    parts, shape = assembled(model, **options)
    found = parts._foresight().of(shape)
    parts.release()
    assert found is not None
    return found.forecast


class Measured(TorchDispatchMode):
    """Memory that real operations make and that is still alive, looked through after each of them."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[tuple[StorageWeakRef, int]] = []
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in self._tensors((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        self._made = [(weak, size) for weak, size in self._made if not weak.expired()]
        known = given | {weak.cdata for weak, _ in self._made}
        for tensor in self._tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                known.add(storage._cdata)
                self._made.append((StorageWeakRef(storage), (storage.nbytes() + 511) // 512 * 512))
        self.peak = max(self.peak, sum(size for _, size in self._made))
        return result

    @staticmethod
    def _tensors(tree: Any) -> list[Tensor]:
        return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def measured(model: nn.Module, **options: Any) -> tuple[int, int]:
    """Peak of a real, uncaptured iteration, and bytes of the gradients that it ends with."""
    parts, shape = assembled(model, **options)
    parts.adapter.create_state()
    count = parts.config.gradient_accumulation_steps
    inputs = parts._inputs(shape, count)
    inputs.stage(0)
    iteration = TrainIteration(parts._wrapped(parts.config), parts.adapter, inputs, parts.guard)
    iteration.probe()
    records: Any = _NoRecord(parts._scratch)
    iteration.equip(records, Shadow([]))
    gc.collect()
    with parts.guard.withholding(), Measured() as counted:
        iteration()
    gradients = sum({g.untyped_storage()._cdata: rounded(g) for g in iteration.gradients}.values())
    parts.release()
    return counted.peak, gradients


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {"tokens": 400}),
    "few tokens and clipping": ({}, {"tokens": 8, "max_grad_norm": 1.0}),
    "checkpointed": ({"checkpointed": True}, {"tokens": 400}),
    "tied": ({"tied": True}, {"tokens": 400}),
    "bf16 experts": ({"dtype": torch.bfloat16}, {"tokens": 400}),
    "autocast": ({}, {"tokens": 400, "autocast": torch.bfloat16}),
    "two micro-batches": ({}, {"tokens": 400, "gradient_accumulation_steps": 2}),
    "two micro-batches, bf16": ({"dtype": torch.bfloat16}, {"tokens": 400, "gradient_accumulation_steps": 2}),
    "five micro-batches": ({}, {"tokens": 400, "gradient_accumulation_steps": 5}),
    "a narrow capacity": ({}, {"tokens": 400, "capacity_factor": 0.5, "overflow": "drop"}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("table", [False, True], ids=["torch's AdamW", "own AdamW"])
def test_the_peak_is_that_of_a_real_iteration(case: str, table: bool) -> None:
    """To the byte: the same operations allocate, and the same references keep."""
    how, options = CASES[case]
    model = Model(**how)
    options = {**options, "optimizer": AdamW(model.parameters()) if table else None}
    peak, gradients = measured(model, **options)
    foreseen = forecast(model, **options)
    assert foreseen.gradients == gradients
    # Of many micro-batches two are rehearsed, and a scalar of the third is missing.
    assert 0 <= peak - foreseen.variants[0].peak <= (512 if case == "five micro-batches" else 0)
    assert peak > gradients


def test_parameters_state_inputs_and_gradients_are_exact() -> None:
    model = Model()
    runner = StaticMoERunner(
        model,
        optimizer := torch.optim.AdamW(model.parameters()),
        example_batch=MicroBatches([a_batch(), a_batch()]),
        loss_fn=loss_fn,
        config=RunnerConfig(gradient_accumulation_steps=2, memory_limit_bytes=AMPLE, capture_warmup_iters=1),
    )
    found = runner.memory().forecast
    assert found is not None
    assert found.parameters == sum(map(rounded, model.parameters()))
    assert found.buffers == sum(map(rounded, model.buffers()))
    assert found.gradients == sum(map(rounded, model.parameters()))
    assert found.optimizer == sum(rounded(t) for state in optimizer.state.values() for t in state.values())
    assert found.inputs == input_bytes(runner._parts.training.programs[0].inputs)
    persistent = found.parameters + found.buffers + found.optimizer + found.inputs
    assert found.total == persistent + found.pool + found.beside + found.fragments
    # All of it in segments: some of 2 MiB, as nothing here is larger than one.
    assert found.fragments > 0 and (persistent + found.pool + found.beside + found.fragments) % (2 << 20) == 0


def input_bytes(inputs: InputRing) -> int:
    memories = [slot.resident for slot in inputs._slots]
    held = [t for memory in memories for values in memory.values for t in values if t is not None]
    held += [t for memory in memories for t in (memory.hyper, memory.control)]
    return sum(map(rounded, [*inputs.tensors.values(), *held]))


def test_tied_weights_count_once() -> None:
    tied, apart = forecast(Model(tied=True)), forecast(Model())
    weight = rounded(torch.empty(VOCABULARY, WIDTH))
    assert apart.parameters - tied.parameters == weight
    assert apart.gradients - tied.gradients == weight
    assert apart.optimizer - tied.optimizer == 2 * weight + 512


def test_checkpointing_needs_less() -> None:
    plain, less = forecast(Model(6), tokens=4000), forecast(Model(6, checkpointed=True), tokens=4000)
    assert less.activations < 0.6 * plain.activations


def test_accumulation_does_not_multiply_the_activations() -> None:
    one, two, eight = (
        forecast(Model(), tokens=4000, gradient_accumulation_steps=n, capacity_scope="expert") for n in (1, 2, 8)
    )
    assert two.variants == eight.variants
    assert one.activations <= two.activations < 1.2 * one.activations
    assert eight.inputs > two.inputs > one.inputs


def test_activations_grow_with_the_tokens() -> None:
    small, large = (forecast(Model(), tokens=tokens).activations for tokens in (1000, 2000))
    assert 1.9 * small < large < 2.1 * small


class Keeper(Model):
    """Leaves in Python what a careless model leaves: lists, dicts, counters, caches; and a tensor hook."""

    def __init__(self) -> None:
        super().__init__(2, tied=True)
        self.seen: list[Tensor] = []
        self.recent: collections.deque[Tensor] = collections.deque(maxlen=2)
        self.cache: dict[str, Any] = {"nested": {"count": 0}}
        self.calls = 0
        self.hooked = 0
        self.last: Tensor | None = None
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))
        self.head.weight.register_hook(self._hook)

    def _hook(self, gradient: Tensor) -> None:
        self.hooked += 1

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.calls += 1
        self.seen.append(y.detach())
        self.recent.append(y.detach())
        self.cache["nested"]["count"] += 1
        self.cache["y"] = self.last = y.detach()
        # A number and a real tensor alone: torch's fake mode would compute it.
        self.counter.add_(1)
        return y


def everything(model: Keeper, optimizer: torch.optim.Optimizer, log: list[Any]) -> list[Any]:
    """All that must be as before: identities, values, versions, gradients, random state and what Python keeps."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return [
        [(name, id(t), t._version, t.data_ptr(), t.requires_grad, t.detach().clone().tolist()) for name, t in tensors],
        [(id(p.grad), None if p.grad is None else p.grad.tolist()) for p in model.parameters()],
        [list(vars(module)) for module in model.modules()],
        [list(map(id, (module._parameters, module._buffers, module._forward_hooks))) for module in model.modules()],
        (list(map(id, model.seen)), list(map(id, model.recent)), model.calls, model.hooked, model.last),
        {key: dict(value) for key, value in model.cache.items()},
        torch.get_rng_state().tolist(),
        [dict(state) for state in optimizer.state.values()],
        [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        sorted(vars(optimizer)),
        list(map(id, log)),
        (torch.is_autocast_cache_enabled(), torch.is_grad_enabled()),
    ]


def fake_tensors() -> list[FakeTensor]:
    """Those that some Python object in this process refers to."""
    return [thing for thing in gc.get_objects() if type(thing) is FakeTensor]


@pytest.mark.parametrize("where", ["nowhere", "forward", "backward", "optimizer"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, AdamW, torch.optim.RMSprop])
def test_a_forecast_leaves_no_trace(where: str, kind: Any) -> None:
    """Model, optimizer, random numbers and the user's lists are as before, also where the run fails half-way."""
    model, log = Keeper(), []
    optimizer = kind(model.parameters(), lr=1e-3)
    model.mix[0].weight.grad = torch.ones(WIDTH, WIDTH)

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise ValueError("in the middle")

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        value = loss_fn(model, batch)
        log.append(value)
        if where == "forward":
            float(value)
        return Failing.apply(value) if where == "backward" else value

    parts, shape = assembled(model, loss=loss, optimizer=optimizer, gradient_accumulation_steps=2)
    if where == "optimizer":
        parts.adapter.step = lambda *given: float(given[2])  # type: ignore[method-assign, assignment, return-value]
    bindings = [dict(vars(binding)) for binding in parts._bindings.values()]
    guard = {name: (t._version, t.tolist()) for name, t in parts.guard.tensors.items()}
    before = everything(model, optimizer, log)
    # Held, so that none of this run's gets the place of one that others, torch's caches among them, have left.
    of_others = fake_tensors()
    found = parts._foresight().of(shape)
    assert (found is not None) == (where == "nowhere")
    assert everything(model, optimizer, log) == before
    assert {name: (t._version, t.tolist()) for name, t in parts.guard.tensors.items()} == guard
    assert [dict(vars(binding)) for binding in parts._bindings.values()] == bindings
    gc.collect()
    assert {id(tensor) for tensor in fake_tensors()} <= {id(tensor) for tensor in of_others}


kept_last: Any = None


def test_variables_of_functions_keep_no_fake_tensor() -> None:
    """A closure, a global and an object's attribute that the loss function rebinds."""
    last, trainer = None, type("Trainer", (), {})()
    trainer.last = None

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        nonlocal last
        global kept_last
        value = loss_fn(model, batch)
        last = kept_last = trainer.last = value.detach()
        return value

    forecast(Model(1), loss=loss)
    assert (last, kept_last, trainer.last) == (None, None, None)


def test_host_values_inside_the_iteration() -> None:
    """A tensor made of Python numbers counts as memory, and its value is known."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        scale = torch.tensor([0.5] * 100_000)
        return loss_fn(model, batch) * scale.mean() * torch.tensor(2.0).item()

    assert forecast(Model(1), loss=loss).variants[0].peak >= 400_000 > forecast(Model(1)).variants[0].peak


def test_a_checkpointed_run_sets_no_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputation restores the random state, which a run without numbers has no use for."""
    set_to: list[Tensor] = []
    original = torch.set_rng_state
    monkeypatch.setattr(torch, "set_rng_state", lambda state: (set_to.append(state), original(state)))
    forecast(Model(checkpointed=True))
    assert not set_to


def test_two_rehearsals_at_once_leave_torchs_own_functions() -> None:
    """The one that came first leaves first: without turns the second would put back what the first had put in."""
    before, inside, left = torch.manual_seed, threading.Event(), threading.Event()

    def second() -> None:
        inside.wait()
        with rehearsal(torch.device("cpu"), (), (), (), {}):
            # In turns, the first has left by now; else it leaves while this one is in.
            left.wait(timeout=5)

    other = threading.Thread(target=second)
    other.start()
    with rehearsal(torch.device("cpu"), (), (), (), {}):
        inside.set()
        other.join(timeout=0.2)
    left.set()
    other.join()
    found, torch.manual_seed = torch.manual_seed, before
    assert found is before


def test_training_goes_on_as_without_a_forecast(assert_same: Callable[[Any, Any], None]) -> None:
    def train(limit: int | None) -> list[Any]:
        torch.manual_seed(1)
        model = Model(2, checkpointed=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        config = RunnerConfig(memory_limit_bytes=limit, capacity_factor=1.2, capacity_scope="expert")
        with StaticMoERunner(model, optimizer, example_batch=a_batch(), loss_fn=loss_fn, config=config) as runner:
            losses = [float(runner.step(a_batch()).loss) for _ in range(3)]
            return [losses, model.state_dict(), torch.get_rng_state()]

    assert_same(train(AMPLE), train(None))


def reads_host(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss = loss_fn(model, batch)
    return loss * 2 if float(loss) > 0 else loss


def test_what_cannot_be_captured_has_no_forecast_and_its_own_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="staticmoe")
    errors = []
    for limit in (AMPLE, None):
        model = Model(1)
        with pytest.raises(CaptureError) as caught:
            StaticMoERunner(
                model,
                torch.optim.AdamW(model.parameters()),
                example_batch=a_batch(),
                loss_fn=reads_host,
                config=RunnerConfig(memory_limit_bytes=limit),
            )
        errors.append(str(caught.value))
    assert errors[0] == errors[1] and "float(tensor)" in errors[0]
    lines = [r for r in caplog.records if "no memory forecast" in r.getMessage()]
    assert len(lines) == 1 and lines[0].levelname == "INFO" and "\n" not in lines[0].getMessage()


def test_no_address_is_given_out() -> None:
    """A kernel that is no torch operation would be launched on the address 0."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        value = loss_fn(model, batch)
        return value if value.data_ptr() else value

    parts, shape = assembled(Model(1), loss=loss)
    assert parts._foresight().of(shape) is None


@pytest.mark.parametrize("options", [{}, {"capacity_factor": 0.5}, {"self_check": False}])
def test_a_limit_is_refused_with_numbers_and_nothing_bound(options: dict[str, Any]) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    log: list[Any] = []

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        log.append({"loss": loss_fn(model, batch)})
        return log[-1]["loss"]

    def wrap(limit: int, loss: Callable[..., Any]) -> StaticMoERunner:
        config = RunnerConfig(memory_limit_bytes=limit, **options)
        return StaticMoERunner(model, optimizer, example_batch=a_batch(4000), loss_fn=loss, config=config)

    total = forecast(model, optimizer=optimizer, tokens=4000, **options).total
    with pytest.raises(MemoryLimitError) as caught:
        wrap(total - 1, loss)
    text = str(caught.value)
    assert f"({total - 1} bytes)" in text and f"({total} bytes)" in text and "would need" in text
    assert re.search(r"parameters +\d+\.\d\d MiB", text) and re.search(r"activations +\d+\.\d\d MiB", text)
    assert not optimizer.state and not log, "what a rehearsal leaves is taken back, and nothing else ran"
    assert all(layer._binding is None for layer in model.layers)
    wrap(total, loss_fn).close()


def test_what_would_fit_is_named() -> None:
    """Each way out that the refusal names is one: with it the runner is admitted."""
    model = Model()
    whole = forecast(model, tokens=40_000, capacity_factor=0.5)
    checked = forecast(model, tokens=40_000, capacity_factor=0.5, self_check=False)
    dropped = forecast(model, tokens=40_000, capacity_factor=0.5, overflow="drop")
    parts, shape = assembled(model, tokens=40_000, capacity_factor=0.5)
    found = parts._foresight().of(shape)
    assert found is not None
    ways = {what: less.forecast for what, less in found.ways_out()}
    # What warm-ups have taken stays held: without a self-check it is less by gradients at most, which are small here.
    assert ways["self_check=False"].total == checked.total <= whole.total
    assert ways["overflow='drop', without the other variants,"].total == dropped.total < whole.total
    half, less = forecast(Model(), tokens=20_000, capacity_factor=0.5), ways["a micro-batch of 1/2 the size"]
    assert abs((less.pool + less.beside) / (half.pool + half.beside) - 1) < 0.02
    # How pieces fall into segments hangs on single bytes.
    assert abs(less.total / half.total - 1) < 0.1


class Slots(nn.Module):
    """Experts with C = ceil(f·T·K/E) rows each, whether they have arrived or not: capacity costs memory here."""

    def __init__(self, experts: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, WIDTH, WIDTH) / WIDTH)
        self.binding: StepBinding | None = None

    def step_fields(self) -> dict[str, tuple[int, ...]]:
        return {"routed": (1,)}

    def bind_step(self, binding: StepBinding | None) -> None:
        self.binding = binding

    def commit_step(self, veto: Tensor) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        assert self.binding is not None
        self.binding.entered += 1
        experts, factor = self.weight.shape[0], self.binding.capacity.factor
        rows = len(x) if factor is None else min(len(x), int(factor * len(x) / experts))
        self.binding.facts = {"capacity_rows": experts * rows, "can_overflow": int(rows < len(x))}
        slots = torch.arange(experts * rows) % len(x)
        y = torch.bmm(x[slots].view(experts, rows, -1), self.weight)
        return x.index_add(0, slots, y.flatten(0, 1))


class Slotted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.slots = nn.Embedding(VOCABULARY, WIDTH), Slots()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.slots(self.embedding(x)))


def test_capacity_slack_grows_with_the_factor() -> None:
    """Of what the rows above the balanced load take; a packed layer has no more rows than assignments, and no slack."""
    factors = (None, 0.5, 1.0, 1.5, 2.0, 3.0)
    options = {"tokens": 2048, "capacity_scope": "expert", "overflow": "drop"}
    slack = {f: forecast(Slotted(), capacity_factor=f, **options) for f in factors}
    assert [slack[f].capacity_slack for f in (None, 0.5, 1.0)] == [0, 0, 0]
    assert 0 < slack[1.5].capacity_slack < slack[2.0].capacity_slack < slack[3.0].capacity_slack
    for factor in (1.5, 2.0, 3.0):
        assert slack[factor].capacity_slack == slack[factor].activations - slack[1.0].activations
    # Twice the rows above the balanced load, twice the slack, but for rounding.
    assert abs(slack[3.0].capacity_slack / slack[2.0].capacity_slack - 2) < 0.01
    assert forecast(Model(), capacity_factor=1.5, tokens=2048, capacity_scope="expert").capacity_slack == 0


def test_a_variant_for_each_graph() -> None:
    narrow = forecast(Slotted(), tokens=2048, capacity_factor=1.5, capacity_scope="expert")
    assert [variant.name for variant in narrow.variants] == ["capacity_factor=1.5", "dropless"]
    assert narrow.variants[1].peak > 2 * narrow.variants[0].peak
    assert narrow.pool == narrow.variants[1].peak
    [only] = forecast(Slotted(), tokens=2048, capacity_factor=8.0, capacity_scope="expert").variants
    assert only.name == "capacity_factor=8.0", "where nothing can overflow there is no other graph"
    assert len(forecast(Slotted(), tokens=2048, capacity_factor=1.5, overflow="skip").variants) == 1


@pytest.mark.parametrize("options", [{}, {"capacity_factor": 2.0, "capacity_scope": "expert"}])
def test_the_gradients_are_what_a_run_leaves(options: dict[str, Any]) -> None:
    """In the events of each variant, whose allocations come to its peak."""
    parts, shape = assembled(Model(), tokens=400, **options)
    found = parts._foresight().of(shape)
    assert found is not None and (found.balanced is None) == (not options)
    for run in (*found.runs, *([found.balanced] if found.balanced is not None else [])):
        alive: dict[int, int] = {}
        most = 0
        for key, nbytes in run.events:
            if nbytes < 0:
                del alive[key]
            else:
                alive[key] = nbytes
            most = max(most, sum(alive.values()))
        assert sum(alive.values()) == run.variant.gradients and most == run.variant.peak
    assert found.runs[0].of_part(2).variant.gradients == found.runs[0].variant.gradients


@pytest.mark.parametrize(
    ("variants", "options", "expected"),
    [
        # gradients 10, activations 90: the pool, and beside it an uncaptured iteration and the gradients of another
        ([(10, 90)], {}, (100, 110)),
        # warm-up is over before there is a pool
        ([(10, 90)], {"self_check": False}, (100, 0)),
        # the second graph in the memory of the first
        ([(10, 90), (10, 290)], {}, (300, 310)),
        ([(10, 90), (10, 290)], {"self_check": False}, (300, 100)),
        # unless the first's gradients are looked at again
        ([(10, 90), (10, 290)], {"rechecked": True}, (310, 310)),
        ([(10, 90)], {"replayed": False}, (100, 0)),
    ],
)
def test_the_pool_is_shared(
    variants: list[tuple[int, int]], options: dict[str, bool], expected: tuple[int, int]
) -> None:
    graphs = [Variant(str(number), *sizes) for number, sizes in enumerate(variants)]
    assert over_construction(graphs, Checks(**options)) == expected


def test_the_table_has_80_columns_and_compares() -> None:
    found = dataclasses.replace(forecast(Model(1)), others=3 << 30)
    lines = found.lines(measured=found.total * 2)
    assert all(len(line) == 80 for line in lines)
    assert any(line.startswith("other memory") and line.endswith("3.00 GiB") for line in lines)
    assert "forecast -50.0%" in lines[-1]
    named = {re.split(r"  +", line.strip())[0] for line in found.lines()}
    assert {"parameters", "buffers", "optimizer state", "inputs", "gradients", "activations"} <= named


def test_a_summary_shows_the_forecast_beside_what_is_kept() -> None:
    model = Model(1)
    optimizer = torch.optim.AdamW(model.parameters())
    with StaticMoERunner(model, optimizer, example_batch=a_batch(), loss_fn=loss_fn) as runner:
        memory = runner.memory()
        assert memory.forecast is not None and memory.graphs == runner._parts.owned_bytes > 0
        assert memory.forecast.total == forecast(Model(1)).total, "asked for late or early, it is the same"
        foreseen = f"memory: forecast {memory.forecast.total / 2**20:.2f} MiB"
        assert foreseen in runner.summary() and f"{memory.graphs / 2**20:.2f} MiB" in runner.summary()
    assert runner.memory().forecast == memory.forecast


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_a_limit_is_a_number_of_bytes(value: Any) -> None:
    with pytest.raises(ConfigError, match="memory_limit_bytes"):
        RunnerConfig(memory_limit_bytes=value)


def operations() -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
    """Operations on a [6, 4] tensor whose results lie in memory in different ways."""
    yield "sum with a number", lambda x: x + 1
    yield "sum with a float", lambda x: x + 1.0
    yield "view", lambda x: x.view(3, 8)
    yield "transpose", lambda x: x.t()
    yield "slice", lambda x: x[1:3, ::2]
    yield "split", lambda x: x.split(2)
    yield "expand", lambda x: x[:, None].expand(6, 5, 4)
    yield "several", lambda x: torch.max(x, dim=1)
    yield "cast", lambda x: x.to(torch.bfloat16)
    yield "transposed product", lambda x: (x.float() @ x.float().t()).t()
    yield "empty", lambda x: x.new_empty(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize(("name", "run"), list(operations()), ids=lambda value: value if isinstance(value, str) else "")
def test_a_remembered_operation_gives_what_the_real_one_gives(
    name: str, run: Callable[[Tensor], Any], dtype: torch.dtype
) -> None:
    class Remembering(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.prim.device.default:
                return args[0].fake_device
            return operation(func, args, kwargs or {})

    real = torch.zeros(6, 4, dtype=dtype)
    fake = FakeTensorMode()
    operation, x = FakeOperations(fake), fake.from_tensor(real)
    with fake, Remembering():
        run(x)
        found = torch.utils._pytree.tree_leaves(run(x))
        run(x + 1), run(x + 1.0)
        mixed = (x + 1).dtype, (x + 1.0).dtype
    assert mixed == ((real + 1).dtype, (real + 1.0).dtype)
    for one, other in zip(found, torch.utils._pytree.tree_leaves(run(real)), strict=True):
        assert (one.shape, one.stride(), one.storage_offset()) == (other.shape, other.stride(), other.storage_offset())
        assert (one.dtype, one.device) == (other.dtype, other.device)
        assert one.untyped_storage().nbytes() == other.untyped_storage().nbytes()
        shared = one.untyped_storage()._cdata == x.untyped_storage()._cdata
        assert shared == (other.untyped_storage()._cdata == real.untyped_storage()._cdata)
