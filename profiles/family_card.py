"""Which transformers families are captured whole, and what their own code reads on the host: a card for each.

    python profiles/family_card.py --output profiles/results/cpu/families.json
    python profiles/family_card.py --families mixtral gpt_oss

Small random models on a CPU, under the emulated capture, which refuses what a CUDA graph could not hold. For each
family: how its experts run (one op, or two grouped products around its own activation), what it reads on the host when
it gets a 2-D mask as a loop would pass it, and whether three steps with a ready 4-D mask are bitwise the uncaptured
ones, or what keeps them from it. Speeds are for a GPU: `profiles/moe_block.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from staticmoe import RunnerConfig, StaticMoERunner
from staticmoe.errors import StaticMoEError
from staticmoe.integrations import huggingface
from staticmoe.integrations.huggingface.activation import activation_of
from staticmoe.integrations.huggingface.specimens import FAMILIES, specimen

# Variants of an activation are for the tests.
NAMES = [name for name in FAMILIES if " with " not in name]
STEPS, SEQUENCES, TOKENS = 3, 3, 8


def batch(seed: int) -> dict[str, Tensor]:
    """Sequences of random lengths, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, TOKENS + 1, (SEQUENCES, 1), generator=generator)
    real = torch.arange(TOKENS) < lengths
    tokens = torch.randint(3, 64, (SEQUENCES, TOKENS), generator=generator)
    return {"input_ids": torch.where(real, tokens, 0), "attention_mask": real.long()}


def loss(model: Any, given: dict[str, Tensor], *, ready: bool) -> Tensor:
    """Mean square of the last output, which every family has."""
    mask = given["attention_mask"]
    if ready:
        mask = huggingface.causal_mask(mask)
    out = model(input_ids=given["input_ids"], attention_mask=mask, use_cache=False)
    last = out.logits if hasattr(out, "logits") else out.last_hidden_state
    return (last * given["attention_mask"][..., None]).square().mean()


def made(name: str) -> Any:
    """A model with torch's attention, or where the family has none with its own."""
    try:
        return specimen(name, "staticmoe", attention="sdpa")
    except ValueError:
        return specimen(name, "staticmoe")


def train(name: str, capture: str, *, ready: bool, audit: str = "error") -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters after `STEPS` steps."""
    torch.manual_seed(0)
    model = made(name).train()
    huggingface.prepare(model)
    used = [p for p in model.parameters() if p.requires_grad]
    given = batch(0)
    found = torch.autograd.grad(loss(model, given, ready=ready), used, allow_unused=True)
    for parameter, gradient in zip(used, found, strict=True):
        # Such as the embedding of a position that a small model never reaches.
        parameter.requires_grad_(gradient is not None)
    optimizer = torch.optim.AdamW([p for p in used if p.requires_grad], lr=1e-3)
    config = RunnerConfig(capture=capture, audit=audit)
    with StaticMoERunner(
        model, optimizer, example_batch=given, token_mask="attention_mask", config=config,
        loss_fn=lambda net, b: loss(net, b, ready=ready),
    ) as runner:  # fmt: skip
        losses = [float(runner.step(batch(seed)).loss) for seed in range(STEPS)]
        runner.synchronize()
    return losses, {key: value.detach().clone() for key, value in model.named_parameters()}


@contextlib.contextmanager
def warnings_of(logger: str) -> Iterator[list[str]]:
    """Collect what is logged as a warning."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                found.append(record.getMessage())

    handler, source = Keep(), logging.getLogger(logger)
    source.addHandler(handler)
    try:
        yield found
    finally:
        source.removeHandler(handler)


def place(message: str) -> str:
    """File and line in transformers of a message about a host read."""
    seen = re.search(r"transformers/(\S+\.py:\d+)", message)
    return seen[1] if seen else message[:120]


def card(name: str) -> dict[str, Any]:
    """What is said of one family."""
    model = made(name)
    layers = [m for m in model.modules() if hasattr(m, "is_transposed")]
    whole = all(activation_of(m) is not None and not getattr(m, "has_post_expert_norm", False) for m in layers)
    found: dict[str, Any] = {
        "experts": "one op" if whole else "by parts",
        "attention": model.config._attn_implementation,
    }
    with warnings_of("staticmoe") as messages, contextlib.suppress(StaticMoEError, ValueError, RuntimeError):
        train(name, "emulate", ready=False, audit="warn")
    found["host_reads_with_2d_mask"] = sorted({place(message) for message in messages if "transformers/" in message})
    try:
        (losses, state), (want_losses, want) = (train(name, capture, ready=True) for capture in ("emulate", "off"))
    except Exception as error:  # whatever a family's own code throws is the finding
        found["captured"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return found
    same = losses == want_losses and all(torch.equal(state[key], want[key]) for key in want)
    found["captured"] = "bitwise" if same else "differs from the uncaptured steps"
    return found


def main() -> None:
    """Make the cards, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=NAMES, choices=NAMES)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    import transformers

    transformers.logging.set_verbosity_error()
    huggingface.register()
    torch.set_num_threads(1)
    table = Table()
    for column in ("family", "experts", "attention", "captured with a 4-D mask", "host reads with a 2-D mask"):
        table.add_column(column)
    cards = {}
    for name in arguments.families:
        cards[name] = card(name)
        print(name, json.dumps(cards[name]), flush=True)
        made_card = cards[name]
        reads = ", ".join(made_card["host_reads_with_2d_mask"]) or "none"
        table.add_row(name, made_card["experts"], made_card["attention"], made_card["captured"], reads)
    Console(width=150).print(table)
    if arguments.output:
        git = ["git", "rev-parse", "--short", "HEAD"]
        provenance = {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "commit": subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip(),
            "protocol": f"{STEPS} steps, {SEQUENCES} sequences of up to {TOKENS} tokens, fp32, emulated capture, CPU",
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps({"provenance": provenance, "families": cards}, indent=1) + "\n")


if __name__ == "__main__":
    main()
