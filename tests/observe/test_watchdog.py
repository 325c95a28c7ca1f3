"""A run that stands still leaves the stacks of its threads, once a stall; a run that goes on leaves nothing."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

import pytest

from staticmoe.errors import ConfigError
from staticmoe.observe import watchdog
from staticmoe.observe.watchdog import Watchdog


class Scene:
    """A watchdog whose thread has ended, so that only the test calls `check`, on a clock that only the test moves."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.now = 500.0
        self.dumps: list[float] = []
        self.dog = Watchdog(folder, clock=lambda: self.now, dump=self._dump, **options)
        self.dog.close()

    def _dump(self, file: TextIO, /) -> None:
        self.dumps.append(self.now)
        file.write("the stacks\n")

    def beats(self, *intervals: float) -> None:
        for interval in intervals:
            self.now += interval
            self.dog.beat()

    def silent(self, seconds: float) -> bool:
        self.now += seconds
        return self.dog.check()


def test_a_stall_is_ten_median_intervals(tmp_path: Path) -> None:
    scene = Scene(tmp_path, minimum_seconds=1.0)
    scene.beats(100.0, 2.0, 2.0, 3.0, 50.0, 2.0, 2.0)
    assert [scene.silent(19.99), scene.silent(0.02)] == [False, True]
    assert scene.dumps == [scene.now]


def test_a_stall_takes_the_minimum_at_least(tmp_path: Path) -> None:
    scene = Scene(tmp_path, timeout_factor=5.0)
    scene.beats(*[0.1] * 20)
    assert [scene.silent(29.9), scene.silent(0.2)] == [False, True]


def test_the_median_is_of_the_last_200_intervals(tmp_path: Path) -> None:
    scene = Scene(tmp_path, minimum_seconds=1.0)
    scene.beats(*[100.0] * 300, *[1.0] * 101)
    assert [scene.silent(9.9), scene.silent(0.2)] == [False, True]


def test_the_time_before_five_beats_is_ignored(tmp_path: Path) -> None:
    for beats, stalls in [(0, False), (1, False), (4, False), (5, True)]:
        scene = Scene(tmp_path, minimum_seconds=1.0)
        scene.beats(*[1.0] * beats)
        assert scene.silent(1e6) is stalls
    # The time before the first beat is no interval either.
    scene = Scene(tmp_path, minimum_seconds=1.0)
    scene.beats(1e6, 1.0, 1.0, 1e6, 1e6)
    assert scene.silent(6e6) is True


def test_a_stall_is_told_once_and_its_length_is_no_step_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(tmp_path, minimum_seconds=1.0)
    scene.beats(*[1.0] * 6)
    assert [scene.silent(seconds) for seconds in (10.0, 10.0, 500.0)] == [True, False, False]
    # Were stalls counted, eleven of 900 s beside five intervals of 1 s would make 900 s the median.
    for _ in range(11):
        scene.beats(900.0)
        assert scene.silent(10.0) is True
        assert scene.silent(10.0) is False
    assert len(scene.dumps) == 12
    text = (tmp_path / "stalls.log").read_text()
    assert text.count("stall: no step for 10.0 s (median 1 s, limit 10 s)\nthe stacks\n\n") == 12
    where = f"the stacks of all threads are in {tmp_path}/stalls.log"
    assert [(entry.levelname, entry.getMessage()) for entry in caplog.records[:2]] == [
        ("ERROR", f"stall: no step for 10.0 s (median 1 s, limit 10 s); {where}"),
        ("WARNING", "the run goes on after a stall of 1420.0 s"),
    ]
    assert len(caplog.records) == 12 + 11


def test_as_a_sink_an_evaluation_is_a_sign_of_life_but_no_step(tmp_path: Path) -> None:
    scene = Scene(tmp_path, minimum_seconds=1.0)

    def records(kind: str, *intervals: float) -> None:
        for interval in intervals:
            scene.now += interval
            scene.dog({"kind": kind, "void": False})

    records("eval", *[1.0] * 9)
    records("train", *[1.0] * 4)
    assert scene.silent(1e6) is False, "evaluations do not start the watch"
    records("train", 0.0, *[1.0] * 9)
    assert scene.silent(9.0) is False
    for _ in range(20):
        # The time from the step to the evaluation and from there to the next step would raise the median.
        records("eval", 9.0)
        assert scene.silent(9.0) is False
        records("train", 0.5)
    records("train", 1.0)
    assert [scene.silent(9.9), scene.silent(0.2)] == [False, True]


