"""Every error that staticmoe raises on purpose: what was expected, what came, what to do.

All of them derive from `StaticMoEError`; those caused by an argument are `ValueError` as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class StaticMoEError(Exception):
    """Base class of the errors raised on purpose by this package."""


class ConfigError(StaticMoEError, ValueError):
    """An option or argument has a value that cannot work. Names the option, the value and the fix."""


class BatchError(StaticMoEError, ValueError):
    """A batch does not fit the structure, shape, dtype or device that was captured."""


class ModelError(StaticMoEError, ValueError):
    """The model cannot be wrapped: wrong kind, meta device, no participant, a parameter without gradient."""


class OptimizerError(StaticMoEError, ValueError):
    """The optimizer cannot run inside the captured iteration, or no longer belongs to the model."""


class CaptureError(StaticMoEError, RuntimeError):
    """The iteration cannot be recorded. Names the operation, the module and the line in the user's file."""


class AuditError(CaptureError):
    """The audit found what a replay could not repeat: one error for all of it, each with code, line, why and mend.

    Attributes:
        findings: all of them, most severe first; see `staticmoe.capture.findings.Finding`.
    """

    def __init__(self, message: str, findings: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.findings = tuple(findings)


class CompileError(CaptureError):
    """A dense region of the model cannot be compiled whole. Names the region, what the compiler said and the fix."""


class ReplayError(StaticMoEError, RuntimeError):
    """A captured iteration can no longer be replayed as it was captured."""


class SelfCheckError(StaticMoEError, RuntimeError):
    """A replay did not reproduce the uncaptured iteration, or a block its oracle. Names what differs, and how much."""


class CapacityError(StaticMoEError, RuntimeError):
    """More rows than the buffer holds, under a policy that does not go on. Names layer, rows, factor."""


class MemoryLimitError(StaticMoEError, RuntimeError):
    """A run would need more memory than there is, or than it may take. Names limit and forecast, bytes by part."""


class NonFiniteError(StaticMoEError, RuntimeError):
    """Loss or gradient is not finite, under a policy that does not go on."""


class ReplicaError(StaticMoEError, RuntimeError):
    """Ranks that train together do not hold or do the same, or one of them is missing. Names what, and the ranks."""


class ClosedError(StaticMoEError, RuntimeError):
    """The runner was closed, or a part of it was used after it was."""
