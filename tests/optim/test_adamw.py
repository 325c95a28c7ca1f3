"""staticmoe.optim.AdamW: alone as torch's, its state dict both ways, and under a runner with everything changing."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from staticmoe import OptimizerError, RunnerConfig, StaticMoE, StaticMoERunner
from staticmoe.optim import AdamW

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def twins(dtype: torch.dtype = torch.float32) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The same three parameters twice."""
    values = [torch.randn(shape).to(dtype) for shape in ((), (3,), (5, 7))]
    return [nn.Parameter(v.clone()) for v in values], [nn.Parameter(v.clone()) for v in values]


def walk(steps: int, *runs: tuple[Any, list[nn.Parameter]]) -> None:
    """The same random gradients for each optimizer."""
    for _ in range(steps):
        gradients = [torch.randn_like(p) for p in runs[0][1]]
        for optimizer, parameters in runs:
            for p, g in zip(parameters, gradients, strict=True):
                p.grad = g.clone()
            optimizer.step()


def assert_close(mine: list[nn.Parameter], theirs: list[nn.Parameter]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=2e-6, atol=2e-6)


def test_alone_it_walks_as_torchs() -> None:
    """Two groups, twenty steps; a parameter without a gradient is left out and gets no state."""
    mine, theirs = twins()

    def groups(p: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": p[:2]}, {"params": p[2:], "lr": 0.3, "weight_decay": 0.0}]

    idle = nn.Parameter(torch.ones(2))
    optimizer, plain = (
        AdamW([*groups(mine), {"params": [idle]}], **OPTIONS),
        torch.optim.AdamW(groups(theirs), **OPTIONS),
    )
    walk(20, (optimizer, mine), (plain, theirs))
    assert_close(mine, theirs)
    assert [float(optimizer.state[p]["step"]) for p in mine] == [20.0] * 3
    assert idle not in optimizer.state and torch.equal(idle, torch.ones(2))


def test_a_closure_runs_with_gradients() -> None:
    """As with every optimizer of torch."""
    p = nn.Parameter(torch.ones(()))
    optimizer = AdamW([p], lr=0.1, weight_decay=0.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = 3 * p
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == 3.0
    assert float(p.detach()) == pytest.approx(0.9)


@pytest.mark.parametrize("direction", ["from torch", "to torch"])
@pytest.mark.parametrize("saved", [False, True])
def test_state_dicts_go_both_ways(direction: str, saved: bool, tmp_path: Any) -> None:
    """Twenty steps with one class, the state dict into the other, ten more with both: they agree."""
    mine, theirs = twins()
    first, second = (torch.optim.AdamW, AdamW) if direction == "from torch" else (AdamW, torch.optim.AdamW)
    source = first(mine, **OPTIONS)
    walk(20, (source, mine))
    state = copy.deepcopy(source.state_dict())
    if saved:
        torch.save(state, tmp_path / "optimizer.pt")
        state = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    target = second(theirs, lr=5.0)
    with torch.no_grad():
        for one, other in zip(mine, theirs, strict=True):
            other.copy_(one)
    target.load_state_dict(state)
    walk(10, (source, mine), (target, theirs))
    assert_close(mine, theirs)
    assert [float(target.state[p]["step"]) for p in theirs] == [30.0] * 3
    assert target.state_dict()["param_groups"] == source.state_dict()["param_groups"]
    keys = [set(entry) for entry in target.state_dict()["state"].values()]
    assert keys == [{"step", "exp_avg", "exp_avg_sq"}] * 3


def test_moments_of_low_precision_parameters_keep_their_bits() -> None:
    """torch would round them to bf16 on loading."""
    mine, theirs = twins(torch.bfloat16)
    optimizer, other = AdamW(mine, **OPTIONS), AdamW(theirs, **OPTIONS)
    walk(5, (optimizer, mine), (other, theirs))
    fresh = AdamW(theirs)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, q in zip(mine, theirs, strict=True):
        assert fresh.state[q]["exp_avg"].dtype == torch.float32
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[p][key], fresh.state[q][key])
        assert not torch.equal(optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg"].bfloat16().float())
    walk(5, (optimizer, mine), (fresh, theirs))
    assert all(torch.equal(p, q) for p, q in zip(mine, theirs, strict=True))


def test_a_loaded_state_is_its_own() -> None:
    """Steps of the one do not move the other's moments or step count."""
    mine, theirs = twins()
    optimizer, other = AdamW(mine, **OPTIONS), AdamW(theirs, **OPTIONS)
    walk(3, (optimizer, mine))
    other.load_state_dict(optimizer.state_dict())
    walk(2, (other, theirs))
    assert [float(optimizer.state[p]["step"]) for p in mine] == [3.0] * 3
    assert [float(other.state[p]["step"]) for p in theirs] == [5.0] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"amsgrad": True}, "amsgrad=True"),
        ({"maximize": True}, "maximize=True"),
        ({"betas": (1.0, 0.9)}, "beta1"),
        ({"betas": (0.9, -0.1)}, "beta2"),
        ({"lr": -1.0}, "lr"),
        ({"eps": float("nan")}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
    ],
)
def test_what_it_does_not_have_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    """At construction, in a group, and in a loaded state dict."""
    p = nn.Parameter(torch.ones(3))
    with pytest.raises(OptimizerError, match=message):
        AdamW([p], **options)
    optimizer = AdamW([nn.Parameter(torch.ones(3))])
    with pytest.raises(OptimizerError, match=message):
        optimizer.add_param_group({"params": [p], **options})
    assert len(optimizer.param_groups) == 1
    if "=True" in message:
        plain = torch.optim.AdamW([p], **options)
        with pytest.raises(OptimizerError, match=message):
            optimizer.load_state_dict(plain.state_dict())
        optimizer.param_groups[0].update(options)
        with pytest.raises(OptimizerError, match=message):
            optimizer.step()


