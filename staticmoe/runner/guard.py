"""Whether a step may commit: reasons on the device, policies, and what the host does about a record.

The device decides at once (`veto`, `halted`); the host learns of it late and acts at one fixed point.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from staticmoe.config import RunnerConfig
from staticmoe.errors import CapacityError, NonFiniteError, StaticMoEError
from staticmoe.observe.record import Reason, Record

_NONFINITE = Reason.NONFINITE_LOSS | Reason.NONFINITE_GRADIENT
# A share of fewer steps than this says little.
_STEPS_TO_JUDGE_RERUNS = 50
_OVERFLOW = Reason.CAPACITY_OVERFLOW | Reason.STASH_OVERFLOW


@dataclasses.dataclass(frozen=True)
class GuardPolicy:
    """What a reason does to a step, as bits of `Reason`.

    Attributes:
        vetoes: the step commits nothing.
        halts: nothing commits until the host has dealt with it.
        dooms: the step will be run again, so that nothing it computes is looked at.
    """

    vetoes: int
    halts: int
    dooms: int

    @classmethod
    def of(cls, config: RunnerConfig) -> GuardPolicy:
        """The policy that the options ask for; non-finite values never commit."""
        vetoes, halts = int(_NONFINITE | Reason.STASH_OVERFLOW), 0
        if config.nonfinite == "raise":
            halts |= int(_NONFINITE)
        if config.overflow in ("skip", "raise", "rerun"):
            vetoes |= int(Reason.CAPACITY_OVERFLOW)
        if config.overflow in ("raise", "rerun"):
            halts |= int(_OVERFLOW)
        return cls(vetoes=vetoes, halts=halts, dooms=int(_OVERFLOW) if config.overflow == "rerun" else 0)


class DeviceGuard:
    """The scalars by which the device guards itself.

    Attributes:
        halted: fp32 0-dim, 1 while nothing may commit until the host has acted.
        veto: fp32 0-dim, exactly 0 or 1: fused optimizers test found_inf == 1.0, any other value would apply.
        withheld: fp32 0-dim, 1 while the host tries iterations out and nothing may commit.
        doomed: fp32 0-dim, 1 from where it is known that the running step will not commit and will be run again.
        void: int64 0-dim, 1 where the step began halted.
        reasons: int64 0-dim, `Reason` bits of the running step.
        committed: int64 0-dim, steps committed so far.
    """

    def __init__(self, policy: GuardPolicy, device: torch.device) -> None:
        self._policy = policy
        self.halted = torch.zeros((), dtype=torch.float32, device=device)
        self.veto = torch.zeros((), dtype=torch.float32, device=device)
        self.withheld = torch.zeros((), dtype=torch.float32, device=device)
        self.doomed = torch.zeros((), dtype=torch.float32, device=device)
        self.void = torch.zeros((), dtype=torch.int64, device=device)
        self.reasons = torch.zeros((), dtype=torch.int64, device=device)
        self.committed = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Name -> tensor, for the book of origins."""
        names = ("halted", "veto", "withheld", "doomed", "void", "reasons", "committed")
        return {f"guard {name}": getattr(self, name) for name in names}

    @contextlib.contextmanager
    def withholding(self) -> Iterator[None]:
        """Let steps run in full, even while halted, and commit nothing; afterwards the guard is as before."""
        kept = [(tensor, tensor.clone()) for tensor in (self.halted, self.committed, self.withheld)]
        self.withheld.fill_(1)
        self.halted.zero_()
        try:
            yield
        finally:
            for tensor, before in kept:
                tensor.copy_(before)

    def begin(self) -> None:
        """Start a step. Graph-safe."""
        self.reasons.zero_()
        self.void.copy_(self.halted)
        self.doomed.copy_(self.halted)

    def decide(self, loss: Tensor, grad_norm: Tensor) -> None:
        """Set `veto` and `halted` from the reasons so far and from non-finite values. Graph-safe."""
        self.reasons.bitwise_or_(~torch.isfinite(loss) * int(Reason.NONFINITE_LOSS))
        self.reasons.bitwise_or_(~torch.isfinite(grad_norm) * int(Reason.NONFINITE_GRADIENT))
        halted, withheld = self.halted > 0, self.withheld > 0
        vetoed = halted | withheld | ((self.reasons & self._policy.vetoes) != 0)
        # A trial halts nothing: the next one would find the device halted, and compute nothing.
        self.halted.copy_(halted | (((self.reasons & self._policy.halts) != 0) & ~withheld))
        self.veto.copy_(vetoed)
        self.committed.add_(~vetoed)


