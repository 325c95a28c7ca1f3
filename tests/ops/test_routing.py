"""The router's choice against a loop over tokens, its backward against autograd, and rows that hold NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from staticmoe import functional, ops, reference
from staticmoe.errors import ConfigError

NAN, INF = float("nan"), float("inf")

OPTIONS: list[dict[str, Any]] = [
    {"score_function": score, "norm_topk_prob": norm, "routed_scaling_factor": scale}
    for score in ("softmax", "sigmoid")
    for norm in (True, False)
    for scale in (1.0, 2.5)
]
GROUPS: list[dict[str, Any]] = [{}, {"n_group": 4, "topk_group": 2}, {"n_group": 12, "topk_group": 5}]


def choose_by_loop(
    logits: Tensor,
    *,
    top_k: int,
    score_function: str,
    selection_bias: Tensor | None = None,
    norm_topk_prob: bool = True,
    routed_scaling_factor: float = 1.0,
    n_group: int = 1,
    topk_group: int = 1,
) -> tuple[list[list[int]], Tensor]:
    """Python lists and sorted(): ids and differentiable weights of every token."""
    all_ids, all_weights = [], []
    size = logits.shape[1] // n_group
    for row in logits:
        scores = row.softmax(0) if score_function == "softmax" else row.sigmoid()
        key = (scores if selection_bias is None else scores + selection_bias).tolist()
        best = [sum(sorted(key[g * size : (g + 1) * size], reverse=True)[:2]) for g in range(n_group)]
        groups = sorted(range(n_group), key=lambda g: (-best[g], g))[:topk_group]
        allowed = [e for e in range(len(key)) if e // size in groups]
        ids = sorted(allowed, key=lambda e: (-key[e], e))[:top_k]
        weights = torch.stack([scores[e] for e in ids])
        if norm_topk_prob:
            weights = weights / weights.sum()
        all_ids.append(ids)
        all_weights.append(weights * routed_scaling_factor)
    return all_ids, torch.stack(all_weights)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("biased", [False, True])
def test_against_a_loop(
    options: dict[str, Any],
    groups: dict[str, Any],
    biased: bool,
    device: torch.device,
    error: Callable[[Tensor, Tensor], float],
) -> None:
    logits = torch.randn(9, 12, dtype=torch.float64).to(device).requires_grad_()
    bias = torch.randn(12, dtype=torch.float64).to(device) if biased else None
    ids, weights = functional.route(logits, top_k=3, selection_bias=bias, **options, **groups)
    want_ids, want = choose_by_loop(logits, top_k=3, selection_bias=bias, **options, **groups)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float64
    assert ids.tolist() == want_ids
    assert error(weights, want) < 1e-12
    direction = torch.randn_like(weights)
    (got_grad,) = torch.autograd.grad(weights, logits, direction)
    (want_grad,) = torch.autograd.grad(want, logits, direction)
    assert error(got_grad, want_grad) < 1e-11


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("masked", [False, True])
def test_gradcheck_of_op_and_oracle(options: dict[str, Any], masked: bool) -> None:
    """The hand-written backward and autograd through the reference, both against finite differences."""
    logits = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([True, False, True, True, False]) if masked else None
    assert torch.autograd.gradcheck(lambda z: functional.route(z, top_k=3, token_mask=mask, **options)[1], logits)
    assert torch.autograd.gradcheck(lambda z: reference.route(z, top_k=3, token_mask=mask, **options)[1], logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_computes_in_fp32_and_returns_the_gradients_dtype(dtype: torch.dtype, device: torch.device) -> None:
    logits = torch.randn(7, 8).to(device, dtype).requires_grad_()
    ids, weights = functional.route(logits, top_k=2)
    want_ids, want = functional.route(logits.detach().double(), top_k=2)
    assert weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(ids, want_ids)
    assert (weights.double() - want).abs().max() < 1e-6
    weights[:, 0].sum().backward()
    assert logits.grad is not None and logits.grad.dtype == dtype


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("experts", [8, 300])
def test_lowest_expert_wins_a_tie(score_function: str, bias: bool, experts: int, device: torch.device) -> None:
    """O27: equal logits choose the same experts in every run, the lowest numbers."""
    logits = torch.zeros(33, experts, device=device)
    selection_bias = torch.zeros(experts, device=device) if bias else None
    for _ in range(20):
        ids, weights = functional.route(
            logits, top_k=2, score_function=score_function, selection_bias=selection_bias, n_group=2, topk_group=2
        )
        assert ids.tolist() == [[0, 1]] * 33
        assert torch.equal(weights, torch.full_like(weights, 0.5))


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_scores_that_round_to_one_number_are_told_apart(score_function: str, device: torch.device) -> None:
    """In fp32 sigmoid(30) and sigmoid(60) are both 1, and softmax gives 0 to all but the first: logits still choose."""
    logits = torch.tensor([[-300.0, 30.0, 60.0, 50.0], [-200.0, -400.0, 0.0, -300.0]], device=device)
    ids, _ = functional.route(logits, top_k=3, score_function=score_function)
    assert ids.tolist() == [[2, 3, 1], [2, 0, 3]]


def test_bias_chooses_and_does_not_weigh(device: torch.device) -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]], device=device)
    bias = torch.tensor([-10.0, 0.0, 0.0, 10.0], device=device)
    ids, weights = functional.route(
        logits, top_k=2, selection_bias=bias, score_function="sigmoid", norm_topk_prob=False
    )
    assert ids.tolist() == [[3, 1]]
    assert torch.allclose(weights, torch.sigmoid(torch.tensor([[0.0, 2.0]], device=device)))


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("level", [-60.0, -150.0, 80.0])
def test_tiny_scores_still_have_shares(score_function: str, level: float, device: torch.device) -> None:
    """O36: an epsilon in the division would make the weights of tiny sigmoid scores vanish; each share is 1/K."""
    logits = torch.full((4, 8), level, device=device, requires_grad=True)
    _, weights = functional.route(logits, top_k=4, score_function=score_function)
    assert torch.equal(weights, torch.full_like(weights, 0.25))
    weights[:, 0].sum().backward()
    assert logits.grad is not None
    # d share_0 / d l_0 = share (1 - share) sigmoid(-l): 1/8·... of it reaches the other three with the other sign.
    slope = 0.1875 * (1.0 if score_function == "softmax" else 1 / (1 + math.exp(level)))
    assert torch.allclose(logits.grad[:, 0], torch.full((4,), slope, device=device))
    assert torch.allclose(logits.grad[:, 1:4], torch.full((4, 3), -slope / 3, device=device))
    assert torch.equal(logits.grad[:, 4:], torch.zeros(4, 4, device=device))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("groups", [{}, {"n_group": 4, "topk_group": 2}])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_masked_rows_may_hold_anything(
    options: dict[str, Any], groups: dict[str, Any], value: float, device: torch.device
) -> None:
    """O26: a masked NaN row gives no duplicate id, no gradient, and does not touch the other rows."""
    clean = torch.randn(6, 16, device=device)
    mask = torch.tensor([True, False, True, True, False, True], device=device)
    clean[1], clean[4] = 0.0, 0.0
    results = []
    for filling in (0.0, value):
        logits = torch.where(mask[:, None], clean, filling).requires_grad_()
        ids, weights = functional.route(logits, top_k=8, token_mask=mask, **options, **groups)
        (grad,) = torch.autograd.grad(weights.square().sum(), logits)
        results.append((ids, weights, grad))
    for got, want in zip(results[1], results[0], strict=True):
        assert torch.equal(got, want)
    ids, weights, grad = results[1]
    assert (ids[~mask] == -1).all() and (weights[~mask] == 0).all() and (grad[~mask] == 0).all()
    assert all(len(set(row)) == 8 and set(row) <= set(range(16)) for row in ids[mask].tolist())
    assert grad[mask].isfinite().all()
    # The oracle's own derivative, by autograd.
    logits = torch.where(mask[:, None], clean, value).double().requires_grad_()
    _, weights = reference.route(logits, top_k=8, token_mask=mask, **options, **groups)
    (grad,) = torch.autograd.grad(weights.square().sum(), logits)
    assert grad.isfinite().all() and (grad[~mask] == 0).all()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("groups", [{}, {"n_group": 4, "topk_group": 2}])
@pytest.mark.parametrize("bias", [False, True])
def test_unmasked_nan_rows_have_distinct_ids_and_show(
    options: dict[str, Any], groups: dict[str, Any], bias: bool, device: torch.device
) -> None:
    """O26: an unmasked NaN row must not crash; its ids are in range and its NaN reaches the weights."""
    logits = torch.randn(3, 16, device=device)
    # Behind the first eight: where all keys are alike, those are chosen.
    logits[0], logits[1, 13], logits[2, 14] = NAN, NAN, INF
    selection_bias = torch.zeros(16, device=device) if bias else None
    ids, weights = functional.route(logits, top_k=8, selection_bias=selection_bias, **options, **groups)
    assert all(len(set(row)) == 8 and set(row) <= set(range(16)) for row in ids.tolist())
    assert 13 in ids[1] and 14 in ids[2]
    assert weights[:2].isnan().any(-1).all()


@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
def test_one_token(top_k: int, device: torch.device) -> None:
    ids, weights = functional.route(torch.tensor([[0.0, 3.0, 1.0, 2.0]], device=device), top_k=top_k)
    assert ids.tolist() == [[1, 3, 2, 0][:top_k]]
    assert abs(weights.sum() - 1) < 1e-6


@pytest.mark.parametrize("options", OPTIONS[::3])
@pytest.mark.parametrize("bias", [False, True])
def test_opcheck(options: dict[str, Any], bias: bool, device: torch.device) -> None:
    logits = torch.randn(5, 8, device=device, requires_grad=True)
    mask = torch.tensor([True, True, False, True, True], device=device) if bias else None
    selection_bias = torch.randn(8, device=device) if bias else None
    args = (logits, selection_bias, mask, 3, *options.values(), 2, 1)
    torch.library.opcheck(ops.routing.route, args)
    weights, ids = ops.routing.route(*args)
    torch.library.opcheck(
        ops.routing.route_backward, (torch.randn_like(weights), logits.detach(), ids, *options.values())
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_k": 9}, "top_k.*num_experts = 8.*9"),
        ({"top_k": 0}, "top_k.*num_experts = 8.*0"),
        ({"top_k": 2, "score_function": "tanh"}, "score_function.*softmax, sigmoid.*tanh"),
        ({"top_k": 2, "n_group": 3}, "n_group.*divisor of num_experts = 8.*3"),
        ({"top_k": 2, "n_group": 4, "topk_group": 5}, "topk_group.*n_group = 4.*5"),
        ({"top_k": 3, "n_group": 4, "topk_group": 1}, "top_k.*2 experts of 1 groups.*3.*raise topk_group"),
        ({"top_k": 2, "selection_bias": torch.zeros(7)}, r"selection_bias.*\(8,\).*\(7,\)"),
        ({"top_k": 2, "token_mask": torch.ones(5, dtype=torch.bool)}, r"token_mask.*\(4,\).*\(5,\)"),
        ({"top_k": 2, "token_mask": torch.ones(4)}, "token_mask.*bool.*float32.*mask != 0"),
    ],
)
def test_refusals_name_value_and_fix(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        functional.route(torch.zeros(4, 8), **options)


def test_logits_are_two_dimensional() -> None:
    with pytest.raises(ConfigError, match=r"logits.*2 dimensions.*\(2, 4, 8\)"):
        functional.route(torch.zeros(2, 4, 8), top_k=2)
