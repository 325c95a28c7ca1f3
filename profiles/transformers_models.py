"""Whole iterations of transformers models: eager experts, `grouped_mm`, compiled, and ours, uncaptured and captured.

    python profiles/transformers_models.py --output profiles/results/h200/transformers_models.json --plot losses.png
    python profiles/transformers_models.py --models qwen3 --modes eager grouped_mm --output models.json
    python profiles/transformers_models.py --models qwen3-lora --output models.json
    python profiles/transformers_models.py --models qwen3 olmoe --packed --output models.json
    python profiles/transformers_models.py --models qwen3 --packed --ready-masks --output models.json
    python profiles/transformers_models.py --models --output models.json --plot losses.png  # of what there is
    python profiles/transformers_models.py --check

Random weights at real widths, bf16, the same in every mode, and the same batches: sequences of a random chain, in which
each of some hundred symbols has four successors, so that losses fall from ln(vocabulary) towards ln 4. Every mode
trains `--steps` iterations with fused AdamW and clipping, and all but the first are timed. What is not ours is the loop
that a user of transformers writes. Sequences are full, and torch's causal attention takes no mask (ours by
`attend_causally`); GPT-OSS has its own attention, whose mask transformers makes and ours takes from `ready_masks`. With
`--padded` a batch has padding and a mask, with `--packed` it is one row of several sequences with positions of their
own: transformers makes a 4-D mask of either, ours `attend_within_sequences`, or the same mask with `--ready-masks`.

An invocation adds its cases to what the file has, and replaces those of the same name. A mode that fails is an entry
with its error. What the numbers are: `training_loops.measure`; `model_s` is what building the model took.

Dimensions: B sequences, S tokens of each.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor
from training_data import SUCCESSORS, SYMBOLS, packed, padded, texts
from training_loops import (
    LEARNING_RATE,
    MAX_GRAD_NORM,
    WARMUP,
    Loop,
    Runner,
    attempt,
    loss_by_positions,
    loss_of,
    loss_with_ready_mask,
    measure,
    wait,
)

from staticmoe.bench.plot import why_no_plot
from staticmoe.bench.result import provenance, source_commit, write_result
from staticmoe.integrations import huggingface
from staticmoe.integrations.huggingface.specimens import SIZES

STEPS, CHECKED_STEPS = 100, 4
LORA_RANK = 16
# The losses that the others are held against.
REFERENCE = "grouped_mm"


@dataclasses.dataclass(frozen=True)
class Mode:
    """How a model is trained: its experts' implementation, and what is around it.

    Attributes:
        capture: of the runner; None is the loop that a user writes.
    """

    experts: str
    compiled: bool = False
    capture: str | None = None


# Ours last: a capture that breaks the device's context costs nobody else.
MODES = {
    "eager": Mode("eager"),
    "grouped_mm": Mode("grouped_mm"),
    "grouped_mm_compiled": Mode("grouped_mm", compiled=True),
    "staticmoe_off": Mode(huggingface.NAME, capture="off"),
    "staticmoe": Mode(huggingface.NAME, capture="auto"),
    "staticmoe_compiled": Mode(huggingface.NAME, compiled=True, capture="auto"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its batch.

    Attributes:
        kind: transformers' model type.
        sizes: of its config, without the number of layers.
        modes: what is measured unless something else is asked for.
        lora: adapters of the attention's projections alone are trained.
        padded: every other sequence ends after three quarters, and a mask says so.
        packed: four sequences of other lengths, and padding, in place of each two.
        masks: ours gets ready masks, where it could do with offsets.
    """

    kind: str
    sizes: dict[str, Any]
    layers: int
    batch: int = 2
    tokens: int = 2048
    attention: str = "sdpa"
    modes: tuple[str, ...] = tuple(MODES)
    lora: bool = False
    padded: bool = False
    packed: bool = False
    masks: bool = False

    @property
    def ready_masks(self) -> bool:
        """Whether ours gets masks: where that is asked for, and where the attention is not torch's."""
        return self.masks or self.attention != "sdpa"

    @property
    def real_tokens(self) -> int:
        """Tokens of a batch that are no padding."""
        return sum(self.lengths)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        if self.packed:
            return [self.tokens * eighths // 8 for eighths in (5, 1, 7, 2) * (self.batch // 2)]
        return [self.tokens - (self.tokens // 4 if self.padded and row % 2 else 0) for row in range(self.batch)]


_QWEN3 = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
_OLMOE = {
    "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 1024, "num_attention_heads": 16,
    "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "max_position_embeddings": 4096,
}  # fmt: skip
_GPT_OSS = {
    "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
}  # fmt: skip
# Qwen3-30B-A3B, OLMoE-1B-7B and gpt-oss-20b, with as many layers as train on one GPU; the last one whole. GPT-OSS adds
# learned sinks to its scores, which torch's attention does not know.
CASES = {
    "qwen3": Case("qwen3_moe", _QWEN3, layers=8),
    "olmoe": Case("olmoe", _OLMOE, layers=8),
    "gpt-oss": Case("gpt_oss", _GPT_OSS, layers=6, attention="eager"),
    "qwen3-lora": Case("qwen3_moe", _QWEN3, layers=48, modes=("grouped_mm", "staticmoe_off", "staticmoe"), lora=True),
}


def tiny(case: Case) -> Case:
    """The same at widths for a CPU."""
    return dataclasses.replace(case, sizes={**case.sizes, **SIZES, "head_dim": 8}, layers=2, tokens=16)


def batches(case: Case, count: int, *, pin: bool) -> list[dict[str, Tensor]]:
    """Batches on the host: input_ids and labels [B,S] int64, and attention_mask [B,S] where there is padding.

    Packed, they are what `pad_packed` returns, [1,B·S].
    """
    generator = torch.Generator().manual_seed(7)
    symbols = min(SYMBOLS, case.sizes["vocab_size"])
    made = []
    for text in texts(symbols, (count, case.batch, case.tokens), generator):
        batch = packed(text, case.lengths, generator) if case.packed else padded(text, case.lengths)
        if not (case.padded or case.packed):
            del batch["attention_mask"]
        made.append({key: value.pin_memory() if pin else value for key, value in batch.items()})
    return made


def build(case: Case, mode: Mode, device: torch.device, dtype: torch.dtype) -> Any:
    """The same model for the same case, drawn on the device as transformers draws it: normal, standard deviation 0.02.

    Raises:
        ImportError: adapters without peft.
    """
    sizes = {**case.sizes, "num_hidden_layers": case.layers, "initializer_range": 0.02}
    config = transformers.AutoConfig.for_model(case.kind, **sizes, use_cache=False)
    torch.manual_seed(1)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=case.attention, experts_implementation=mode.experts
        )
    if mode.capture is not None and not case.ready_masks:
        if case.padded or case.packed:
            huggingface.attend_within_sequences(model, max_length=case.tokens)
        else:
            huggingface.attend_causally(model)
    if case.lora:
        import peft

        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        model = peft.get_peft_model(model, peft.LoraConfig(r=LORA_RANK, lora_alpha=32, target_modules=targets))
    return model.train()


def train(case: Case, mode: Mode, data: list[dict[str, Tensor]], device: torch.device) -> dict[str, Any]:
    """Build the model and measure it."""
    on_gpu = device.type == "cuda"
    began = time.perf_counter()
    model = build(case, mode, device, torch.bfloat16 if on_gpu else torch.float32)
    wait(device)
    seconds = time.perf_counter() - began

    def make() -> Loop | Runner:
        if mode.capture is None:
            # Without a GPU the check is of this script, not of a compiler for CPUs.
            backend = "inductor" if on_gpu else "aot_eager"
            # GPT-OSS makes its masks without a look at positions, and would read all sequences as one.
            in_packs = loss_by_positions if case.attention == "sdpa" else loss_with_ready_mask
            loss = in_packs if case.packed else loss_of
            return Loop(model, loss, device, torch.compile(model, backend=backend) if mode.compiled else None)
        loss = loss_with_ready_mask if case.ready_masks else loss_of
        mask = "attention_mask" if case.padded or case.packed else None
        return Runner(model, loss, data[0], mode.capture, mask, compiled=mode.compiled)

    return {"model_s": seconds, **measure(make, data, device, case.real_tokens)}


def begin(path: Path | None, device: torch.device, commit: str) -> tuple[dict[str, Any], int]:
    """The result to add to, which is what the file holds, and the number of this invocation's origin in it."""
    result: dict[str, Any] = json.loads(path.read_text()) if path and path.exists() else {"origins": [], "cases": {}}
    try:
        import peft

        adapters = peft.__version__
    except ImportError:
        adapters = None
    origin = {
        **provenance(device, commit, absent=()),
        "transformers": transformers.__version__,
        "peft": adapters,
        "data": f"chain of up to {SYMBOLS} symbols with {SUCCESSORS} successors each, a new batch each step",
        "protocol": f"AdamW(lr={LEARNING_RATE}, fused), norm clipped at {MAX_GRAD_NORM}, up to {WARMUP} warm-up steps",
    }
    if origin not in result["origins"]:
        result["origins"].append(origin)
    return result, result["origins"].index(origin)


def add(result: dict[str, Any], name: str, case: Case, mode: str, row: dict[str, Any]) -> None:
    """Put a row into its case; the rows of a case that was another one under this name go."""
    facts = {key: value for key, value in dataclasses.asdict(case).items() if key != "modes"}
    # As the cases of older files have it.
    facts = {key: value for key, value in facts.items() if value or key not in ("packed", "masks")}
    known = result["cases"].get(name)
    if known is None or known["model"] != facts:
        known = result["cases"][name] = {"model": facts, "real_tokens": case.real_tokens, "modes": {}}
    known["modes"][mode] = row


def gap(row: dict[str, Any], reference: dict[str, Any] | None) -> float | None:
    """Largest difference of a loss from the reference's at the same step, in nats."""
    if reference is None or "losses" not in reference or "losses" not in row:
        return None
    return max(abs(one - other) for one, other in zip(row["losses"], reference["losses"], strict=False))


def print_table(result: dict[str, Any]) -> None:
    """What was measured, for people."""
    table = Table(title=f"one iteration; loss gap: largest at a step, against {REFERENCE}")
    for name in ("model", "mode"):
        table.add_column(name)
    for name in ("ms", "between events", "tokens/s", "peak GiB", "reserved", "start s", "losses", "gap"):
        table.add_column(name, justify="right")
    for name, case in result["cases"].items():
        for mode, row in sorted(case["modes"].items(), key=lambda item: list(MODES).index(item[0])):
            if "failed" in row:
                table.add_row(name, mode, "failed")
                continue
            memory = [f"{row[key]:.1f}" if key in row else "-" for key in ("peak_gib", "reserved_gib")]
            apart = gap(row, case["modes"].get(REFERENCE))
            table.add_row(
                name, mode, f"{row['ms']:.1f}", "{:.1f}-{:.1f}".format(*row["events"]["ms_range"]),
                f"{row['tokens_per_s']:,.0f}", *memory, f"{row['start_s']:.1f}",
                f"{row['losses'][0]:.3f}-{row['losses'][-1]:.3f}", "-" if apart is None else f"{apart:.1e}",
            )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 150).print(table)
    for name, mode, row in failures(result):
        print(f"failed: {name} {mode}: {row['failed'].splitlines()[0]}")


def failures(result: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """Case, mode and row of what did not run."""
    rows = [(name, mode, row) for name, case in result["cases"].items() for mode, row in case["modes"].items()]
    return [one for one in rows if "failed" in one[2]]


def write_curves(result: dict[str, Any], path: Path) -> None:
    """Draw the losses of each case's modes into a PNG, one over the other."""
    # No pyplot: its state and its choice of a screen are the caller's.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cases = result["cases"]
    columns = max(1, min(4, len(cases)))
    rows = max(1, -(-len(cases) // columns))
    figure = Figure(figsize=(4.5 * columns, 4.0 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, (name, case) in zip(panels, cases.items(), strict=False):
        for number, mode in enumerate(MODES):
            if "losses" in case["modes"].get(mode, {}):
                losses = case["modes"][mode]["losses"]
                # The later a line, the thinner, so that those below it stay to be seen.
                width, color = 6.0 - 1.2 * number, f"C{number}"
                axes.plot(range(1, len(losses) + 1), losses, linewidth=width, color=color, label=mode)
        axes.set_title(f"{name}, {case['model']['layers']} layers", fontsize=10)
        axes.set_xlabel("step")
        axes.set_ylabel("loss, nats")
        if axes.lines:
            axes.legend(fontsize=8)
    for axes in panels[len(cases) :]:
        axes.set_axis_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def chosen(arguments: argparse.Namespace) -> dict[str, Case]:
    """The cases that were asked for, by the name in the result."""
    found = {}
    for name in arguments.models:
        case = tiny(CASES[name]) if arguments.check else CASES[name]
        asked = {word: getattr(arguments, word) for word in ("padded", "packed", "masks")}
        case = dataclasses.replace(case, **asked, layers=arguments.layers or case.layers)
        found[", ".join([name, *(word for word, given in asked.items() if given)])] = case
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--modes", nargs="*", default=None, choices=list(MODES), help="default: those of each model")
    parser.add_argument("--steps", type=int, default=None, help=f"iterations of each mode; default {STEPS}")
    parser.add_argument("--layers", type=int, default=None, help="instead of each model's number")
    layouts = parser.add_mutually_exclusive_group()
    layouts.add_argument("--padded", action="store_true", help="batches with padding and a mask")
    layouts.add_argument("--packed", action="store_true", help="batches of one row with several sequences")
    parser.add_argument("--ready-masks", action="store_true", dest="masks", help="ours by masks, not by offsets")
    parser.add_argument("--check", action="store_true", help=f"tiny widths on a CPU, {CHECKED_STEPS} steps")
    parser.add_argument("--output", type=Path, help="JSON file to add to")
    parser.add_argument("--plot", type=Path, help="PNG file for the losses of all that the JSON file has")
    parser.add_argument("--commit", default=None, help="of the code; default: git's")
    arguments = parser.parse_args()
    if arguments.models and not arguments.check and not torch.cuda.is_available():
        parser.error("speeds are measured on a GPU; on a CPU there is --check")
    device = torch.device("cuda" if arguments.models and not arguments.check else "cpu")
    steps = arguments.steps or (CHECKED_STEPS if arguments.check else STEPS)
    if steps < 2:
        parser.error(f"--steps: expected at least 2, one of them to warm up; got {steps}")
    if arguments.check:
        torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    huggingface.register()
    result, origin = begin(arguments.output, device, arguments.commit or source_commit())
    for name, case in chosen(arguments).items():
        data = batches(case, steps, pin=device.type == "cuda")
        for mode in arguments.modes or case.modes:
            row = attempt(functools.partial(train, case, MODES[mode], data, device), device)
            add(result, name, case, mode, {"origin": origin, **row})
            print(name, mode, json.dumps({key: value for key, value in row.items() if key != "losses"}), flush=True)
            if arguments.output:
                write_result(result, arguments.output)
    print_table(result)
    if arguments.plot:
        missing = why_no_plot()
        if missing:
            print(missing)
        else:
            write_curves(result, arguments.plot)
    if arguments.check and failures(result):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