class Model(nn.Module):
    """Loss: s * sum(b) + mean of the layer's output, so that the gradient of b is the batch's s."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.ones(3))
        self.moe = StaticMoE(8, 8, 4, 2, router_aux_loss_coef=0.01)

    def forward(self, x: Tensor, s: Tensor) -> Tensor:
        return s * self.b.sum() + self.moe(x).square().mean()


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch)


def batch_of(step: int, s: float | None = None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(6, 8, generator=generator) + step % 5
    return {"x": x, "s": torch.tensor(float(step % 4) - 1.3 if s is None else s)}


def groups_of(model: Model) -> list[dict[str, Any]]:
    return [{"params": [model.b]}, {"params": list(model.moe.parameters()), "weight_decay": 0.3}]


def change(optimizer: Any, step: int) -> None:
    """Every hyper-parameter moves at every step, each group's by itself."""
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = 1e-2 / (1 + 0.05 * step + number)
        group["betas"] = (0.95 - 0.1 * ((step + number) % 5) / 5, 0.999 - 0.01 * (step % 3))
        group["eps"] = 1e-8 * (1 + step)
        group["weight_decay"] = 0.1 * (step % 3 + number)


def train(capture: str, steps: int, hostile: frozenset[int] = frozenset(), device: str = "cpu") -> dict[str, Any]:
    """Run with everything moving; at steps of `hostile` the gradient of b is NaN."""
    torch.manual_seed(3)
    model = Model().to(device)
    optimizer = AdamW(groups_of(model), lr=1e-2)
    config = RunnerConfig(capture=capture, max_grad_norm=1.0, nonfinite="skip")

    def on_device(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(device) for name, tensor in batch.items()}

    example = on_device(batch_of(0))
    with StaticMoERunner(model, optimizer, example_batch=example, loss_fn=loss_fn, config=config) as runner:
        results = []
        for step in range(steps):
            change(optimizer, step)
            results.append(runner.step(on_device(batch_of(step, float("nan") if step in hostile else None))))
        runner.synchronize()
        state = [t for entry in optimizer.state.values() for t in entry.values()]
        return {
            "losses": [float(result.loss) for result in results],
            "rates": [float(result.metrics["lr"]) for result in results],
            "tensors": [t.detach().clone() for t in (*model.parameters(), *state)],
        }


