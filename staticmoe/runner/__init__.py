"""The runner: inputs, iteration, guard, commit, programs. Knows the layers only through `StepParticipant`."""

from __future__ import annotations

from staticmoe.runner.inputs import DeviceScalars, MicroBatches
from staticmoe.runner.participants import StepBinding, StepParticipant
from staticmoe.runner.runner import StaticMoERunner

__all__ = ["DeviceScalars", "MicroBatches", "StaticMoERunner", "StepBinding", "StepParticipant"]
