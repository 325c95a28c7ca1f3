"""Faults put into a step: NaN and infinity in inputs, router scores, gradients and weights. Nothing of them is kept.

What a vetoed step does use up: its number, and the one draw from torch's generator that seeds it
(`staticmoe.capture.seeding`). A learning-rate schedule belongs to the user's loop, which goes on with it or does not.

Letters: T tokens, K top_k, E experts, H hidden size, C rows of one expert.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from staticmoe import MicroBatches, NonFiniteError, Reason, RunnerConfig, StaticMoE, StaticMoERunner, functional
from staticmoe.optim import AdamW

NAN, INF = float("nan"), float("inf")
T, K, E, H = 24, 2, 4, 8
Same = Callable[[Any, Any], None]


class Sick(torch.autograd.Function):
    """The identity; its gradient is added `sickness`, which is 0 in a healthy batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sickness: Tensor) -> Tensor:
        ctx.save_for_backward(sickness)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad + ctx.saved_tensors[0], None


class Model(nn.Module):
    """Batch statistics, balancing biases, dropout, auxiliary losses: whatever a faulty step could leave behind."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(H)
        self.first = StaticMoE(H, 12, E, K, balancing_bias_rate=1e-2, router_aux_loss_coef=0.01)
        self.second = StaticMoE(H, 12, E, K, score_function="sigmoid", balancing_bias_rate=1e-2)
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(H, 5)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        h = self.norm(batch["x"])
        # One token's router scores, and what its experts are given; the residual stays healthy.
        h = h + self.dropout(self.first(h + batch["spike"][:, None]))
        return self.head(h + self.second(Sick.apply(h, batch["sickness"])))


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch), batch["y"])


@dataclasses.dataclass(frozen=True)
class Fault:
    """A value that is not finite, in one element of the batch's `where`."""

    where: str
    value: float

    def put_into(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        sick = batch[self.where].clone()
        sick.view(-1)[sick.numel() // 2] = self.value
        return {**batch, self.where: sick}

    def __str__(self) -> str:
        return f"{self.value} in {self.where}"


STEPS = 12
# Step -> what is wrong with it: two in a row, alone, and the last step.
FAULTS = {
    2: Fault("x", NAN), 3: Fault("x", INF), 5: Fault("spike", NAN), 8: Fault("spike", INF), 9: Fault("sickness", NAN),
    11: Fault("sickness", INF),
}  # fmt: skip
# Rows do not fit in the step before a fault, in one in flight behind it, and in a faulty one.
SKEWED = (1, 4, 8, 10)
CAPACITIES: dict[str, dict[str, Any]] = {
    "dropless": {},
    "rerun": {"capacity_factor": 1.6, "capacity_scope": "expert", "overflow": "rerun"},
    "drop": {"capacity_factor": 1.2, "capacity_scope": "expert", "overflow": "drop"},
}


def batch_of(step: int, micro: int = 0) -> dict[str, Tensor]:
    """Healthy; where the step is skewed, most tokens are one token, which goes to the same experts."""
    generator = torch.Generator().manual_seed(100 * step + micro)
    x = torch.randn(T, H, generator=generator)
    if step in SKEWED:
        x[4:] = x[3]
    y = torch.randint(5, (T,), generator=generator)
    return {"x": x, "y": y, "spike": torch.zeros(T), "sickness": torch.zeros(())}


def on(device: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in batch.items()}


def input_of(step: int, micro: int, device: str, fault: Fault | None = None) -> Any:
    """The step's batch, or micro-batches; the fault is in the last one."""
    parts = [batch_of(step, number) for number in range(micro)]
    if fault is not None:
        parts[-1] = fault.put_into(parts[-1])
    parts = [on(device, part) for part in parts]
    return parts[0] if micro == 1 else MicroBatches(parts)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "ours": lambda model: AdamW(model.parameters(), lr=1e-2),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-2),
}


