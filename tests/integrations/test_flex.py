"""Block masks for flex attention: those of the dense mask, made anew in each step, and trained with under a capture."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

from staticmoe import RunnerConfig, StaticMoERunner
from staticmoe.audit import audit
from staticmoe.errors import ConfigError
from staticmoe.integrations import huggingface

transformers = pytest.importorskip("transformers")
huggingface.register()


def given(length: int, what: str) -> dict[str, Tensor | None]:
    """Three rows: full, padded on the left, padded on the right; and the numbers of their sequences."""
    mask = torch.ones(3, length, dtype=torch.long)
    mask[1, : length // 3], mask[2, length // 2 :] = 0, 0
    third = torch.arange(length) // max(length // 3, 1)
    numbers = {"padded": None, "packed": third, "packed backwards": -third, "mixed": torch.arange(length) % 3}[what]
    if what == "mixed":
        mask[0, length // 2] = 0
    return {"attention_mask": mask, "sequence_ids": None if numbers is None else numbers.expand(3, length)}


def dense(numbers: Tensor, indices: Tensor) -> Tensor:
    """Blocks as True and False, [B,1,N,N]."""
    places = torch.arange(indices.shape[-1])
    listed = torch.where(places < numbers[..., None], indices, indices.shape[-1])
    return (listed[..., None] == places).any(-2)


@pytest.mark.parametrize("window", [None, 3, 40])
@pytest.mark.parametrize("what", ["padded", "packed", "packed backwards", "mixed"])
@pytest.mark.parametrize(("length", "block_size"), [(8, 4), (9, 4), (96, 16), (100, 16)])
def test_a_block_mask_is_the_dense_mask(length: int, block_size: int, what: str, window: int | None) -> None:
    """Key by key, and by blocks: none is left out, none called whole that is not, and as few as torch itself finds."""
    batch = given(length, what)
    blocks = huggingface.block_mask(**batch, sliding_window=window, block_size=block_size)
    want = huggingface.causal_mask(**batch, sliding_window=window, dtype=torch.bool)
    assert torch.equal(create_mask(blocks.mask_mod, 3, 1, length, length, device="cpu"), want)
    some = dense(blocks.kv_num_blocks, blocks.kv_indices)
    whole = dense(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    count = -(-length // block_size)
    cells = nn.functional.pad(want, (0, count * block_size - length) * 2).view(
        3, 1, count, block_size, count, block_size
    )
    assert not bool((cells.any(-1).any(3) & ~some & ~whole).any())
    assert not bool((whole & ~cells.all(-1).all(3)).any()) and not bool((whole & some).any())
    ours, theirs = blocks, create_block_mask(blocks.mask_mod, 3, 1, length, length, device="cpu", BLOCK_SIZE=block_size)
    assert torch.equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks)
    assert torch.equal(dense(ours.q_num_blocks, ours.q_indices), some.mT)
    if what != "mixed":
        assert torch.equal(ours.kv_num_blocks, theirs.kv_num_blocks)


def test_torchs_flex_attention_reads_it(error: Callable[[Tensor, Tensor], float]) -> None:
    batch = given(40, "packed")
    q, k, v = (torch.randn(3, 2, 40, 16) for _ in range(3))
    blocks = huggingface.block_mask(**batch, block_size=16)
    with torch.compiler.set_stance("force_eager"):
        got = flex_attention(q, k, v, block_mask=blocks)
    seen = huggingface.causal_mask(**batch, dtype=torch.bool)
    assert error(got, nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)) < 1e-5


def test_it_is_made_without_asking_the_host(dispatched: Any) -> None:
    batch = given(40, "packed")
    with dispatched() as seen:
        huggingface.block_mask(**batch, sliding_window=8, block_size=16)
    assert not seen.asking
    with pytest.raises(ConfigError, match="sliding_window: expected at least 1, got 0"):
        huggingface.block_mask(torch.ones(1, 4), sliding_window=0)
    with pytest.raises(ConfigError, match=r"sequence_ids: expected \(1, 4\) as attention_mask, got \(1, 3\)"):
        huggingface.block_mask(torch.ones(1, 4), sequence_ids=torch.ones(1, 3))


def built(build: Callable[..., Any], name: str, device: torch.device, attention: str) -> Any:
    """Heads as wide as the compiled kernels want them, a window that cuts, and in bf16 every expert for every token."""
    over = {"head_dim": 16, **({"sliding_window": 8} if name != "qwen3_moe" else {})}
    if device.type == "cuda":
        over.update(num_experts_per_tok=6, top_k=6)
    model = build(name, "staticmoe", attention=attention, **over).to(device)
    return model.bfloat16() if device.type == "cuda" else model


def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    ready = huggingface.ready_masks(model, batch["attention_mask"], sequence_ids=batch["sequence_ids"])
    tokens = {key: value for key, value in batch.items() if key != "sequence_ids"}
    return model(**{**tokens, "attention_mask": ready}, use_cache=False).loss


def batches_of(count: int, length: int) -> list[dict[str, Tensor]]:
    made = []
    for step in range(count):
        tokens, mask = torch.randint(3, 64, (2, length)), torch.ones(2, length, dtype=torch.long)
        mask[0, length - 3 * step :], mask[1, : 2 * step] = 0, 0
        numbers = (torch.randint(0, 8, (2, length)) == 0).long().cumsum(1)
        # What stands behind padding is not predicted from it.
        labels = torch.where((mask * mask.roll(1, 1)) != 0, tokens, -100)
        made.append({"input_ids": tokens, "attention_mask": mask, "sequence_ids": numbers, "labels": labels})
    return made


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_it_trains_captured_as_uncaptured_and_as_by_dense_masks(
    name: str, device: torch.device, build: Callable[..., Any]
) -> None:
    """On a GPU through the compiled kernels; on a CPU, where they have no backward, as plain operations."""
    batches = batches_of(6, 160 if device.type == "cuda" else 24)
    start = built(build, name, device, "flex_attention").train()
    losses = {}
    for capture in ("cuda" if device.type == "cuda" else "emulate", "off"):
        model = copy.deepcopy(start)
        huggingface.prepare(model)
        huggingface.attend_by_blocks(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        with StaticMoERunner(
            model, optimizer, example_batch=batches[0], loss_fn=loss, token_mask="attention_mask",
            config=RunnerConfig(capture=capture),
        ) as runner:  # fmt: skip
            losses[capture] = [float(runner.step(batch).loss) for batch in batches]
    captured, uncaptured = losses.values()
    on_gpu = device.type == "cuda"
    assert captured == pytest.approx(uncaptured, rel=2e-2 if on_gpu else 0)
    plain = built(build, name, device, "eager").train()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)
    dense = []
    for batch in batches:
        optimizer.zero_grad()
        value = loss(plain, {key: one.to(device) for key, one in batch.items()})
        value.backward()
        optimizer.step()
        dense.append(float(value.detach()))
    assert captured == pytest.approx(dense, rel=3e-2 if on_gpu else 1e-4)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_no_scores_of_transformers_own_are_computed_in_an_audit(
    name: str, build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where `attend_by_blocks` calls it; observed it computes nothing, and needs no backward for CPUs."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *args: None)
    model = built(build, name, torch.device("cpu"), "flex_attention").train()
    huggingface.prepare(model)
    given = {
        "model": model, "optimizer": torch.optim.AdamW(model.parameters()), "example_batch": batches_of(1, 24)[0],
        "loss_fn": loss, "token_mask": "attention_mask",
    }  # fmt: skip
    assert [str(finding) for finding in audit(given).findings] == []


def loss_with_lists(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The same, and all that a block mask holds as a number: its lists, and each key that each query sees."""
    value = loss(model, batch)
    blocks = huggingface.block_mask(batch["attention_mask"], sequence_ids=batch["sequence_ids"], block_size=8)
    seen = create_mask(blocks.mask_mod, 2, 1, *blocks.seq_lengths, device=value.device)
    lists = [
        blocks.kv_num_blocks, blocks.kv_indices, blocks.full_kv_num_blocks, blocks.full_kv_indices,
        blocks.q_num_blocks, blocks.q_indices, blocks.full_q_num_blocks, blocks.full_q_indices,
    ]  # fmt: skip
    each = [((one + 1.0) * torch.arange(1, one.shape[-1] + 1, device=one.device)).sum() for one in lists]
    weight = torch.arange(seen.shape[-1], device=seen.device) / seen.shape[-1]
    return value + 1e-3 * ((seen * weight).sum() + sum(each))


