"""What `staticmoe train` shows: a progress bar on a terminal, plain lines anywhere else, a summary at the end.

Nothing here waits for a step: results are handed in when they have arrived.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from staticmoe import StepResult
from staticmoe.demo.run import BITS_PER_NAT, UNIFORM_BITS, DemoRun
from staticmoe.demo.text import Corpus

# The lines of a log: about this many over a run, whatever its length.
LOG_LINES = 20
# Load and drop rate are those of the latest steps: over a whole run the first ones would hide the last.
RECENT_STEPS = 50


class Stopwatch:
    """Seconds spent training: evaluation and checkpoints stop it."""

    def __init__(self) -> None:
        self._elapsed = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        return self._elapsed + running

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time inside."""
        self._since = time.perf_counter()
        try:
            yield
        finally:
            self._elapsed, self._since = self.seconds, None


@dataclasses.dataclass
class Tally:
    """The latest arrived results, summed up.

    Attributes:
        arrived: results so far in this process.
        skipped: steps that committed nothing.
        loss: nats a byte of the latest result, None before the first.
    """

    arrived: int = 0
    skipped: int = 0
    loss: float | None = None

    def __post_init__(self) -> None:
        self._recent: collections.deque[dict[str, tuple[list[int], int]]] = collections.deque(maxlen=RECENT_STEPS)

    def add(self, result: StepResult) -> None:
        """Take in an arrived result."""
        self.arrived += 1
        self.skipped += int(result.skipped)
        self.loss = float(result.loss)
        self._recent.append({name: (load.routed, sum(load.dropped)) for name, load in result.moe.items()})

    @property
    def drop_rate(self) -> float:
        """Dropped share of the routed assignments of the latest steps, 0 to 1."""
        layers = [layer for step in self._recent for layer in step.values()]
        return sum(dropped for _, dropped in layers) / max(1, sum(sum(routed) for routed, _ in layers))

    def loads(self) -> dict[str, float]:
        """Return, for each layer, the busiest expert's load over the mean load, in the latest steps."""
        sums: dict[str, list[int]] = {}
        for step in self._recent:
            for name, (routed, _) in step.items():
                before = sums.get(name, [0] * len(routed))
                sums[name] = [a + b for a, b in zip(before, routed, strict=True)]
        return {name: max(total) * len(total) / max(1, sum(total)) for name, total in sums.items()}


class TrainReport:
    """Writes to the console; the bar exists only while `progress` is entered, and only on a terminal.

    Args:
        console: where to write.
        total: step at which the whole run ends.
    """

    def __init__(self, console: Console, total: int) -> None:
        self.console = console
        self._total = total
        self._bar: Progress | None = None
        self._every = max(1, round(total / LOG_LINES))

    def say(self, text: str = "") -> None:
        """Write a line as it is: no markup, no wrapping."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def table(self, rows: Mapping[str, str] | Sequence[tuple[str, str]]) -> None:
        """Write two aligned columns."""
        pairs = list(rows.items()) if isinstance(rows, Mapping) else list(rows)
        width = max(len(name) for name, _ in pairs)
        for name, value in pairs:
            self.say(f"  {name:<{width}}  {value}")

    @contextmanager
    def progress(self, first: int) -> Iterator[None]:
        """Show the bar, from step `first` on, while inside."""
        if not self.console.is_terminal:
            yield
            return
        columns = (BarColumn(bar_width=8), MofNCompleteColumn(), TextColumn("{task.description}"))
        with Progress(*columns, TimeRemainingColumn(), console=self.console, transient=True) as bar:
            self._bar = bar
            bar.add_task("", total=self._total, completed=first)
            try:
                yield
            finally:
                self._bar = None

    def arrived(self, step: int, tally: Tally, tokens_per_second: float) -> None:
        """Show the state after the result of `step` (from 1) has arrived."""
        assert tally.loss is not None, "a result has arrived"
        # Short enough that with bar and remaining time it fits 80 columns.
        text = (
            f"loss {tally.loss:.3f} {tally.loss * BITS_PER_NAT:.3f} bits/byte "
            f"{tokens_per_second:,.0f} tokens/s drop {tally.drop_rate:.1%}"
        )
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, description=text)
        elif step % self._every == 0 or step == self._total:
            self.say(f"step {step:>{len(str(self._total))}}/{self._total}  {text}")

    def heldout(self, step: int, bits: float, bigram: float) -> None:
        """Show a held-out measurement after `step` updates."""
        width = len(str(self._total))
        self.say(f"step {step:>{width}}/{self._total}  held out: {bits:.3f} bits/byte (bigram {bigram:.3f})")


def describe_start(run: DemoRun, corpus: Corpus, bigram: float) -> list[tuple[str, str]]:
    """Return the rows that say what is about to be trained, on what, and against what."""
    config = run.model.config
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    experts = sum(p.numel() for name, p in run.model.named_parameters() if ".experts." in name)
    active = parameters - experts + experts * config.top_k // config.num_experts
    names = ", ".join(Path(name).name for name in corpus.heldout_files[:3])
    more = ", ..." if len(corpus.heldout_files) > 3 else ""
    held = f" ({names}{more})" if names else ""
    windows = sum(len(batch["labels"]) for batch in run.heldout)
    accumulate = f" x {run.options.accumulate} micro-batches" if run.options.accumulate > 1 else ""
    return [
        ("text", f"{corpus.source}: {len(corpus.train):,} bytes to train on, {len(corpus.heldout):,} held out{held}"),
        (
            "model",
            f"depth {config.depth}: width {config.hidden_size}, {config.num_experts} experts a layer, "
            f"{config.top_k} for each byte; {parameters:,} parameters, {active:,} at work on a byte",
        ),
        (
            "step",
            f"{run.options.batch_size} windows of {run.options.seq_len} bytes{accumulate}, "
            f"learning rate up to {run.peak_lr:.2g}",
        ),
        ("runner", f"backend {run.runner.backend}" + _backend_in_words(run.runner.backend)),
        ("to beat", f"bigram {bigram:.3f} bits/byte on {windows} held-out windows (uniform {UNIFORM_BITS:.3f})"),
        ("run", str(run.run_dir)),
    ]


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a call reached; `summary.json` of the run's directory holds it by these names.

    Attributes:
        backend: how iterations ran.
        steps, planned_steps, skipped: updates of the run so far, as asked for, and of this call without effect.
        train_seconds, tokens_per_second: of this call, training alone.
        heldout_bits, bigram_bits: bits a byte on the held-out windows.
        routed, dropped: assignments over the whole run.
        loads: layer -> busiest expert over the mean, in the latest steps.
    """

    backend: str
    steps: int
    planned_steps: int
    skipped: int
    train_seconds: float
    tokens_per_second: float
    heldout_bits: float
    bigram_bits: float
    routed: int
    dropped: int
    loads: dict[str, float]

    @classmethod
    def of(cls, run: DemoRun, tally: Tally, seconds: float, bits: float, bigram: float) -> Summary:
        """Take it from a run whose steps have all arrived."""
        totals = run.runner.telemetry()["moe"].values()
        return cls(
            backend=run.runner.backend,
            steps=run.step,
            planned_steps=run.options.steps,
            skipped=tally.skipped,
            train_seconds=seconds,
            tokens_per_second=tally.arrived * run.tokens_per_step / seconds if seconds > 0 else 0.0,
            heldout_bits=bits,
            bigram_bits=bigram,
            routed=sum(sum(layer["routed"]) for layer in totals),
            dropped=sum(sum(layer["dropped"]) for layer in totals),
            loads=tally.loads(),
        )

    def write(self, run_dir: Path) -> None:
        """Write `summary.json`."""
        (run_dir / "summary.json").write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")


