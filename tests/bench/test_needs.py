"""The estimate of bytes grows as sizes do, bounds what was measured, and refuses what does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from staticmoe.bench import needs
from staticmoe.bench.problems import SHAPES, Shape
from staticmoe.errors import ConfigError

MEASURED = Path(__file__).resolve().parents[2] / "profiles" / "results" / "h200" / "moe_block.json"
SMALL = Shape(64, 32, 8, 2)


def test_it_bounds_what_was_measured_and_not_by_far() -> None:
    cases = json.loads(MEASURED.read_text())["cases"]
    assert len(cases) == 8
    for case in cases:
        estimate = needs.pass_bytes(SHAPES[case["shape"]], case["tokens"], 2) / needs.GIB
        worst = max(block["peak_gib"] for block in case["blocks"].values())
        assert worst <= estimate <= 1.35 * worst, (case["shape"], case["tokens"], worst, estimate)


def test_it_grows_as_sizes_do() -> None:
    # x, grad: 2·3·64·2 bytes; ids and weights: 3·2·8; weights 3·8·64·32·2.
    assert needs.problem_bytes(SMALL, 3, 2) == 768 + 48 + 98_304
    # gradients, y and d_x, and 6 rows of 2·64 + 4·32.
    assert needs.pass_bytes(SMALL, 3, 2) == 98_304 + 768 + 3_072
    # With 2000 rows of 2·64 + 6·32 they count for more than a third of the gradients.
    assert needs.pass_bytes(SMALL, 1000, 2) == 65_536 + 256_000 + 1_280_000
    plain, main = (sum(needs.needed_bytes(SMALL, 3, 2, main_grad=on).values()) for on in (False, True))
    assert plain == needs.problem_bytes(SMALL, 3, 2) + needs.pass_bytes(SMALL, 3, 2)
    assert main - plain == 4 * SMALL.weights
    more = needs.pass_bytes(SMALL, 6, 2) - needs.pass_bytes(SMALL, 3, 2)
    assert more == 768 + 3_072
    assert needs.repeat_bytes(SMALL, 3, 2) > plain


def test_what_does_not_fit_is_refused_with_numbers() -> None:
    mixtral, bf16 = SHAPES["mixtral"], torch.bfloat16
    needed = needs.refuse_what_does_not_fit(mixtral, [8192, 32768], bf16, 80 * needs.GIB)
    assert 17 * needs.GIB < needed < 26 * needs.GIB
    assert needs.refuse_what_does_not_fit(mixtral, [8192, 32768], bf16, needed) == needed
    with pytest.raises(ConfigError) as caught:
        needs.refuse_what_does_not_fit(mixtral, [8192, 32768], bf16, needed - 1)
    message = str(caught.value)
    assert f"about {needed / needs.GIB:.1f} GiB" in message and "32768 tokens" in message
    assert "weights 2.6, their gradients 2.6" in message and "fewer tokens" in message
    # A block that needs next to nothing: the copy whose rate is measured does.
    assert needs.refuse_what_does_not_fit(SMALL, [8], bf16, 80 * needs.GIB) == int(1.1 * 4 * needs.GIB)


def test_a_check_that_does_not_fit_takes_a_narrower_token() -> None:
    shape = Shape(4096, 14336, 4, 2)
    assert needs.checkable(shape, 1024, 2, 1 << 40) == shape
    fitting = needs.checkable(shape, 1024, 2, 20 * needs.GIB)
    assert fitting == Shape(2048, 14336, 4, 2)
    assert needs.SLACK * needs.oracle_bytes(fitting, 1024, 2) <= 20 * needs.GIB
    assert needs.checkable(Shape(24, 8, 2, 1), 1, 2, 0).hidden == 8
