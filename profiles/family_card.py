"""Which transformers families are captured whole, and what their own code reads on the host: a card for each.

    python profiles/family_card.py --output profiles/results/cpu/families.json
    python profiles/family_card.py --families mixtral gpt_oss
    python profiles/family_card.py --device cuda --output profiles/results/h200/families.json
    python profiles/family_card.py --device cuda --output families.json --skip-done families.json  # what is missing

Small random models on a CPU, under the emulated capture, which refuses what a CUDA graph could not hold. For each
family: how its experts run (one op, or two grouped products around its own activation), which attention transformers
gives it, what it reads on the host when it gets a 2-D mask as a loop would pass it, and whether three steps with a
ready 4-D mask are bitwise the uncaptured ones, or what keeps them from it.

On a GPU: time and memory of the captured iteration at somewhat larger widths, bf16, beside the loop that a user of
transformers writes with `grouped_mm`. The models are still small, so that this shows what launching costs in each
family; for real widths: `profiles/transformers_models.py`.

The file is written after each family. A run that was cut off goes on with `--skip-done`: families that went well in
that file are kept, those that are missing or failed are made. Each card names the commit that it was made with.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from training_loops import WARMUP, Loop, Runner, attempt, measure

from staticmoe import RunnerConfig, StaticMoERunner
from staticmoe.bench.result import provenance, source_commit, write_result
from staticmoe.errors import StaticMoEError
from staticmoe.integrations import huggingface
from staticmoe.integrations.huggingface.activation import activation_of
from staticmoe.integrations.huggingface.specimens import FAMILIES, specimen

# Variants of an activation are for the tests.
NAMES = [name for name in FAMILIES if " with " not in name]
STEPS, SEQUENCES, TOKENS = 3, 3, 8
# On a GPU: every name that some family has for a size. No window is shorter than a sequence.
TIMED_STEPS, TIMED_SEQUENCES, TIMED_TOKENS = 30, 4, 512
WIDE = {
    "vocab_size": 1024, "hidden_size": 1024, "moe_hidden_size": 1024, "intermediate_size": 512,
    "moe_intermediate_size": 512, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64,
    "kv_lora_rank": 64, "q_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
    "max_position_embeddings": 2 * TIMED_TOKENS, "sliding_window": 2 * TIMED_TOKENS, "num_experts": 16,
    "num_local_experts": 16, "n_routed_experts": 16, "moe_num_experts": 16,
}  # fmt: skip


def batch(seed: int, sequences: int = SEQUENCES, length: int = TOKENS) -> dict[str, Tensor]:
    """Sequences of random lengths, padded on the right to `length`."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, length + 1, (sequences, 1), generator=generator)
    real = torch.arange(length) < lengths
    tokens = torch.randint(3, 64, (sequences, length), generator=generator)
    return {"input_ids": torch.where(real, tokens, 0), "attention_mask": real.long()}


def loss(model: Any, given: dict[str, Tensor], *, ready: bool) -> Tensor:
    """Mean square of the last output, which every family has."""
    mask = given["attention_mask"]
    if ready:
        mask = huggingface.ready_masks(model, mask)
    out = model(input_ids=given["input_ids"], attention_mask=mask, use_cache=False)
    last = out.logits if hasattr(out, "logits") else out.last_hidden_state
    return (last * given["attention_mask"][..., None]).square().mean()


def made(name: str, implementation: str = huggingface.NAME, **over: Any) -> Any:
    """A model with the attention that transformers gives its family: torch's, or where it has none its own."""
    return specimen(name, implementation, attention=None, **over)


def reached(model: Any, given: dict[str, Tensor], *, ready: bool) -> list[Tensor]:
    """The parameters that get a gradient; the others are frozen, such as the embedding of a position never reached."""
    used = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss(model, given, ready=ready), used, allow_unused=True)
    for parameter, gradient in zip(used, found, strict=True):
        parameter.requires_grad_(gradient is not None)
    return [p for p in used if p.requires_grad]


