"""Two processes that are the ranks of every test here: started once, told what to run, killed where they hang."""

from __future__ import annotations

import concurrent.futures
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import staticmoe

RANKS = 2
# Of a call on a busy machine, importing torch included: ranks that miss each other say so long before.
SECONDS = 240


class Ranks:
    """The processes; `folder` takes the files by which their groups find each other."""

    def __init__(self, folder: Path) -> None:
        self.answered: dict[str, list[Any]] = {}
        self._folder = folder
        self._calls = 0
        self._running: list[subprocess.Popen[bytes]] = []
        self._threads = concurrent.futures.ThreadPoolExecutor(RANKS)

    def start(self) -> None:
        root = str(Path(staticmoe.__file__).parent.parent)
        paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        command = [sys.executable, str(Path(__file__).with_name("rank.py"))]
        pipe = subprocess.PIPE
        self._running = [subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment) for _ in range(RANKS)]

    def stop(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()
        self._running = []

    def leave(self) -> list[int]:
        """Close the inputs and wait for both processes to end."""
        for process in self._running:
            assert process.stdin is not None
            process.stdin.close()
        try:
            return [process.wait(SECONDS) for process in self._running]
        finally:
            self.stop()

    def call(self, file: str, function: str, **arguments: Any) -> list[tuple[str, Any]]:
        """What each rank answers: the text of its error, or "", and what the function returned."""
        if not self._running:
            self.start()
        self._calls += 1
        store = self._folder / f"store {self._calls}"
        for rank, process in enumerate(self._running):
            assert process.stdin is not None
            pickle.dump((file, function, arguments, rank, RANKS, str(store)), process.stdin)
            process.stdin.flush()
        waits = [self._threads.submit(pickle.load, process.stdout) for process in self._running]
        try:
            answers = [wait.result(SECONDS) for wait in waits]
        except BaseException as error:
            self.stop()
            if isinstance(error, (TimeoutError, EOFError)):
                pytest.fail(f"{function}: a rank hung or died ({type(error).__name__})")
            raise
        if any(error for error, _ in answers):
            # What is left of the groups is not the next test's.
            self.stop()
        return answers


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.stop()


@pytest.fixture
def on_ranks(processes: Ranks, request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Calls a function of the test's file, by name, on two gloo ranks; returns what each returned, errors raised."""

    def run(function: str, **arguments: Any) -> list[Any]:
        answers = processes.call(str(request.path), function, **arguments)
        errors = [f"rank {rank}:\n{error}" for rank, (error, _) in enumerate(answers) if error]
        assert not errors, "\n".join(errors)
        return [result for _, result in answers]

    return run


@pytest.fixture
def once_on_ranks(processes: Ranks, on_ranks: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Like `on_ranks`, and the same call of another test is not made again."""

    def run(function: str, **arguments: Any) -> list[Any]:
        key = f"{function} {arguments}"
        if key not in processes.answered:
            processes.answered[key] = on_ranks(function, **arguments)
        return processes.answered[key]

    return run


@pytest.fixture
def leave(processes: Ranks) -> Callable[[], list[int]]:
    """Lets the processes end by themselves, and returns their exit codes."""
    return processes.leave
