"""O10, O16 (iii): a value of the device that Python looks at inside the iteration."""

from __future__ import annotations

import math
import re

import pytest
import torch

from staticmoe import StaticMoE
from staticmoe.errors import CaptureError

# Name of the fault -> (what the model does with x, what the error must name).
READS = {
    "item": (lambda x: x * x.sum().item(), r"item"),
    "float()": (lambda x: x * float(x.sum()), r"item|float"),
    "int()": (lambda x: x * int(x.sum()), r"item|int"),
    "branch": (lambda x: x * 2 if x.sum() > 0 else x, r"item|bool|nonzero|branch"),
    "while": (lambda x: x * 2 if not bool((x > 5).any()) else x, r"item|bool|nonzero|branch"),
    "tolist": (lambda x: x * x.sum(1).tolist()[0], r"tolist|item"),
    "numpy": (lambda x: x * float(x.detach().numpy().sum()), r"numpy"),
    "cpu": (lambda x: x * x.sum().cpu(), r"cpu"),
    "boolean mask": (lambda x: x[x > 0].sum() + 0 * x, r"mask|index"),
    "masked_select": (lambda x: torch.masked_select(x, x > 0).sum() + 0 * x, r"masked_select"),
    "nonzero": (lambda x: torch.nonzero(x).sum() * x, r"nonzero"),
    "where": (lambda x: torch.where(x > 0)[0].sum() * x, r"where|nonzero"),
    "unique": (lambda x: torch.unique(x).sum() * x, r"unique"),
    "bincount": (lambda x: torch.bincount(x.argmax(1)).sum() * x, r"bincount"),
    "repeat_interleave": (lambda x: x.sum(0).repeat_interleave(x.argmax(0)).sum() * x, r"repeat_interleave"),
    "equal": (lambda x: x * 2 if torch.equal(x, x + 1) else x, r"equal"),
    "allclose": (lambda x: x * 2 if torch.allclose(x, x + 1) else x, r"allclose|equal"),
    "iteration bound": (lambda x: sum(x * i for i in range(x.argmax(1).max())), r"item|int|index"),
    "one_hot": (lambda x: torch.nn.functional.one_hot(x.argmax(1)).sum() * x, r"one_hot|item"),
    "set by mask": (lambda x: x.clone().index_put((x > 0,), x[0, 0]), r"mask|index"),
    "format": (lambda x: x * len(f"{x.sum():.3f}"), r"item|format|repr"),
}


@pytest.mark.parametrize("name", READS)
def test_a_host_read_is_one_error_that_names_it_and_a_good_model_captures_after(
    captured_way, probe, probe_batch, wrap, name
):
    """Goes wrong: on a GPU each of these waits for the device, ends the capture with an error about something else,
    leaks its pool, or bakes the value in.

    Instead: keep it on the device: `torch.where(mask, a, b)`, a weight of zero in place of a branch, `scatter_add` in
    place of `bincount`, `repeat_interleave(output_size=n)`, `one_hot(num_classes=n)`.
    """
    read, names = READS[name]
    model = probe(captured_way)

    def loss_fn(model, batch):
        return model(**batch) + 0 * read(batch["x"]).sum()

    def sgd(model):
        return torch.optim.SGD([model.b], lr=0.1)

    with pytest.raises(CaptureError) as caught:
        wrap(captured_way, model, sgd(model), probe_batch(captured_way, 1), loss_fn=loss_fn)
    message = str(caught.value)
    assert re.search(names, message), message
    assert "test_host_reads.py" in message, "the line in the user's file is missing"
    assert float(model.b) == 1.0

    quick = {"self_check": False, "capture_warmup_iters": 1}
    runner = wrap(captured_way, model, sgd(model), probe_batch(captured_way, 1), **quick)
    result = runner.step(probe_batch(captured_way, 1))
    assert float(result.loss) == 1.0
    runner.synchronize()
    assert float(model.b) == pytest.approx(0.9)
    assert float(torch.rand((), device=captured_way.device)) != float(torch.rand((), device=captured_way.device))