def assert_bitwise(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_hundred_steps_captured_are_bitwise_the_uncaptured_ones(caplog: pytest.LogCaptureFixture) -> None:
    """With all hyper-parameters moving at each step, and not one recapture."""
    with caplog.at_level(logging.INFO, "staticmoe"):
        captured = train("emulate", 100)
    assert caplog.text.count("built the training graph") == 1 and "recapturing" not in caplog.text
    plain = train("off", 100)
    assert captured["losses"] == plain["losses"] and captured["losses"][-1] != captured["losses"][0]
    assert captured["rates"] == plain["rates"] == pytest.approx([1e-2 / (1 + 0.05 * n) for n in range(100)])
    assert_bitwise(captured["tensors"], plain["tensors"])


def test_under_a_runner_it_walks_as_torchs_alone() -> None:
    """Thirty steps by hand: torch's AdamW, clipping, the auxiliary loss added."""
    torch.manual_seed(3)
    model = Model()
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
    for step in range(30):
        change(optimizer, step)
        optimizer.zero_grad()
        (model(**batch_of(step)) + 0.01 * model.moe.router_losses()["aux_loss"]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    tensors = train("emulate", 30)["tensors"]
    for mine, theirs in zip(tensors, model.parameters(), strict=False):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("capture", ["emulate", "off"])
@pytest.mark.parametrize("first", [0, 4])
def test_a_step_under_veto_leaves_not_one_bit(capture: str, first: int) -> None:
    """NaN gradients at two steps, also at the very first: parameters, moments and step counts as if never called."""
    torch.manual_seed(3)
    model = Model()
    optimizer = AdamW(groups_of(model), lr=1e-2)
    config = RunnerConfig(capture=capture, nonfinite="skip")
    with StaticMoERunner(model, optimizer, example_batch=batch_of(0), loss_fn=loss_fn, config=config) as runner:

        def bits() -> list[Tensor]:
            runner.synchronize()
            state = [t for entry in optimizer.state.values() for t in entry.values()]
            return [t.detach().clone() for t in (*model.parameters(), *state)]

        for step in range(first):
            runner.step(batch_of(step))
        before = bits()
        runner.step(batch_of(0, float("nan")))
        runner.step(batch_of(0, float("inf")))
        assert_bitwise(bits(), before)
        runner.step(batch_of(9))
        after = bits()
        assert float(optimizer.state[model.b]["step"]) == first + 1
        assert all(torch.isfinite(t).all() for t in after)
        assert not torch.equal(after[0], before[0])


def test_vetoed_steps_do_not_disturb_the_others() -> None:
    """Captured and not, with steps in flight behind a vetoed one."""
    hostile = frozenset({0, 5, 6, 13})
    captured, plain = train("emulate", 20, hostile), train("off", 20, hostile)
    assert_bitwise(captured["tensors"], plain["tensors"])
    assert all(torch.isfinite(t).all() for t in captured["tensors"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the graph of the compiled kernel needs a GPU")
def test_captured_on_a_gpu_it_walks_as_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    """Parameter b and its state, with everything moving and three vetoed steps; one capture."""
    hostile = frozenset({0, 5, 13})
    with caplog.at_level(logging.INFO, "staticmoe"):
        captured = train("cuda", 30, hostile, "cuda")
    assert caplog.text.count("built the training graph") == 1 and "recapturing" not in caplog.text
    uncaptured, on_cpu = train("off", 30, hostile, "cuda"), train("off", 30, hostile)
    names = len(list(Model().parameters()))
    for place in (0, names, names + 1, names + 2):
        mine, theirs, far = (run["tensors"][place] for run in (captured, uncaptured, on_cpu))
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mine.cpu(), far, rtol=1e-4, atol=1e-5)
    assert float(captured["tensors"][names]) == 27.0


def test_a_cycled_beta_captures_nothing_anew(caplog: pytest.LogCaptureFixture) -> None:
    """OneCycleLR moves rate and first beta at every step: an error with torch's AdamW, nothing at all here."""
    ends = []
    for capture in ("emulate", "off", "plain"):
        torch.manual_seed(3)
        model = Model()
        optimizer = (torch.optim.AdamW if capture == "plain" else AdamW)([model.b], lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=40)
        if capture == "plain":
            for step in range(30):
                model.b.grad = batch_of(step)["s"].expand(3)
                optimizer.step()
                schedule.step()
        else:
            config = RunnerConfig(capture=capture)
            for parameter in model.moe.parameters():
                parameter.requires_grad_(False)
            with (
                caplog.at_level(logging.INFO, "staticmoe"),
                StaticMoERunner(model, optimizer, example_batch=batch_of(0), loss_fn=loss_fn, config=config) as runner,
            ):
                for step in range(30):
                    runner.step(batch_of(step))
                    schedule.step()
        ends.append(model.b.detach())
    assert "recapturing" not in caplog.text and caplog.text.count("built the training graph") == 2
    assert torch.equal(ends[0], ends[1])
    torch.testing.assert_close(ends[0], ends[2], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("capture", ["emulate", "off"])
def test_a_weight_decay_changed_in_the_run_takes_effect(capture: str, caplog: pytest.LogCaptureFixture) -> None:
    """Gradient zero: decay alone moves b, at the first step after the change and by exactly its amount."""
    model = Model()
    optimizer = AdamW([model.b], lr=0.1, weight_decay=0.0)
    config = RunnerConfig(capture=capture)
    with StaticMoERunner(model, optimizer, example_batch=batch_of(0), loss_fn=loss_fn, config=config) as runner:
        walked = []
        for step in range(4):
            if step == 2:
                optimizer.param_groups[0]["weight_decay"] = 0.5
            runner.step(batch_of(step, 0.0))
            runner.synchronize()
            walked.append(float(model.b.detach()[0]))
    assert walked == pytest.approx([1.0, 1.0, 0.95, 0.95**2], rel=1e-6)
    assert "recapturing" not in caplog.text


def test_a_state_dict_loaded_in_the_run_is_used() -> None:
    """A state of torch's AdamW goes into the memory that the graph knows, and the run goes on from it."""
    model, alone = Model(), nn.Parameter(torch.ones(3))
    plain = torch.optim.AdamW([alone], lr=0.05, betas=(0.5, 0.9))
    for step in range(3):
        alone.grad = torch.full((3,), float(step + 1))
        plain.step()
    optimizer = AdamW([model.b], lr=1.0)
    with StaticMoERunner(model, optimizer, example_batch=batch_of(0), loss_fn=loss_fn) as runner:
        runner.step(batch_of(0))
        place = [t.data_ptr() for t in optimizer.state[model.b].values()]
        optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
        with torch.no_grad():
            model.b.copy_(alone)
        assert place == [t.data_ptr() for t in optimizer.state[model.b].values()]
        for step in range(3):
            runner.step(batch_of(step, 2.0 - step))
            alone.grad = torch.full((3,), 2.0 - step)
            plain.step()
        runner.synchronize()
    torch.testing.assert_close(model.b.detach(), alone.detach(), rtol=2e-6, atol=2e-6)
    assert float(optimizer.state[model.b]["step"]) == 6.0
