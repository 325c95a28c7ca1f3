"""Whatever is handed in wrongly is one clear error: both values, what to do, and a runner that goes on or is closed."""

from __future__ import annotations

import dataclasses
import datetime
import re

import pytest
import torch
from torch import nn

from staticmoe import RunnerConfig, StaticMoE, StaticMoERunner
from staticmoe.errors import BatchError, ClosedError, ConfigError, ModelError, OptimizerError, StaticMoEError
from staticmoe.runner.batch_shape import Leaf, wrong_device


class Model(nn.Module):
    """loss = s * b + 0 * moe: one step of SGD moves b by its rate times s."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.ones(()))
        self.moe = StaticMoE(8, 8, num_experts=4, top_k=2)

    def forward(self, x: torch.Tensor, s: torch.Tensor, note: object = None) -> torch.Tensor:
        return s * self.b + 0 * self.moe(x).sum()


def batch(s: float = 1.0, **more: object) -> dict[str, object]:
    return {"x": torch.randn(4, 8), "s": torch.tensor(s), **more}


def by_name(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture(params=["emulate", "off"])
def config(request: pytest.FixtureRequest) -> RunnerConfig:
    return RunnerConfig(capture=request.param)


def build(model: nn.Module, config: RunnerConfig, **options: object) -> StaticMoERunner:
    optimizer = options.pop("optimizer", None) or sgd(model)
    if "example_batch" not in options:
        options["example_batch"] = batch()
    arguments = {"loss_fn": by_name, "config": config, **options}
    return StaticMoERunner(model, optimizer, **arguments)


def assert_a_good_model_trains(config: RunnerConfig, model: Model | None = None) -> None:
    """After a refusal nothing is left behind that would disturb the next one."""
    model = model or Model()
    start = float(model.b.detach())
    quick = dataclasses.replace(config, self_check=False, capture_warmup_iters=1)
    with build(model, quick) as runner:
        losses = [float(runner.step(batch(s)).loss) for s in (1.0, 2.0)]
    assert losses == pytest.approx([start, 2 * (start - 0.1)])
    assert float(model.b.detach()) == pytest.approx(start - 0.3)


def assert_clear(error: BaseException, *parts: str) -> None:
    """One message with everything in it that a person needs: no bare assert, no text of torch alone."""
    message = str(error)
    for part in parts:
        assert re.search(part, message), f"{part!r} is missing in: {message}"


GOOD = batch()
BAD_BATCHES = {
    "missing key": ({"x": GOOD["x"]}, ["s"]),
    "extra key": ({**GOOD, "z": GOOD["s"]}, ["z"]),
    "tuple for dict": ((GOOD["x"], GOOD["s"]), ["s", r"\[0\]"]),
    "tensor for dict": (GOOD["x"], ["[Tt]ensor"]),
    "list for tensor": ({**GOOD, "s": [GOOD["s"]]}, ["s", r"\[0\]"]),
    "None for tensor": ({**GOOD, "s": None}, ["s", "None"]),
    "None": (None, ["None"]),
    "number for tensor": ({**GOOD, "x": 1.0}, ["x", "float"]),
    "shape": ({**GOOD, "x": torch.randn(4, 9)}, ["x", r"4, 8", r"4, 9"]),
    "rank": ({**GOOD, "x": torch.randn(1, 4, 8)}, ["x", r"4, 8", r"1, 4, 8"]),
    "empty": ({**GOOD, "x": torch.randn(0, 8)}, ["x", r"4, 8", r"0, 8"]),
    "dtype": ({**GOOD, "x": torch.randn(4, 8, dtype=torch.float64)}, ["x", "float32", "float64"]),
    "integers": ({**GOOD, "x": torch.zeros(4, 8, dtype=torch.int64)}, ["x", "float32", "int64"]),
    "meta": ({**GOOD, "x": torch.randn(4, 8, device="meta")}, ["x", "meta"]),
    "sparse": ({**GOOD, "x": torch.randn(4, 8).to_sparse()}, ["x", "sparse"]),
    "string": ({**GOOD, "note": "hello"}, ["note"]),
}


def test_batches_that_do_not_fit(config: RunnerConfig) -> None:
    """Each refused with what was captured and what came, before anything is launched; the runner goes on."""
    model, left = Model(), 1.0
    with build(model, config) as runner:
        runner.evaluate(batch())
        for name, (wrong, parts) in BAD_BATCHES.items():
            with pytest.raises(BatchError) as caught:
                runner.step(wrong)
                pytest.fail(f"accepted: {name}")
            assert_clear(caught.value, *parts)
            with pytest.raises(BatchError):
                runner.evaluate(wrong)
                pytest.fail(f"accepted by evaluate: {name}")
            assert float(runner.step(batch(0.5)).loss) == pytest.approx(0.5 * left, abs=1e-6), name
            left -= 0.05
        assert float(runner.evaluate(batch()).loss) == pytest.approx(left, abs=1e-5)
    assert float(model.b.detach()) == pytest.approx(1 - 0.05 * len(BAD_BATCHES), abs=1e-5)


def test_an_example_batch_that_cannot_be_staged(config: RunnerConfig) -> None:
    """Refused by key at construction."""
    model = Model()
    for example, parts in (
        (batch(note="hello"), ["note", "hello|str"]),
        (batch(note=["a", "b"]), ["note", "str"]),
        (batch(note={"deep": {"name": "x"}}), ["note", "deep", "name", "str"]),
        (batch(note=object()), ["note", "object"]),
        (batch(note=datetime.date(2020, 1, 1)), ["note", "date"]),
        ({**batch(), "x": torch.randn(4, 8, device="meta")}, ["x", "meta"]),
    ):
        with pytest.raises(BatchError) as caught:
            build(model, config, example_batch=example)
        assert_clear(caught.value, *parts)
    assert_a_good_model_trains(config, model)


def test_an_optimizer_that_cannot_be_captured(config: RunnerConfig) -> None:
    """Names the optimizer and those that work."""
    model = Model()
    for kind in (torch.optim.LBFGS, torch.optim.SparseAdam, type("MyAdam", (torch.optim.Adam,), {})):
        with pytest.raises(OptimizerError) as caught:
            build(model, config, optimizer=kind(list(model.parameters())))
        assert_clear(caught.value, kind.__name__, "AdamW")
    assert_a_good_model_trains(config, model)


def test_an_optimizer_of_another_model(config: RunnerConfig) -> None:
    """The classic after `model = Model()` a second time: everything runs and nothing trains."""
    model, other = Model(), Model()
    with pytest.raises(OptimizerError) as caught:
        build(model, config, optimizer=sgd(other))
    assert_clear(caught.value, "optimizer", "model")
    assert_a_good_model_trains(config, model)


def test_something_that_is_no_model_or_no_optimizer(config: RunnerConfig) -> None:
    model = Model()
    with pytest.raises((OptimizerError, TypeError)) as caught:
        build(model, config, optimizer=model.parameters())
    assert_clear(caught.value, "[Oo]ptimizer", "generator")
    with pytest.raises((ModelError, TypeError)) as caught:
        build(lambda **b: None, config, optimizer=sgd(model))
    assert_clear(caught.value, "Module", "function")


def test_a_model_without_a_layer_of_ours(config: RunnerConfig) -> None:
    """There is nothing to do here that plain torch does not do; say so."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
            return s * self.b

    with pytest.raises(ModelError) as caught:
        build(Plain(), config)
    assert_clear(caught.value, "Plain")
    assert_a_good_model_trains(config)


