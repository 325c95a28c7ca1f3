"""The study of capacities: its tail victims are what they are called, and all else is the same under every policy.

Letters: T tokens, K top_k, E experts, C rows of one expert.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from staticmoe import functional
from staticmoe.demo.run import DemoRun, TrainOptions, load_corpus
from staticmoe.moe import StaticMoE
from staticmoe.shapes import scaled_ceil

Run = Callable[..., Any]
Script = Callable[[str], Any]

CPU = torch.device("cpu")
OPTIONS = TrainOptions(steps=3, depth=2, batch_size=2, seq_len=32, eval_windows=2, seed=1)
# An expert is chosen at most once by a token: with E/K rows for each token of its share, nothing exceeds.
ROOM_FOR_ALL = 8 / 2


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Imports a script, of which this one needs no transformers."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "profiles")
    return importlib.import_module


def losses(results: list[Any]) -> list[tuple[float, float]]:
    return [(result.loss, result.grad_norm) for result in results]


@pytest.mark.parametrize(("tokens", "top_k", "experts", "capacity"), [(1, 1, 1, 1), (37, 2, 5, 11), (64, 4, 8, 32)])
def test_tail_victims_are_the_last_in_token_order(
    tokens: int, top_k: int, experts: int, capacity: int, script: Script
) -> None:
    """Against a loop; a tenth of the assignments has no expert, and one expert is everybody's."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k].to(torch.int32)
    ids[torch.rand(tokens, top_k, generator=generator) < 0.1] = -1
    for given in (ids, torch.zeros_like(ids)):
        seen: collections.Counter[int] = collections.Counter()
        want = torch.zeros(tokens, top_k, dtype=torch.bool)
        for token in range(tokens):
            for slot in range(top_k):
                expert = int(given[token, slot])
                want[token, slot] = expert >= 0 and seen[expert] >= capacity
                seen[expert] += 1
        got = script("capacity_study").tail_victims(given, experts, capacity)
        assert got.dtype == torch.bool and torch.equal(got, want)


