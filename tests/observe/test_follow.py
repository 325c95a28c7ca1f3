"""Following files that are being written: each record once, whatever was cut, renamed, replaced or is not there yet."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staticmoe.observe import follow
from staticmoe.observe.follow import Follower, RunFilesError, RunFollower
from staticmoe.observe.sinks.jsonl import JsonlSink

META = {"kind": "meta", "schema": 2}


def line(record: dict[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"


def write(path: Path, *steps: int, mode: str = "wb", meta: bool = True) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode) as stream:
        stream.write(b"".join([line(META)] * meta + [line({"step": step}) for step in steps]))


class Seen:
    """What a follower hands on: steps, and how often it began anew."""

    def __init__(self, path: Path) -> None:
        self.steps: list[int] = []
        self.restarts = 0
        self.follower = Follower(path, take=lambda record: self.steps.append(record["step"]), restart=self.forget)

    def forget(self) -> None:
        self.restarts += 1
        self.steps = []

    def poll(self, limit: int | None = None) -> list[int]:
        while self.follower.poll(limit):
            pass
        return self.steps


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@settings(max_examples=60)
@given(
    rotations=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    cuts=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    limit=st.none() | st.integers(1, 100),
    polled=st.lists(st.booleans(), min_size=1, max_size=30),
)
def test_every_record_comes_once_however_the_bytes_arrive(
    rotations: list[int], cuts: list[int], limit: int | None, polled: list[bool]
) -> None:
    """Bytes arrive in pieces of these sizes, a part has so many records; a look is taken, or not, after each piece."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        seen, sizes, looks = Seen(path), itertools.cycle(cuts), itertools.cycle(polled)
        written: list[int] = []

        def look() -> None:
            if next(looks):
                # One look, not as many as it takes: what lies beyond the limit is left for the next.
                seen.follower.poll(limit)
                assert seen.steps == written[: len(seen.steps)]

        for number, records in enumerate(rotations, start=1):
            if number > 1:
                path.rename(path.with_name(f"metrics.{number - 1}.jsonl"))
                look()
            steps = list(range(len(written), len(written) + records))
            data = b"".join([line(META), *(line({"step": step, "text": "é" * step}) for step in steps)])
            written += steps
            while data:
                size = next(sizes)
                with path.open("ab") as stream:
                    stream.write(data[:size])
                data = data[size:]
                look()
        assert seen.poll(limit) == written
        assert seen.restarts == 0
        seen.follower.close()


def test_the_files_of_a_rotating_sink_are_followed(path: Path) -> None:
    seen = Seen(path)
    with JsonlSink(path, max_bytes=150) as sink:
        for step in range(100):
            sink({"step": step})
            if step % 7 == 0:
                assert seen.poll() == list(range(step + 1))
    assert len(list(path.parent.iterdir())) > 10
    assert seen.poll() == list(range(100)) and seen.restarts == 0
    assert Seen(path).poll() == list(range(100))


def test_parts_are_in_the_order_of_their_numbers_and_other_files_are_none(path: Path) -> None:
    for name, step in (("metrics.2", 1), ("metrics.10", 2), ("metrics.1", 0), ("metrics", 3)):
        write(path.with_name(f"{name}.jsonl"), step)
    for name in ("metrics.x.jsonl", "metrics.1.jsonl.bak", "xmetrics.1.jsonl", "metricsx1.jsonl"):
        write(path.with_name(name), 99)
    assert Seen(path).poll() == [0, 1, 2, 3]


@pytest.mark.parametrize("when", range(5))
def test_a_rotation_between_two_looks_at_the_names_loses_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, when: int
) -> None:
    """The names are listed, then the file is renamed, then what stands behind the names is looked at."""
    write(path, 0)
    write(path.with_name("metrics.1.jsonl"), 10)
    seen, listdir, calls = Seen(path), os.listdir, itertools.count()

    def list_then_rotate(folder: Path) -> list[str]:
        names = listdir(folder)
        if next(calls) == when:
            path.rename(path.with_name("metrics.2.jsonl"))
            write(path, 20)
        return names

    monkeypatch.setattr(os, "listdir", list_then_rotate)
    assert seen.poll() == [10, 0, 20]


def test_a_rotation_between_the_look_and_the_opening_loses_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, 0)
    seen, opened, calls = Seen(path), os.open, itertools.count()

    def rotate_then_open(name: Path, flags: int) -> int:
        assert flags == os.O_RDONLY
        if next(calls) == 0:
            path.rename(path.with_name("metrics.1.jsonl"))
            with monkeypatch.context() as undone:
                undone.setattr(os, "open", opened)
                write(path, 1)
        return opened(name, flags)

    monkeypatch.setattr(os, "open", rotate_then_open)
    assert seen.poll() == [0, 1] and seen.restarts == 0


def test_what_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "run" / "layers" / "layers.jsonl"
    seen = Seen(path)
    assert seen.poll() == []
    path.parent.mkdir(parents=True)
    assert seen.poll() == []
    path.write_bytes(line(META)[:9])
    assert seen.poll() == []
    write(path, 4)
    assert seen.poll() == [4] and seen.restarts == 0


def test_a_torn_line_that_the_next_writer_cuts_off_is_never_seen(path: Path) -> None:
    write(path, 0)
    with path.open("ab") as stream:
        stream.write(b'{"step": 1, "a long tail": 2222222222222222')
    seen = Seen(path)
    assert seen.poll() == [0]
    with JsonlSink(path) as sink:
        sink({"step": 5})
    assert seen.poll() == [0, 5] and seen.restarts == 0 and seen.follower.unreadable == 0