class Training:
    """A model, its optimizer, a schedule and a runner, and everything that a step may change."""

    def __init__(self, capture: str, *, micro: int = 1, optimizer: str = "AdamW", **options: Any) -> None:
        self.device, self.micro = "cuda" if capture == "cuda" else "cpu", micro
        torch.manual_seed(0)
        self.model = Model().to(self.device)
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        # Every rate of RMSprop would be a graph of its own.
        self._decay = 0.0 if optimizer == "RMSprop" else 0.1
        config = RunnerConfig(
            capture=capture,
            max_grad_norm=1.0,
            gradient_accumulation_steps=micro,
            max_rerun_fraction=1.0,
            capture_warmup_iters=1,
            **options,
        )
        self.runner = StaticMoERunner(
            self.model, self.optimizer, example_batch=input_of(0, micro, self.device), loss_fn=loss_fn, config=config
        )

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.close()

    def step(self, number: int, fault: Fault | None = None) -> Any:
        """Launch a step, at a learning rate of its own."""
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + self._decay * number)
        return self.runner.step(input_of(number, self.micro, self.device, fault))

    def state(self) -> dict[str, Any]:
        """Everything that training changes, save the counts of skipped and repeated steps."""
        self.runner.synchronize()
        totals = self.runner.telemetry()
        return {
            "model": copy.deepcopy(self.model.state_dict()),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()["state"]),
            "random": torch.get_rng_state(),
            "totals": {name: totals[name] for name in ("committed", "moe")},
            "committed": self.runner.state_dict()["committed"],
        }


def outcome(result: Any) -> tuple[Any, ...]:
    """What a step told about itself, save its number."""
    loads = [(load.routed, load.kept) for load in result.moe.values()]
    return result.loss, result.grad_norm, result.metrics, result.skipped, result.attempt, result.reasons, loads


@functools.cache
def healthy(capture: str, order: tuple[int | None, ...], **how: Any) -> tuple[list[Any], list[Any]]:
    """Outcomes of these steps, and the state after each; None: the draw that a vetoed step uses up, alone."""
    results, states = [], []
    with Training(capture, **how) as training:
        for number in order:
            if number is None:
                torch.randint(2**62, (), dtype=torch.int64)
            else:
                results.append(outcome(training.step(number)))
            states.append(training.state())
    return results, states


def check_reasons(result: Any, fault: Fault, micro: int = 1) -> None:
    """The step was vetoed for what is wrong with it, and its ids were legal all the same."""
    assert result.skipped and Reason.NONFINITE_GRADIENT in result.reasons and not math.isfinite(result.grad_norm)
    # The sickness is in the gradient alone.
    assert bool(result.reasons & Reason.NONFINITE_LOSS) == (fault.where != "sickness") != math.isfinite(result.loss)
    # Every token, the sick ones too, has K experts of those that there are.
    assert [sum(load.routed) for load in result.moe.values()] == [micro * T * K] * 2


def check_skipped(training: Training, want: tuple[list[Any], list[Any]], assert_same: Same) -> None:
    """Train with faulty steps; they are vetoed, and all else is as `want`."""
    results = [training.step(number, FAULTS.get(number)) for number in range(STEPS)]
    state = training.state()
    assert [number for number, result in enumerate(results) if result.skipped] == list(FAULTS)
    assert [result.step for result in results] == [number + 1 for number in range(STEPS)]
    for number, fault in FAULTS.items():
        check_reasons(results[number], fault, training.micro)
    assert_same([outcome(result) for number, result in enumerate(results) if number not in FAULTS], want[0])
    assert_same(state, want[1][-1])
    assert training.runner.telemetry()["skipped"] == len(FAULTS)


SKIPPED = tuple(None if number in FAULTS else number for number in range(STEPS))
# The step in flight behind a fault is lost with it, and given again.
RAISED = (0, 1, None, None, None, None, 4, None, None, 6, 7, None, None, None, None, 10, None)


@pytest.fixture(params=["replayed", "off"])
def mode(request: pytest.FixtureRequest, captured: str) -> str:
    """Replayed and not."""
    return captured if request.param == "replayed" else "off"


# Mode and capacity; where nothing is replayed, drops add nothing to what the other two show.
WAYS = [("replayed", "dropless"), ("replayed", "rerun"), ("replayed", "drop"), ("off", "dropless"), ("off", "rerun")]


@pytest.mark.parametrize(("mode", "capacity"), WAYS, indirect=["mode"])
def test_skipped_steps_leave_nothing(mode: str, capacity: str, assert_same: Same) -> None:
    """Parameters, optimizer state, statistics, biases, totals and random numbers are those of a run without them."""
    want = healthy(mode, SKIPPED, **CAPACITIES[capacity])
    with Training(mode, **CAPACITIES[capacity]) as training:
        check_skipped(training, want, assert_same)
    attempts, loads = [one[4] for one in want[0]], [one[-1] for one in want[0]]
    # Else a capacity would prove nothing. Of the healthy steps 0, 1, 4, 6, 7 and 10 those are skewed.
    overflows = [bool(attempt) or any(r != k for r, k in load) for attempt, load in zip(attempts, loads, strict=True)]
    if capacity == "dropless":
        assert not any(overflows)
    else:
        assert overflows[1] and overflows[2] and overflows[5] and not all(overflows)