def test_a_victim_gives_what_a_dropped_assignment_gives(script: Script) -> None:
    """The output and every gradient, against a plan in which the victims have no expert."""
    module = script("capacity_study")
    torch.manual_seed(0)
    layer = StaticMoE(16, 16, 4, 2, score_function="sigmoid", dtype=torch.float64)
    x = torch.randn(32, 16, dtype=torch.float64, requires_grad=True)
    wanted = torch.randn_like(x)
    leaves = [x, *layer.parameters()]
    routed = layer.router(x)
    victims = module.tail_victims(routed.topk_ids, 4, scaled_ceil(0.75, 64, 4))
    y = layer(x, routing=(torch.where(victims, -1, routed.topk_ids), routed.topk_weights))
    want = [y.detach(), *torch.autograd.grad(y, leaves, wanted)]
    study = module.TailVictims(layer, 0.75)
    y = layer(x)
    assert float(study.shares) == victims.float().mean() >= 0.25
    for one, other in zip([y.detach(), *torch.autograd.grad(y, leaves, wanted)], want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
    whole = layer.eval()(x)
    assert not torch.equal(whole, y)


def test_what_nothing_exceeds_is_dropless_and_dropless_is_the_command(script: Script, tmp_path: Path) -> None:
    """Losses, norms, parameters and bits per byte, bitwise."""
    module = script("capacity_study")
    corpus = load_corpus(OPTIONS)
    with DemoRun(OPTIONS, corpus, tmp_path) as command:
        want = losses([command.advance() for _ in range(OPTIONS.steps)])
        bits = command.heldout_bits()
    assert len(set(want)) == OPTIONS.steps
    for run in (module.Run("dropless", None, 1), module.Run("tail", ROOM_FOR_ALL, 1)):
        row, results, model = module.train(OPTIONS, run, corpus, CPU)
        assert losses(results) == want and row["bits_per_byte"] == bits, run.name
        assert row["dropped"] == row["skipped_steps"] == 0
        for one, other in zip(model.parameters(), command.model.parameters(), strict=True):
            assert torch.equal(one, other)
    other, _, _ = module.train(OPTIONS, module.Run("tail", ROOM_FOR_ALL, 2), corpus, CPU)
    assert other["bits_per_byte"] != bits


def test_what_was_masked_is_what_exceeded(script: Script) -> None:
    module = script("capacity_study")
    row, results, _ = module.train(OPTIONS, module.Run("tail", 1.0, 1), load_corpus(OPTIONS), CPU)
    assignments = OPTIONS.batch_size * OPTIONS.seq_len * 2
    shares = []
    for result in results:
        routed = [load.routed for load in result.moe.values()]
        assert len(routed) == OPTIONS.depth and all(sum(layer) == assignments and len(layer) == 8 for layer in routed)
        shares.append(
            sum(max(count - assignments // 8, 0) for layer in routed for count in layer) / assignments / OPTIONS.depth
        )
    assert [result.metrics[module.DROPPED] for result in results] == pytest.approx(shares, rel=1e-6)
    assert row["dropped"] == pytest.approx(statistics.mean(shares)) and min(shares) > 0
    assert row["dropped_last_tenth"] == pytest.approx(shares[-1])


def test_policies_differ_in_their_victims_alone(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the library's victims, the hook gives the losses of the library's overflow="drop"; with its own, not."""
    module = script("capacity_study")
    corpus = load_corpus(OPTIONS)
    lowest, tail = (
        losses(module.train(OPTIONS, module.Run(policy, 1.0, 1), corpus, CPU)[1]) for policy in ("lowest", "tail")
    )

    def mask(self: Any, share: torch.Tensor, router: Any, given: Any, routed: Any) -> Any:
        if not router.training:
            return routed
        ids, weights = routed.topk_ids, routed.topk_weights
        plan = functional.make_plan(ids, weights, num_experts=8, expert_capacity=ids.numel() // 8)
        return dataclasses.replace(routed, topk_weights=torch.where(plan.assignment_row < 0, 0.0, weights))

    monkeypatch.setattr(module.TailVictims, "_mask", mask)
    masked = losses(module.train(OPTIONS, module.Run("tail", 1.0, 1), corpus, CPU)[1])
    for one, other in zip(masked, lowest, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    assert max(abs(one[0] - other[0]) for one, other in zip(tail, lowest, strict=True)) > 1e-3


def test_parts_merge_into_one_result(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    paths = [tmp_path / "parts" / f"{number}.json" for number in (1, 2)]
    whole, plot = tmp_path / "whole.json", tmp_path / "deep" / "plot.png"
    for number, path in enumerate(paths, 1):
        module = run("capacity_study", "--check", "--part", f"{number}/2", "--output", str(path), "--commit", path.stem)
    run("capacity_study", "--merge", *map(str, paths), "--output", str(whole), "--plot", str(plot))
    assert plot.read_bytes().startswith(b"\x89PNG")
    found = json.loads(whole.read_text())
    assert set(found["runs"]) == {one.name for one in module.runs(module.POLICIES, (1.0,), (0,))}
    commits = {name: found["origins"][row["origin"]]["commit"] for name, row in found["runs"].items()}
    assert sorted(commits.values()) == ["1", "1", "2", "2"] and commits["dropless, seed 0"] == "1"
    for row in found["runs"].values():
        assert 0 < row["bits_per_byte"] < 9 and (row["dropped"] > 0) == (row["policy"] != "dropless")
    over = module.summary(found)[("tail", 1.0)]["over_dropless"]
    rows = found["runs"]
    tail, dropless = (rows[name]["bits_per_byte"] for name in ("tail, factor 1.0, seed 0", "dropless, seed 0"))
    assert over == [tail - dropless] and f"{tail - dropless:+.4f}" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="steps 3 and 6.*another --output"):
        run("capacity_study", "--check", "--steps", "6", "--policies", "dropless", "--output", str(whole))
    assert json.loads(whole.read_text()) == found


@pytest.mark.parametrize("text", ["0/4", "5/4", "2", "a/b"])
def test_a_part_that_is_none_is_refused(text: str, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("capacity_study", "--check", "--part", text)
    assert f"got '{text}'" in capsys.readouterr().err
