"""Weights of experts that were chosen elsewhere: bitwise those of the choice, and of nothing where the ids are none.

Letters: T tokens, K top_k, E experts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from staticmoe import functional, ops
from staticmoe.errors import ConfigError

T, E = 33, 12
OPTIONS: list[dict[str, Any]] = [
    {"score_function": score, "norm_topk_prob": norm, "routed_scaling_factor": scale}
    for score in ("softmax", "sigmoid")
    for norm, scale in ((True, 1.0), (False, 2.5))
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("top_k", [1, 2, 6, 8])
def test_the_weights_of_a_choice_come_back_bitwise(top_k: int, options: dict[str, Any], dtype: torch.dtype) -> None:
    """With the gradient of the logits; however bias and groups made the choice, and whichever tokens are masked."""
    logits, mask = torch.randn(T, E, dtype=dtype), torch.rand(T) > 0.2
    groups = {"n_group": 4, "topk_group": 3}
    a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    ids, want = functional.route(a, top_k=top_k, selection_bias=torch.randn(E), token_mask=mask, **options, **groups)
    for given in (ids, ids.long(), ids.to(torch.int16), torch.stack([ids, ids - 1], 2)[..., 0]):
        again, weights = functional.weigh(b, given, n_group=4, **options)
        assert torch.equal(again, ids) and again.dtype == torch.int32 and torch.equal(weights, want)
    direction = torch.randn_like(want)
    want.backward(direction)
    weights.backward(direction)
    assert a.grad is not None and torch.equal(a.grad, b.grad)
    assert torch.equal(
        functional.weigh(b, ids.clamp(min=0), token_mask=mask & False, **options)[0], torch.full_like(ids, -1)
    )


@pytest.mark.parametrize("options", OPTIONS)
def test_any_choice_has_the_gradient_of_autograd(options: dict[str, Any]) -> None:
    """Of the scores as written down, in fp64."""
    logits = torch.randn(T, E, dtype=torch.float64, requires_grad=True)
    ids = torch.rand(T, E).argsort(-1)[:, :3]
    scores = logits.softmax(-1) if options["score_function"] == "softmax" else logits.sigmoid()
    want = scores.gather(1, ids)
    if options["norm_topk_prob"]:
        want = want / want.sum(-1, keepdim=True)
    want = want * options["routed_scaling_factor"]
    _, weights = functional.weigh(logits, ids, **options)
    torch.testing.assert_close(weights, want)
    direction = torch.randn_like(want)
    (got,) = torch.autograd.grad(weights, logits, direction)
    torch.testing.assert_close(got, torch.autograd.grad(want, logits, direction)[0])
    torch.library.opcheck(
        ops.weigh.weigh, (logits, ids, None, *options.values(), 1), test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize("bad", [[0, E], [-2, 0], [2**40, 1], [3, 3], [-1, 4]])
def test_ids_that_are_no_choice_are_no_expert(bad: list[int]) -> None:
    """Weights and gradients of that token are exactly zero, whatever its logits hold; others are untouched."""
    logits = torch.randn(T, E)
    logits[4] = float("nan")
    logits.requires_grad_()
    ids = torch.rand(T, E).argsort(-1)[:, :2]
    ids[4] = torch.tensor(bad)
    got, weights = functional.weigh(logits, ids)
    assert got[4].tolist() == [-1, -1] and weights[4].tolist() == [0, 0]
    weights.square().sum().backward()
    assert logits.grad is not None and not logits.grad[4].any() and torch.isfinite(logits.grad).all()
    others = torch.arange(T) != 4
    assert torch.equal(got[others], ids[others].int()) and (weights[others] > 0).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"topk_ids": torch.zeros(T - 1, 2, dtype=torch.int32)}, r"topk_ids: expected shape \(33, 2\).*got \(32, 2\)"),
        ({"topk_ids": torch.zeros(T, 2)}, "topk_ids: expected integers; got torch.float32"),
        ({"topk_ids": torch.zeros(T, 2) > 0}, "topk_ids: expected integers; got torch.bool"),
        ({"topk_ids": torch.zeros(T, E + 1, dtype=torch.int32)}, "top_k: expected 1 to num_experts = 12; got 13"),
        ({"token_mask": torch.ones(T)}, "token_mask: expected bool"),
        ({"n_group": 5}, "n_group: expected a divisor of num_experts = 12; got 5"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"topk_ids": torch.zeros(T, 2, dtype=torch.int32), **change}
    logits: Tensor = torch.randn(T, E)
    with pytest.raises(ConfigError, match=words):
        functional.weigh(logits, **given)
