"""`staticmoe train` killed again and again and resumed: does it end bitwise where an uninterrupted run does?

    python profiles/kill_and_resume.py --output profiles/results/cpu/kill_and_resume.json
    python profiles/kill_and_resume.py --kills 3

One run is left alone. Others, of the same options, are killed by SIGKILL and SIGTERM by turns and resumed, up to
`--per-run` times each, and then finish. A kill comes at a time drawn from `--seed`: while the process starts or
resumes, some time after its first step, or when it is seen to write a checkpoint. After each kill the checkpoint that
is there must be whole, and what was recorded up to its step must all be there. A run killed before its first checkpoint
has nothing to go on from; its directory is emptied and it begins anew.

At its end a killed run's checkpoint (parameters, optimizer, scheduler, totals, random state) must be bitwise the
uninterrupted run's, and so must be the records: of a step that occurs again after a resume the last line counts, and
the lines before it are compared as well.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import staticmoe
from staticmoe.bench.result import source_commit, write_result
from staticmoe.demo.checkpoint import CHECKPOINT_NAME, load_checkpoint
from staticmoe.observe.sinks.jsonl import read_records

SIGNALS = (signal.SIGKILL, signal.SIGTERM)
STEPS, CHECKPOINT_EVERY = 200, 3
# Dropout, so that the random state counts; a bound that drops, so that routing does. A step takes some 15 ms.
OPTIONS = (
    "--depth", "1", "--batch-size", "2", "--seq-len", "16", "--eval-windows", "2", "--eval-every", "20",
    "--dropout", "0.1", "--capacity-factor", "1.25", "--capacity-scope", "expert", "--overflow", "drop",
    "--capture", "emulate",
)  # fmt: skip
# Where a kill is aimed at, and how often; where it hit is seen afterwards. A run without a checkpoint has its own odds.
AIMS = {"start": 0.15, "write": 0.4, "steps": 0.45}
FIRST_AIMS = {"start": 0.7, "write": 0.2, "steps": 0.1}
# Longest time from a process's first step to its kill, and from the first sight of a half-written file, in seconds.
LATEST, LATEST_WRITING = 0.4, 0.004
PHASES = ("before the first checkpoint", "while resuming", "while writing", "between")
DEADLINE = 300.0
# Keys of a record that are another number in each run.
MEASURED = ("time/", "throughput/", "gpu/", "memory/")
# The checkout's package, wherever the script is called from.
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(staticmoe.__file__).resolve().parents[1])}


def text() -> str:
    """Some kilobytes of words from a small vocabulary."""
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(1, 8))) for _ in range(200)]
    return " ".join(draw.choices(words, weights=[1 / (rank + 1) for rank in range(200)], k=4000))


@dataclasses.dataclass(frozen=True)
class Life:
    """One process of a run, from its start.

    Attributes:
        folder: of the run.
        process: `staticmoe train`.
        began: when, by time.monotonic.
        size: bytes of records before it.
        written: when the temporary checkpoint was last written before it; 0: there was none.
    """

    folder: Path
    process: subprocess.Popen[bytes]
    began: float
    size: int
    written: int

    @classmethod
    def start(cls, folder: Path, data: Path, steps: int) -> Life:
        """Begin the run, or resume it from its checkpoint; what no checkpoint was made of is thrown away."""
        command = [sys.executable, "-c", "from staticmoe.cli.app import main; main()", "train"]
        if (folder / CHECKPOINT_NAME).exists():
            command += ["--resume", str(folder)]
        else:
            shutil.rmtree(folder, ignore_errors=True)
            command += ["--run-dir", str(folder), "--data", str(data), "--steps", str(steps)]
            command += ["--checkpoint-every", str(CHECKPOINT_EVERY), *OPTIONS]
        folder.mkdir(exist_ok=True)
        log = data.with_name(f"{folder.name}.log").open("ab")
        with log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=ENVIRONMENT)
        return cls(folder, process, time.monotonic(), _size(folder), _written(folder))

    def wait_for(self, seen: Callable[[], bool]) -> bool:
        """Wait until `seen`; False where the process ended before."""
        while not seen():
            if self.process.poll() is not None:
                return False
            if time.monotonic() - self.began > DEADLINE:
                raise SystemExit(f"{self.folder.name}: nothing happened for {DEADLINE:.0f} s")
            time.sleep(0.0005)
        return True

    @property
    def stepped(self) -> bool:
        """Whether a step of this process has been recorded."""
        return _size(self.folder) > max(self.size, _META_BYTES)

    @property
    def writing(self) -> bool:
        """Whether this process has a half-written checkpoint."""
        return _written(self.folder) not in (0, self.written)

    def finish(self) -> None:
        """Let it come to its end, which must be a good one."""
        code = self.process.wait(DEADLINE)
        if code:
            raise SystemExit(f"{self.folder.name}: exit code {code}; see {self.folder.name}.log, kept by --folder")


# The first line of a file of records says what they are, and is there before the first step.
_META_BYTES = 64


def _size(folder: Path) -> int:
    try:
        return (folder / "metrics.jsonl").stat().st_size
    except FileNotFoundError:
        return 0


def _written(folder: Path) -> int:
    try:
        return (folder / f".{CHECKPOINT_NAME}.tmp").stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def kill(life: Life, aim: str, how: signal.Signals, draw: random.Random, start_s: float) -> dict[str, Any] | None:
    """Kill a process; return what was hit, or None where it had come to its end before.

    Args:
        life: the process.
        aim: one of `AIMS`.
        how: the signal.
        draw: of the time.
        start_s: how long a process takes to its first step.
    """
    delay = draw.uniform(0, start_s if aim == "start" else LATEST)
    if aim != "start" and not life.wait_for(lambda: life.stepped):
        return None
    moment = time.monotonic() + delay
    alive = life.wait_for(lambda: time.monotonic() >= moment)
    if alive and aim == "write":
        alive = life.wait_for(lambda: life.writing)
        time.sleep(draw.uniform(0, LATEST_WRITING))
    if not alive:
        return None
    life.process.send_signal(how)
    if life.process.wait(DEADLINE) != -how:
        # It had just come to its end.
        return None
    return {"signal": how.name, "aim": aim, "phase": phase(life), **left_behind(life.folder)}


def phase(life: Life) -> str:
    """What the process was at when it was killed."""
    if life.writing:
        return "while writing"
    if not (life.folder / CHECKPOINT_NAME).exists():
        return "before the first checkpoint"
    return "between" if life.stepped else "while resuming"


def left_behind(folder: Path) -> dict[str, int]:
    """The step of the checkpoint, which must be whole, and the last one recorded; all up to the former must be there.

    Raises:
        SystemExit: a record is missing.
    """
    saved = load_checkpoint(folder)["step"] if (folder / CHECKPOINT_NAME).exists() else 0
    steps = {record["step"] for record in train_records(folder)}
    missing = set(range(1, saved + 1)) - steps
    if missing:
        raise SystemExit(f"{folder.name}: the checkpoint is of step {saved}, but no record of steps {sorted(missing)}")
    return {"saved_step": saved, "recorded_step": max(steps, default=0)}


def train_records(folder: Path) -> list[dict[str, Any]]:
    """Records of training steps, in the order of the file, without what a clock or the machine has put there."""
    path = folder / "metrics.jsonl"
    records = read_records(path) if path.exists() else []
    return [
        {key: value for key, value in record.items() if key != "time" and not key.startswith(MEASURED)}
        for record in records
        if record.get("kind") == "train"
    ]


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two nested values are not the same, tensors bit by bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        same = same and torch.equal(
            one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
        )
        return [] if same else [where]
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return [f"{where}: {sorted(map(str, one.keys() ^ other.keys()))}"]
        return [found for key in one for found in differences(one[key], other[key], f"{where}.{key}")]
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            return [f"{where}: {len(one)} against {len(other)}"]
        pairs = enumerate(zip(one, other, strict=True))
        return [found for number, pair in pairs for found in differences(*pair, f"{where}[{number}]")]
    same = type(one) is type(other) and (one == other or (one != one and other != other))
    return [] if same else [f"{where}: {one!r} against {other!r}"]


def compared(folder: Path, straight: Path) -> dict[str, Any]:
    """A finished run beside the uninterrupted one."""
    records, wanted = train_records(folder), {record["step"]: record for record in train_records(straight)}
    last = {record["step"]: record for record in records}
    heldout = [{r["step"]: r for r in read_records(f / "heldout.jsonl")[1:]} for f in (folder, straight)]
    mine, theirs = load_checkpoint(folder), load_checkpoint(straight)
    return {
        "tensors": sum(isinstance(value, Tensor) for value in _leaves(mine)),
        "checkpoint": differences(mine, theirs, "checkpoint"),
        "records": differences([*sorted(last.items())], [*sorted(wanted.items())], "records"),
        "held_out": differences(*heldout, "held out"),
        "recorded_again": len(records) - len(last),
        "recorded_again_differently": sum(record != wanted.get(record["step"]) for record in records),
    }


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for one in value for leaf in _leaves(one)] if isinstance(value, (list, tuple)) else [value]


def straight_run(folder: Path, data: Path, steps: int) -> float:
    """Run without interruption; return the seconds that the start took."""
    life = Life.start(folder, data, steps)
    life.wait_for(lambda: life.stepped)
    took = time.monotonic() - life.began
    life.finish()
    return took


def killed_run(
    folder: Path, data: Path, steps: int, signals: list[signal.Signals], draw: random.Random, start_s: float
) -> list[dict[str, Any]]:
    """Run, killed by each of `signals` in turn or until it comes to its end, and let it finish; return the kills."""
    found: list[dict[str, Any]] = []
    for how in signals:
        odds = AIMS if (folder / CHECKPOINT_NAME).exists() else FIRST_AIMS
        (aim,) = draw.choices(list(odds), list(odds.values()))
        life = Life.start(folder, data, steps)
        hit = kill(life, aim, how, draw, start_s)
        if hit is None:
            life.finish()
            return found
        found.append({"run": folder.name, **hit})
        print(f"{folder.name}: {hit}", flush=True)
    Life.start(folder, data, steps).finish()
    return found


def study(folder: Path, kills: int, per_run: int, steps: int, seed: int) -> dict[str, Any]:
    """The uninterrupted run, and killed ones until there are that many kills."""
    data = folder / "text.txt"
    data.write_text(text())
    draw, done, runs = random.Random(seed), [], {}
    began = time.monotonic()
    start_s = straight_run(folder / "straight", data, steps)
    while len(done) < kills:
        name = f"run {len(runs) + 1}"
        signals = [SIGNALS[n % 2] for n in range(len(done), min(kills, len(done) + per_run))]
        done += killed_run(folder / name, data, steps, signals, draw, start_s)
        runs[name] = compared(folder / name, folder / "straight")
        print(f"{name}: {runs[name]}", flush=True)
    counts = collections.Counter((hit["phase"], hit["signal"]) for hit in done)
    return {
        "kills": len(done),
        "phases": {name: {how.name: counts[name, how.name] for how in SIGNALS} for name in PHASES},
        "same": all(is_same(row) for row in runs.values()),
        "start_s": start_s,
        "wall_s": time.monotonic() - began,
        "runs": runs,
        "each": done,
    }


def is_same(row: dict[str, Any]) -> bool:
    """Whether a killed run ended as the uninterrupted one, and each time it repeated a step, it gave the same."""
    return not (row["checkpoint"] or row["records"] or row["held_out"] or row["recorded_again_differently"])


def print_tables(result: dict[str, Any]) -> None:
    """What was found, for people."""
    console = Console()
    table = Table("killed", *(how.name for how in SIGNALS), title=f"{result['kills']} kills")
    for name, row in result["phases"].items():
        table.add_row(name, *map(str, row.values()))
    console.print(table)
    table = Table("run", "kills", "tensors", "bitwise", "steps recorded again", "differently")
    kills = collections.Counter(hit["run"] for hit in result["each"])
    for name, row in result["runs"].items():
        numbers = (str(row[key]) for key in ("recorded_again", "recorded_again_differently"))
        table.add_row(name, str(kills[name]), str(row["tensors"]), "yes" if is_same(row) else "NO", *numbers)
    console.print(table)


def main() -> None:
    """Kill, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--per-run", type=int, default=10, help="most kills of one run")
    parser.add_argument("--steps", type=int, default=STEPS, help="of a run")
    parser.add_argument("--seed", type=int, default=0, help="of the times")
    parser.add_argument("--folder", type=Path, help="keep the runs here, a folder that does not exist yet")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--commit", default=None, help="of the code; default: git's")
    arguments = parser.parse_args()
    provenance = {
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": arguments.commit or source_commit(),
        "data": "words of a small vocabulary, as bytes",
        "protocol": f"{arguments.steps} steps, a checkpoint every {CHECKPOINT_EVERY}, {' '.join(OPTIONS)}; at most "
        f"{arguments.per_run} kills a run, at times drawn from seed {arguments.seed}",
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=arguments.folder is None)
        found = study(folder, arguments.kills, arguments.per_run, arguments.steps, arguments.seed)
    result = {"provenance": provenance, **found}
    if arguments.output:
        write_result(result, arguments.output)
    print_tables(result)
    if not result["same"]:
        raise SystemExit("a killed run did not end as the uninterrupted one")


if __name__ == "__main__":
    main()
