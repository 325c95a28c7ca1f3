"""Capturing an iteration: backends, the tape, and the book of where tensors come from."""

from __future__ import annotations

from staticmoe.capture.emulated import EmulatedCapture, Uncaptured
from staticmoe.capture.interface import Capture, Graph, Stream
from staticmoe.capture.provenance import Provenance
from staticmoe.capture.recorder import Recorder
from staticmoe.capture.tape import Tape

__all__ = ["Capture", "EmulatedCapture", "Graph", "Provenance", "Recorder", "Stream", "Tape", "Uncaptured"]
