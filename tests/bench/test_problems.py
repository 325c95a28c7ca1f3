"""Shapes refuse what cannot work; routings differ in what they were made to differ in."""

from __future__ import annotations

import pytest
import torch

from staticmoe.bench.problems import ROUTINGS, SHAPES, Problem, Shape, make_problem
from staticmoe.errors import ConfigError

CPU = torch.device("cpu")


def problem(routing: str, tokens: int = 256) -> Problem:
    return make_problem(Shape(16, 8, 16, 4), tokens, routing, torch.float32, CPU)


def loads(p: Problem) -> torch.Tensor:
    return torch.bincount(p.ids.flatten().long(), minlength=16)


def test_routings_load_experts_as_they_say() -> None:
    natural, zipf, one_hot = (loads(problem(routing)) for routing in ROUTINGS)
    assert all(int(found.sum()) == 256 * 4 for found in (natural, zipf, one_hot))
    # The mean is 64; independent choices stay near it.
    assert int(natural.min()) > 40 and int(natural.max()) < 90
    assert sorted(one_hot.tolist()) == [0] * 12 + [256] * 4
    assert int(natural.max()) < int(zipf.max()) < 257 and 0 < int(zipf.min()) < int(natural.min())


def test_a_problem_is_the_same_each_time_and_has_the_shapes_it_says() -> None:
    one, other = problem("zipf", 5), problem("zipf", 5)
    assert all(torch.equal(a, b) for a, b in zip(one.inputs(), other.inputs(), strict=True))
    assert [tuple(t.shape) for t in (*one.inputs(), one.ids, one.grad)] == [
        (5, 16), (5, 4), (16, 16, 16), (16, 16, 8), (5, 4), (5, 16)
    ]  # fmt: skip
    assert all(t.requires_grad for t in one.inputs()) and not one.grad.requires_grad
    assert float(problem("natural", 4096).x.detach().std()) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((2050, 768, 8, 2), "hidden: expected a multiple of 8, .*; got 2050: take 2048 or 2056"),
        ((64, 4, 8, 2), "intermediate: expected a multiple of 8, .*; got 4: take 8"),
        ((64, 64, 4, 8), "top_k: expected 1 to experts = 4; got 8: lower top_k or raise experts"),
        ((64, 64, 0, 1), "experts: expected at least 1; got 0"),
    ],
)
def test_sizes_that_cannot_work_are_refused(sizes: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Shape(*sizes)


def test_the_named_shapes_have_the_weights_of_their_models() -> None:
    assert {name: shape.weights for name, shape in SHAPES.items()} == {
        "mixtral": 1_409_286_144, "deepseek": 2_818_572_288, "olmoe": 402_653_184, "qwen3": 603_979_776
    }  # fmt: skip
