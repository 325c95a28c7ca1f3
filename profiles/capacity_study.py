"""What a capacity costs in quality: held-out bits per byte against the capacity factor, by who the victims are.

    python profiles/capacity_study.py --output profiles/results/h200/capacity_study.json --plot capacity.png
    for i in 1 2 3 4; do python profiles/capacity_study.py --part $i/4 --output part$i.json & done; wait
    python profiles/capacity_study.py --merge part?.json --output capacity_study.json --plot capacity.png
    python profiles/capacity_study.py --check

Trains the model of `staticmoe train` on its text, with its optimizer and schedule, once for each policy, factor and
seed; a seed decides weights and the order of the text, the same for all policies. A capacity is C = ceil(f·T·K/E) rows
of each expert (scope "expert"), in training alone: evaluation is dropless. Balancing is the model's own, the same in
all runs, and counts assignments before capacity: a bias of the choice that moves by `balancing_bias_rate`, and an
auxiliary loss.

    dropless               every assignment is computed
    lowest                 overflow="drop": at each expert the lowest weights lose
    lowest-renormalized    and what a token keeps takes over the weight of what it lost
    tail                   at each expert the last in token order lose, as is usual elsewhere

The library has no tail victims. Here a hook of the routers takes their weight from them, so that they give nothing to
the output and get no gradient, as where they were dropped; their ids stay, and balancing sees what it sees under the
other policies. That says nothing about speed: their rows are computed.

An invocation adds its runs to what the output has, and replaces those of the same name.

Dimensions: T tokens of a step, K top_k, E experts, C rows of one expert, B sequences, S tokens of each.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import staticmoe.demo.run as recipe
from staticmoe import RunnerConfig, StaticMoERunner, StepResult
from staticmoe.bench.plot import why_no_plot
from staticmoe.bench.result import provenance, source_commit, write_result
from staticmoe.demo.batches import WindowSampler, heldout_batches, valid_labels
from staticmoe.demo.model import DemoLM, ModelConfig
from staticmoe.demo.text import Corpus
from staticmoe.errors import ConfigError, StaticMoEError
from staticmoe.moe.router import Router, RouterOutput
from staticmoe.shapes import scaled_ceil

DROPLESS, LOWEST, RENORMALIZED, TAIL = POLICIES = ("dropless", "lowest", "lowest-renormalized", "tail")
FACTORS, SEEDS = (1.0, 1.25, 1.5, 2.0), (0, 1, 2)
SIZES = {"steps": 600, "depth": 4, "batch_size": 32, "seq_len": 256, "eval_windows": 1024}
CHECKED_SIZES = {"steps": 3, "depth": 1, "batch_size": 2, "seq_len": 32, "eval_windows": 2}
CHECKED: dict[str, Any] = {"factors": (1.0,), "seeds": (0,), **CHECKED_SIZES}
DROPPED = "dropped_share"


class Run(NamedTuple):
    """One training: `factor` is against the balanced load, None for dropless."""

    policy: str
    factor: float | None
    seed: int

    @property
    def name(self) -> str:
        """Its key in the result."""
        return f"{self.policy}{'' if self.factor is None else f', factor {self.factor}'}, seed {self.seed}"


def runs(policies: Sequence[str], factors: Sequence[float], seeds: Sequence[int]) -> list[Run]:
    """Every policy at every factor, dropless at none, for each seed."""
    pairs = [(policy, factor) for policy in policies for factor in ([None] if policy == DROPLESS else factors)]
    return [Run(policy, factor, seed) for seed in seeds for policy, factor in pairs]


def tail_victims(topk_ids: Tensor, num_experts: int, expert_capacity: int) -> Tensor:
    """Whether an assignment has C or more of the same expert before it, in token order and within a token by slot.

    Shapes:
        topk_ids [T,K] int, -1 for none, which is nobody's victim. Returns [T,K] bool.
    Graph-safe: yes.
    """
    experts = torch.arange(num_experts, device=topk_ids.device)
    # Assignments last, [E,T·K]: a sum along the innermost dimension is the one that a GPU shares out.
    chosen = topk_ids.flatten() == experts[:, None]
    number = chosen.cumsum(1, dtype=torch.int32)  # inclusive
    return (chosen & (number > expert_capacity)).any(0).view_as(topk_ids)


class TailVictims:
    """Takes their weight from the tail victims of a model's routers while it trains, and measures their share."""

    def __init__(self, model: nn.Module, factor: float) -> None:
        routers = [module for module in model.modules() if isinstance(module, Router)]
        self.factor = factor
        # Of each layer. Written in place, as a replay must find it where the capture left it.
        self.shares = torch.zeros(len(routers), device=routers[0].weight.device)
        for share, router in zip(self.shares, routers, strict=True):
            router.register_forward_hook(functools.partial(self._mask, share))

    def _mask(self, share: Tensor, router: nn.Module, given: Any, routed: RouterOutput) -> RouterOutput:
        if not router.training:
            return routed
        assignments, num_experts = routed.topk_ids.numel(), routed.logits.shape[1]
        victims = tail_victims(routed.topk_ids, num_experts, scaled_ceil(self.factor, assignments, num_experts))
        share.copy_(victims.float().mean())
        return dataclasses.replace(routed, topk_weights=torch.where(victims, 0.0, routed.topk_weights))

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean cross entropy in nats, and the share of all assignments that were victims."""
        return loss_of(model, batch), {DROPPED: self.shares.mean()}


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross entropy in nats."""
    return model(**batch).loss