@pytest.mark.parametrize("how", ["shorter", "longer", "another file", "renamed over"])
def test_a_file_that_was_replaced_is_read_from_its_start(path: Path, how: str) -> None:
    write(path, 0, 1, 2)
    seen = Seen(path)
    assert seen.poll() == [0, 1, 2]
    steps = (7,) if how == "shorter" else (7, 8, 9, 10, 11)
    with path.open("ab") as stream:
        stream.write(b"?\n")
    assert seen.poll() == [0, 1, 2] and seen.follower.unreadable == 1
    if how == "another file":
        path.unlink()
        assert seen.poll() == [0, 1, 2]
    if how == "renamed over":
        write(path.with_name("new"), *steps)
        path.with_name("new").replace(path)
    else:
        write(path, *steps)
    assert seen.poll() == list(steps) and seen.restarts == 1 and seen.follower.unreadable == 0
    write(path, 12, mode="ab", meta=False)
    assert seen.poll() == [*steps, 12] and seen.restarts == 1


def test_lines_that_are_no_objects_are_counted_and_left_out(path: Path) -> None:
    write(path, 0)
    with path.open("ab") as stream:
        stream.write(b'{"step": \n[1]\n\n\xff\xfe\n' + b"[" * 100_000 + b"\n" + line({"step": 1}) + line(META))
    seen = Seen(path)
    assert seen.poll() == [0, 1] and seen.follower.unreadable == 5


def test_a_line_longer_than_a_block_is_read_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "BLOCK_BYTES", 16)
    seen = Seen(path)
    path.write_bytes(line(META) + line({"step": 1, "text": "x" * 500}) + line({"step": 2}))
    assert seen.poll() == [1, 2]


def test_a_limit_is_kept_and_the_rest_is_told(path: Path) -> None:
    write(path, *range(1000))
    seen = Seen(path)
    assert seen.follower.poll(1000) is True
    assert 40 < len(seen.steps) < 100
    assert seen.follower.total_bytes == path.stat().st_size and 900 < seen.follower.read_bytes < 1100
    assert seen.poll(1000) == list(range(1000)) and seen.follower.poll() is False
    assert seen.follower.read_bytes == path.stat().st_size


@pytest.mark.parametrize(
    "first", [b'{"kind": "meta", "schema": 1}\n', b'{"kind": "train", "schema": 2}\n', b"hello\n", b"[2]\n"]
)
def test_another_schema_is_refused_with_the_file_and_what_it_begins_with(path: Path, first: bytes) -> None:
    path.write_bytes(first)
    with pytest.raises(RunFilesError) as error:
        Seen(path).poll()
    message = str(error.value)
    assert message.startswith(f"{path}: expected a first line with kind 'meta' and schema 2; got ")
    assert first.decode().strip() in message and "version of staticmoe" in message


def test_a_file_that_may_not_be_read_is_named(path: Path) -> None:
    path.mkdir()
    with pytest.raises(RunFilesError, match=r"metrics\.jsonl: expected a file that can be read; got Is a directory"):
        Seen(path).poll()


class Received:
    """A receiver that writes down what it gets."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    def take_meta(self, meta: dict[str, Any]) -> None:
        self.log.append(meta)

    def take(self, stream: str, record: dict[str, Any]) -> None:
        self.log.append((stream, record["step"]))

    def restart(self, stream: str) -> None:
        self.log.append(("restart", stream))

    def since(self) -> list[Any]:
        found, self.log = self.log, []
        return found


def test_the_streams_of_a_run_and_its_meta_arrive_under_their_names(tmp_path: Path) -> None:
    received = Received()
    run = RunFollower(tmp_path, received)
    assert run.poll() is False and received.since() == [] and run.share_read == 1.0
    (tmp_path / "meta.json").write_text('{"schema": 2, "backend": "a"}')
    write(tmp_path / "metrics.jsonl", 1, 2)
    write(tmp_path / "layers" / "layers.jsonl", 50)
    write(tmp_path / "alerts.jsonl", 7)
    run.poll()
    assert received.since() == [
        {"schema": 2, "backend": "a"}, ("metrics", 1), ("metrics", 2), ("layers", 50), ("alerts", 7)
    ]  # fmt: skip
    assert run.poll() is False and received.since() == []
    (tmp_path / "meta.json").write_text('{"schema": 2, "backend": "bb"}')
    write(tmp_path / "alerts.jsonl", 8)
    with (tmp_path / "metrics.jsonl").open("ab") as stream:
        stream.write(b"?\n")
    run.poll()
    assert received.since() == [{"schema": 2, "backend": "bb"}, ("restart", "alerts"), ("alerts", 8)]
    assert run.unreadable == 1
    run.close()


def test_how_far_a_run_was_read_counts_every_stream(tmp_path: Path) -> None:
    write(tmp_path / "metrics.1.jsonl", *range(400))
    write(tmp_path / "metrics.jsonl", *range(400, 500))
    write(tmp_path / "alerts.jsonl", *range(500))
    run = RunFollower(tmp_path, Received())
    assert run.poll(3000) is True and 0.4 < run.share_read < 0.9
    while run.poll(3000):
        pass
    assert run.share_read == 1.0


@pytest.mark.parametrize(("text", "got"), [("{", "got '{'"), ('{"schema": 1}', "got schema 1"), ("[]", "got '[]'")])
def test_a_meta_file_of_another_kind_is_refused(tmp_path: Path, text: str, got: str) -> None:
    (tmp_path / "meta.json").write_text(text)
    with pytest.raises(RunFilesError) as error:
        RunFollower(tmp_path, Received()).poll()
    assert "meta.json: expected an object with schema 2" in str(error.value) and got in str(error.value)
