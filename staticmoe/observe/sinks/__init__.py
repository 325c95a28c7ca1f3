"""Where records go: each sink is called with one record, a dictionary of host values, per step."""

from __future__ import annotations

from staticmoe.observe.sinks.jsonl import JsonlError, JsonlSink
from staticmoe.observe.sinks.prometheus import PrometheusSink
from staticmoe.observe.sinks.tensorboard import TensorBoardSink

__all__ = ["JsonlError", "JsonlSink", "PrometheusSink", "TensorBoardSink"]