def peak_lr(sizes: ModelConfig) -> float:
    """The learning rate that `staticmoe train` takes for this width."""
    return recipe.BASE_LR * math.sqrt(recipe.BASE_WIDTH / sizes.hidden_size)


def wrapped(
    options: recipe.TrainOptions, run: Run, example: dict[str, Tensor], device: torch.device
) -> tuple[StaticMoERunner, DemoLM, torch.optim.Optimizer]:
    """The model and optimizer of `staticmoe train` under a policy; the options say all but seed and capacity."""
    sizes = ModelConfig.from_depth(options.depth, options.seq_len)
    model = DemoLM(sizes, run.seed).to(device)
    # Vectors do not decay.
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": recipe.WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak_lr(sizes), betas=recipe.BETAS)
    loss = TailVictims(model, run.factor).loss if run.policy == TAIL and run.factor else loss_of
    bounded = run.policy in (LOWEST, RENORMALIZED)
    config = RunnerConfig(
        capacity_factor=run.factor if bounded else None,
        capacity_scope="expert",
        overflow="drop" if bounded else "rerun",
        renormalize_drops=run.policy == RENORMALIZED,
        max_grad_norm=recipe.MAX_GRAD_NORM,
        autocast=recipe.DTYPES[options.dtype],
    )
    runner = StaticMoERunner(model, optimizer, example_batch=example, loss_fn=loss, eval_fn=loss_of, config=config)
    return runner, model, optimizer


