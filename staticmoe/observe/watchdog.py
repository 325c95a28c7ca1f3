"""A watch over a run that stands still: when no step comes for long, it writes down where every thread is."""

from __future__ import annotations

import collections
import datetime
import faulthandler
import logging
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

from staticmoe.errors import ConfigError

log = logging.getLogger(__name__)

_BEATS_TO_START = 5
_INTERVALS = 200
_POLL_SECONDS = 1.0


class Dump(Protocol):
    """Writes the stacks of all threads to a file that has a descriptor."""

    def __call__(self, file: TextIO, /) -> None: ...


class Watchdog:
    """Waits for the next step in a daemon thread; a sink for `runner.subscribe`, or call `beat()` once a step.

    A stall: no beat for `timeout_factor` times the median of the last 200 intervals, and for `minimum_seconds` at
    least. It is logged once, and the stacks of all threads are appended to run_dir/stalls.log. The first 5 beats only
    start the watch, since capturing takes long. As a sink it takes any record, also of an evaluation, for a sign of
    life, but measures intervals between training steps only. A call that holds the interpreter's lock keeps the
    watchdog from running too.

    Args:
        run_dir: folder of stalls.log, made if needed.
        timeout_factor: median intervals until a stall, over 1.
        minimum_seconds: until a stall, at least; over 0.
        clock: seconds that only grow.
        dump: writes the stacks to the file that it is called with.

    Raises:
        ConfigError: a factor or time that cannot work.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        timeout_factor: float = 10.0,
        minimum_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        dump: Dump = faulthandler.dump_traceback,
    ) -> None:
        if not timeout_factor > 1:
            raise ConfigError(f"timeout_factor: expected median intervals, over 1; got {timeout_factor}: use 10")
        if not minimum_seconds > 0:
            raise ConfigError(f"minimum_seconds: expected seconds, over 0; got {minimum_seconds}: use 30")
        self.path = Path(run_dir) / "stalls.log"
        self._factor, self._minimum = timeout_factor, minimum_seconds
        self._clock, self._dump = clock, dump
        self._lock = threading.Lock()
        self._intervals: collections.deque[float] = collections.deque(maxlen=_INTERVALS)
        self._beats = 0
        self._last = clock()
        self._last_was_step = False
        self._reported = False
        self._closed = threading.Event()
        # A daemon: a run that ends without close() ends all the same.
        self._thread = threading.Thread(target=self._watch, name="staticmoe-watchdog", daemon=True)
        self._thread.start()

    def beat(self) -> None:
        """Tell that a training step has come."""
        self._alive(step=True)

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Take `record` for a sign of life."""
        self._alive(step=record["kind"] == "train")

    def _alive(self, *, step: bool) -> None:
        with self._lock:
            now = self._clock()
            silence, self._last = now - self._last, now
            stalled, self._reported = self._reported, False
            # What a stall or an evaluation took is no step time.
            if step and self._last_was_step and not stalled:
                self._intervals.append(silence)
            self._beats += step
            self._last_was_step = step
        if stalled:
            log.warning("the run goes on after a stall of %.1f s", silence)

    def check(self) -> bool:
        """Report a stall that is not reported yet, and return whether there was one. The thread does this by itself."""
        with self._lock:
            silence = self._clock() - self._last
            if self._beats < _BEATS_TO_START or self._reported or not self._intervals:
                return False
            median = statistics.median(self._intervals)
            limit = max(self._factor * median, self._minimum)
            if silence < limit:
                return False
            self._reported = True
        what = f"no step for {silence:.1f} s (median {median:.3g} s, limit {limit:.3g} s)"
        log.error("stall: %s; the stacks of all threads are in %s", what, self.path)
        try:
            self._write(what)
        except Exception:
            # A full disk must not end the watch.
            log.exception("the stacks could not be written to %s", self.path)
        return True

    def _write(self, what: str) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(f"{now} stall: {what}\n")
            self._dump(file)
            file.write("\n")

    def _watch(self) -> None:
        while not self._closed.wait(min(_POLL_SECONDS, self._minimum / 4)):
            self.check()

    def close(self) -> None:
        """Stop watching; a second call does nothing."""
        self._closed.set()
        self._thread.join()

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