def test_a_layer_that_is_never_entered(config: RunnerConfig) -> None:
    """A report of zero drops from a layer that never ran is worse than an error."""
    model = Model()
    model.spare = StaticMoE(8, 8, num_experts=4, top_k=2)
    optimizer = torch.optim.SGD([model.b, *model.moe.parameters()], lr=0.1)
    with pytest.raises(ModelError) as caught:
        build(model, config, optimizer=optimizer)
    assert_clear(caught.value, "spare")
    del model.spare
    assert_a_good_model_trains(config, model)


def test_a_trainable_parameter_without_a_gradient(config: RunnerConfig) -> None:
    """It would never move, or be decayed in one mode and not in the other."""
    model = Model()
    model.unused = nn.Linear(3, 3)
    with pytest.raises(ModelError) as caught:
        build(model, config)
    assert_clear(caught.value, r"unused\.weight", "requires_grad|optimizer")
    model.unused.requires_grad_(False)
    assert_a_good_model_trains(config, model)


def test_a_loss_that_is_none(config: RunnerConfig) -> None:
    """Of the wrong kind, shape or name; the default expects `.loss`."""
    model = Model()
    for loss_fn, parts in (
        (lambda model, batch: model(**batch) * torch.ones(3), ["loss", r"3"]),
        (lambda model, batch: {"loss": model(**batch)}, ["loss", "dict"]),
        (lambda model, batch: None, ["loss", "None"]),
        (lambda model, batch: model(**batch).detach(), ["loss", "grad"]),
        (lambda model, batch: 1.0, ["loss", "float"]),
        (lambda model, batch: (model(**batch), {"wide": torch.ones(3)}), ["wide", "3"]),
        (lambda model, batch: (model(**batch), {"lr": batch["s"]}), ["lr"]),
        (None, ["loss"]),
    ):
        with pytest.raises(StaticMoEError) as caught:
            build(model, config, loss_fn=loss_fn)
        assert_clear(caught.value, *parts)
    assert_a_good_model_trains(config, model)


