"""Flex attention: compiled, or refused with the bytes of its scores before they are allocated, whatever led there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from staticmoe import RunnerConfig, StaticMoE, StaticMoERunner
from staticmoe.capture.attention import guarded, score_bytes
from staticmoe.capture.dynamo import entries_of
from staticmoe.capture.findings import Finding
from staticmoe.errors import AuditError

B, H, S, D = 2, 4, 128, 16
BYTES = B * H * S * S * 4


class Refused(Exception):
    """Raised in place of the dense computation."""


def refuse(finding: Finding) -> None:
    raise Refused(str(finding))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def qkv(device: torch.device | str = "cpu") -> list[Tensor]:
    return [torch.randn(B, H, S, D, device=device) for _ in range(3)]


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


def test_outside_of_an_iteration_it_is_left_alone() -> None:
    with torch.no_grad():
        args = qkv()
        expected = nn.functional.scaled_dot_product_attention(*args)
        with guarded({}, refuse):
            pass
        torch.testing.assert_close(flex_attention(*args), expected)


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
def test_a_runner_refuses_it_in_an_evaluation(capture: str) -> None:
    """On a CPU there is no backward of it, so training leaves it out."""
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
