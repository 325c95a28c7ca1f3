"""The routing kernels against their oracle: the choice, the weights, and the gradient of the logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from staticmoe import reference

pytest.importorskip("triton")

from staticmoe.kernels.routing import route, route_backward  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAN, INF = float("nan"), float("inf")
GUARD = 77

# NumPy, under the interpreter, about the NaN that the tests put there.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def guarded(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A tensor full of rubbish, and the buffer around it, which is longer on both sides."""
    size = torch.Size(shape).numel()
    buffer = torch.full((64 + size + 64,), GUARD, dtype=dtype, device=DEVICE)
    return buffer[64 : 64 + size].view(shape), buffer


def intact(*buffers: Tensor) -> bool:
    """Whether nothing was written around a tensor."""
    return all(bool((b[:64] == GUARD).all() and (b[-64:] == GUARD).all()) for b in buffers)


def same(a: Tensor, b: Tensor) -> bool:
    """Bitwise equality where NaN equals NaN."""
    return torch.equal(torch.nan_to_num(a, 55.0), torch.nan_to_num(b, 55.0)) and torch.equal(a.isnan(), b.isnan())


def routed(
    logits: Tensor,
    top_k: int,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    score_function: str = "softmax",
    norm_topk_prob: bool = True,
    routed_scaling_factor: float = 1.0,
    **groups: int,
) -> tuple[Tensor, Tensor]:
    """ids and weights of the kernel; nothing around them and no input is written."""
    logits = logits.to(DEVICE)
    bias, mask = (None if t is None else t.to(DEVICE) for t in (bias, mask))
    weights, around_weights = guarded(logits.shape[0], top_k, dtype=torch.float32)
    ids, around_ids = guarded(logits.shape[0], top_k, dtype=torch.int32)
    before = logits.clone()
    route(
        logits,
        bias,
        mask,
        weights,
        ids,
        top_k=top_k,
        score_function=score_function,
        norm_topk_prob=norm_topk_prob,
        routed_scaling_factor=routed_scaling_factor,
        **groups,
    )
    assert intact(around_weights, around_ids) and same(logits, before)
    return ids.cpu(), weights.cpu()