def test_a_model_on_the_meta_device(config: RunnerConfig) -> None:
    """All of it, or one part that was forgotten."""
    with torch.device("meta"):
        empty = Model()
    half = Model()
    half.moe.experts.to("meta")
    for model, name in ((empty, "b"), (half, r"moe\.experts\.(gate_up_proj|down_proj)")):
        with pytest.raises(ModelError) as caught:
            build(model, config)
        assert_clear(caught.value, "meta", name, "to_empty|load|device")
    assert_a_good_model_trains(config)


def test_a_compiled_model(config: RunnerConfig) -> None:
    model = Model()
    with pytest.raises(ModelError) as caught:
        build(torch.compile(model), config, optimizer=sgd(model))
    assert_clear(caught.value, "compile")
    assert_a_good_model_trains(config, model)


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_model_in_distributed_data_parallel(config: RunnerConfig, process_group: None) -> None:
    model = Model()
    wrapped = nn.parallel.DistributedDataParallel(model)
    with pytest.raises(ModelError) as caught:
        build(wrapped, config, optimizer=sgd(model))
    assert_clear(caught.value, "DistributedDataParallel", "module|unwrap")
    del wrapped
    assert_a_good_model_trains(config)


def test_a_model_that_is_sharded(config: RunnerConfig, process_group: None) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    model = Model()
    fsdp.fully_shard(model.moe, mesh=mesh)
    with pytest.raises(ModelError) as caught:
        build(model, config)
    assert_clear(caught.value, "FSDP|fully_shard|shard|DTensor")


def test_a_group_added_after_wrapping(config: RunnerConfig) -> None:
    model = Model()
    optimizer = sgd(model)
    late = nn.Parameter(torch.ones(()))
    with build(model, config, optimizer=optimizer) as runner:
        runner.step(batch())
        with pytest.raises(OptimizerError) as caught:
            optimizer.add_param_group({"params": [late], "lr": 0.1})
            runner.step(batch())
        assert_clear(caught.value, "group", "1", "2")
    assert float(late.detach()) == 1.0 and float(model.b.detach()) == pytest.approx(0.9)
    assert_a_good_model_trains(config)


