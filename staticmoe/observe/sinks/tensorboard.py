"""Records as TensorBoard events: a scalar for each metric, and who got the tokens as a histogram over the experts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from numbers import Real
from types import TracebackType
from typing import Any

from staticmoe.errors import ClosedError, ConfigError

_FLUSH_SECONDS = 10


class TensorBoardSink:
    """Writes the metrics of every record at its step; those of an evaluation under "eval/". Void records are left out.

    The histogram "load/<module>" has a bucket for each expert, from its number to the next, that counts its routed
    assignments. A scalar is an fp32. In a folder that an earlier run wrote to, what that run wrote at or after the
    first training step of this one is hidden: after a resume the last record of a step counts.

    Args:
        log_dir: folder of the event files, made if needed.
        histogram_every: records, training and evaluation each on their own, from one histogram to the next; the first
            has one.

    Raises:
        ConfigError: tensorboard is not installed, or `histogram_every` is below 1.
    """

    def __init__(self, log_dir: str | os.PathLike[str], histogram_every: int = 50) -> None:
        if histogram_every < 1:
            raise ConfigError(f"histogram_every: expected records, at least 1; got {histogram_every}: use 50")
        try:
            # At the first sink: the package is an extra, and its import takes seconds.
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from torch.utils.tensorboard import FileWriter
        except ImportError as error:
            raise ConfigError(
                f"TensorBoardSink: expected the package tensorboard; got {error}: pip install 'staticmoe[report]'"
            ) from error
        self._events, self._summaries = event_pb2, summary_pb2
        self._writer: Any = FileWriter(os.fspath(log_dir), flush_secs=_FLUSH_SECONDS)
        self._histogram_every = histogram_every
        self._seen = {"train": 0, "eval": 0}

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Write `record`.

        Raises:
            ClosedError: the sink is closed.
            OSError: an earlier record could not be written.
        """
        if self._writer is None:
            raise ClosedError("TensorBoardSink: expected an open sink; this one was closed. Open a new one to go on")
        if record["void"]:
            return
        kind, step, time = record["kind"], record["step"], record["time"]
        if kind == "train" and not self._seen["train"]:
            self._hide_from(step, time)
        prefix = "" if kind == "train" else "eval/"
        values = [
            self._summaries.Summary.Value(tag=prefix + key.removeprefix(prefix), simple_value=float(value))
            for key, value in record.items()
            if "/" in key and isinstance(value, Real)
        ]
        if self._seen[kind] % self._histogram_every == 0:
            values += [
                self._summaries.Summary.Value(tag=f"{prefix}load/{module}", histo=self._over_experts(load["routed"]))
                for module, load in record.get("moe", {}).items()
            ]
        self._seen[kind] += 1
        self._writer.add_summary(self._summaries.Summary(value=values), step, time)

    def _hide_from(self, step: int, time: float) -> None:
        """Make readers forget what earlier event files of the folder hold from `step` on."""
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._writer.add_event(self._events.Event(session_log=start), step, time)

    def _over_experts(self, routed: Sequence[int]) -> Any:
        """Assignments of expert e as the bucket from e to e + 1."""
        middles = [(expert + 0.5, rows) for expert, rows in enumerate(routed)]
        return self._summaries.HistogramProto(
            min=0.0,
            max=float(len(routed)),
            num=float(sum(routed)),
            sum=sum(middle * rows for middle, rows in middles),
            sum_squares=sum(middle * middle * rows for middle, rows in middles),
            bucket_limit=[float(expert + 1) for expert in range(len(routed))],
            bucket=[float(rows) for rows in routed],
        )

    def close(self) -> None:
        """Write what is pending and close the file; a second call does nothing."""
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        writer.close()

    def __enter__(self) -> TensorBoardSink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
