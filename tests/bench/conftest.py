"""A result as a GPU would give it, with made-up times."""

from __future__ import annotations

from typing import Any

import pytest

from staticmoe.bench.measure import with_shares

FLOPS = 6 * 8192 * 8 * 2048 * 768


def entry(ms: float) -> dict[str, Any]:
    """A block that takes `ms` forward, and three times as long for both passes."""
    passes = {"forward": (ms, FLOPS), "both": (3 * ms, 3 * FLOPS)}
    times = {
        name: {"ms": value, "ms_range": [0.9 * value, 1.2 * value], "replays": 20, "tflops": work / value / 1e9}
        for name, (value, work) in passes.items()
    }
    return {"saved_gib": 0.1875, "peak_gib": 1.75, **times}


@pytest.fixture
def made_up() -> dict[str, Any]:
    """Two cases; in the second one the compiled peer was left out."""
    one = {"staticmoe": entry(1.0), "grouped_mm": entry(2.0), "grouped_mm, eager": entry(8.0)}
    named: dict[str, Any] = {"shape": "qwen3", "tokens": 8192}
    cases = [
        {**named, "routing": "natural", "blocks": {**one, "grouped_mm, compiled": entry(1.6)}},
        {**named, "routing": "one-hot", "blocks": one, "left_out": {"grouped_mm, compiled": "x"}},
    ]
    return {
        "provenance": {"gpu": [{"name": "Made-up GPU"}], "commit": "abc"},
        "absent": {"SonicMoE": "not installed", "Liger": "not installed"},
        "left_out": {},
        "shape": {"hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8},
        "dtype": "bf16",
        "check": {"bitwise_equal_calls": 40},
        "copy_tb_per_s": 4.27,
        "cases": with_shares(cases, [790.0, 810.0]),
    }
