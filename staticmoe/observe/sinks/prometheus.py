"""Records as Prometheus metrics: served over HTTP, or kept in a file for the node exporter's textfile collector.

A metric of the registry is a gauge: "time/step_p50" is staticmoe_time_step_p50_seconds. Units are base units: seconds,
bytes, hertz, watts, and shares from 0 to 1 as ratio. An evaluation has gauges of its own, staticmoe_eval_...; the
user's own metrics share staticmoe_user, by their label `name`. A gauge appears with its first number, and is NaN where
its metric became null.
"""

from __future__ import annotations

import errno
import importlib.metadata
import math
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from staticmoe.errors import ClosedError, ConfigError
from staticmoe.observe.metrics import REGISTRY, USER_PREFIX, Metric

_PREFIX = "staticmoe_"
# Unit -> how a metric's name may end with it, how a Prometheus name ends, and the factor to that unit.
_BASE_UNITS: Mapping[str, tuple[str, str, float]] = {
    "s": ("_seconds", "_seconds", 1.0),
    "bytes": ("_bytes", "_bytes", 1.0),
    "ratio": ("_ratio", "_ratio", 1.0),
    "W": ("_watts", "_watts", 1.0),
    "MHz": ("_mhz", "_hertz", 1e6),
    "tokens/s": ("_per_s", "_per_second", 1.0),
    "TFLOP/s": ("_tflops", "_flops", 1e12),
}
_STEP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SECONDS_PER_FILE = 1.0
_RUN_AGAIN = frozenset({"capacity_overflow", "stash_overflow"})


