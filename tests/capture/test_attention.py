"""Flex attention: compiled, or refused with the bytes of its scores before they are allocated, whatever led there."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from staticmoe import RunnerConfig, StaticMoE, StaticMoERunner
from staticmoe.audit import audit
from staticmoe.capture import Provenance, Recorder
from staticmoe.capture.attention import guarded, score_bytes
from staticmoe.capture.dynamo import CompiledCalls, entries_of
from staticmoe.capture.findings import Finding, Findings
from staticmoe.errors import AuditError
from staticmoe.runner.rehearsal import rehearsal

pytestmark = pytest.mark.usefixtures("fresh_compiler")

B, H, S, D = 2, 4, 128, 16
BYTES = B * H * S * S * 4
HIGHER = sys.modules["torch._higher_order_ops.flex_attention"]
OPERATORS = HIGHER.flex_attention, HIGHER.flex_attention_backward


class Refused(Exception):
    """Raised in place of the dense computation."""


def refuse(finding: Finding) -> None:
    raise Refused(str(finding))


def qkv(tokens: int = S) -> list[Tensor]:
    return [torch.randn(B, H, tokens, D) for _ in range(3)]


def in_thread(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> None:
        raised: list[BaseException] = []

        def work() -> None:
            try:
                with guarded({}, refuse):
                    function(*args)
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if raised:
            raise raised[0]

    return run


# The compiler's backend "eager" leaves the operation to torch: compiled by name, dense in fact.
DENSE = {
    "uncompiled": lambda: flex_attention,
    "dense backend": lambda: torch.compile(flex_attention, backend="eager"),
    "another thread": lambda: in_thread(flex_attention),
    "recomputed": lambda: lambda *args: checkpoint(flex_attention, *args, use_reentrant=False),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("how", DENSE)
def test_dense_is_refused_with_its_bytes(how: str, mode: Any) -> None:
    with (
        mode(),
        guarded({}, refuse),
        pytest.raises(Refused, match=rf"would allocate {BYTES} bytes.*\[SM606\]") as caught,
    ):
        DENSE[how]()(*qkv())
    assert "test_attention.py" in str(caught.value) and "2 x 4 x 128 x 128" in str(caught.value)
    assert score_bytes(*qkv()[:2]) == BYTES


def kernel_without_scores(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """Stands for a compiler's kernel, which holds no scores."""
    return lambda *args: (torch.zeros_like(next(arg for arg in args if isinstance(arg, Tensor))),)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("how", ["here", "another thread", "recomputed"])