class HostGuard:
    """What the host makes of the records, in order."""

    def __init__(self, config: RunnerConfig) -> None:
        self.configure(config)
        self.consecutive_skips = 0
        self._steps = self._reruns = 0

    def configure(self, config: RunnerConfig) -> None:
        """Judge by `config` from here on."""
        self._config = config
        self._policy = GuardPolicy.of(config)

    def wants_rerun(self, record: Record) -> bool:
        """Whether the policy runs `record`'s step again: its rows did not fit, so nothing else in it counts."""
        return self._config.overflow == "rerun" and not record.void and bool(record.reasons & _OVERFLOW)

    def halts(self, record: Record) -> bool:
        """Whether `record`'s step has halted the device."""
        return bool(record.reasons & self._policy.halts)

    def judge(
        self, record: Record, capacities: dict[str, int], required_factor: Callable[[], float]
    ) -> StaticMoEError | None:
        """Error that the policies demand for `record`, or None; counts skips in a row and reruns.

        Args:
            capacities: participant -> rows that its buffers hold, for the message.
            required_factor: tells with which the step's rows would have fitted, for the message.
        """
        self._steps += 1
        self._reruns += record.attempt > 0
        if self.halts(record):
            return self._error(record, self._policy.halts, capacities, f"step {record.launch} was not applied: ")
        if record.attempt and self._steps >= _STEPS_TO_JUDGE_RERUNS and self._reruns > self._allowed_reruns():
            return self._too_many_reruns(required_factor())
        if not record.veto:
            self.consecutive_skips = 0
            return None
        self.consecutive_skips += 1
        if self.consecutive_skips > self._config.max_consecutive_skips:
            count, self.consecutive_skips = self.consecutive_skips, 0
            limit = self._config.max_consecutive_skips
            prefix = f"{count} steps in a row were skipped (max_consecutive_skips={limit}), last: "
            return self._error(record, self._policy.vetoes, capacities, prefix)
        return None

    def _allowed_reruns(self) -> float:
        return self._config.max_rerun_fraction * self._steps

    def _too_many_reruns(self, required_factor: float) -> CapacityError:
        count, steps = self._reruns, self._steps
        self._steps = self._reruns = 0
        # Rounded up: a little less would be too little.
        enough = math.ceil(100 * required_factor) / 100
        return CapacityError(
            f"{count} of {steps} steps were run again because their rows did not fit (max_rerun_fraction="
            f"{self._config.max_rerun_fraction}); none was lost, but each costs a second run: the last would "
            f"have fitted with capacity_factor={enough:g} instead of {self._config.capacity_factor}"
        )

    def _error(self, record: Record, causes: int, capacities: dict[str, int], prefix: str) -> StaticMoEError:
        # What a policy lets pass, such as drops, is not what the step met.
        reasons = record.reasons & Reason(causes)
        if reasons & _OVERFLOW:
            return CapacityError(prefix + self._overflow_words(record, capacities))
        words = " and ".join(str(reason.name).lower().replace("_", " ") for reason in reasons)
        return NonFiniteError(
            f"{prefix}{words} (loss {record.scalars['loss']}, gradient norm {record.scalars['grad_norm']}); parameters "
            "and optimizer state are as before it; lower the learning rate, set max_grad_norm, or look at the batch"
        )

    def _overflow_words(self, record: Record, capacities: dict[str, int]) -> str:
        over = [
            f"'{name}' kept {sum(fields['kept'])} of {sum(fields['routed'])} assignments in {capacities[name]} rows"
            for name, fields in record.fields.items()
            if "kept" in fields and sum(fields["kept"]) < sum(fields["routed"])
        ]
        return (
            f"rows over capacity (capacity_factor={self._config.capacity_factor}, scope "
            f"'{self._config.capacity_scope}'): {'; '.join(over) or 'on another rank'}; raise the factor, or use "
            "overflow='drop'"
        )
