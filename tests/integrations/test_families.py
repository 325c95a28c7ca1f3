"""The audit over families of transformers: silent where masks are ready, else the report card's host reads.

The card is `profiles/results/cpu/families.json`, made by `profiles/family_card.py`.
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from staticmoe import StaticMoERunner
from staticmoe.audit import audit
from staticmoe.integrations import huggingface

CARD = json.loads((Path(__file__).parents[2] / "profiles/results/cpu/families.json").read_text())
VERSION = CARD["provenance"]["transformers"]
EVALUATED = ("mixtral", "nemotron_h: no gate")
# One of each kind of card.
PLAIN = {tuple(row["host_reads_with_2d_mask"]): name for name, row in reversed(CARD["families"].items())}.values()

pytest.importorskip("transformers")
huggingface.register()


def test_the_card_has_enough_families() -> None:
    assert len(CARD["families"]) >= 12
    assert all(row["captured"] == "bitwise" for row in CARD["families"].values())


def batch() -> dict[str, Tensor]:
    """Three sequences of 8, 5 and 2 tokens, padded on the right."""
    real = torch.arange(8) < torch.tensor([[8], [5], [2]])
    tokens = torch.randint(3, 64, real.shape, generator=torch.Generator().manual_seed(0))
    return {"input_ids": torch.where(real, tokens, 0), "attention_mask": real.long()}


def ready_loss(model: Any, given: dict[str, Tensor]) -> Tensor:
    return loss_of(model, given, huggingface.ready_masks(model, given["attention_mask"]))


def plain_loss(model: Any, given: dict[str, Tensor]) -> Tensor:
    return loss_of(model, given, given["attention_mask"])


def loss_of(model: Any, given: dict[str, Tensor], mask: Any) -> Tensor:
    out = model(input_ids=given["input_ids"], attention_mask=mask, use_cache=False)
    last = out.logits if hasattr(out, "logits") else out.last_hidden_state
    return (last * given["attention_mask"][..., None]).square().mean()


def prepared(model: Any, loss_fn: Any) -> dict[str, Any]:
    """The runner's arguments for a model that has taken one uncaptured step, and may have left caches behind."""
    model.train()
    huggingface.prepare(model)
    given = batch()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(loss_fn(model, given), trained, allow_unused=True)
    for parameter, gradient in zip(trained, found, strict=True):
        # Such as the embedding of a position that is never reached.
        parameter.requires_grad_(gradient is not None)
        parameter.grad = gradient
    optimizer = torch.optim.AdamW([parameter for parameter in trained if parameter.requires_grad], lr=1e-3)
    optimizer.step()
    optimizer.zero_grad()
    arguments = {"model": model, "optimizer": optimizer, "example_batch": given, "loss_fn": loss_fn}
    return {**arguments, "token_mask": "attention_mask"}


@pytest.mark.parametrize("name", list(CARD["families"]))
def test_a_prepared_family_gives_no_alarm(build: Any, name: str) -> None:
    arguments = prepared(build(name, huggingface.NAME, attention=None), ready_loss)
    if name in EVALUATED:
        arguments["eval_fn"] = ready_loss
    assert [str(finding) for finding in audit(arguments).findings] == []


@pytest.mark.parametrize("name", list(PLAIN))
@pytest.mark.skipif(importlib.metadata.version("transformers") != VERSION, reason=f"the card's lines are of {VERSION}")
def test_with_a_mask_as_loops_pass_it_the_card_s_host_reads_are_found(build: Any, name: str) -> None:
    report = audit(prepared(build(name, huggingface.NAME, attention=None), plain_loss))
    places = {f"{Path(finding.source.file).name}:{finding.source.line}" for finding in report.findings}
    assert places == set(CARD["families"][name]["host_reads_with_2d_mask"])
    assert {finding.code for finding in report.findings} <= {"SM101", "SM106", "SM109"}


def test_what_is_silent_can_be_wrapped(build: Any) -> None:
    """An audit that says nothing where the runner refuses would be of no use."""
    arguments = prepared(build("mixtral", huggingface.NAME, attention=None), ready_loss)
    assert audit(arguments).findings == ()
    with StaticMoERunner(**arguments) as runner:
        assert torch.isfinite(torch.tensor(float(runner.step(batch()).loss)))
