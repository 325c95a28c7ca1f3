"""Packed and padded batches by offsets: captured, and equal to their sequences alone.

Letters: T tokens of a packed batch, B rows, S tokens of a padded sequence.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from staticmoe import RunnerConfig, StaticMoERunner
from staticmoe.integrations import huggingface

transformers = pytest.importorskip("transformers")
huggingface.register()

SERVED = [
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe", "granitemoe", "minimax_m2",
    "phimoe", "ernie4_5_moe", "dots1", "flex_olmo", "hunyuan_v1_moe", "aria_text: transposed",
]  # fmt: skip
T, B, S = 24, 3, 8
EVERY_EXPERT = {"num_experts_per_tok": 6, "moe_k": 6, "moe_topk": 6, "top_k": 6, "n_group": 1}


def texts(lengths: list[int]) -> list[Tensor]:
    return [torch.randint(3, 64, (length,)) for length in lengths]


def packed(pieces: list[Tensor], **sizes: Any) -> dict[str, Tensor]:
    """What the collator of transformers makes of them, at a constant size."""
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    sizes = {"tokens": T, "max_sequences": 6, **sizes}
    return huggingface.pad_packed(collate([{"input_ids": piece} for piece in pieces]), **sizes)


def padded(pieces: list[Tensor], *, left: bool = False) -> dict[str, Tensor]:
    """The same sequences as rows of S tokens."""
    rows = torch.zeros(len(pieces), S, dtype=torch.long)
    real = torch.zeros_like(rows)
    for row, piece in enumerate(pieces):
        place = slice(S - len(piece), S) if left else slice(0, len(piece))
        rows[row, place], real[row, place] = piece, 1
    places = (real.cumsum(1) - 1).clamp(min=0)
    labels = torch.where((real == 1) & (places > 0), rows, -100)
    return {"input_ids": rows, "attention_mask": real, "position_ids": places, "labels": labels}


def given_to(device: torch.device, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.to(device) for key, value in batch.items()}


def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch, use_cache=False).loss


def loss_alone(model: Any, pieces: list[Tensor]) -> Tensor:
    """The same loss of each sequence in a forward of its own: the mean over all labels."""
    counted = [piece.to(model.device)[None] for piece in pieces if len(piece) > 1]
    total = sum(len(piece[0]) - 1 for piece in counted)
    return sum(model(input_ids=p, labels=p, use_cache=False).loss * ((len(p[0]) - 1) / total) for p in counted)


def unpacked(
    build: Callable[..., Any], device: torch.device, name: str = "qwen3_moe", experts: str = "eager", **over: Any
) -> Any:
    """A model with transformers' own attention, in the dtype that the device's kernels take."""
    if device.type == "cpu":
        return build(name, experts, attention="sdpa", **over)
    # Every expert for every token: in bf16 two attentions differ by enough that a router chooses otherwise.
    return build(name, experts, attention="sdpa", **over, **EVERY_EXPERT).to(device, torch.bfloat16)


def built(build: Callable[..., Any], device: torch.device, name: str = "qwen3_moe", **sizes: Any) -> Any:
    """The same with experts of ours, told to attend within sequences."""
    model = unpacked(build, device, name, "staticmoe")
    huggingface.attend_within_sequences(model, **sizes)
    return model


def captured(device: torch.device) -> str:
    return "cuda" if device.type == "cuda" else "emulate"


# Roundings of bf16 through two layers, and of fp32.
def close(device: torch.device) -> float:
    return 5e-2 if device.type == "cuda" else 2e-5


LAYOUTS = {
    "packed": (lambda pieces: packed(pieces), {}),
    "packed, short": (lambda pieces: packed(pieces, max_length=9), {"max_length": 9}),
    "packed, by positions": (
        lambda pieces: {key: value for key, value in packed(pieces).items() if "cu_seq" not in key},
        {"max_sequences": 6},
    ),
    "packed, by positions alone": (
        lambda pieces: {
            key: value for key, value in packed(pieces).items() if key in ("input_ids", "labels", "position_ids")
        },
        # Padding has positions of 0: each of them is a sequence.
        {"max_sequences": 24},
    ),
    "padded right": (lambda pieces: padded(pieces), {}),
    "padded left": (lambda pieces: padded(pieces, left=True), {}),
    "padded left, short": (lambda pieces: padded(pieces, left=True), {"max_length": 8}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_is_its_sequences_alone(
    layout: str,
    device: torch.device,
    build: Callable[..., Any],
    error: Callable[[Tensor, Tensor], float],
) -> None:
    """Loss and every gradient are those of the sequences in forwards of their own, with the eager experts."""
    make, sizes = LAYOUTS[layout]
    pieces = texts([5, 1, 8, 7])
    model, plain = built(build, device, **sizes), unpacked(build, device)
    got, want = loss(model, given_to(device, make(pieces))), loss_alone(plain, pieces)
    assert error(got, want) < close(device)
    got.backward()
    want.backward()
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            assert error(mine.grad, theirs.grad) < 2 * close(device), name


@pytest.mark.parametrize("name", SERVED)
def test_every_family_takes_offsets(
    name: str, device: torch.device, build: Callable[..., Any], error: Callable[[Tensor, Tensor], float]
) -> None:
    """Logits of a packed batch and of a padded one are those of the sequences alone; and not those of one long text."""
    if name == "phimoe" and device.type == "cuda":
        pytest.skip("PhiMoE chooses two experts, and in bf16 not always the same ones")
    pieces = texts([4, 8, 3])
    model, plain = built(build, device, name), unpacked(build, device, name)
    want = torch.cat([plain(input_ids=piece.to(device)[None], use_cache=False)[0][0] for piece in pieces])
    for batch in (packed(pieces), padded(pieces, left=True)):
        given = given_to(device, {key: value for key, value in batch.items() if key != "labels"})
        got = model(**given, use_cache=False)[0][given["attention_mask"].bool()]
        assert error(got, want) < close(device)
    long = plain(input_ids=torch.cat(pieces).to(device)[None], use_cache=False)[0][0]
    assert error(long, want) > 1e-2


def test_twenty_captured_steps_are_an_uncaptured_loop_of_the_sequences_alone(
    device: torch.device, build: Callable[..., Any]
) -> None:
    """Other packings in each step, of one sequence to six, with and without padding behind."""
    lengths = [[3, 9, 5], [24], [1, 2, 3, 4, 5, 9], [12, 11], [2, 2], [7, 6, 5, 4], [23, 1], [8, 8, 8]]
    steps = [texts(lengths[step % len(lengths)]) for step in range(20)]
    start = built(build, device).train()
    losses: dict[str, list[float]] = {}
    for capture in (captured(device), "off"):
        model = copy.deepcopy(start)
        huggingface.prepare(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        with StaticMoERunner(
            model, optimizer, example_batch=packed(steps[0]), loss_fn=loss, token_mask="attention_mask",
            config=RunnerConfig(capture=capture),
        ) as runner:  # fmt: skip
            results = [runner.step(packed(pieces)) for pieces in steps]
            losses[capture] = [float(result.loss) for result in results]
        for pieces, result in zip(steps, results, strict=True):
            chosen = model.config.num_experts_per_tok * sum(map(len, pieces))
            assert all(sum(layer.routed) == chosen for layer in result.moe.values())
    if device.type == "cpu":
        assert losses[captured(device)] == losses["off"]
    plain = unpacked(build, device).train()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)
    alone = []
    for pieces in steps:
        optimizer.zero_grad()
        value = loss_alone(plain, pieces)
        value.backward()
        optimizer.step()
        alone.append(float(value.detach()))
    assert losses[captured(device)] == pytest.approx(alone, rel=3e-2 if device.type == "cuda" else 1e-4)
    assert len(set(alone)) == 20


def test_twenty_captured_steps_of_padded_batches(device: torch.device, build: Callable[..., Any]) -> None:
    steps = [texts(torch.randint(2, S + 1, (B,)).tolist()) for _ in range(20)]
    batches = [padded(pieces, left=step % 2 == 1) for step, pieces in enumerate(steps)]
    start, losses = built(build, device).train(), {}
    for capture in (captured(device), "off"):
        model = copy.deepcopy(start)
        huggingface.prepare(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        with StaticMoERunner(
            model, optimizer, example_batch=batches[0], loss_fn=loss, token_mask="attention_mask",
            config=RunnerConfig(capture=capture),
        ) as runner:  # fmt: skip
            losses[capture] = [float(runner.step(batch).loss) for batch in batches]
    first = float(loss_alone(unpacked(build, device), steps[0]).detach())
    assert losses[captured(device)][0] == pytest.approx(first, rel=close(device))
    assert losses[captured(device)] == pytest.approx(losses["off"], rel=3e-2 if device.type == "cuda" else 0)


WRONG = {
    "one that goes back": ({"offsets": [0, 9, 5, 24, 24]}, {}),
    "one past the end": ({"offsets": [0, 9, 15, 99, 99]}, {}),
    "a last one before the end": ({"offsets": [0, 9, 15, 20, 20]}, {}),
    "a first one behind the beginning": ({"offsets": [2, 9, 15, 24, 24]}, {}),
    "a sequence too long": ({"offsets": [0, 9, 24, 24, 24]}, {"max_length": 14}),
    "too many sequences": ({"places": [0, 1] * 12}, {"max_sequences": 2}),
    "a sequence too long, by positions": ({"places": [*range(13), *range(11)]}, {"max_sequences": 2, "max_length": 12}),
    "padding within a sequence": ({"mask": [1] * 9 + [0] + [1] * 14}, {}),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_the_device_alone_can_see_is_a_step_that_is_not_finite(
    what: str, device: torch.device, build: Callable[..., Any]
) -> None:
    """Captured with a good batch: the bad one is vetoed, changes nothing and is counted; the next one trains."""
    changed, sizes = WRONG[what]
    model = built(build, device, **sizes).train()
    huggingface.prepare(model)
    kind = next(iter(changed))
    key = {"offsets": "cu_seq_lens_q", "places": "position_ids", "mask": "attention_mask"}[kind]
    good = packed(texts([9, 7, 8]), max_sequences=3, **({"max_length": 14} if "max_length" in sizes else {}))
    if kind != "offsets":
        good = {"input_ids": good["input_ids"], "labels": good["labels"]}
        fine = {"places": [0] * 1 + [*range(1, 12), *range(12)], "mask": [0] * 3 + [1] * 18 + [0] * 3}[kind]
        good[key] = torch.tensor([fine])
    else:
        good[key] = torch.tensor([0, 9, 16, 24, 24], dtype=torch.int32)
    bad = {**good, key: torch.tensor(changed[kind], dtype=good[key].dtype).view(good[key].shape)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    with StaticMoERunner(
        model, optimizer, example_batch=good, loss_fn=loss, config=RunnerConfig(capture=captured(device))
    ) as runner:
        assert torch.isfinite(torch.tensor(float(runner.step(good).loss)))
        runner.synchronize()
        before = copy.deepcopy(model.state_dict())
        result = runner.step(bad)
        assert not torch.isfinite(torch.tensor(float(result.loss)))
        runner.synchronize()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert torch.isfinite(torch.tensor(float(runner.step(good).loss)))
        runner.synchronize()
        assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_offsets_ask_the_host_nothing(dispatched: Any, build: Callable[..., Any], device: torch.device) -> None:
    """Whatever they are taken from; a mask that transformers would make of the same batch does ask."""
    pieces = texts([5, 1, 8, 7])
    for make, sizes in LAYOUTS.values():
        model, batch = built(build, device, **sizes), given_to(device, make(pieces))
        with dispatched() as seen:
            loss(model, batch)
        assert not seen.asking
    with dispatched() as seen:
        loss(unpacked(build, device), given_to(device, padded(pieces)))
    assert seen.asking