def train(name: str, capture: str, *, ready: bool, audit: str = "error") -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters after `STEPS` steps."""
    torch.manual_seed(0)
    model = made(name).train()
    huggingface.prepare(model)
    given = batch(0)
    optimizer = torch.optim.AdamW(reached(model, given, ready=ready), lr=1e-3)
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


def facts(model: Any) -> dict[str, Any]:
    """How the experts run, and which attention."""
    layers = [m for m in model.modules() if hasattr(m, "is_transposed")]
    whole = all(activation_of(m) is not None and not getattr(m, "has_post_expert_norm", False) for m in layers)
    return {"experts": "one op" if whole else "by parts", "attention": model.config._attn_implementation}


def card(name: str) -> dict[str, Any]:
    """What is said of one family."""
    found = facts(made(name))
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


def timed(name: str, implementation: str, device: torch.device) -> dict[str, Any]:
    """Time and memory of an iteration: ours captured with a ready mask, others in a loop with a 2-D one."""
    ours, on_gpu = implementation == huggingface.NAME, device.type == "cuda"
    data = [batch(seed, TIMED_SEQUENCES, TIMED_TOKENS) for seed in range(TIMED_STEPS)]
    data = [{key: value.pin_memory() if on_gpu else value for key, value in one.items()} for one in data]
    real = sum(int(one["attention_mask"].sum()) for one in data) / TIMED_STEPS
    torch.manual_seed(0)
    model = made(name, implementation, **WIDE).to(device, torch.bfloat16 if on_gpu else torch.float32).train()
    for parameter in model.parameters():
        # At these widths the deviation of a specimen would grow from layer to layer.
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    reached(model, {key: value.to(device) for key, value in data[0].items()}, ready=ours)
    counted = functools.partial(loss, ready=ours)

    def make() -> Loop | Runner:
        if ours:
            return Runner(model, counted, data[0], "auto", "attention_mask")
        return Loop(model, counted, device)

    return {**facts(model), **measure(make, data, device, real)}


def speeds(name: str, device: torch.device) -> dict[str, Any]:
    """What is said of one family on a GPU: ours captured, and `grouped_mm`."""
    found: dict[str, Any] = {}
    for key, implementation in (("captured", huggingface.NAME), ("grouped_mm", "grouped_mm")):
        row = attempt(functools.partial(timed, name, implementation, device), device)
        row.pop("losses", None)
        shared: dict[str, Any] = {fact: row.pop(fact) for fact in ("experts", "attention") if fact in row}
        # How the experts run is said of ours.
        found = {**shared, **found, key: row}
    return found


def shown(row: dict[str, Any]) -> str:
    """A row of `timed` in a cell."""
    return row["failed"][:40] if "failed" in row else f"{row['ms']:.2f} ms, {row.get('peak_gib', 0.0):.2f} GiB"


def origin(device: torch.device, commit: str) -> dict[str, Any]:
    """Where and with what this was found."""
    import transformers

    known: dict[str, Any] = {"transformers": transformers.__version__}
    if device.type == "cpu":
        protocol = f"{STEPS} steps, {SEQUENCES} sequences of up to {TOKENS} tokens, fp32, emulated capture, CPU"
        known |= {"torch": torch.__version__, "commit": commit}
        two_d = "what is read on the host with one"
    else:
        protocol = (
            f"2 layers, bf16, {TIMED_SEQUENCES} sequences of up to {TIMED_TOKENS} tokens, {TIMED_STEPS} steps with "
            f"clipping and fused AdamW, {WARMUP} of them to warm up; peak of building, capture and steps"
        )
        known |= {**provenance(device, commit, absent=()), "widths": WIDE}
        two_d = "grouped_mm"
        known["data"] = "random tokens and lengths, a new batch each step"
    known["masks"] = f"ready, [B,1,S,S], added to the scores; 2-D for {two_d}"
    return {**known, "protocol": protocol}


def went_well(card: dict[str, Any]) -> bool:
    """Whether there is nothing to try again."""
    captured = card.get("captured")
    if isinstance(captured, str):
        return captured == "bitwise"
    return all("failed" not in card.get(key, {"failed": ""}) for key in ("captured", "grouped_mm"))


def known_cards(path: Path | None, device: torch.device) -> dict[str, Any]:
    """The cards of a file, each with the commit that it was made with.

    Raises:
        SystemExit: no such file, or one of another kind of device.
    """
    if path is None:
        return {}
    if not path.exists():
        raise SystemExit(f"--skip-done: expected a file of an earlier run, got {path}, which is not there")
    file = json.loads(path.read_text())
    if ("gpu" in file["provenance"]) != (device.type == "cuda"):
        raise SystemExit(f"--skip-done: expected cards of a {device.type} device, got {path} of another")
    made_with = file["provenance"]["commit"]
    return {name: {"commit": made_with, **card} for name, card in file["families"].items()}


def arguments_of() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=NAMES, choices=NAMES)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cuda: times and memory instead")
    parser.add_argument("--output", type=Path, help="JSON file to write after each family; on a GPU, to add to")
    parser.add_argument("--skip-done", type=Path, help="JSON file whose cards are kept where they went well")
    parser.add_argument("--commit", default=None, help="of the code; default: git's")
    return parser.parse_args()


def main() -> None:
    """Make the cards, print, write."""
    arguments = arguments_of()
    import transformers

    transformers.logging.set_verbosity_error()
    huggingface.register()
    device = torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    if not on_gpu:
        torch.set_num_threads(1)
    table = Table()
    last = ("captured", "grouped_mm") if on_gpu else ("captured with a 4-D mask", "host reads with a 2-D mask")
    for column in ("family", "experts", "attention", *last):
        table.add_column(column)
    commit = arguments.commit or source_commit()
    result: dict[str, Any] = {"provenance": origin(device, commit), "families": {}}
    if on_gpu and arguments.output and arguments.output.exists():
        result["families"] = known_cards(arguments.output, device)
    done = {name: kept for name, kept in known_cards(arguments.skip_done, device).items() if went_well(kept)}
    result["families"] |= done
    for name in arguments.families:
        if name in done:
            continue
        found = {"commit": commit, **(speeds(name, device) if on_gpu else card(name))}
        result["families"][name] = found
        print(name, json.dumps(found), flush=True)
        if on_gpu:
            cells = [shown(found["captured"]), shown(found["grouped_mm"])]
        else:
            cells = [found["captured"], ", ".join(found["host_reads_with_2d_mask"]) or "none"]
        table.add_row(name, found.get("experts", "-"), found.get("attention", "-"), *cells)
        if arguments.output:
            write_result(result, arguments.output)
    Console(width=150).print(table)
    if arguments.output:
        write_result(result, arguments.output)


if __name__ == "__main__":
    main()
