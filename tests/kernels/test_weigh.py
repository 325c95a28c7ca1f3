"""The kernel that weighs given experts: bitwise the routing kernel's weights, near its oracle, and safe for any id."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from staticmoe import reference

pytest.importorskip("triton")

from staticmoe.kernels.routing import route  # noqa: E402
from staticmoe.kernels.weigh import weigh  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GUARD = 77
SHAPES = [(1, 1, 1, 1), (3, 6, 2, 3), (17, 10, 10, 1), (17, 160, 8, 8), (5, 300, 16, 1), (9, 60, 6, 4)]
OPTIONS: list[dict[str, Any]] = [
    {"score_function": score, "norm_topk_prob": norm, "routed_scaling_factor": 2.5}
    for score in ("softmax", "sigmoid")
    for norm in (True, False)
]

# NumPy, under the interpreter, about the NaN that the tests put there.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def weighed(logits: Tensor, ids: Tensor, mask: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    """ids and weights of the kernel; nothing around them is written."""
    size, pad = ids.numel(), 64
    around = [torch.full((size + 2 * pad,), GUARD, dtype=d, device=DEVICE) for d in (torch.float32, torch.int32)]
    weights, out = (buffer[pad : pad + size].view(ids.shape) for buffer in around)
    weigh(logits, ids, mask, weights, out, **options)
    assert all(bool((b[:pad] == GUARD).all() and (b[-pad:] == GUARD).all()) for b in around)
    return out, weights


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: f"{o['score_function']}-{o['norm_topk_prob']}")
@pytest.mark.parametrize(("tokens", "experts", "top_k", "n_group"), SHAPES)
def test_a_choice_is_weighed_as_it_was(
    tokens: int, experts: int, top_k: int, n_group: int, options: dict[str, Any]
) -> None:
    """int32 and int64 ids of any strides, some tokens masked."""
    logits = (torch.randn(tokens, experts + 3) * 3).to(DEVICE)[:, 2:-1]
    mask = torch.rand(tokens, device=DEVICE) > 0.2
    want = torch.empty(tokens, top_k, device=DEVICE)
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=DEVICE)
    route(logits, None, mask, want, ids, top_k=top_k, n_group=n_group, topk_group=n_group, **options)
    apart = torch.full((tokens, 2 * top_k + 1), 9, dtype=torch.int64, device=DEVICE)
    apart[:, 1::2] = ids
    # A masked token's ids may be anything.
    anything = torch.where(mask[:, None], ids, torch.randint(-9, 9, ids.shape, device=DEVICE, dtype=torch.int32))
    for given, real in ((ids, None), (ids.T.contiguous().T, mask), (apart[:, 1::2], mask), (anything, mask)):
        got, weights = weighed(logits, given, real, n_group=n_group, **options)
        assert torch.equal(got, ids) and torch.equal(weights, want)
    oracle_ids, oracle = reference.weigh(logits, ids, **options)
    assert torch.equal(oracle_ids, ids)
    torch.testing.assert_close(want, oracle, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: f"{o['score_function']}-{o['norm_topk_prob']}")
def test_ids_that_are_no_choice_reach_no_memory(options: dict[str, Any]) -> None:
    """Too large, negative, beyond int32, twice, and -1 beside others: -1 and 0, as the oracle says, of any logits."""
    logits = torch.randn(9, 12, device=DEVICE)
    ids = torch.rand(9, 12, device=DEVICE).argsort(-1)[:, :3]
    bad = [[12, 0, 1], [0, -2, 1], [0, 1, 2**40], [4, 5, 4], [-1, 2, 3], [-1, -1, -1], [2**32, 1, 2], [-(2**62), 0, 1]]
    ids[: len(bad)] = torch.tensor(bad, device=DEVICE)
    logits[0] = float("nan")
    got, weights = weighed(logits, ids, None, **options)
    want_ids, want = reference.weigh(logits, ids, **options)
    assert torch.equal(got, want_ids) and bool((got[: len(bad)] == -1).all()) and not weights[: len(bad)].any()
    torch.testing.assert_close(weights, want, rtol=2e-6, atol=1e-7)


def test_no_tokens() -> None:
    ids = torch.empty(0, 2, dtype=torch.int32, device=DEVICE)
    weigh(torch.empty(0, 4, device=DEVICE), ids, None, torch.empty(0, 2, device=DEVICE), ids.clone(), **OPTIONS[0])
