"""Field reports O5, O24, O28, O34 and O35 on transformers models.

Letters: B sequences, S tokens of a padded sequence, K experts a token.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from staticmoe import RunnerConfig, StaticMoERunner
from staticmoe.integrations import huggingface

transformers = pytest.importorskip("transformers")
huggingface.register()

B, S, K = 2, 16, 2
RATE = 0.1


def given(device: torch.device, lengths: tuple[int, ...] = (S, S)) -> dict[str, Tensor]:
    """Sequences of these lengths, padded on the right."""
    generator = torch.Generator().manual_seed(0)
    real = torch.arange(S) < torch.tensor(lengths)[:, None]
    tokens = torch.randint(3, 64, (B, S), generator=generator)
    batch = {"input_ids": torch.where(real, tokens, 0), "labels": torch.where(real, tokens, -100)}
    return {key: value.to(device) for key, value in {**batch, "attention_mask": real.long()}.items()}


def gradients(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the model as transformers runs it."""
    loss = model(**batch, use_cache=False).loss
    used = dict(model.named_parameters())
    return loss.detach(), dict(zip(used, torch.autograd.grad(loss, used.values()), strict=True))


def one_step(model: Any, batch: dict[str, Tensor], capture: str, **options: Any) -> Any:
    """The result of one plain descent of `RATE` times the gradient."""
    huggingface.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with StaticMoERunner(
        model, optimizer, example_batch=batch, loss_fn=huggingface.causal_lm_loss, token_mask="attention_mask",
        config=RunnerConfig(capture=capture, **options),
    ) as runner:  # fmt: skip
        assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in model.parameters()}
        result = runner.step(batch)
        runner.synchronize()
    return result


def test_every_weight_moves_by_its_gradient(build: Callable[..., Any], captured: str, device: torch.device) -> None:
    """O5: experts and routers included, by the optimizer of before; names and objects stay."""
    many = {"num_experts_per_tok": 3}
    model, batch = build("qwen3_moe", "staticmoe", **many), given(device)
    _, grads = gradients(build("qwen3_moe", **many), batch)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    keys, objects = list(model.state_dict()), {name: id(p) for name, p in model.named_parameters()}
    result = one_step(model, batch, captured)
    assert all(min(layer.routed) > 0 for layer in result.moe.values())
    moved = {name: (before[name] - parameter.detach()) / RATE for name, parameter in model.named_parameters()}
    named = [name for name in grads if ".experts." in name or ".gate." in name]
    assert len(named) == 6 and all(float(grads[name].abs().max()) > 1e-4 for name in named)
    # The difference of two fp32 weights around 1 holds a gradient to their rounding over the rate.
    assert all(float((moved[name] - grads[name]).abs().max()) < 1e-5 for name in grads)
    assert list(model.state_dict()) == keys and {name: id(p) for name, p in model.named_parameters()} == objects


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_padding_takes_no_row_and_is_in_nothing(
    name: str, build: Callable[..., Any], captured: str, device: torch.device, error: Callable[..., float]
) -> None:
    """O24: at a capacity that holds the real assignments alone; loss and update are those of transformers' own loop."""
    lengths = (5, S)
    batch, model = given(device, lengths), build(name, "staticmoe")
    real = sum(lengths) * K
    want, grads = gradients(build(name), batch)
    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    result = one_step(model, batch, captured, capacity_factor=real / (B * S * K), overflow="drop")
    for layer in result.moe.values():
        assert layer.capacity_rows == real == sum(layer.routed) == sum(layer.kept) and not sum(layer.dropped)
    assert error(torch.tensor(float(result.loss)), want.cpu()) < 1e-5
    for key, parameter in model.named_parameters():
        assert float(((before[key] - parameter.detach()) / RATE - grads[key]).abs().max()) < 1e-5, key


@pytest.mark.parametrize("capacity", [None, 0.5])
def test_a_recomputed_forward_counts_nothing_and_routes_alike(
    capacity: float | None, build: Callable[..., Any], captured: str, device: torch.device
) -> None:
    """O28: all ties, by routers of zeros; counts, drops and the update are those without checkpointing."""
    found = []
    for again in (True, False):
        model = build("mixtral", "staticmoe").train()
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.data.zero_()
        if again:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        result = one_step(model, given(device), captured, capacity_factor=capacity, overflow="drop")
        for layer in result.moe.values():
            assert sum(layer.routed) == B * S * K and sum(layer.dropped) == (0 if capacity is None else B * S * K // 2)
        found.append((result.loss, {n: (x.routed, x.kept) for n, x in result.moe.items()}, model.state_dict()))
    (loss, counts, state), (want, want_counts, want_state) = found
    assert loss == want and counts == want_counts
    assert all(torch.equal(state[key], want_state[key]) for key in want_state)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_odd_strides_offsets_and_widths(
    ids_dtype: torch.dtype, dtype: torch.dtype, build: Callable[..., Any], device: torch.device
) -> None:
    """O34: tokens with an odd offset, ids and weights that are a layer's slice of a larger tensor, H=100, I=36."""
    model = build("mixtral", "staticmoe", hidden_size=100, intermediate_size=36, num_hidden_layers=1).to(dtype)
    module = next(module for module in model.modules() if hasattr(module, "is_transposed"))
    big = torch.randn(11, 103).to(device, dtype)
    every = torch.stack([torch.randperm(6)[:2] for _ in range(33)]).view(11, 3, 2).to(device, ids_dtype)
    shares = torch.rand(11, 3, 2).to(device, dtype)
    found = []
    for odd in (True, False):
        x, ids, weights = big[:, 1:101], every[:, 1, :], shares[:, 1, :]
        if not odd:
            x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
        assert all(tensor.is_contiguous() != odd for tensor in (x, ids, weights))
        x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
        out = module(x, ids, weights)
        found.append((out, *torch.autograd.grad(out.square().sum(), (x, weights, *module.parameters()))))
    assert all(torch.isfinite(got).all() and torch.equal(got, want) for got, want in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "qwen3_moe: renormalised", "qwen3_moe"])
def test_one_expert_a_token(
    name: str, build: Callable[..., Any], device: torch.device, error: Callable[..., float]
) -> None:
    """O35: equal to the loop; where the weight is divided by itself the router gets nothing, and `check` says so."""
    family, constant = name.split(":")[0], name != "qwen3_moe"
    over = {"num_experts_per_tok": 1, "top_k": 1, "norm_topk_prob": constant}
    model, batch = build(family, "staticmoe", **over), given(device)
    loss, grads = gradients(model, batch)
    want, want_grads = gradients(build(family, **over), batch)
    assert error(loss, want) < 1e-5
    for key, grad in want_grads.items():
        learns = not constant or not any(part in key for part in (".gate.", ".router."))
        assert error(grads[key], grad) < 1e-5 if learns else float(grads[key].abs().max()) < 1e-7, key
    given_to_check = {"input_ids": batch["input_ids"], "use_cache": False}
    if constant:
        with pytest.warns(UserWarning, match=r"layers\.0.*experts: with one expert a token and renormalised weights"):
            huggingface.check(model, given_to_check)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            huggingface.check(model, given_to_check)


def test_nothing_is_put_on_the_modules(build: Callable[..., Any], captured: str, device: torch.device) -> None:
    """O5: what `prepare` and a runner add stands beside the model: its modules and buffers are those of before."""
    model = build("deepseek_v3", "staticmoe")

    def seen(net: nn.Module) -> list[tuple[str, type, list[str]]]:
        return [(name, type(module), sorted(module._buffers)) for name, module in net.named_modules()]

    before = seen(model)
    one_step(model, given(device), captured)
    assert seen(model) == before