class PrometheusSink:
    """Counts what records tell, and shows it to Prometheus; a sink for `runner.subscribe`.

    Counters begin at 0 with the sink and count every training step once, void attempts never: assignments and steps
    where the step committed, reruns and skips by reason, several of one step joined by "+". The histogram of step
    durations takes the time between the records of steps that follow each other, as long as they are read equally
    late: not across an evaluation or a flush.

    Args:
        port: to serve on; 0 picks a free one. Not used with `textfile`.
        host: address to listen on; "0.0.0.0" for all.
        registry: collector registry to add the metrics to; None makes one.
        textfile: *.prom file, replaced at most once a second and by `close()`, instead of serving.
        clock: seconds that only grow, for `textfile`.

    Attributes:
        port: that is served on, or None with `textfile`.

    Raises:
        ConfigError: prometheus-client is not installed, or the port is taken.
    """

    def __init__(
        self,
        port: int = 9464,
        host: str = "127.0.0.1",
        registry: Any = None,
        textfile: str | os.PathLike[str] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client = _prometheus_client()
        self._registry = registry if registry is not None else client.CollectorRegistry()
        self._textfile = Path(textfile) if textfile is not None else None
        self._clock = clock
        self._written: float | None = None
        self._collectors: list[Any] = []
        self._gauges: dict[str, Any] = {}
        self._users: set[tuple[str, str]] = set()
        self._previous: tuple[float, Any] | None = None
        self._closed = False
        self._server: tuple[Any, threading.Thread] | None = None
        self.port: int | None = None
        if self._textfile is None:
            # Before anything is registered, so that a taken port leaves no metric behind.
            self._server = _serve(client, port, host, self._registry)
            self.port = self._server[0].server_port
        try:
            self._make_counters()
        except BaseException:
            self._shut()
            raise

    def _make_counters(self) -> None:
        client = self._client
        self._routed = self._add(client.Counter, "assignments_routed", "Assignments before capacity.", ["layer"])
        self._dropped = self._add(client.Counter, "assignments_dropped", "Assignments over capacity.", ["layer"])
        self._reruns = self._add(client.Counter, "reruns", "Steps that were run again.", ["reason"])
        self._skips = self._add(client.Counter, "skips", "Steps that committed nothing.", ["reason"])
        self._steps = self._add(client.Counter, "steps", "Committed steps.")
        self._durations = self._add(
            client.Histogram, "step_duration_seconds", "Time between records of steps in a row.", buckets=_STEP_BUCKETS
        )
        build = self._add(client.Info, "build", "Versions of what runs.")
        build.info({"version": _version("staticmoe"), "torch": _version("torch"), "python": platform.python_version()})

    def _add(self, kind: Callable[..., Any], name: str, text: str, labels: list[str] | None = None, **more: Any) -> Any:
        collector = kind(_PREFIX + name, text, labels or (), registry=self._registry, **more)
        self._collectors.append(collector)
        return collector

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Take `record`.

        Raises:
            ClosedError: the sink is closed.
            OSError: the text file could not be written; the one before is still there.
        """
        if self._closed:
            raise ClosedError("PrometheusSink: expected an open sink; this one was closed. Open a new one to go on")
        if record["void"]:
            self._previous = None
            return
        training = record["kind"] == "train"
        self._set_gauges(record, "" if training else "eval_")
        if training:
            self._count(record)
        else:
            self._previous = None
        if self._textfile is not None:
            now = self._clock()
            if self._written is None or now - self._written >= _SECONDS_PER_FILE:
                self._write(self._textfile)
                self._written = now

    def _count(self, record: Mapping[str, Any]) -> None:
        read, lag, reasons = record["time"], record.get("graph/record_lag"), record["reasons"]
        previous, self._previous = self._previous, (read, lag)
        again = [reason for reason in reasons if record["attempt"] and reason in _RUN_AGAIN]
        if record["attempt"] > 0:
            self._reruns.labels(reason="+".join(again)).inc()
        if record["skipped"]:
            # What made a step run again was cured by that, unless there is nothing else to skip it for.
            left = [reason for reason in reasons if reason not in again] or reasons
            self._skips.labels(reason="+".join(left)).inc()
            return
        self._steps.inc()
        self._gauge("last_step_timestamp_seconds", "When the last committed step's record was read.").set(read)
        for layer, load in record.get("moe", {}).items():
            self._routed.labels(layer=layer).inc(sum(load["routed"]))
            self._dropped.labels(layer=layer).inc(sum(load["dropped"]))
        # A wall clock can be set back; no step took less than nothing.
        if previous is not None and previous[1] == lag and read >= previous[0]:
            self._durations.observe(read - previous[0])

    def _set_gauges(self, record: Mapping[str, Any], kind: str) -> None:
        for key, value in record.items():
            number = float(value) if isinstance(value, Real) else math.nan
            if key.startswith(USER_PREFIX):
                name, user = f"{kind}user", key.removeprefix(USER_PREFIX)
                if (name, user) in self._users or not math.isnan(number):
                    self._users.add((name, user))
                    gauge = self._gauge(name, "What the loss function returned, by name.", ["name"])
                    gauge.labels(name=user).set(number)
            elif metric := REGISTRY.get(key):
                name, factor = _base_name(metric)
                name = kind + name.removeprefix(kind)
                if name in self._gauges or not math.isnan(number):
                    self._gauge(name, metric.help).set(number * factor)

    def _gauge(self, name: str, text: str, labels: list[str] | None = None) -> Any:
        """The gauge of that name, made where its first value comes: before, it would show a 0 that nobody measured."""
        if name not in self._gauges:
            self._gauges[name] = self._add(self._client.Gauge, name, text, labels)
        return self._gauges[name]

    def _write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The collector reads *.prom: a name of another ending keeps it from reading half a file.
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            partial.write_bytes(self._client.generate_latest(self._registry))
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def close(self) -> None:
        """Stop serving and free the port, or write the text file a last time; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._textfile is not None:
                self._write(self._textfile)
        finally:
            self._shut()

    def _shut(self) -> None:
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()
        for collector in self._collectors:
            self._registry.unregister(collector)

    def __enter__(self) -> PrometheusSink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _prometheus_client() -> ModuleType:
    try:
        # At the first sink: the package is an extra.
        import prometheus_client
    except ImportError as error:
        raise ConfigError(
            f"PrometheusSink: expected the package prometheus-client; got {error}: pip install 'staticmoe[report]'"
        ) from error
    return prometheus_client


def _serve(client: ModuleType, port: int, host: str, registry: Any) -> tuple[Any, threading.Thread]:
    try:
        return client.start_http_server(port, host, registry)
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            fix = "another process or sink serves there; port=0 picks a free one"
        else:
            fix = "choose an address of this machine and a port from 1024 to 65535, or port=0 for a free one"
        raise ConfigError(f"PrometheusSink: expected to serve on {host}:{port}; got {error}: {fix}") from error


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _base_name(metric: Metric) -> tuple[str, float]:
    """Name, without prefix, in base units, and the factor to them."""
    name = re.sub(r"\W", "_", metric.name)
    if metric.unit not in _BASE_UNITS:
        return name, 1.0
    ending, base, factor = _BASE_UNITS[metric.unit]
    return name.removesuffix(ending) + base, factor
