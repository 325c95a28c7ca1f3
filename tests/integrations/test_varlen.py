"""Attention by offsets: what it is handed, what its kernel is handed, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from staticmoe.errors import BatchError, ConfigError, ModelError
from staticmoe.integrations import huggingface
from staticmoe.integrations.huggingface import sequences, varlen

transformers = pytest.importorskip("transformers")
huggingface.register()


def packed(pieces: list[Tensor], **sizes: Any) -> dict[str, Tensor]:
    """What the collator of transformers makes of them, at a constant size."""
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    return huggingface.pad_packed(collate([{"input_ids": piece} for piece in pieces]), **sizes)


def built(build: Callable[..., Any], name: str = "qwen3_moe", **over: Any) -> Any:
    model = build(name, "staticmoe", attention="sdpa", **over)
    huggingface.attend_within_sequences(model)
    return model


def test_pad_packed_says_what_is_real_and_repeats_the_last_offset() -> None:
    batch = packed([torch.tensor([3, 4, 5]), torch.tensor([6, 7])], tokens=12, max_sequences=3, max_length=4)
    want = {
        "input_ids": [3, 4, 5, 6, 7, 0, 0, 0, 0, 0, 0, 0], "labels": [-100, 4, 5, -100, 7, *[-100] * 7],
        "position_ids": [0, 1, 2, 0, 1, 0, 0, 0, 0, 0, 0, 0], "attention_mask": [1] * 5 + [0] * 7,
    }  # fmt: skip
    assert {key: value[0].tolist() for key, value in batch.items() if "cu_seq" not in key} == want
    # Two sequences, two pieces of padding of at most 4, and 3 + ceil(12 / 4) places.
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 3, 5, 9, 12, 12, 12]
    full = packed([torch.randint(3, 64, (12,))], tokens=12, max_sequences=3)
    assert full["cu_seq_lens_q"].tolist() == [0, 12, 12, 12, 12] and bool(full["attention_mask"].all())
    assert full["cu_seq_lens_q"].dtype == torch.int32 and full["input_ids"].dtype == torch.int64
    numbered = {"input_ids": torch.ones(1, 2), "seq_idx": torch.zeros(1, 2), "cu_seq_lens_q": [0, 2]}
    numbered = huggingface.pad_packed(numbered, tokens=4, max_sequences=1, pad_token_id=9)
    assert numbered["seq_idx"].tolist() == [[0, 0, -1, -1]] and numbered["input_ids"].tolist() == [[1, 1, 9, 9]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seq_lens_q": [0, 3, 6]}, r"expected offsets that go up from 0 to 5, got \[0, 3, 6\]"),
        ({"cu_seq_lens_q": [0, 3, 2, 5]}, "expected offsets that go up from 0 to 5"),
        ({"cu_seq_lens_q": [1, 5]}, "expected offsets that go up from 0 to 5"),
        ({"cu_seq_lens_q": [0]}, "expected offsets that go up from 0 to 5"),
        ({"cu_seq_lens_q": [0, 1, 2, 3, 5]}, "expected at most max_sequences=3, got 4: pack fewer"),
        ({"cu_seq_lens_q": [0, 5]}, "expected sequences of at most max_length=4, got 5"),
        ({"input_ids": torch.zeros(1, 13)}, "expected input_ids .1,t. on the host, and all else like it, got"),
        ({"labels": torch.zeros(5)}, r"got input_ids \(1, 5\) on cpu, labels \(5,\) on cpu"),
        ({"labels": torch.zeros(1, 5, device="meta")}, "labels .* on meta"),
    ],
)
def test_a_packing_that_does_not_fit_is_refused_on_the_host(change: dict[str, Any], message: str) -> None:
    given = {"input_ids": torch.ones(1, 5), "labels": torch.ones(1, 5), "cu_seq_lens_q": [0, 3, 5], **change}
    with pytest.raises(BatchError, match=message):
        huggingface.pad_packed(given, tokens=12, max_sequences=3, max_length=4)


def test_sizes_that_mean_nothing_are_refused(build: Callable[..., Any]) -> None:
    given = {"input_ids": torch.ones(1, 5), "cu_seq_lens_q": [0, 3, 5]}
    with pytest.raises(BatchError, match="expected at most tokens=4, got 5: pack fewer"):
        huggingface.pad_packed(given, tokens=4, max_sequences=3)
    with pytest.raises(BatchError, match="expected cu_seq_lens_q, got input_ids: use DataCollatorWithFlattening"):
        huggingface.pad_packed({"input_ids": torch.ones(1, 5)}, tokens=8, max_sequences=3)
    for name, value, wanted in (
        ("tokens", 0, "1 or more"),
        ("max_sequences", 0, "1 or more"),
        ("max_length", 9, "1 to"),
    ):
        with pytest.raises(ConfigError, match=f"{name}: expected {wanted}.*got {value}"):
            huggingface.pad_packed(given, **{"tokens": 8, "max_sequences": 3, name: value})
    for name in ("max_sequences", "max_length"):
        with pytest.raises(ConfigError, match=f"{name}: expected 1 or more, got 0"):
            huggingface.attend_within_sequences(build("qwen3_moe", attention="sdpa"), **{name: 0})


def test_offsets_are_mended_so_that_no_kernel_reads_outside() -> None:
    given = torch.tensor([3, -7, 9, 5, 99], dtype=torch.int32)
    safe, wrong = sequences.safe_offsets(given, 24, 24)
    assert safe.tolist() == [0, 3, 9, 9, 24] and bool(wrong)
    right = torch.tensor([0, 3, 3, 24, 24], dtype=torch.int32)
    safe, wrong = sequences.safe_offsets(right, 24, 21)
    assert torch.equal(safe, right) and not bool(wrong)
    assert bool(sequences.safe_offsets(right, 24, 20)[1])


def oracle(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *rest: Any, **options: Any) -> Tensor:
    """What torch's varlen_attn is documented to compute, sequence by sequence."""
    assert cu_q is cu_k and rest == (9, 9) and options.pop("window_size") == (-1, 0)
    assert options.pop("enable_gqa", True) and q.shape[-1] == k.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    out = torch.empty_like(q)
    for begin, end in zip(cu_q.tolist(), cu_q.tolist()[1:], strict=False):
        one = [t[begin:end].transpose(0, 1) for t in (q, k, v)]
        one = [t.repeat_interleave(q.shape[1] // t.shape[0], 0) for t in one]
        scores = (one[0] @ one[1].transpose(1, 2)).float() * options["scale"]
        seen = torch.ones(end - begin, end - begin, dtype=torch.bool, device=q.device).tril()
        out[begin:end] = (scores.masked_fill(~seen, -torch.inf).softmax(-1).to(v.dtype) @ one[2]).transpose(0, 1)
    return out


@pytest.mark.parametrize(("heads", "width", "width_of_values"), [((4, 4), 8, 8), ((6, 2), 16, 8), ((4, 1), 12, 20)])
def test_the_kernel_is_handed_what_it_is_documented_to_take(
    heads: tuple[int, int], width: int, width_of_values: int, monkeypatch: pytest.MonkeyPatch, device: torch.device,
    error: Callable[[Tensor, Tensor], float],
) -> None:  # fmt: skip
    """Layout, scale, grouped heads and widths: the kernel's way with an oracle in its place is the mask's way."""
    batch = [torch.randn(2, count, 12, size).to(device) for count, size in (
        (heads[0], width), (heads[1], width), (heads[1], width_of_values)
    )]  # fmt: skip
    offsets = torch.tensor([0, 3, 12, 12, 21, 24], dtype=torch.int32, device=device)
    numbers = torch.tensor([[0] * 3 + [1] * 9, [2] * 9 + [3] * 3], device=device)
    seen = huggingface.causal_mask(torch.ones_like(numbers), sequence_ids=numbers, dtype=torch.bool)
    rows = torch.nn.functional.scaled_dot_product_attention(*batch, attn_mask=seen, scale=0.3, enable_gqa=True)
    want = rows.transpose(1, 2).flatten(0, 1)
    assert error(varlen._by_mask(*batch, offsets, 9, 0.3), want) < 1e-5
    monkeypatch.setattr(varlen, "varlen_attn", oracle)
    got = varlen._by_kernel(*[one.bfloat16() for one in batch], offsets, 9, 0.3)
    assert got.shape == (24, heads[0], width_of_values) and error(got, want) < 3e-2
    with pytest.raises(ConfigError, match=r"expected bf16 or fp16 on a GPU.*got torch.float32"):
        varlen._by_kernel(*batch, offsets, 9, 0.3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: flash attention has no other kernel")
@pytest.mark.parametrize(
    ("heads", "width", "width_of_values"), [((4, 4), 64, 64), ((8, 2), 128, 128), ((4, 4), 24, 16)]
)
def test_the_kernel_on_cuda_is_the_mask(
    heads: tuple[int, int], width: int, width_of_values: int, error: Callable[[Tensor, Tensor], float]
) -> None:
    """Output and gradients, with sequences of no token among them."""
    shapes = [(2, heads[0], 300, width), (2, heads[1], 300, width), (2, heads[1], 300, width_of_values)]
    batch = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    wide = [one.detach().float().requires_grad_(True) for one in batch]
    offsets = torch.tensor([0, 130, 131, 131, 300, 600, 600, 600], dtype=torch.int32, device="cuda")
    got, want = varlen._by_kernel(*batch, offsets, 300, 0.1), varlen._by_mask(*wide, offsets, 300, 0.1)
    direction = torch.randn_like(want)
    got.backward(direction.bfloat16())
    want.backward(direction)
    assert error(got, want) < 2e-2
    for mine, theirs in zip(batch, wide, strict=True):
        assert error(mine.grad, theirs.grad) < 3e-2


def test_generation_and_the_way_back(build: Callable[..., Any]) -> None:
    """Prompts with padding before them are read by offsets; what comes after goes over the cache."""
    model, plain = built(build).eval(), build("qwen3_moe", attention="sdpa").eval()
    prompt = torch.randint(3, 64, (2, 5))
    ones = torch.ones_like(prompt)
    options = {"max_new_tokens": 4, "do_sample": False}
    want = plain.generate(prompt, attention_mask=ones, **options)
    assert torch.equal(model.generate(prompt, attention_mask=ones, **options), want)
    ones[0, :2] = 0
    with pytest.raises(ConfigError, match="expected no padding after attend_within_sequences over a cache, got some"):
        model.generate(prompt, attention_mask=ones, **options)
    model.set_attn_implementation("sdpa")
    assert torch.equal(
        model.generate(prompt, attention_mask=ones, **options), plain.generate(prompt, attention_mask=ones, **options)
    )
    huggingface.attend_causally(model)
    huggingface.attend_within_sequences(model, max_length=3)
    huggingface.attend_within_sequences(model, max_length=5)
    decoder = model.get_decoder()
    assert sum(isinstance(hook, varlen._Offsets) for hook in decoder._forward_pre_hooks.values()) == 1
    assert torch.isfinite(model(prompt, attention_mask=ones).logits).all()


def test_what_it_does_not_do_is_refused_by_name(build: Callable[..., Any]) -> None:
    tokens = torch.randint(3, 64, (2, 6))
    for name, over, got in (
        ("mixtral", {"sliding_window": 4}, "sliding_window=4"), ("minimax", {}, "linear_attention"),
        ("afmoe", {}, "sliding_attention"), ("lfm2_moe", {}, "conv"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"attend_within_sequences: expected layers .* got {got}"):
            built(build, name, **over)
    with pytest.raises(ConfigError, match="attn_implementation='sdpa', got 'eager'"):
        huggingface.attend_within_sequences(build("gpt_oss", "staticmoe"))
    model = built(build)
    ready = huggingface.causal_mask(torch.ones(2, 6))
    for given in (ready, {"full_attention": ready}):
        with pytest.raises(ConfigError, match=r"attention_mask: expected \[batch, tokens\] after"):
            model(tokens, attention_mask=given)
    with pytest.raises(ConfigError, match=r"cu_seq_lens_q: expected \[sequences \+ 1\] int32, got \(2,\) torch.int64"):
        model(tokens, cu_seq_lens_q=torch.tensor([0, 12]))
    layer = model.get_decoder().layers[0].self_attn
    heads = torch.randn(1, 4, 6, 8)
    offsets = {"cu_seq_lens_q": torch.tensor([0, 6], dtype=torch.int32), "max_length_q": 6}
    for name, value in (("softcap", 30.0), ("s_aux", torch.zeros(4)), ("sliding_window", 2), ("dropout", 0.1)):
        with pytest.raises(ConfigError, match=f"expected attention without {name} after attend_within_sequences"):
            varlen.varlen_attention(layer, heads, heads, heads, None, **{name: value}, **offsets)
    with pytest.raises(ConfigError, match="expected causal attention, got is_causal=False"):
        varlen.varlen_attention(layer, heads, heads, heads, None, is_causal=False, **offsets)
    with pytest.raises(ConfigError, match="expected as many keys as queries, got 6 and 2: a cache of constant size"):
        varlen.varlen_attention(layer, heads[:, :, :2], heads, heads, None, **offsets)


def test_a_family_that_keeps_the_offsets_to_itself_is_refused(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built(build)
    layer = model.get_decoder().layers[1]
    forward = layer.forward
    monkeypatch.setattr(
        layer,
        "forward",
        lambda hidden, position_embeddings, **_: forward(hidden, position_embeddings=position_embeddings),
    )
    with pytest.raises(
        ModelError, match="Qwen3MoeAttention: expected cu_seq_lens_q from the model's forward, got none"
    ):
        model(torch.randint(3, 64, (2, 6)))
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda cls: False))
    model.config._attn_implementation_internal = "sdpa"
    with pytest.raises(ModelError, match="expected a family that asks transformers for its attention"):
        huggingface.attend_within_sequences(model)