def test_use_after_close(config: RunnerConfig) -> None:
    model = Model()
    runner = build(model, config)
    result = runner.step(batch())
    runner.close()
    runner.close()
    for use in (lambda: runner.step(batch()), lambda: runner.evaluate(batch()), lambda: runner.recapture()):
        with pytest.raises(ClosedError) as caught:
            use()
        assert_clear(caught.value, "closed")
    assert float(result.loss) == 1.0 and float(model.b.detach()) == pytest.approx(0.9)
    assert_a_good_model_trains(config, model)


def test_a_second_runner_on_one_model(config: RunnerConfig) -> None:
    """Two recordings of one parameter would each think the other's updates away."""
    model = Model()
    with build(model, config) as first:
        with pytest.raises(ModelError) as caught:
            build(model, config)
        assert_clear(caught.value, "runner", "close")
        assert float(first.step(batch()).loss) == 1.0
    assert float(model.b.detach()) == pytest.approx(0.9)
    assert_a_good_model_trains(config, model)


@pytest.mark.parametrize(
    ("error", "call"),
    [*((KeyboardInterrupt, call) for call in (1, 2, 5)), (ZeroDivisionError, 1), (ZeroDivisionError, 5)],
)
def test_an_interruption_while_building(config: RunnerConfig, error: type[BaseException], call: int) -> None:
    """Ctrl-C in warm-up, capture or self-check: the error comes out as it is, and everything is as before."""
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random, calls = torch.get_rng_state(), []

    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        calls.append(1)
        if len(calls) == call:
            raise error
        return model(**batch) + 0 * nn.functional.dropout(batch["x"], 0.5).sum()

    example = batch()
    random = torch.get_rng_state()
    try:
        build(model, config, optimizer=optimizer, loss_fn=loss_fn, example_batch=example).close()
    except BaseException as caught:
        if type(caught) is not error:
            raise
    else:
        assert len(calls) < call, "the interruption was swallowed"
        assert call > 1
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    now = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    assert now == groups and model.training
    assert_a_good_model_trains(config, model)


def test_a_value_that_cannot_be_set(config: RunnerConfig) -> None:
    """A scalar that was not declared; a capacity factor that cannot work: refused, what was before stays in force."""
    with build(Model(), config) as runner:
        with pytest.raises((StaticMoEError, KeyError)) as caught:
            runner.scalars["alhpa"] = 1.0
        assert_clear(caught.value, "alhpa")
        for factor in (0.0, -1.0, float("nan"), float("inf"), "2", True):
            with pytest.raises(ConfigError) as caught:
                runner.set_capacity_factor(factor)
            assert_clear(caught.value, "capacity_factor", re.escape(repr(factor)))
        assert float(runner.step(batch()).loss) == 1.0


@pytest.mark.parametrize("key", ["missing", "s"])
def test_a_token_mask_that_is_none(config: RunnerConfig, key: str) -> None:
    """A key that is not in the batch; a mask that does not have the tokens' shape."""
    model = Model()
    with pytest.raises(StaticMoEError) as caught:
        build(model, config, token_mask=key)
    assert_clear(caught.value, key if key == "missing" else "mask")
    assert_a_good_model_trains(config, model)


def test_a_batch_on_another_gpu_is_named() -> None:
    """Devices compare without a GPU: the host's and the model's are right, any other is not."""
    x = torch.zeros(2)
    leaves = [Leaf("['x']", "tensor", (2,), x.dtype, torch.device(place)) for place in ("cpu", "cuda:0", "cuda:1")]
    assert wrong_device(leaves[:2], torch.device("cuda:0")) is None
    message = wrong_device(leaves, torch.device("cuda:0"))
    assert message is not None
    assert_clear(ValueError(message + "; move it"), r"\['x'\]", "cuda:0", "cuda:1")
    assert "cuda:0" in (wrong_device(leaves[1:2], torch.device("cpu")) or "")
