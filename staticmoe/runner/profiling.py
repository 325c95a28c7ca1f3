"""Profiles of a live job: which steps, what records them, where the file goes.

Asked for by `runner.profile(steps)`, by a file `profile.request` in the run's folder, or from outside:

    STATICMOE_PROFILE         start:count:ranks, as "10:5:0" or "10:5:all"; the first step is 1
    STATICMOE_PROFILE_KINETO  file to write to where no nsys is attached

The range is opened before the graphs are captured anew: a node that was made before has no origin that a tool knows.
"""

from __future__ import annotations

import contextlib
import gzip
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch

from staticmoe.errors import ConfigError
from staticmoe.phases import KINETO_VARIABLE, WINDOW_VARIABLE, shown_by

log = logging.getLogger(__name__)

# nsys tells its children so.
_NSYS = "NSYS_PROFILING_SESSION_ID"
REQUEST = "profile.request"
_REQUESTED_STEPS = 10
# Looking for a file takes about a microsecond.
_LOOK_EVERY = 16


class _Tool(Protocol):
    """What records a window."""

    def start(self) -> None:
        """Begin."""

    def stop(self, first: int, last: int) -> None:
        """End, having recorded these steps."""


class _Nsys:
    """An nsys that waits for the CUDA profiler's start, and writes its own file."""

    def start(self) -> None:
        """Begin."""
        torch.cuda.profiler.start()

    def stop(self, first: int, last: int) -> None:
        """End."""
        torch.cuda.profiler.stop()
        log.info("nsys has recorded steps %d to %d", first, last)


class _Kineto:
    """torch.profiler, into a Chrome trace.

    Args:
        path: file to write, packed where it ends in .gz; a folder gets one named by the steps.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=kinds)
        self._ranges = contextlib.ExitStack()

    def start(self) -> None:
        """Begin."""
        self._profile.start()
        # It does not see ranges of nvtx.
        self._ranges.enter_context(shown_by(torch.profiler.record_function))

    def stop(self, first: int, last: int) -> None:
        """End and write the file, under its name when it is whole."""
        self._ranges.close()
        self._profile.stop()
        path = self._path if self._path.suffix else self._path / f"steps_{first}_{last}.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        # torch packs by the name's end.
        plain = path.with_name(f".{path.name}.partial.json")
        packed = path.with_name(f".{path.name}.partial")
        try:
            self._profile.export_chrome_trace(str(plain))
            if path.suffix == ".gz":
                with plain.open("rb") as source, gzip.open(packed, "wb") as target:
                    shutil.copyfileobj(source, target)
            else:
                os.replace(plain, packed)
            os.replace(packed, path)
        finally:
            plain.unlink(missing_ok=True)
            packed.unlink(missing_ok=True)
        log.info("profile of steps %d to %d: %s; look at it with staticmoe profile --analyse", first, last, path)


class Profiling:
    """Opens and closes the windows of one runner.

    Args:
        run_dir: the run's folder, or None.
        prepare: waits for the steps in flight and lets the next ones be captured anew.
        flush: waits for the steps in flight.
        environment: of the process.

    Raises:
        ConfigError: the environment's window is not start:count:ranks, or there is nowhere to write it to.
    """

    def __init__(
        self,
        run_dir: str | Path | None,
        prepare: Callable[[], None],
        flush: Callable[[], None],
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._run_dir = Path(run_dir) if run_dir is not None else None
        self._prepare, self._flush = prepare, flush
        self._environment = environment
        self._start, self._count = _window(environment)
        self._left = self._wanted = 0
        self._first = 0
        self._tool: _Tool | None = None
        if self._count:
            # Now, and not in the middle of the training.
            self._make_tool()

    def request(self, steps: int) -> None:
        """Record the next `steps` steps.

        Raises:
            ConfigError: not a positive integer, a window is open, or there is nowhere to write to.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ConfigError(f"profile: expected a number of steps of at least 1; got {steps!r}")
        if self._left or self._wanted:
            raise ConfigError(f"profile: expected no open window; one of {self._left or self._wanted} steps is")
        self._make_tool()
        self._wanted = steps

    def begin(self, step: int) -> None:
        """Before `step`: open the window where it is due."""
        if self._left:
            return
        if self._count and step >= self._start:
            self._wanted, self._count = self._count, 0
        elif self._run_dir is not None and step % _LOOK_EVERY == 0:
            self._look()
        if self._wanted:
            self._open(step)

    def _open(self, step: int) -> None:
        steps, self._wanted = self._wanted, 0
        self._flush()
        try:
            tool = self._make_tool()
            tool.start()
        except Exception:
            # A profile never stops training: another profiler may be at work.
            log.exception("no profile of step %d and those after it", step)
            return
        self._tool, self._first, self._left = tool, step, steps
        self._prepare()

    def end(self, step: int) -> None:
        """After `step`: close the window where it is over."""
        if self._left:
            self._left -= 1
            if not self._left:
                self.close(step)

    def close(self, step: int) -> None:
        """End an open window at once: what was recorded up to `step` is written."""
        tool, self._tool, self._left = self._tool, None, 0
        if tool is None:
            return
        try:
            self._flush()
        finally:
            self._stop(tool, step)

    def _stop(self, tool: _Tool, step: int) -> None:
        try:
            tool.stop(self._first, step)
        except Exception:
            # A profile never stops training.
            log.exception("the profile of steps %d to %d is lost", self._first, step)

    def _look(self) -> None:
        """Take a request that lies in the run's folder; it is removed, so that it counts once."""
        assert self._run_dir is not None
        path = self._run_dir / REQUEST
        try:
            text = path.read_text().strip()
            path.unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("%s: %s", path, error)
            return
        if text and not (text.isdecimal() and int(text)):
            log.warning("%s: expected a number of steps, or nothing for %d; got %r", path, _REQUESTED_STEPS, text[:40])
            return
        self._wanted = int(text or _REQUESTED_STEPS)

    def _make_tool(self) -> _Tool:
        """What is there to record with.

        Raises:
            ConfigError: nothing, or nowhere to write to.
        """
        if _NSYS in self._environment and torch.cuda.is_available():
            return _Nsys()
        given = self._environment.get(KINETO_VARIABLE)
        if given:
            return _Kineto(Path(given.replace("{rank}", self._environment.get("RANK", "0"))))
        if self._run_dir is None:
            raise ConfigError(
                f"profile: expected an nsys that records this process, RunnerConfig(run_dir=...) or "
                f"{KINETO_VARIABLE}=file; got none; run it under `staticmoe profile --`, or give it a run_dir"
            )
        return _Kineto(self._run_dir / "profile")


def _window(environment: Mapping[str, str]) -> tuple[int, int]:
    """First step and number of steps that the environment asks this rank for; (0, 0) for none."""
    text = environment.get(WINDOW_VARIABLE)
    if not text:
        return 0, 0
    found = re.fullmatch(r"(\d+):([1-9]\d*):(all|\d+(?:,\d+)*)", text)
    if found is None:
        raise ConfigError(f"{WINDOW_VARIABLE}: expected start:count:ranks, as 10:5:0 or 10:5:all; got {text!r}")
    start, count, ranks = found.groups()
    mine = ranks == "all" or environment.get("RANK", "0") in ranks.split(",")
    return (int(start), int(count)) if mine else (0, 0)
