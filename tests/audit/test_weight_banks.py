"""Banks of weights behind caches: from an earlier step, from evaluation, from a copy; and what only looks like one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from staticmoe import StaticMoERunner
from staticmoe.audit import audit
from staticmoe.errors import AuditError


class Bank(nn.Module):
    """Two experts that are used as one bank."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        self.bank: Tensor | None = None

    def stacked(self) -> Tensor:
        return torch.stack([expert.weight for expert in self.experts])

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("th,eoh->to", x, self.current())

    def current(self) -> Tensor:
        return self.stacked()


class FirstBank(Bank):
    """Stacked once, in whichever mode the first call runs."""

    def current(self) -> Tensor:
        if self.bank is None:
            self.bank = self.stacked()
        return self.bank


class EvaluationBank(Bank):
    """Stacked anew in each evaluation, and used by the training step that follows."""

    def current(self) -> Tensor:
        if not torch.is_grad_enabled():
            self.bank = self.stacked()
        return self.stacked() if self.bank is None else self.bank


def found(arguments: dict[str, Any]) -> list[tuple[str, str]]:
    return [(finding.code, finding.severity) for finding in audit(arguments).findings]


def by_name(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch)


def test_the_fault_is_real() -> None:
    """A bank that evaluation left behind gives the experts of the next step no gradient, and no error."""
    block, x = EvaluationBank(), torch.randn(4, 8)
    scale = torch.ones((), requires_grad=True)
    with torch.no_grad():
        block(x)
    (scale * block(x).sum()).backward()
    assert [expert.weight.grad for expert in block.experts] == [None, None]


def test_a_bank_of_an_evaluation_is_found_in_the_training_step_after_it(built: Callable[..., dict[str, Any]]) -> None:
    given = built(EvaluationBank())
    assert found(given) == []
    codes = found({**given, "eval_fn": by_name})
    assert ("SM402", "error") in codes, "the step after it is not looked at"
    # The evaluation itself binds the attribute anew; without gradients the step cannot run.
    assert {code for code, _ in codes} == {"SM301", "SM402", "SM901"}


def test_a_bank_that_evaluation_reads_too_is_listed_once(built: Callable[..., dict[str, Any]]) -> None:
    assert found({**built(FirstBank()), "eval_fn": by_name}) == [("SM401", "error")]


def test_a_bank_without_history_that_alone_uses_its_weights_is_an_error(built: Callable[..., dict[str, Any]]) -> None:
    block = FirstBank()
    with torch.no_grad():
        block(torch.randn(4, 8))
    report = audit(built(block))
    assert [finding.code for finding in report.findings] == ["SM403", "SM901"]
    assert "block.experts.0.weight" in report.findings[0].why and report.findings[0].source.module == "block"
    assert "no gradient" in report.findings[1].why


def test_a_bank_of_steps_ago_is_found_while_it_resembles_its_weights(built: Callable[..., dict[str, Any]]) -> None:
    """Scaled, cast, and five steps of AdamW old: nothing of it is equal to its weights any more."""
    block = FirstBank()
    block.bank = (block.stacked() * 3).detach().bfloat16().float()
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2)
    for _ in range(5):
        block.stacked().square().sum().backward()
        optimizer.step()
    codes = [code for code, _ in found(built(block))]
    assert codes == ["SM403", "SM901"]


def test_the_runner_refuses_a_bank_of_before(built: Callable[..., dict[str, Any]]) -> None:
    block = FirstBank()
    block(torch.randn(4, 8)).sum().backward()
    with pytest.raises(AuditError, match=r"experts\.\d\.weight.*SM403"):
        StaticMoERunner(**built(block))
    block.bank = None
    with pytest.raises(AuditError, match="SM401"):
        StaticMoERunner(**built(block))


def test_a_copy_beside_its_weights_is_a_warning_and_a_buffer_is_none(built: Callable[..., dict[str, Any]]) -> None:
    """As of a loss that holds weights near those of the start."""

    def loss_with(anchor: Tensor) -> Callable[..., Tensor]:
        return lambda model, batch: model(**batch) + (model.block.weight - anchor).square().sum()

    given = built(nn.Linear(8, 8))
    weight = given["model"].block.weight
    assert found({**given, "loss_fn": loss_with(weight.detach().clone())}) == [("SM403", "warning")]
    assert found({**given, "loss_fn": loss_with(weight.detach().clone().roll(1))}) == []
    given["model"].register_buffer("anchor", weight.detach().clone())
    assert found({**given, "loss_fn": loss_with(given["model"].anchor)}) == []


def test_the_weights_of_a_teacher_are_no_copy(built: Callable[..., dict[str, Any]]) -> None:
    given = built(nn.Linear(8, 8))
    teacher = copy.deepcopy(given["model"].block).requires_grad_(False)

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(**batch) + (model.block(batch["x"]) - teacher(batch["x"])).square().mean()

    assert found({**given, "loss_fn": loss_fn}) == []


def test_a_bank_of_what_does_not_train_is_a_constant(built: Callable[..., dict[str, Any]]) -> None:
    """As of a model of which adapters train alone."""
    block = FirstBank().requires_grad_(False)
    assert found(built(block)) == []
    block(torch.randn(4, 8))
    assert found(built(block)) == []
    assert found(built(FirstBank())) == [("SM401", "error")]


def test_only_a_parameter_s_version_asked_for_by_the_user_counts(built: Callable[..., dict[str, Any]]) -> None:
    def of_others(x: Tensor) -> Tensor:
        y = x * 2
        y._version  # noqa: B018
        # torch looks at versions itself when it unpacks saved tensors.
        return torch.utils.checkpoint.checkpoint(torch.sin, y, use_reentrant=False)

    class Asks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (self.weight._version < 1000)

    class Function(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return of_others(x)

    assert found(built(Function())) == []
    assert found(built(Asks(8, 8))) == [("SM404", "error")]