def test_compiled_it_is_let_through_and_at_the_limit_refused(how: str, mode: Any) -> None:
    """Warmed up at a shorter shape with gradients; then the compiler either makes another form, or has given up."""
    attend = torch.compile(flex_attention, backend=kernel_without_scores, dynamic=False)

    def limited(limit: int) -> Callable[..., Any]:
        # In the calling thread: the compiler's options are each thread's own.
        return torch._dynamo.config.patch(recompile_limit=limit)(lambda *args: attend(*args))

    ways: dict[str, Callable[..., Any]] = {
        "here": lambda attend: attend,
        "another thread": in_thread,
        "recomputed": lambda attend: lambda *args: checkpoint(attend, *args, use_reentrant=False),
    }
    with guarded({}, refuse):
        attend(*qkv(S // 2))
    with mode(), guarded({}, refuse):
        ways[how](limited(8))(*qkv())
        assert entries_of(flex_attention.__code__) == 2
        with pytest.raises(Refused, match=f"would allocate {4 * BYTES} bytes"):
            ways[how](limited(2))(*qkv(2 * S))


def test_the_backward_is_asked_as_well() -> None:
    """On a CPU it has no way there, so its kernel is called."""
    with guarded({}, refuse):
        for operator in OPERATORS:
            kernel = operator.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd]
            with pytest.raises(Refused, match=f"would allocate {BYTES} bytes"):
                kernel(*qkv())


def test_bytes_are_those_of_the_scores() -> None:
    """In fp32 at least; queries and keys may be of different numbers."""
    query, key = torch.empty(2, 3, 5, 8), torch.empty(2, 3, 7, 8)
    for dtype, size in ((torch.bfloat16, 4), (torch.float32, 4), (torch.float64, 8)):
        assert score_bytes(query.to(dtype), key.to(dtype)) == 2 * 3 * 5 * 7 * size


def test_a_line_may_allow_it() -> None:
    args = qkv()
    with torch.no_grad(), guarded({}, refuse):
        flex_attention(*args)  # staticmoe: allow SM606


def test_outside_of_an_iteration_it_is_left_alone() -> None:
    """Of two guards, one within the other, each speaks for its own span; then torch's tables are as before."""
    heard: list[str] = []

    def held() -> list[Any]:
        tables = [table for operator in OPERATORS for table in (operator.py_kernels, operator._dispatch_cache)]
        return [HIGHER.create_fw_bw_graph, *(kernel for table in tables for kernel in table.values())]

    with torch.no_grad():
        args = qkv()
        expected = nn.functional.scaled_dot_product_attention(*args)
        flex_attention(*args)
        before = held()
        assert not any(hasattr(function, "original") for function in before)
        with guarded({}, lambda finding: heard.append("outer")):
            with guarded({}, lambda finding: heard.append("inner")):
                flex_attention(*args)
            flex_attention(*args)
        assert heard == ["inner", "outer"] and held() == before
        torch.testing.assert_close(flex_attention(*args), expected)


@pytest.mark.parametrize("in_backward", [False, True])
def test_threads_of_a_backward_belong_to_the_iteration(in_backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU's, which know nothing of the thread that began it; other threads are nobody's."""
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 0 if in_backward else -1)
    raised: list[BaseException] = []

    def work() -> None:
        try:
            with torch.no_grad():
                flex_attention(*qkv())
        except Refused as error:
            raised.append(error)

    with guarded({}, refuse):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(raised) == in_backward


@pytest.mark.parametrize("compiled", [True, False])
def test_an_eye_sees_what_will_be_compiled_without_its_scores(compiled: bool) -> None:
    """Observed, a compiled function runs as written, with zeros in its place; an uncompiled one is refused."""
    attend = torch.compile(flex_attention, backend="eager") if compiled else flex_attention
    args = qkv()
    provenance = Provenance({str(number): one for number, one in enumerate(args)}, {})
    refused = contextlib.nullcontext() if compiled else pytest.raises(Refused)
    with torch.no_grad(), guarded({}, refuse), provenance.open(), refused, Recorder(provenance, {}).watch():
        y = attend(*args)
    assert not compiled or torch.equal(y, torch.zeros(B, H, S, D))


class Attending(nn.Module):
    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.moe, self.attend = StaticMoE(D, 8, 2, 2), attend

    def forward(self, x: Tensor) -> Tensor:
        y = self.moe(x)
        if self.training:
            return y
        return self.attend(*(y[:, None] for _ in range(3)))[:, 0]


@pytest.mark.parametrize("capture", ["emulate", "off"])
def test_a_runner_refuses_it_in_an_evaluation(capture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any score is computed. On a CPU there is no backward of it, so training leaves it out."""
    computed: list[Tensor] = []
    monkeypatch.setattr(HIGHER, "math_attention", lambda *args: computed.extend(args))
    model = Attending(flex_attention)
    runner = StaticMoERunner(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        example_batch={"x": torch.randn(2, S, D)},
        loss_fn=lambda model, batch: model(batch["x"]).square().mean(),
        config=RunnerConfig(capture=capture),
    )
    with (
        runner,
        pytest.raises(AuditError, match=rf"would allocate {2 * S * S * 4} bytes of scores \(2 x 1 x 128 x 128\)"),
    ):
        runner.evaluate({"x": torch.randn(2, S, D)})
    assert computed == []


@pytest.fixture
def trained_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Observed it computes nothing, and so may be told that a CPU has a backward of it."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *args: None)


def capped(score: Tensor, *place: Tensor) -> Tensor:
    return 30 * torch.tanh(score / 30)


@pytest.mark.usefixtures("trained_on_a_cpu")
def test_a_compiled_one_has_a_stand_in_while_it_is_observed() -> None:
    """With its backward, for which torch traces the score function; what torch wraps by itself is no call of theirs."""
    args = [one.requires_grad_() for one in qkv()]
    attend, findings, calls = torch.compile(flex_attention), Findings(), CompiledCalls({})
    provenance = Provenance(dict(zip("qkv", args, strict=True)), {})
    with provenance.open(), guarded({}, refuse), Recorder(provenance, {}, findings=findings, calls=calls).watch():
        out = attend(*args, score_mod=capped)
        gradients = torch.autograd.grad(out.sum(), args)
    assert not any(tensor.any() for tensor in (out, *gradients)) and findings.items == []
    assert [one.name for one in calls.orders] == ["flex_attention"]


@pytest.mark.usefixtures("trained_on_a_cpu")
def test_a_forecast_counts_no_scores_of_a_compiled_one() -> None:
    args, attend = [one.requires_grad_() for one in qkv()], torch.compile(flex_attention)
    with rehearsal(torch.device("cpu"), (), (), (), {}) as tally:
        torch.autograd.grad(attend(*args, score_mod=capped).sum(), args)
    assert args[0].nbytes < tally.peak < BYTES


@pytest.mark.usefixtures("trained_on_a_cpu")
def test_an_audit_computes_no_scores_of_a_compiled_one() -> None:
    """Neither where it observes nor where it compiles on trial, with a backend that leaves the operation to torch."""
    model = Attending(torch.compile(flex_attention))
    model.forward = lambda x: model.attend(*(model.moe(x)[:, None] for _ in range(3)))
    given = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "example_batch": {"x": torch.randn(2, S, D)},
        "loss_fn": lambda model, batch: model(batch["x"]).square().mean(),
    }
    assert audit(given).findings == ()


def test_a_compiled_one_is_evaluated() -> None:
    model = Attending(torch.compile(flex_attention))
    batch = {"x": torch.randn(2, S, D)}
    with StaticMoERunner(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        example_batch=batch,
        loss_fn=lambda model, batch: model(batch["x"]).square().mean(),
        config=RunnerConfig(capture="off"),
    ) as runner:
        loss = float(runner.evaluate(batch).loss)
    with torch.no_grad():
        y = model.moe(batch["x"])[:, None]
    assert loss == pytest.approx(float(nn.functional.scaled_dot_product_attention(y, y, y).square().mean()), rel=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU has no backward of flex attention")
def test_a_compiled_one_trains_and_is_captured_on_cuda() -> None:
    attend = torch.compile(flex_attention)
    model = Attending(attend).cuda()
    model.forward = lambda x: attend(*(model.moe(x)[:, None] for _ in range(3)))[:, 0]
    batch = {"x": torch.randn(2, S, D, device="cuda")}
    with StaticMoERunner(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        example_batch=batch,
        loss_fn=lambda model, batch: model(batch["x"]).square().mean(),
    ) as runner:
        losses = [float(runner.step(batch).loss) for _ in range(3)]
    assert losses[2] < losses[0] and entries_of(flex_attention.__code__) >= 1