def test_a_replay_makes_its_lists_anew_from_its_batch(device: torch.device, build: Callable[..., Any]) -> None:
    """Losses of a captured step are those of an uncaptured one, with other lists each time."""
    batches, start, losses = batches_of(6, 24), built(build, "qwen3_moe", device, "eager").train(), {}
    for capture in ("cuda" if device.type == "cuda" else "emulate", "off"):
        model = copy.deepcopy(start)
        huggingface.prepare(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
        with StaticMoERunner(
            model, optimizer, example_batch=batches[0], loss_fn=loss_with_lists, token_mask="attention_mask",
            config=RunnerConfig(capture=capture),
        ) as runner:  # fmt: skip
            losses[capture] = [float(runner.step(batch).loss) for batch in batches]
    captured, uncaptured = losses.values()
    assert captured == pytest.approx(uncaptured, rel=1e-4) and len(set(uncaptured)) == 6


def test_what_is_no_block_mask_is_refused(build: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="attn_implementation='flex_attention', got 'sdpa'"):
        huggingface.attend_by_blocks(build("qwen3_moe", attention="sdpa"))
    with pytest.raises(ConfigError, match="got None"):
        huggingface.attend_by_blocks(nn.Linear(2, 2))
    model, tokens = build("qwen3_moe", attention="flex_attention"), torch.randint(3, 64, (1, 6))
    huggingface.attend_by_blocks(model)
    for mask, got in ((None, "NoneType"), (huggingface.causal_mask(torch.ones(1, 6)), "Tensor")):
        with pytest.raises(ConfigError, match=f"Qwen3MoeAttention: expected a block mask after .* got {got}"):
            model(tokens, attention_mask=mask)
    model.config.attention_dropout = 0.5
    for layer in model.get_decoder().layers:
        layer.self_attn.attention_dropout = 0.5
    with pytest.raises(ConfigError, match=r"expected scores that flex attention takes, got dropout=0.5"):
        model.train()(tokens, attention_mask=huggingface.ready_masks(model, torch.ones_like(tokens)))