ON_THE_DEVICE = {
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    "repeat_interleave of a fixed size": lambda x: x.repeat_interleave(3, dim=0),
    "one_hot of a fixed size": lambda x: torch.nn.functional.one_hot(x.argmax(1), num_classes=8).to(x.dtype),
    "gather": lambda x: x.gather(1, x.argmax(1, keepdim=True)),
    "index of integers": lambda x: x[x[:, :4].argmax(1) * 0 + 1],
    "shape": lambda x: x * x.shape[0] + len(x) + x.numel(),
    "arange": lambda x: x * torch.arange(x.shape[1], device=x.device),
}


def test_what_asks_nothing_is_captured(way, probe, probe_batch, wrap):
    """Goes wrong: a check that is too eager refuses the very workarounds that it names.

    Instead: these.
    """
    model = probe(way)

    def metrics(batch):
        return {name: compute(batch["x"]).float().sum() for name, compute in ON_THE_DEVICE.items()}

    def loss_fn(model, batch):
        return model(**batch), metrics(batch)

    batches = [probe_batch(way, 1) for _ in range(3)]
    runner = wrap(way, model, torch.optim.SGD([model.b], lr=0.1), batches[0], loss_fn=loss_fn)
    for batch in batches:
        result = runner.step(batch)
        for name, value in metrics(batch).items():
            assert float(result.metrics[name]) == pytest.approx(float(value), rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("masked", [False, True])
def test_z_and_aux_loss_of_a_zero_router_with_every_mask(way, wrap, masked):
    """Goes wrong: the mean over real tokens is taken by boolean indexing (a wait), by the padded count, or is 0 / 0.

    Instead: `token_mask=`; the z-loss of eight equal logits of zero is (ln 8)^2, with any mask that leaves a token.
    """

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.moe = StaticMoE(8, 4, 8, 2, router_z_loss_coef=0.1, router_aux_loss_coef=0.1)

        def forward(self, x):
            return self.moe(x).sum()

    def loss_fn(model, batch):
        return model(batch["x"])

    def batch(real):
        mask = (torch.arange(8).reshape(2, 4) < real).to(torch.int64)
        found = {"x": torch.randn(2, 4, 8, device=way.device)}
        return {**found, "attention_mask": mask.to(way.device)} if masked else found

    model = Model().to(way.device)
    with torch.no_grad():
        model.moe.router.weight.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    # All real at capture, `real` of eight in the replays.
    options = {"token_mask": "attention_mask"} if masked else {}
    runner = wrap(way, model, optimizer, batch(8), loss_fn=loss_fn, **options)
    for real in (8, 4, 1, 0, 8) if masked else (8, 8):
        result = runner.step(batch(real))
        z, aux = (float(result.metrics[name]) for name in ("z_loss", "aux_loss"))
        if real:
            assert (z, aux) == pytest.approx((math.log(8) ** 2, 1.0), rel=1e-5)
        else:
            assert math.isfinite(z) and math.isfinite(aux) and not result.skipped
        assert result.moe["moe"].routed == [real, real, 0, 0, 0, 0, 0, 0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="sync_debug_mode sees only waits for a CUDA device")
@pytest.mark.parametrize("masked", [False, True])
def test_the_uncaptured_step_waits_for_nothing(captured_way, wrap, masked):
    """Goes wrong: a hidden wait (bincount, repeat_interleave, a boolean mask, torch.tensor on the device) in the step.

    Instead: nothing to do; look at your own model so: `capture="off"` under sync_debug_mode "error".
    """
    if captured_way.device.type != "cuda":
        pytest.skip("the emulated capture has no device to wait for")
    model = torch.nn.Module()
    model.moe = StaticMoE(8, 4, 8, 2, router_z_loss_coef=0.1, router_aux_loss_coef=0.1).to(captured_way.device)
    batch = {"x": torch.randn(2, 4, 8, device=captured_way.device)}
    options = {"capture": "off", "max_grad_norm": 1.0, "max_in_flight": 8}
    if masked:
        batch["mask"] = torch.ones(2, 4, dtype=torch.int64, device=captured_way.device)
        options["token_mask"] = "mask"

    def loss_fn(model, batch):
        return model.moe(batch["x"]).square().sum()

    runner = wrap(captured_way, model, torch.optim.AdamW(model.parameters()), batch, loss_fn=loss_fn, **options)
    runner.step(batch)
    runner.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [runner.step(batch) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [sum(result.moe["moe"].routed) for result in results] == [16, 16, 16]
