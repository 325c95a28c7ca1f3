"""What a run can be told: frozen, validated, every default explained.

A `RunnerConfig` is checked when it is built, so a wrong value is named before anything is captured.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import torch

from staticmoe.errors import ConfigError

CAPTURE_MODES = ("auto", "cuda", "emulate", "off")
CAPTURE_SCOPES = ("iteration", "forward_backward")
CAPACITY_SCOPES = ("rank", "expert")
OVERFLOW_POLICIES = ("rerun", "drop", "skip", "raise")
NONFINITE_POLICIES = ("skip", "raise")
LOSS_REDUCTIONS = ("mean", "sum", "tokens")
COMPILE_MODES = ("off", "blocks")
AUDIT_MODES = ("error", "warn", "off")
CHANGE_POLICIES = ("recapture", "raise")
# Of files and memory: ranks that train together may differ in them.
OWN_OPTIONS = frozenset(
    {"run_dir", "layers_every", "experts_every", "rank_files", "rotate_bytes", "memory_limit_bytes"}
)


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}: expected one of {', '.join(allowed)}; got {value!r}")


def _positive_factor(name: str, value: float | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{name}: expected None (dropless) or a finite number above 0; got {value!r}")


def _at_least(name: str, value: int, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name}: expected an integer of at least {low}; got {value!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapacityPolicy:
    """How many rows a layer's buffers hold and what happens when more arrive.

    Attributes:
        factor: against the balanced load; None is dropless.
        scope: "rank" bounds the rows of a rank, "expert" the rows of each expert.
        overflow: "rerun", "drop", "skip" or "raise".
        renormalize: whether what a token keeps takes over the weight of what it lost.
    """

    factor: float | None = None
    scope: str = "rank"
    overflow: str = "rerun"
    renormalize: bool = False

    def __post_init__(self) -> None:
        _positive_factor("capacity_factor", self.factor)
        _choice("capacity_scope", self.scope, CAPACITY_SCOPES)
        _choice("overflow", self.overflow, OVERFLOW_POLICIES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """Options of `StaticMoERunner`; each default is what a first run should use.

    Attributes:
        capture: "auto" takes "cuda" where there is a GPU and "emulate" elsewhere; "off" runs uncaptured.
        capture_scope: "iteration" holds the optimizer in the graph; "forward_backward" leaves it outside.
        capacity_factor: rows against the balanced load, None for dropless (on one GPU nothing can overflow).
        capacity_scope: "rank" or "expert".
        overflow: what a step does whose rows exceed the capacity: "rerun" commits nothing and runs again where they fit
            (a dropless graph is captured beside), "drop" counts and commits, "skip" commits nothing, "raise" stops.
        renormalize_drops: a token that lost an assignment to the capacity shares its weight out among those it kept, so
            that the weights sum to what they did; else the lost share of its output is missing.
        capacity_ladder: under overflow="rerun" further capacity factors, ascending, between `capacity_factor` and
            dropless; a step whose rows do not fit is run again on the lowest that they may fit, captured when needed.
        capacity_forecast: start a step on the variant that the last records ask for, among those that are captured,
            instead of on the lowest; which variant a step runs on changes its time and nothing else.
        eval_capacity_factor: capacity in `evaluate`; None is dropless, so that evaluation loses no token.
        gradient_accumulation_steps: micro-batches of one `step`.
        loss_reduction: how micro-batch losses are joined: "mean" divides by their number, "sum" adds,
            "tokens" weights each by its number of labels that are not -100.
        max_grad_norm: clip threshold for the 2-norm over all gradients; None measures and does not clip.
        nonfinite: "skip" vetoes the update of a step with a non-finite loss or gradient; "raise" stops.
        max_consecutive_skips: more vetoed steps in a row than this are an error.
        max_rerun_fraction: more reruns than this share of steps are an error.
        autocast: dtype for `torch.autocast` around the loss, or None.
        compile: "off", or "blocks": the largest parts of the model in which nothing takes part in the step (attention,
            norms, dense blocks) are compiled by torch.compile, each whole. Not under "emulate", which says so.
        compile_fallback: a part that does not compile whole stays as it is, with a warning; else it is an error.
        compile_limit_s: seconds of compiling after which the parts that are left stay as they are, with a warning.
        capture_warmup_iters: uncaptured iterations, vetoed, before the capture.
        max_in_flight: steps that may be launched and not yet known to have committed.
        self_check: replay once, vetoed, and compare with the uncaptured iteration before the first step.
        recheck_every: repeat that comparison every N steps, and compare the parameters of several ranks; 0 never.
        on_change: what a step does that finds changed what the graph holds frozen (an attribute that the recording
            read, a parameter's memory, a hook, and so on): "recapture" captures anew, with a warning that names it, and
            the third time for one cause is an error; "raise" is an error at once, until it is as it was, or
            `recapture()` is called.
        audit: "error" refuses what would not capture, "warn" logs it and captures all the same, "off" does not look.
        memory_limit_bytes: a forecast above this is refused before anything is captured; None: on a GPU what is free
            there and what torch already holds for this process, on a CPU no limit.
        run_dir: folder for the files of the run: meta.json, metrics.jsonl and layers/; None writes nothing.
        layers_every: committed steps that a line of layers/layers.jsonl sums up; memory and GPU are sampled as often.
        experts_every: write the counts of every expert to layers/experts.jsonl at each N-th committed step; 0 never.
        rank_files: of a run of several processes each but the first writes the same files to run_dir/rank1, ...; False:
            the first alone writes.
        rotate_bytes: a file of the run that grows over this many bytes becomes a part, name.1.jsonl, and a new one
            begins.
    """

    capture: str = "auto"
    capture_scope: str = "iteration"
    capacity_factor: float | None = None
    capacity_scope: str = "rank"
    overflow: str = "rerun"
    renormalize_drops: bool = False
    capacity_ladder: tuple[float, ...] = ()
    capacity_forecast: bool = False
    eval_capacity_factor: float | None = None
    gradient_accumulation_steps: int = 1
    loss_reduction: str = "mean"
    max_grad_norm: float | None = None
    nonfinite: str = "skip"
    max_consecutive_skips: int = 10
    max_rerun_fraction: float = 0.2
    autocast: torch.dtype | None = None
    compile: str = "off"
    compile_fallback: bool = False
    compile_limit_s: float = 600.0
    capture_warmup_iters: int = 3
    max_in_flight: int = 2
    self_check: bool = True
    recheck_every: int = 0
    on_change: str = "recapture"
    audit: str = "error"
    memory_limit_bytes: int | None = None
    run_dir: str | Path | None = None
    layers_every: int = 50
    experts_every: int = 0
    rank_files: bool = True
    rotate_bytes: int = 256 * 2**20

    def __post_init__(self) -> None:
        _choice("capture", self.capture, CAPTURE_MODES)
        _choice("capture_scope", self.capture_scope, CAPTURE_SCOPES)
        _choice("loss_reduction", self.loss_reduction, LOSS_REDUCTIONS)
        _choice("nonfinite", self.nonfinite, NONFINITE_POLICIES)
        _choice("compile", self.compile, COMPILE_MODES)
        _choice("audit", self.audit, AUDIT_MODES)
        _choice("on_change", self.on_change, CHANGE_POLICIES)
        _positive_factor("eval_capacity_factor", self.eval_capacity_factor)
        self._check_ladder()
        _at_least("gradient_accumulation_steps", self.gradient_accumulation_steps, 1)
        _at_least("max_consecutive_skips", self.max_consecutive_skips, 1)
        _at_least("capture_warmup_iters", self.capture_warmup_iters, 1)
        _at_least("max_in_flight", self.max_in_flight, 1)
        _at_least("recheck_every", self.recheck_every, 0)
        if not self.compile_limit_s > 0:
            raise ConfigError(f"compile_limit_s: expected a number of seconds above 0; got {self.compile_limit_s!r}")
        _at_least("layers_every", self.layers_every, 1)
        _at_least("experts_every", self.experts_every, 0)
        _at_least("rotate_bytes", self.rotate_bytes, 1)
        if self.memory_limit_bytes is not None:
            _at_least("memory_limit_bytes", self.memory_limit_bytes, 1)
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(
                f"max_grad_norm: expected None or a number above 0 (inf measures only); got {self.max_grad_norm!r}"
            )
        if not 0 <= self.max_rerun_fraction <= 1:
            raise ConfigError(f"max_rerun_fraction: expected a share between 0 and 1; got {self.max_rerun_fraction!r}")
        if self.autocast not in (None, torch.bfloat16):
            raise ConfigError(
                f"autocast: expected None or torch.bfloat16 (float16 needs a loss scale, which there is none of); "
                f"got {self.autocast!r}"
            )
        _ = self.train_capacity

    def _check_ladder(self) -> None:
        object.__setattr__(self, "capacity_ladder", tuple(self.capacity_ladder))
        for factor in self.capacity_ladder:
            _positive_factor("capacity_ladder", factor)
        if None in self.capacity_ladder or list(self.capacity_ladder) != sorted(set(self.capacity_ladder)):
            raise ConfigError(
                f"capacity_ladder: expected ascending factors, dropless coming last by itself; got "
                f"{self.capacity_ladder}"
            )
        if self.overflow != "rerun" and (self.capacity_ladder or self.capacity_forecast):
            raise ConfigError(
                f"capacity_ladder, capacity_forecast: expected overflow='rerun', which runs a step again on a wider "
                f"variant; got overflow={self.overflow!r}"
            )

    @property
    def train_capacity(self) -> CapacityPolicy:
        """Capacity of training steps."""
        return CapacityPolicy(
            factor=self.capacity_factor,
            scope=self.capacity_scope,
            overflow=self.overflow,
            renormalize=self.renormalize_drops,
        )

    @property
    def eval_capacity(self) -> CapacityPolicy:
        """Capacity of evaluation: what exceeds it is dropped and counted, never rerun."""
        return CapacityPolicy(
            factor=self.eval_capacity_factor,
            scope=self.capacity_scope,
            overflow="drop",
            renormalize=self.renormalize_drops,
        )
