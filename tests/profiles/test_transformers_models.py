"""The script that trains transformers models: on a CPU, its check; its cases are the models that they are named after.

Letters: B sequences, S tokens of a padded sequence.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Run = Callable[..., Any]
Script = Callable[[str], Any]


def modes_of(path: Path, case: str) -> dict[str, Any]:
    return json.loads(path.read_text())["cases"][case]["modes"]


def test_every_mode_trains_the_same_model_on_the_same_batches(run: Run, tmp_path: Path) -> None:
    """In fp32 the losses of each step agree; what is merged stays, and is replaced by name."""
    path = tmp_path / "deep" / "models.json"
    plan = ["--check", "--models", "qwen3", "--output", str(path), "--commit"]
    module = run("transformers_models", *plan, "first")
    rows = modes_of(path, "qwen3")
    assert list(rows) == list(module.MODES)
    reference = rows["grouped_mm"]["losses"]
    assert len(set(reference)) == module.CHECKED_STEPS
    for name, row in rows.items():
        assert row["losses"] == pytest.approx(reference, abs=1e-5), name
        assert row["tokens_per_s"] == pytest.approx(32e3 / row["ms"])
        assert row["events"]["replays"] == 2 and row["start_s"] > 0
    run("transformers_models", *plan, "second", "--modes", "eager", "--steps", "2")
    again = modes_of(path, "qwen3")
    assert len(again["eager"]["losses"]) == 2 and again["staticmoe"] == rows["staticmoe"]
    origins = json.loads(path.read_text())["origins"]
    assert [origins[again[mode]["origin"]]["commit"] for mode in ("eager", "staticmoe")] == ["second", "first"]
    run("transformers_models", *plan, "first", "--modes", "eager", "--layers", "1")
    assert list(modes_of(path, "qwen3")) == ["eager"] and json.loads(path.read_text())["origins"] == origins


@pytest.mark.parametrize("model", ["gpt-oss", "olmoe"])
def test_padded_batches_give_the_same_losses(model: str, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "models.json"
    run("transformers_models", "--check", "--padded", "--models", model, "--output", str(path), "--modes", "grouped_mm",
        "staticmoe_off", "staticmoe")  # fmt: skip
    rows = modes_of(path, f"{model}, padded")
    assert json.loads(path.read_text())["cases"][f"{model}, padded"]["real_tokens"] == 16 + 12
    for row in rows.values():
        assert row["losses"] == pytest.approx(rows["grouped_mm"]["losses"], abs=1e-5)


@pytest.mark.parametrize(("model", "masks"), [("qwen3", []), ("qwen3", ["--ready-masks"]), ("gpt-oss", [])])
def test_packed_batches_give_the_same_losses(model: str, masks: list[str], run: Run, tmp_path: Path) -> None:
    """As transformers packs by positions; and other sequences than those of one long text."""
    path = tmp_path / "models.json"
    run("transformers_models", "--check", "--packed", *masks, "--models", model, "--output", str(path), "--modes",
        "grouped_mm", "staticmoe_off", "staticmoe")  # fmt: skip
    name = f"{model}, packed, masks" if masks else f"{model}, packed"
    rows = modes_of(path, name)
    assert json.loads(path.read_text())["cases"][name]["real_tokens"] == 10 + 2 + 14 + 4
    for row in rows.values():
        assert row["losses"] == pytest.approx(rows["grouped_mm"]["losses"], abs=1e-5)


def test_a_packed_batch_is_one_row_of_the_same_text(script: Script) -> None:
    """In another order each time, with an offset at each beginning, which no label stands at."""
    module = script("transformers_models")
    case = dataclasses.replace(module.tiny(module.CASES["qwen3"]), packed=True)
    found = module.batches(case, 6, pin=False)
    assert len({tuple(batch["cu_seq_lens_q"].tolist()) for batch in found}) > 1
    for batch in found:
        offsets = batch["cu_seq_lens_q"].tolist()
        lengths = [after - before for before, after in zip(offsets, offsets[1:], strict=False)]
        assert sorted(lengths[:4]) == [2, 4, 10, 14] and sum(lengths) == 32 and batch["input_ids"].shape == (1, 32)
        assert (batch["labels"][0, offsets[:4]] == -100).all() and int((batch["labels"] == -100).sum()) == 4 + 2


def test_adapters_alone_are_trained(run: Run, script: Script, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    path = tmp_path / "models.json"
    module = run("transformers_models", "--check", "--models", "qwen3-lora", "--output", str(path))
    rows = modes_of(path, "qwen3-lora")
    assert list(rows) == list(module.CASES["qwen3-lora"].modes)
    for row in rows.values():
        assert row["losses"] == pytest.approx(rows["grouped_mm"]["losses"], abs=1e-5)
    case = module.tiny(module.CASES["qwen3-lora"])
    model = module.build(case, module.MODES["eager"], torch.device("cpu"), torch.float32)
    trained = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 4 * 2 and all("self_attn" in name and "lora" in name for name in trained)
    assert all(module.LORA_RANK in shape for shape in trained.values())


def test_what_fails_is_an_entry_and_the_rest_goes_on(
    run: Run, script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, path = script("transformers_models"), tmp_path / "models.json"
    built = module.build

    def without_memory(case: Any, mode: Any, *rest: Any) -> Any:
        if mode.experts == "eager":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return built(case, mode, *rest)

    monkeypatch.setattr(module, "build", without_memory)
    plan = ["--check", "--models", "olmoe", "--modes", "eager", "grouped_mm", "--output", str(path)]
    with pytest.raises(SystemExit) as stopped:
        run("transformers_models", *plan)
    assert stopped.value.code == 1
    rows = modes_of(path, "olmoe")
    assert rows["eager"]["failed"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB"
    assert rows["grouped_mm"]["ms"] > 0
    assert "failed: olmoe eager: OutOfMemoryError: CUDA out of memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "layers", "billions"), [("qwen3-lora", 48, 30.53), ("olmoe", 16, 6.92), ("gpt-oss", 24, 20.91)]
)
def test_whole_they_have_the_parameters_of_the_models_they_are_named_after(
    name: str, layers: int, billions: float, script: Script
) -> None:
    module = script("transformers_models")
    case = dataclasses.replace(module.CASES[name], layers=layers, lora=False)
    model = module.build(case, module.MODES["eager"], torch.device("meta"), torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.005)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("padded", [False, True])
def test_the_data_can_be_learnt(padded: bool, script: Script) -> None:
    """Each symbol has at most four successors; what is padding is in no label."""
    module = script("transformers_models")
    case = dataclasses.replace(module.CASES["olmoe"], tokens=64, padded=padded)
    made = module.batches(case, 40, pin=False)
    again = module.batches(case, 40, pin=False)
    successors: dict[int, set[int]] = {}
    for batch, same in zip(made, again, strict=True):
        assert all(torch.equal(batch[key], same[key]) for key in batch)
        assert ("attention_mask" in batch) == padded
        for tokens, labels, length in zip(batch["input_ids"], batch["labels"], case.lengths, strict=True):
            assert torch.equal(tokens[:length], labels[:length])
            assert (labels[length:] == -100).all() and (tokens[length:] == 0).all()
            for one, following in zip(tokens[: length - 1].tolist(), tokens[1:length].tolist(), strict=True):
                successors.setdefault(one, set()).add(following)
    assert case.lengths == ([64, 48] if padded else [64, 64])
    assert len(successors) > 200 and max(map(len, successors.values())) == module.SUCCESSORS


def test_a_ready_mask_has_the_window_of_each_layer(script: Script) -> None:
    """GPT-OSS with a window shorter than the sequence: the loss is that of transformers' own masks."""
    module = script("transformers_models")
    case = module.tiny(module.CASES["gpt-oss"])
    case = dataclasses.replace(case, padded=True, sizes={**case.sizes, "sliding_window": 3})
    model = module.build(case, module.MODES["eager"], torch.device("cpu"), torch.float32)
    for parameter in model.requires_grad_(False).parameters():
        # Drawn small, as it is, a model hardly looks at what its attention brings.
        parameter.mul_(10 if parameter.dim() > 1 else 1)
    (batch,) = module.batches(case, 1, pin=False)
    want, got = float(module.loss_of(model, batch)), float(module.loss_with_ready_mask(model, batch))
    assert got == pytest.approx(want, rel=1e-5)
    model.config.sliding_window = 16
    assert abs(float(module.loss_with_ready_mask(model, batch)) - want) > 1e-3


def test_the_plot_has_the_losses_of_the_file(script: Script, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    module, path = script("transformers_models"), tmp_path / "deep" / "losses.png"
    rows = {"eager": {"losses": [3.0, 2.0]}, "staticmoe": {"losses": [3.0, 2.5]}, "grouped_mm": {"failed": "x"}}
    module.write_curves({"cases": {"a": {"model": {"layers": 2}, "modes": rows}}}, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert module.gap(rows["staticmoe"], rows["eager"]) == 0.5
    assert module.gap(rows["grouped_mm"], rows["eager"]) is None