def check(logits: Tensor, top_k: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Ids equal to the oracle's and weights near them; returns the kernel's."""
    names = {"bias": "selection_bias", "mask": "token_mask"}
    ids, weights = routed(logits, top_k, **options)
    want_ids, want = reference.route(logits, top_k=top_k, **{names.get(k, k): v for k, v in options.items()})
    assert torch.equal(ids, want_ids), (ids, want_ids)
    torch.testing.assert_close(weights, want, rtol=2e-6, atol=1e-7, equal_nan=True)
    return ids, weights


def gradient(grad: Tensor, logits: Tensor, ids: Tensor, **options: Any) -> Tensor:
    """Gradient of the logits by the kernel; nothing around it and no input is written."""
    grad, logits, ids = grad.to(DEVICE), logits.to(DEVICE), ids.to(DEVICE)
    out, around = guarded(*logits.shape, dtype=logits.dtype)
    before = grad.clone(), logits.clone(), ids.clone()
    route_backward(grad, logits, ids, out, **options)
    assert intact(around)
    assert same(grad, before[0]) and same(logits, before[1]) and torch.equal(ids, before[2])
    return out.cpu()


SHAPES = [(1, 1, 1), (3, 6, 2), (17, 10, 10), (129, 60, 3), (17, 160, 8), (5, 300, 16), (3, 512, 22), (2, 96, 64)]
OPTIONS = [
    {"score_function": score, "norm_topk_prob": norm, "routed_scaling_factor": scale}
    for score, norm, scale in [("softmax", True, 1.0), ("softmax", False, 2.5), ("sigmoid", True, 2.5)]
] + [{"score_function": "sigmoid", "norm_topk_prob": False, "routed_scaling_factor": 1.0}]
NAMES = ["-".join(str(v) for v in o.values()) for o in OPTIONS]


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), SHAPES)
def test_choice_and_weights(tokens: int, experts: int, top_k: int, options: dict[str, Any]) -> None:
    check(torch.randn(tokens, experts) * 3, top_k, **options)


def test_the_last_of_4096_experts() -> None:
    logits = torch.randn(2, 4096)
    logits[1, 4095] = 9.0
    ids, _ = check(logits, 3)
    assert int(ids[1, 0]) == 4095


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [s for s in SHAPES if s[0] != 129])
def test_gradient_of_the_logits(tokens: int, experts: int, top_k: int, options: dict[str, Any]) -> None:
    """Against autograd of the oracle in fp64."""
    logits = torch.randn(tokens, experts) * 3
    exact = logits.double().requires_grad_()
    ids, weights = reference.route(exact, top_k=top_k, **options)
    grad = torch.randn(tokens, top_k)
    (want,) = torch.autograd.grad(weights, exact, grad.double())
    got = gradient(grad, logits, ids, **options)
    assert float((got - want).abs().max()) <= 2e-6 * max(1.0, float(grad.abs().max()) * 2.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_two_bytes(dtype: torch.dtype) -> None:
    """Many ties in bf16; the gradient has the dtype of the logits."""
    logits = torch.randn(20, 40).to(dtype)
    ids, _ = check(logits, 6)
    options = {"score_function": "softmax", "norm_topk_prob": True, "routed_scaling_factor": 1.0}
    grad = torch.randn(20, 6)
    want = reference.route_backward(grad, logits, ids, **options)
    got = gradient(grad, logits, ids, **options)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, rtol=0.01, atol=1e-6)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("experts", "top_k", "groups"), [(8, 2, (1, 1)), (32, 4, (8, 3)), (160, 6, (8, 3)), (30, 5, (5, 5)), (6, 2, (6, 4))]
)
def test_bias_and_groups(experts: int, top_k: int, groups: tuple[int, int], score_function: str) -> None:
    """The choice follows score + bias and the groups; the weights do not know of either. Groups of one expert too."""
    logits, bias = torch.randn(19, experts), torch.randn(experts) * 0.1
    options = {"score_function": score_function, "n_group": groups[0], "topk_group": groups[1]}
    check(logits, top_k, bias=bias, routed_scaling_factor=2.5, **options)
    check(logits, top_k, **options)


def test_bias_of_two_bytes_and_strided() -> None:
    bias = (torch.arange(20).to(torch.bfloat16) / 64)[::2]
    check(torch.zeros(3, 10), 4, bias=bias)


def test_ties_go_to_the_lowest_expert() -> None:
    """O27: a zero router; zeros of both signs are equal."""
    for options in ({}, {"bias": torch.zeros(8)}, {"n_group": 4, "topk_group": 2}, {"score_function": "sigmoid"}):
        ids, _ = check(torch.zeros(32, 8), 2, **options)
        assert (ids == torch.tensor([0, 1])).all()
    check(torch.tensor([[-0.0, 0.0, -0.0, 0.0, -1e-42, 1e-42]]), 6)


def test_choices_reach_every_expert() -> None:
    """O33: token t prefers expert (7 t) mod E."""
    for experts in (6, 10, 60, 160, 300, 512):
        tokens = 127 if experts < 100 else 17
        wanted = (7 * torch.arange(tokens)) % experts
        ids, weights = check(torch.nn.functional.one_hot(wanted, experts).float(), 1)
        assert torch.equal(ids[:, 0].long(), wanted) and (weights == 1).all()


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
def test_masked_rows_are_harmless(options: dict[str, Any], value: float) -> None:
    """O26: the other rows are bitwise those of a run with zeros in the masked rows; ids -1, weight and gradient 0."""
    logits, grad = torch.randn(9, 16), torch.randn(9, 8)
    mask = torch.arange(9) % 3 != 1
    zeroed, spoiled = (torch.where(mask[:, None], logits, v) for v in (0.0, value))
    bias = torch.randn(16) * 0.1
    ids, weights = check(spoiled, 8, bias=bias, mask=mask, **options)
    plain = routed(zeroed, 8, bias=bias, mask=mask, **options)
    assert torch.equal(ids, plain[0]) and torch.equal(weights, plain[1])
    assert (ids[~mask] == -1).all() and (weights[~mask] == 0).all()
    grad[~mask] = NAN
    got = gradient(grad, spoiled, ids, **options)
    assert (got[~mask] == 0).all()
    assert torch.equal(got, gradient(torch.nan_to_num(grad), zeroed, ids, **options))


@pytest.mark.parametrize("bias", [None, torch.zeros(16)], ids=["plain", "bias"])
@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
def test_rows_that_are_not_finite(options: dict[str, Any], bias: Tensor | None) -> None:
    """O26: an unmasked NaN row has distinct ids in range and NaN weights; infinities go as in the oracle."""
    logits = torch.randn(6, 16)
    logits[0] = NAN
    # Behind the first eight: where all keys are alike, those are chosen.
    logits[1, 13] = NAN
    logits[2, ::2] = -INF
    logits[3, 14] = INF
    logits[4] = -INF
    logits[5, 1:] = -INF
    ids, weights = check(logits, 8, bias=bias, **options)
    assert all(len(set(row)) == 8 and min(row) >= 0 and max(row) < 16 for row in ids.tolist())
    assert weights[0].isnan().all() and weights[1].isnan().any()
    assert 13 in ids[1] and 14 in ids[3]
    want = reference.route_backward(torch.ones(6, 8), logits, ids, **options)
    got = gradient(torch.ones(6, 8), logits, ids, **options)
    assert got[0].isnan().any()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_one_choice_normalised_has_weight_1_and_no_gradient() -> None:
    """O35."""
    logits = torch.tensor([[1.0, 0.0]])
    assert check(logits, 1)[1].item() == 1.0
    options = {"score_function": "softmax", "norm_topk_prob": True, "routed_scaling_factor": 1.0}
    ids = torch.zeros(1, 1, dtype=torch.int32)
    assert (gradient(torch.ones(1, 1), logits, ids, **options) == 0).all()
    options["norm_topk_prob"] = False
    assert check(logits, 1, norm_topk_prob=False)[1].item() == pytest.approx(0.731059, abs=1e-6)
    assert gradient(torch.ones(1, 1), logits, ids, **options)[0].tolist() == pytest.approx([0.196612, -0.196612], 1e-5)


def test_tiny_scores_are_still_shares() -> None:
    """O36."""
    _, weights = check(torch.full((4, 8), -60.0), 8, score_function="sigmoid")
    torch.testing.assert_close(weights, torch.full((4, 8), 0.125))


def test_strided_inputs() -> None:
    logits = torch.randn(40, 2, 21)[::2, 1, 1::2].T.contiguous().T
    assert logits.stride() == (1, 20)
    mask = (torch.arange(40) % 5 != 0)[::2]
    ids, _ = check(logits, 3, mask=mask)
    options = {"score_function": "sigmoid", "norm_topk_prob": False, "routed_scaling_factor": 1.0}
    # What autograd hands over for the gradient of a sum.
    grad = torch.ones(1, 1).expand(20, 3)
    want = reference.route_backward(grad, logits, ids, **options)
    torch.testing.assert_close(gradient(grad, logits, ids, **options), want, rtol=1e-5, atol=1e-6)


def test_no_tokens() -> None:
    check(torch.randn(0, 8), 2)
    options = {"score_function": "softmax", "norm_topk_prob": True, "routed_scaling_factor": 1.0}
    none = torch.zeros(0, 2, dtype=torch.int32)
    assert gradient(torch.ones(0, 2), torch.randn(0, 8), none, **options).shape == (0, 8)