@pytest.mark.parametrize(
    "how",
    [
        {"micro": 2, "max_in_flight": 4},
        {"capture_scope": "forward_backward"},
        {"optimizer": "ours"},
        {"optimizer": "RMSprop"},
    ],
    ids=str,
)
def test_however_the_step_is_made(how: dict[str, Any], captured: str, assert_same: Same) -> None:
    """A faulty last micro-batch, other depths of the flight, an optimizer outside, one undone from copies."""
    alike = {name: value for name, value in how.items() if name != "max_in_flight"}
    want = healthy(captured, SKIPPED, **alike, **CAPACITIES["drop"])
    with Training(captured, **how, **CAPACITIES["drop"]) as training:
        check_skipped(training, want, assert_same)


@pytest.mark.parametrize(("mode", "capacity"), WAYS[1:4], indirect=["mode"])
def test_raise_names_the_step_and_goes_on(mode: str, capacity: str, assert_same: Same) -> None:
    """The faulty step and the one in flight behind it are not applied; given again, that one is applied."""
    outcomes, states = healthy(mode, RAISED, **CAPACITIES[capacity])
    launched: list[tuple[int, Any]] = []
    order: list[int | None] = []
    errors = 0
    with Training(mode, nonfinite="raise", **CAPACITIES[capacity]) as training:
        number = 0
        while number < STEPS:
            try:
                launched.append((number, training.step(number, FAULTS.get(number))))
                order.append(number)
                number += 1
                if number == STEPS:
                    training.runner.flush()
            except NonFiniteError as error:
                bad = list(FAULTS)[errors]
                errors += 1
                at = len(order) - 1 - order[::-1].index(bad)
                result = launched[at][1]
                check_reasons(result, FAULTS[bad])
                what = (
                    "nonfinite gradient" if FAULTS[bad].where == "sickness" else "nonfinite loss and nonfinite gradient"
                )
                begins = f"step {at + 1} was not applied: {what} (loss {result.loss}, gradient norm {result.grad_norm})"
                assert str(error).startswith(begins)
                assert all(one.skipped for _, one in launched[at:])
                order[at:] = [None] * len(order[at:])
                assert_same(training.state(), states[len(order) - 1])
                number = bad + 1
        state = training.state()
        assert order == list(RAISED) and [result.step for _, result in launched] == [n + 1 for n in range(len(RAISED))]
        assert_same(
            [outcome(result) for kept, (_, result) in zip(order, launched, strict=True) if kept is not None], outcomes
        )
        assert_same(state, states[-1])


WEIGHTS = [
    (f"{layer}.{name}", value)
    for layer in ("first", "second")
    for name in ("router.weight", "experts.gate_up_proj", "experts.down_proj")
    for value in (NAN, INF)
]


class Poisoned:
    """Within: one element of a parameter is overwritten in place; what it was stands there again afterwards.

    Of a router the last: where all scores of a row are NaN, it is not its expert that comes first by number.
    """

    def __init__(self, training: Training, name: str, value: float) -> None:
        self._runner, self._value = training.runner, value
        self._parameter = training.model.get_parameter(name)
        self._at = -1 if "router" in name else 0

    @torch.no_grad()
    def __enter__(self) -> None:
        self._runner.synchronize()
        self._before = self._parameter.view(-1)[self._at].clone()
        self._parameter.view(-1)[self._at] = self._value

    @torch.no_grad()
    def __exit__(self, *_: object) -> None:
        self._runner.synchronize()
        self._parameter.view(-1)[self._at] = self._before


@pytest.mark.parametrize(
    ("mode", "capacity", "nonfinite"),
    [
        ("replayed", "dropless", "raise"),
        ("replayed", "rerun", "skip"),
        ("replayed", "drop", "raise"),
        ("off", "dropless", "skip"),
        ("off", "rerun", "raise"),
    ],
    indirect=["mode"],
)
def test_a_poisoned_weight_vetoes_every_step_until_it_is_repaired(
    mode: str, nonfinite: str, capacity: str, assert_same: Same
) -> None:
    """A router's row or an expert's weight, each in turn: two steps, a repair by hand, and training goes on."""
    order = tuple(itertools.chain.from_iterable((None, None, number) for number in range(len(WEIGHTS))))
    outcomes, states = healthy(mode, order, **CAPACITIES[capacity])
    good = []
    with Training(mode, nonfinite=nonfinite, **CAPACITIES[capacity]) as training:
        for number, (name, value) in enumerate(WEIGHTS):
            with Poisoned(training, name, value):
                for attempt in (1, 2):
                    result = training.step(number)
                    if nonfinite == "raise":
                        with pytest.raises(NonFiniteError, match=f"^step {3 * number + attempt} was not applied"):
                            training.runner.flush()
                    assert result.skipped and Reason.NONFINITE_GRADIENT in result.reasons, (name, value)
                    assert [sum(load.routed) for load in result.moe.values()] == [T * K] * 2
            if number % 4 == 0:
                assert_same(training.state(), states[3 * number + 1])
            good.append(training.step(number))
        state = training.state()
        assert_same([outcome(result) for result in good], outcomes)
        assert_same(state, states[-1])


