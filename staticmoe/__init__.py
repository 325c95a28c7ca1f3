"""staticmoe: trains mixture-of-experts models at static shape, one captured graph per iteration."""

from __future__ import annotations

from staticmoe.config import RunnerConfig
from staticmoe.errors import (
    AuditError,
    BatchError,
    CapacityError,
    CaptureError,
    ClosedError,
    CompileError,
    ConfigError,
    MemoryLimitError,
    ModelError,
    NonFiniteError,
    OptimizerError,
    ReplayError,
    ReplicaError,
    SelfCheckError,
    StaticMoEError,
)
from staticmoe.moe import StaticMoE
from staticmoe.observe.record import Reason
from staticmoe.observe.results import EvalResult, StepResult
from staticmoe.runner.batch_shape import MicroBatches
from staticmoe.runner.inputs import DeviceScalars
from staticmoe.runner.runner import StaticMoERunner

__version__ = "0.1.0"

__all__ = [
    "AuditError",
    "BatchError",
    "CapacityError",
    "CaptureError",
    "ClosedError",
    "CompileError",
    "ConfigError",
    "DeviceScalars",
    "EvalResult",
    "MemoryLimitError",
    "MicroBatches",
    "ModelError",
    "NonFiniteError",
    "OptimizerError",
    "Reason",
    "ReplayError",
    "ReplicaError",
    "RunnerConfig",
    "SelfCheckError",
    "StaticMoE",
    "StaticMoEError",
    "StaticMoERunner",
    "StepResult",
    "__version__",
]
