"""Capturing an iteration: backends, the tape, and the book of where tensors come from."""

from __future__ import annotations

from staticmoe.capture.cuda_graph import CudaGraphCapture
from staticmoe.capture.emulated import EmulatedCapture
from staticmoe.capture.interface import Capture, Graph, Stream, Upload
from staticmoe.capture.provenance import Provenance
from staticmoe.capture.recorder import Recorder
from staticmoe.capture.tape import Tape
from staticmoe.capture.uncaptured import Uncaptured

__all__ = [
    "Capture",
    "CudaGraphCapture",
    "EmulatedCapture",
    "Graph",
    "Provenance",
    "Recorder",
    "Stream",
    "Tape",
    "Uncaptured",
    "Upload",
]
