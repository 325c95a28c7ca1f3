"""One run of the demonstration: what its options build, how it steps, measures, saves and goes on.

The command line decides when; this room decides what. A step is `accumulate` batches of B windows of S
tokens, drawn by step number, so that a resumed run reads on exactly where it stopped.

Dimensions: B sequences, S tokens of a sequence, N micro-batches of a step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from staticmoe import MicroBatches, RunnerConfig, StaticMoERunner, StepResult
from staticmoe.demo.batches import WindowSampler, heldout_batches, valid_labels
from staticmoe.demo.bigram import fit_bigram
from staticmoe.demo.checkpoint import CHECKPOINT_NAME, check_options, rng_state, save_checkpoint, set_rng_state
from staticmoe.demo.model import DemoLM, ModelConfig
from staticmoe.demo.text import VOCAB_SIZE, Corpus, load_paths, load_plays, synthetic_corpus
from staticmoe.errors import ConfigError

BITS_PER_NAT = 1.0 / math.log(2.0)
UNIFORM_BITS = math.log2(VOCAB_SIZE)
DTYPES: Mapping[str, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16}
MAX_GRAD_NORM = 1.0
# The learning rate rises over this share of the steps and then falls along a cosine to this share of its peak.
WARMUP_SHARE = 0.05
FINAL_LR_SHARE = 0.05
# Found at width 64; wider models take less, in proportion to the square root.
BASE_LR, BASE_WIDTH = 1e-2, 64
BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What a run is told; the defaults take one CPU core a minute to a minute and a half.

    Attributes:
        steps: updates of the whole run.
        depth: layers; decides every other size of the model.
        batch_size: B.
        seq_len: S.
        accumulate: N.
        lr: peak learning rate; None follows the model's width.
        seed: of weights, data order and dropout.
        data: files and directories of text; empty: the plays.
        synthetic: a made-up stream instead of text.
        dropout: probability.
        dtype: "float32", or "bfloat16" for autocast.
        capture, compile, capacity_factor, capacity_scope, overflow, experts_every: as in `RunnerConfig`.
        eval_windows: held-out windows of S tokens that bits per byte are measured on.
        eval_every, checkpoint_every: steps between two; 0: only at the end.
        threads: of torch on the CPU; None leaves the choice to the command line.
    """

    steps: int = 800
    depth: int = 2
    batch_size: int = 16
    seq_len: int = 64
    accumulate: int = 1
    lr: float | None = None
    seed: int = 0
    data: tuple[str, ...] = ()
    synthetic: bool = False
    dropout: float = 0.0
    dtype: str = "float32"
    capture: str = "auto"
    compile: str = "off"
    capacity_factor: float | None = None
    capacity_scope: str = "rank"
    overflow: str = "rerun"
    experts_every: int = 0
    eval_windows: int = 512
    eval_every: int = 200
    checkpoint_every: int = 200
    threads: int | None = None

    def __post_init__(self) -> None:
        lows = {"steps": 1, "depth": 1, "batch_size": 1, "seq_len": 1, "accumulate": 1, "eval_windows": 1}
        for name, low in {
            **lows,
            "eval_every": 0,
            "checkpoint_every": 0,
            "experts_every": 0,
            "threads": 1,
            "seed": 0,
        }.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"--{name.replace('_', '-')}: expected at least {low}; got {value}")
        if self.lr is not None and not (math.isfinite(self.lr) and self.lr > 0):
            raise ConfigError(f"--lr: expected a finite number above 0; got {self.lr}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype: expected one of {', '.join(DTYPES)}; got {self.dtype!r}")
        if self.synthetic and self.data:
            raise ConfigError(f"--synthetic and --data exclude each other; got both, with {', '.join(self.data)}")

    def runner_config(self, run_dir: Path) -> RunnerConfig:
        """Return the runner's options."""
        return RunnerConfig(
            capture=self.capture,
            compile=self.compile,
            capacity_factor=self.capacity_factor,
            capacity_scope=self.capacity_scope,
            overflow=self.overflow,
            experts_every=self.experts_every,
            gradient_accumulation_steps=self.accumulate,
            max_grad_norm=MAX_GRAD_NORM,
            autocast=DTYPES[self.dtype],
            run_dir=run_dir,
        )


def load_corpus(options: TrainOptions) -> Corpus:
    """Return the text that the options name.

    Raises:
        DataError: it is missing, or too short for a window.
    """
    if options.synthetic:
        corpus = synthetic_corpus(options.seed)
    elif options.data:
        corpus = load_paths([Path(path) for path in options.data])
    else:
        corpus = load_plays()
    corpus.require_windows(options.seq_len)
    return corpus