def test_too_many_skips_in_a_row_say_so_and_the_runner_goes_on(captured: str, assert_same: Same) -> None:
    """The steps in flight when the error comes are vetoed too; the repaired weight trains on.

    The sick row sends every token to one expert: what that drops, as it may, is not what the error is about.
    """
    order = (0, 1, None, None, None, None, None, 2, 3)
    outcomes, states = healthy(captured, order, **CAPACITIES["drop"])
    with Training(captured, max_consecutive_skips=3, **CAPACITIES["drop"]) as training:
        results = [training.step(number) for number in (0, 1)]
        with Poisoned(training, "first.router.weight", NAN):
            with pytest.raises(NonFiniteError) as caught:
                for _ in range(9):
                    results.append(training.step(2))
            assert str(caught.value).startswith("4 steps in a row were skipped (max_consecutive_skips=3), last: nonfin")
            assert len(results) == 2 + 5, "the fourth record is read before the sixth launch"
        results += [training.step(number) for number in (2, 3)]
        state = training.state()
        assert [result.skipped for result in results] == [number is None for number in order]
        assert_same([outcome(result) for result in results if not result.skipped], outcomes)
        assert_same(state, states[-1])


@pytest.mark.parametrize("reading", [torch.no_grad, torch.inference_mode])
def test_a_step_may_run_again_where_its_result_is_read_without_gradients(
    reading: Callable[[], Any], captured: str, assert_same: Same
) -> None:
    """Reading settles a step, which may capture a variant and run on it: in the mode of the reader."""
    options = {**CAPACITIES["rerun"], "capacity_ladder": (2.2,)}
    want = healthy(captured, (1, 4), **CAPACITIES["rerun"])
    with Training(captured, **options) as training:
        first = training.step(1)
        with reading():
            assert first.attempt > 0 and not first.skipped
            results = [first, training.step(4)]
            state = training.state()
        # How many variants were tried is not compared.
        assert_same([outcome(result)[:4] for result in results], [one[:4] for one in want[0]])
        assert_same(state, want[1][-1])


@pytest.mark.parametrize("groups", [{}, {"n_group": 2, "topk_group": 1}], ids=["one group", "two groups"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("norm", [False, True], ids=["scores", "shares"])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_ids_are_legal_whatever_the_scores(
    score_function: str, norm: bool, bias: bool, groups: dict[str, int], device: torch.device
) -> None:
    """All rows of four scores out of six special ones: K different experts each, rows within bounds, no NaN unseen."""
    special = (NAN, INF, -INF, 0.0, 3e38, -1.0)
    logits = torch.tensor(list(itertools.product(special, repeat=E)), device=device)
    ids, weights = functional.route(
        logits,
        top_k=K,
        score_function=score_function,
        norm_topk_prob=norm,
        selection_bias=torch.tensor([0.1, 0.0, -0.1, 0.0], device=device) if bias else None,
        **groups,
    )
    assert ids.min() >= 0 and ids.max() < E and (ids[:, 0] != ids[:, 1]).all()
    assert weights[logits.isnan().any(-1)].isnan().any(-1).all(), "a NaN must reach the loss, which vetoes the step"
    count = logits.shape[0] * K
    for expert_capacity, capacity_rows in ((None, count), (300, E * 300), (None, 500)):
        plan = functional.make_plan(
            ids, weights, num_experts=E, capacity_rows=capacity_rows, expert_capacity=expert_capacity
        )
        used = int(plan.expert_offsets[-1])
        assert int(plan.routed_per_expert.sum()) == count and int(plan.tokens_per_expert.sum()) == used <= capacity_rows
        assert expert_capacity is None or int(plan.tokens_per_expert.max()) <= expert_capacity
        rows = plan.row_assignment[:used]
        assert sorted(rows.tolist()) == sorted(set(rows.tolist())) and rows.min() >= 0 and rows.max() < count
        assert torch.equal(
            plan.assignment_row.view(-1)[rows.long()], torch.arange(used, dtype=torch.int32, device=device)
        )