def train(
    options: recipe.TrainOptions, run: Run, corpus: Corpus, device: torch.device
) -> tuple[dict[str, Any], list[StepResult], DemoLM]:
    """Train, then evaluate: bits per byte, dropped shares of all assignments, seconds from nothing to the end."""
    start = time.perf_counter()
    sampler = WindowSampler(corpus.train, options.batch_size, options.seq_len, run.seed)
    heldout = heldout_batches(corpus.heldout, options.eval_windows, options.batch_size, options.seq_len)
    runner, model, optimizer = wrapped(options, run, sampler.batch(0), device)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(recipe.lr_share, steps=options.steps))
    with runner:
        results = []
        for step in range(options.steps):
            results.append(runner.step(sampler.batch(step)))
            scheduler.step()
        runner.flush()
        nats = sum(float(runner.evaluate(batch).loss) * valid_labels(batch) for batch in heldout)
    dropped = [result.metrics.get(DROPPED, result.moe.drop_rate) for result in results]
    row = {
        **run._asdict(),
        "bits_per_byte": nats / sum(map(valid_labels, heldout)) * recipe.BITS_PER_NAT,
        "dropped": statistics.mean(dropped),
        "dropped_last_tenth": statistics.mean(dropped[-max(1, len(dropped) // 10) :]),
        "skipped_steps": sum(result.skipped for result in results),
        "seconds": time.perf_counter() - start,
    }
    return row, results, model


def study_of(options: recipe.TrainOptions, corpus: Corpus, device: torch.device) -> dict[str, Any]:
    """What all runs of one study have in common."""
    sizes = ModelConfig.from_depth(options.depth, options.seq_len)
    named = {key: getattr(options, key) for key in ("steps", "batch_size", "seq_len", "eval_windows", "dtype")}
    text = {"source": corpus.source, "sha256": corpus.fingerprint(), "heldout_bytes": len(corpus.heldout)}
    return {"model": dataclasses.asdict(sizes), **named, "peak_lr": peak_lr(sizes), "text": text, "device": device.type}


def load(path: Path | None) -> dict[str, Any]:
    """What the file holds; an empty result where there is none."""
    return json.loads(path.read_text()) if path and path.exists() else {"study": None, "origins": [], "runs": {}}


def add(result: dict[str, Any], study: dict[str, Any], origin: dict[str, Any], name: str, row: dict[str, Any]) -> None:
    """Put a run into the result under its name; a ConfigError where the result is of another study."""
    if result["study"] not in (None, study):
        was = result["study"]
        apart = [f"{key} {was.get(key)} and {value}" for key, value in study.items() if was.get(key) != value]
        raise ConfigError(f"expected runs of one study; got {'; '.join(apart)}. Give another --output")
    if origin not in result["origins"]:
        result["origins"].append(origin)
    result["study"] = study
    result["runs"][name] = {**row, "origin": result["origins"].index(origin)}


def summary(result: dict[str, Any]) -> dict[tuple[str, float | None], dict[str, list[float]]]:
    """(policy, factor), in their order -> the runs' values, one a seed; `over_dropless` where that seed has both."""
    rows = sorted(result["runs"].values(), key=lambda row: (POLICIES.index(row["policy"]), row["factor"] or 0.0))
    base = {row["seed"]: row["bits_per_byte"] for row in rows if row["policy"] == DROPLESS}
    found: dict[Any, dict[str, list[float]]] = {}
    for row in rows:
        values = found.setdefault((row["policy"], row["factor"]), collections.defaultdict(list))
        for key in ("bits_per_byte", "dropped", "dropped_last_tenth", "seconds"):
            values[key].append(row[key])
        if row["seed"] in base:
            values["over_dropless"].append(row["bits_per_byte"] - base[row["seed"]])
    return found


def print_table(result: dict[str, Any]) -> None:
    """What was found, for people: means over the seeds, and ranges."""
    table = Table(title="held-out bits per byte; over dropless: of the same seed")
    table.add_column("victims")
    for name in ("factor", "seeds", "bits per byte", "range", "over dropless", "range", "dropped", "last tenth", "s"):
        table.add_column(name, justify="right")
    for (policy, factor), values in summary(result).items():
        bits, over = values["bits_per_byte"], values["over_dropless"]
        shares = [f"{statistics.mean(values[key]):.2%}" for key in ("dropped", "dropped_last_tenth")]
        apart = [f"{statistics.mean(over):+.4f}", f"{min(over):+.4f} {max(over):+.4f}"] if over else ["-", "-"]
        numbers = [f"{statistics.mean(bits):.4f}", f"{min(bits):.4f}-{max(bits):.4f}", *apart, *shares]
        seconds = f"{statistics.mean(values['seconds']):.1f}"
        table.add_row(policy, "-" if factor is None else f"{factor:g}", str(len(bits)), *numbers, seconds)
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def write_plot(result: dict[str, Any], path: Path) -> None:
    """Draw bits per byte and dropped share against the factor into a PNG: means, and ranges over the seeds."""
    # No pyplot: its state and its choice of a screen are the caller's.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    found = summary(result)
    for number, policy in enumerate(POLICIES):
        cases = {factor: values for (name, factor), values in found.items() if name == policy}
        style = {"color": f"C{number}", "label": policy}
        for axes, key in ((left, "bits_per_byte"), (right, "dropped")):
            mean, low, high = ([of(values[key]) for values in cases.values()] for of in (statistics.mean, min, max))
            if policy != DROPLESS and cases:
                axes.plot(list(cases), mean, marker="o", **style)
                axes.fill_between(list(cases), low, high, color=style["color"], alpha=0.15)
            elif cases and axes is left:
                axes.axhline(mean[0], linestyle="dashed", **style)
                axes.axhspan(low[0], high[0], color=style["color"], alpha=0.15)
    study = result["study"]
    left.set_ylabel("held-out bits per byte")
    right.set_ylabel("share of assignments dropped in training")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xlabel("capacity factor of an expert")
        axes.legend(fontsize=8)
    seeds = len({row["seed"] for row in result["runs"].values()})
    experts = "{depth} layers of {num_experts} experts, top {top_k}".format(**study["model"])
    figure.suptitle(f"{experts}, {study['steps']} steps, {seeds} seeds: mean and range", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def part(text: str) -> slice:
    """Read "i/n": every n-th, from the i-th."""
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"expected i/n with i from 1 to n, such as 2/4; got {text!r}")
    return slice(int(number) - 1, None, int(count))


def arguments_of() -> argparse.Namespace:
    """The command line, with what `--check` makes smaller."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=POLICIES, choices=POLICIES)
    parser.add_argument("--factors", nargs="+", type=float, help=f"default: {FACTORS}")
    parser.add_argument("--seeds", nargs="+", type=int, help=f"default: {SEEDS}")
    for name, value in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"default: {value}")
    parser.add_argument("--data", nargs="+", default=(), help="text; default: that of `staticmoe train`")
    parser.add_argument("--part", type=part, default=slice(None), metavar="i/n", help="every n-th run, from the i-th")
    parser.add_argument("--merge", nargs="+", type=Path, help="result files to join, instead of training")
    parser.add_argument("--check", action="store_true", help="tiny sizes on a CPU")
    parser.add_argument("--output", type=Path, help="JSON file to add to")
    parser.add_argument("--plot", type=Path, help="PNG file for all that the result has")
    parser.add_argument("--commit", default=None, help="of the code; default: git's")
    arguments = parser.parse_args()
    defaults = {"factors": FACTORS, "seeds": SEEDS, **SIZES, **(CHECKED if arguments.check else {})}
    for name in (name for name in defaults if getattr(arguments, name) is None):
        setattr(arguments, name, defaults[name])
    return arguments


def train_all(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """Take this part's runs one after the other; the output has each as soon as it is done."""
    device = torch.device("cuda" if torch.cuda.is_available() and not arguments.check else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    given = {name: getattr(arguments, name) for name in SIZES}
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    options = recipe.TrainOptions(**given, data=tuple(arguments.data), dtype=dtype)
    corpus = recipe.load_corpus(options)
    study = study_of(options, corpus, device)
    origin = provenance(device, arguments.commit or source_commit(), absent=())
    origin |= {"data": corpus.source, "protocol": "as `staticmoe train`; evaluation dropless, at the end"}
    for run in runs(arguments.policies, arguments.factors, arguments.seeds)[arguments.part]:
        row, _, _ = train(options, run, corpus, device)
        add(result, study, origin, run.name, row)
        print(run.name, json.dumps(row), flush=True)
        if arguments.output:
            write_result(result, arguments.output)


def main() -> None:
    """Train or join, print, draw."""
    arguments = arguments_of()
    result = load(arguments.output)
    try:
        if arguments.merge:
            for held in (json.loads(path.read_text()) for path in arguments.merge):
                for name, row in held["runs"].items():
                    add(result, held["study"], held["origins"][row["origin"]], name, row)
        else:
            train_all(arguments, result)
    except StaticMoEError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    if arguments.output:
        write_result(result, arguments.output)
    print_table(result)
    if arguments.plot:
        missing = why_no_plot()
        print(missing) if missing else write_plot(result, arguments.plot)


if __name__ == "__main__":
    main()