def lr_share(step: int, steps: int) -> float:
    """Return the learning rate of `step` (from 0) of `steps`, as a share of its peak: linear warm-up, then a cosine."""
    warmup = max(1, round(steps * WARMUP_SHARE))
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return FINAL_LR_SHARE + (1.0 - FINAL_LR_SHARE) * 0.5 * (1.0 + math.cos(math.pi * progress))


class DemoRun:
    """A model in training through `StaticMoERunner`; a context manager that closes the runner.

    Args:
        options: of the run.
        corpus: its text.
        run_dir: where the runner and `save` write.
        checkpoint: payload to go on from, whose options `check_options` has admitted.

    Attributes:
        options: with the learning rate filled in.
        peak_lr: that learning rate.
        step: updates begun so far; the next batch is number `step`.
        tokens_per_step: N * B * S.
    """

    def __init__(
        self, options: TrainOptions, corpus: Corpus, run_dir: Path, checkpoint: Mapping[str, Any] | None = None
    ) -> None:
        config = ModelConfig.from_depth(options.depth, options.seq_len, options.dropout)
        self.peak_lr = options.lr or BASE_LR * math.sqrt(BASE_WIDTH / config.hidden_size)
        self.options = dataclasses.replace(options, lr=self.peak_lr)
        self.run_dir = run_dir
        self.corpus_fingerprint = corpus.fingerprint()
        self.notes = [] if checkpoint is None else check_options(checkpoint["options"], self.identity())
        self._sampler = WindowSampler(corpus.train, options.batch_size, options.seq_len, options.seed)
        self.heldout = heldout_batches(corpus.heldout, options.eval_windows, options.batch_size, options.seq_len)
        self._corpus = corpus
        # Dropout draws from torch's generator; weights and data order have generators of their own.
        torch.manual_seed(options.seed)
        self.model = DemoLM(config, options.seed).to(_device(options.capture))
        self.optimizer = _optimizer(self.model, self.peak_lr)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: lr_share(step, options.steps))
        self.step = 0
        self.tokens_per_step = options.accumulate * options.batch_size * options.seq_len
        if checkpoint is not None:
            self.model.load_state_dict(checkpoint["model"])
            self.optimizer.load_state_dict(checkpoint["optimizer"])
            self.scheduler.load_state_dict(checkpoint["scheduler"])
        self.runner = StaticMoERunner(
            self.model,
            self.optimizer,
            example_batch=self._batch(0),
            loss_fn=_loss,
            config=options.runner_config(run_dir),
        )
        if checkpoint is not None:
            self.runner.load_state_dict(checkpoint["runner"])
            self.step = checkpoint["step"]
            # Last: everything above may have drawn.
            set_rng_state(checkpoint["rng"])

    def identity(self) -> dict[str, Any]:
        """Return the options and the text's fingerprint: what two parts of one run must have in common."""
        return {**dataclasses.asdict(self.options), "corpus": self.corpus_fingerprint}

    def advance(self) -> StepResult:
        """Launch the next update and return its result, which need not have arrived yet."""
        result = self.runner.step(self._batch(self.step))
        self.step += 1
        self.scheduler.step()
        return result

    def _batch(self, step: int) -> Any:
        """Return what update `step` (from 0) reads: a batch, or the micro-batches of one update."""
        count = self.options.accumulate
        batches = [self._sampler.batch(step * count + index) for index in range(count)]
        return MicroBatches(batches) if count > 1 else batches[0]

    def heldout_bits(self) -> float:
        """Return the model's bits per byte on the held-out windows, weighted by label."""
        total, count = 0.0, 0
        for batch in self.heldout:
            labels = valid_labels(batch)
            total += float(self.runner.evaluate(batch).loss) * labels
            count += labels
        return total / count * BITS_PER_NAT

    def bigram_bits(self) -> float:
        """Return a bigram's bits per byte on the same labels of the same windows."""
        tokens = torch.cat([batch["tokens"].flatten() for batch in self.heldout])
        labels = torch.cat([batch["labels"].flatten() for batch in self.heldout])
        counted = labels >= 0
        return fit_bigram(self._corpus.train).bits_per_byte(tokens[counted], labels[counted])

    def save(self) -> Path:
        """Wait for all steps, write the checkpoint and return its path."""
        self.runner.flush()
        path = self.run_dir / CHECKPOINT_NAME
        payload = {
            "options": self.identity(),
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "runner": self.runner.state_dict(),
            "rng": rng_state(),
        }
        save_checkpoint(path, payload)
        return path

    def __enter__(self) -> DemoRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.close()


def _loss(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss


def _device(capture: str) -> torch.device:
    """The GPU where there is one, save for the emulated capture, which is the CPU's."""
    return torch.device("cuda" if torch.cuda.is_available() and capture != "emulate" else "cpu")


def _optimizer(model: DemoLM, lr: float) -> torch.optim.AdamW:
    """AdamW that decays matrices only: a norm's scale has no reason to shrink."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS)