def test_a_dump_that_fails_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(tmp_path / "file" / "run", minimum_seconds=1.0)
    (tmp_path / "file").write_text("where the folder should be")
    scene.beats(*[1.0] * 6)
    assert [scene.silent(20.0), scene.silent(20.0)] == [True, False]
    scene.beats(1.0)
    (tmp_path / "file").unlink()
    assert scene.silent(20.0) is True and len(scene.dumps) == 1
    failures = [entry.getMessage() for entry in caplog.records if entry.exc_info]
    assert failures == [f"the stacks could not be written to {tmp_path}/file/run/stalls.log"]


def stuck_in_a_named_place(release: threading.Event) -> None:
    release.wait(60)


def test_its_thread_dumps_the_stacks_of_all_threads(tmp_path: Path) -> None:
    """The real thread, clock and dump. Waits for the outcome, so that a slow machine only makes it slower."""
    release = threading.Event()
    stuck = threading.Thread(target=stuck_in_a_named_place, args=(release,))
    stuck.start()
    path, deadline = tmp_path / "deep" / "stalls.log", time.monotonic() + 30
    try:
        with Watchdog(tmp_path / "deep", minimum_seconds=0.05) as dog:
            for _ in range(6):
                dog.beat()
            while time.monotonic() < deadline and not (path.exists() and path.read_text().endswith("\n\n")):
                time.sleep(0.02)
            time.sleep(0.2)
    finally:
        release.set()
        stuck.join()
    text = path.read_text()
    assert text.count("stall: no step for") == 1
    assert text.index("stall:") < text.index("stuck_in_a_named_place") and "test_its_thread_dumps" in text


def test_close_ends_the_thread_and_the_watch(tmp_path: Path) -> None:
    before = threading.active_count()
    dog = Watchdog(tmp_path, minimum_seconds=0.02)
    assert threading.active_count() == before + 1
    for _ in range(6):
        dog.beat()
    dog.close()
    dog.close()
    assert threading.active_count() == before
    seen = list(tmp_path.iterdir())
    time.sleep(0.1)
    assert list(tmp_path.iterdir()) == seen


# The package's front would import torch, which takes seconds and has nothing to do with this.
WITHOUT_FRONT = """
import sys, types
front = types.ModuleType("staticmoe")
front.__path__ = [sys.argv[1]]
sys.modules["staticmoe"] = front
from staticmoe.observe.watchdog import Watchdog
Watchdog(sys.argv[2]).beat()
print("end")
"""


def test_it_does_not_keep_the_process_alive(tmp_path: Path) -> None:
    package = Path(watchdog.__file__).parent.parent
    command = [sys.executable, "-c", WITHOUT_FRONT, str(package), str(tmp_path)]
    done = subprocess.run(command, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout_factor": 1.0}, "timeout_factor: expected median intervals, over 1; got 1.0"),
        ({"timeout_factor": float("nan")}, "timeout_factor: .* got nan"),
        ({"minimum_seconds": 0.0}, "minimum_seconds: expected seconds, over 0; got 0.0"),
    ],
)
def test_limits_that_cannot_work_are_refused(tmp_path: Path, options: dict[str, float], message: str) -> None:
    before = threading.active_count()
    with pytest.raises(ConfigError, match=message):
        Watchdog(tmp_path, **options)
    assert threading.active_count() == before


def test_nothing_is_logged_while_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        scene = Scene(tmp_path, minimum_seconds=1.0)
        for seconds in [1.0] * 20 + [9.0] * 3 + [1.0] * 20:
            scene.beats(seconds)
            assert scene.dog.check() is False
    assert caplog.records == [] and list(tmp_path.iterdir()) == []