def describe_end(summary: Summary, run_dir: Path, checkpoint: Path) -> list[tuple[str, str]]:
    """Return the rows of the summary."""
    bits, bigram = summary.heldout_bits, summary.bigram_bits
    skipped = f", {summary.skipped} of them skipped" if summary.skipped else ""
    loads = "  ".join(f"{name} {load:.2f}" for name, load in summary.loads.items()) or "no steps in this call"
    speed = f"{summary.tokens_per_second:,.0f} (training alone, {summary.train_seconds:.0f} s)"
    return [
        ("backend", summary.backend + _backend_in_words(summary.backend)),
        ("steps", f"{summary.steps} of {summary.planned_steps}{skipped}"),
        ("tokens/s", speed),
        ("held out", f"{bits:.3f} bits/byte; bigram {bigram:.3f} ({bits - bigram:+.3f}), uniform {UNIFORM_BITS:.3f}"),
        ("dropped", f"{summary.dropped / max(1, summary.routed):.3%} of {summary.routed:,} assignments"),
        ("load", f"busiest expert over mean: {loads} (last {RECENT_STEPS} steps)"),
        ("checkpoint", str(checkpoint)),
        ("records", f"{run_dir / 'metrics.jsonl'}, {run_dir / 'summary.json'}"),
    ]


def resume_command(run_dir: Path) -> str:
    """Return the command that continues the run in `run_dir`."""
    return f"staticmoe train --resume {shlex.quote(str(run_dir))}"


def next_steps(run: DemoRun) -> list[str]:
    """Return what to try next, as commands and a word on each."""
    options = run.options
    if run.step < options.steps:
        return [f"{resume_command(run.run_dir)}   # the remaining {options.steps - run.step} steps"]
    tries = [f"staticmoe monitor {shlex.quote(str(run.run_dir))}   # loss, drop rates and loads of this run"]
    if options.experts_every:
        tries.append(f"staticmoe tune {shlex.quote(str(run.run_dir))}   # the capacity factor for these loads")
    tries += [f"staticmoe train --depth {options.depth + 1} --steps {2 * options.steps}   # a larger model, longer"]
    if options.capacity_factor is None:
        tries.append("staticmoe train --capacity-factor 1.25 --capacity-scope expert --overflow drop   # see drops")
    else:
        policy = f"--capacity-scope {options.capacity_scope} --overflow {options.overflow}"
        tries.append(f"staticmoe train --capacity-factor {2 * options.capacity_factor:g} {policy}   # fewer drops")
    if not options.data:
        tries.append("staticmoe train --data PATH   # your own text")
    return tries


def _backend_in_words(backend: str) -> str:
    words = {
        "emulate": "the CPU's stand-in for a CUDA graph",
        "cuda": "one CUDA graph a step",
        "off": "uncaptured",
    }
    return f" ({words[backend]})" if backend in words else ""
