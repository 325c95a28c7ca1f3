"""A run: resumed it continues bitwise, measuring moves nothing, and through the runner it is plain training."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from staticmoe.demo.checkpoint import CheckpointError, load_checkpoint
from staticmoe.demo.run import DemoRun, TrainOptions, load_corpus, lr_share
from staticmoe.errors import ConfigError

OPTIONS = TrainOptions(
    steps=12, depth=1, batch_size=4, seq_len=16, accumulate=2, seed=3, synthetic=True, dropout=0.1, eval_windows=6
)


def flat(tree: Any, path: str = "") -> dict[str, torch.Tensor]:
    """Every number of nested containers, by path."""
    if isinstance(tree, torch.Tensor):
        return {path: tree}
    if isinstance(tree, (int, float)):
        return {path: torch.tensor(tree, dtype=torch.float64)}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    return {key: value for name, entry in items for key, value in flat(entry, f"{path}/{name}").items()}


def state_of(run: DemoRun) -> dict[str, torch.Tensor]:
    run.runner.flush()
    parts = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
    parts |= {"scheduler": run.scheduler.state_dict(), "runner": run.runner.state_dict()}
    return {name: tensor.clone() for name, tensor in flat(parts).items()}


def advance(run: DemoRun, count: int) -> list[float]:
    results = [run.advance() for _ in range(count)]
    return [float(result.loss) for result in results]


@pytest.mark.parametrize("capture", ["emulate", "off"])
def test_twelve_steps_equal_six_and_six_resumed_bitwise(tmp_path: Path, capture: str) -> None:
    options = dataclasses.replace(OPTIONS, capture=capture)
    corpus = load_corpus(options)
    with DemoRun(options, corpus, tmp_path / "straight") as run:
        initial = run.model.embedding.weight.detach().clone()
        straight = advance(run, 12)
        expected = state_of(run)
    assert not torch.equal(initial, expected["/model/embedding.weight"])

    with DemoRun(options, corpus, tmp_path / "parts") as run:
        first = advance(run, 6)
        run.heldout_bits()
        path = run.save()
    torch.manual_seed(999)
    with DemoRun(options, corpus, tmp_path / "parts", load_checkpoint(path)) as run:
        assert run.step == 6 and run.notes == []
        second = advance(run, 6)
        resumed = state_of(run)

    assert first + second == straight
    assert resumed.keys() == expected.keys() and len(expected) > 50
    # Evaluations are replays too, and the straight run had none.
    del expected["/runner/totals/counts/replays"]
    assert [name for name in expected if not torch.equal(expected[name], resumed[name])] == []
    # Dropout was at work: without it the same run goes elsewhere.
    with DemoRun(dataclasses.replace(options, dropout=0.0), corpus, tmp_path / "dry") as run:
        assert advance(run, 1) != straight[:1]


def test_another_run_is_refused_and_harmless_changes_are_noted(tmp_path: Path) -> None:
    options = dataclasses.replace(OPTIONS, capture="off")
    corpus = load_corpus(options)
    with DemoRun(options, corpus, tmp_path) as run:
        advance(run, 1)
        checkpoint = load_checkpoint(run.save())
    with pytest.raises(CheckpointError, match=r"seq-len: the checkpoint has 16, asked for 8") as caught:
        DemoRun(dataclasses.replace(options, seq_len=8, lr=0.5), corpus, tmp_path, checkpoint)
    assert "lr: the checkpoint has 0.0141" in str(caught.value)
    other = load_corpus(dataclasses.replace(options, seed=4))
    with pytest.raises(CheckpointError, match="corpus: .*the text would be another"):
        DemoRun(options, other, tmp_path, checkpoint)
    with DemoRun(dataclasses.replace(options, eval_every=7), corpus, tmp_path, checkpoint) as run:
        assert run.notes == ["eval-every: 200 before, 7 from here on"]


def test_heldout_bits_are_weighted_by_label_and_compared_on_the_same_labels(tmp_path: Path) -> None:
    options = dataclasses.replace(OPTIONS, capture="off", dropout=0.5)
    corpus = load_corpus(options)
    with DemoRun(options, corpus, tmp_path) as run:
        before = torch.get_rng_state()
        bits = run.heldout_bits()
        assert torch.equal(torch.get_rng_state(), before)
        assert len(run.heldout) == 2
        run.model.eval()
        windows = torch.cat([batch["tokens"] for batch in run.heldout])[:6]
        labels = torch.cat([batch["labels"] for batch in run.heldout])[:6]
        with torch.no_grad():
            loss = run.model(windows, labels).loss
        assert bits == pytest.approx(loss.item() / math.log(2), rel=1e-5)
        assert 4.5 < run.bigram_bits() < 5.5


def test_the_learning_rate_rises_then_falls() -> None:
    shares = [lr_share(step, 100) for step in range(100)]
    assert shares[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert all(a > b for a, b in zip(shares[5:-1], shares[6:], strict=True))
    assert 0.05 <= shares[-1] < 0.06
    assert lr_share(0, 1) == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "--steps: expected at least 1; got 0"),
        ({"seq_len": -3}, "--seq-len: expected at least 1; got -3"),
        ({"lr": math.nan}, "--lr: expected a finite number above 0; got nan"),
        ({"dtype": "float8"}, "--dtype: expected one of float32, bfloat16; got 'float8'"),
        ({"data": ("x",)}, "--synthetic and --data exclude each other"),
    ],
)
def test_options_that_cannot_work_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(OPTIONS, **change)
