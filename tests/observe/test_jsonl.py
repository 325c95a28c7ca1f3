"""Lines of JSON: whole after a crash, valid whatever the numbers, appended to only where they belong."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from staticmoe.observe.sinks import JsonlError, JsonlSink
from staticmoe.observe.sinks.jsonl import encode_record, read_records, read_rotated


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def strict(line: str) -> dict:
    return json.loads(line, parse_constant=refuse_constant)


def test_the_first_record_names_the_schema_and_each_record_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    with JsonlSink(path, meta={"run": "a"}) as sink:
        sink({"step": 0, "loss": 2.5})
        sink({"step": 1, "text": "line\nbreak"})
    assert path.read_text().count("\n") == 3
    assert read_records(path) == [
        {"kind": "meta", "schema": 2, "run": "a"},
        {"step": 0, "loss": 2.5},
        {"step": 1, "text": "line\nbreak"},
    ]


def test_a_line_is_in_the_file_when_the_call_returns(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    for step in range(3):
        sink({"step": step})
        assert read_records(path)[-1] == {"step": step}
    sink.close()
    sink.close()
    with pytest.raises(JsonlError, match="closed"):
        sink({"step": 3})


@pytest.mark.parametrize("torn", [b'{"step": 1, "lo', b"{", b'{"step": 1}', b'{"k": "' + b"x" * 200_000])
def test_a_torn_last_line_is_cut_off_and_the_file_goes_on(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonlSink(path, meta={"run": "a"}) as sink:
        sink({"step": 0})
    with path.open("ab") as stream:
        stream.write(torn)
    assert read_records(path)[1:] == [{"step": 0}]
    with JsonlSink(path, meta={"run": "b"}) as sink:
        sink({"step": 1})
    assert read_records(path) == [{"kind": "meta", "schema": 2, "run": "a"}, {"step": 0}, {"step": 1}]


def test_a_file_of_a_whole_run_says_where_it_was_continued(tmp_path: Path) -> None:
    path, head = tmp_path / "metrics.jsonl", {"kind": "meta", "schema": 2}
    for run in "ab":
        with JsonlSink(path, meta={"run": run}, say_resumed=True) as sink:
            sink({"step": ord(run)})
    first, second = {"step": 97}, {"step": 98}
    assert read_records(path) == [{**head, "run": "a"}, first, {**head, "run": "b", "resumed": True}, second]
    assert list(read_rotated(path)) == [first, second]


def test_a_torn_first_line_starts_the_file_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "me')
    JsonlSink(path).close()
    assert read_records(path) == [{"kind": "meta", "schema": 2}]


@pytest.mark.parametrize("first", [b"hello\n", b'{"kind": "meta", "schema": 1}\n', b'{"step": 0}\n', b"[1]\n"])
def test_another_file_is_refused_and_left_alone(tmp_path: Path, first: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(first)
    with pytest.raises(JsonlError, match="schema 2; got"):
        JsonlSink(path)
    assert path.read_bytes() == first


def test_values_that_json_lacks_become_null_and_are_named() -> None:
    record = {
        "loss": float("nan"),
        "grad_norm": float("inf"),
        "ok": 1.5,
        "moe": {"a": {"rates": [0.5, float("-inf")]}},
    }
    assert strict(encode_record(record)) == {
        "loss": None,
        "grad_norm": None,
        "ok": 1.5,
        "moe": {"a": {"rates": [0.5, None]}},
        "nonfinite": {"loss": "nan", "grad_norm": "inf", "moe.a.rates.1": "-inf"},
    }
    assert "nonfinite" not in strict(encode_record({"ok": 1.5, "missing": None}))


def test_host_values_of_other_libraries_are_plain_numbers() -> None:
    record = {
        "tensor": torch.tensor([1, 2]),
        "scalar": torch.tensor(0.5, dtype=torch.float64),
        "array": numpy.array([[1.5]]),
        "float32": numpy.float32(0.25),
        "nan": numpy.float64("nan"),
        "int": numpy.int64(7),
        "bool": numpy.bool_(True),
        "tuple": (1, None, True),
        "dtype": torch.float32,
        "path": Path("a/b"),
        "surrogate": "\udcff",
    }
    assert strict(encode_record(record)) == {
        "tensor": [1, 2],
        "scalar": 0.5,
        "array": [[1.5]],
        "float32": 0.25,
        "nan": None,
        "int": 7,
        "bool": True,
        "tuple": [1, None, True],
        "dtype": "torch.float32",
        "path": "a/b",
        "surrogate": "\udcff",
        "nonfinite": {"nan": "nan"},
    }


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)


@settings(max_examples=50)
@given(st.dictionaries(st.text(max_size=5), st.recursive(VALUES, st.lists, max_leaves=6), max_size=4))
def test_every_record_is_one_line_of_strict_json(record: dict) -> None:
    line = encode_record(record)
    assert "\n" not in line and "\r" not in line
    decoded = strict(line)
    assert decoded.keys() - {"nonfinite"} == record.keys() - {"nonfinite"}


def test_a_failed_write_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    write, calls = os.write, []

    def half_then_full(fd: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) > 1:
            raise OSError("disk full")
        return write(fd, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", half_then_full)
    with pytest.raises(OSError, match="disk full"):
        sink({"step": 0})
    monkeypatch.undo()
    assert len(calls) == 2
    sink({"step": 1})
    sink.close()
    assert read_records(path) == [{"kind": "meta", "schema": 2}, {"step": 1}]


def test_a_short_write_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
    sink({"step": 0, "text": "é" * 20})
    monkeypatch.undo()
    sink.close()
    assert read_records(path)[1] == {"step": 0, "text": "é" * 20}


def test_a_file_over_its_limit_becomes_a_part_and_none_is_lost(tmp_path: Path) -> None:
    """Thirty records in parts of at most 120 bytes; parts above nine are in the order of their numbers."""
    path = tmp_path / "metrics.jsonl"
    with JsonlSink(path, meta={"n": 1}, max_bytes=120) as sink:
        for step in range(30):
            sink({"kind": "train", "step": step})
    parts = sorted(tmp_path.glob("metrics.*.jsonl"))
    assert len(parts) > 10 and max(file.stat().st_size for file in [*parts, path]) <= 120
    assert {name.name for name in parts} == {f"metrics.{n + 1}.jsonl" for n in range(len(parts))}
    for file in [*parts, path]:
        assert read_records(file)[0] == {"kind": "meta", "schema": 2, "n": 1} and len(read_records(file)) > 1
    assert [record["step"] for record in read_rotated(path)] == list(range(30))
    assert [record["step"] for record in read_records(tmp_path / "metrics.1.jsonl")[1:]] == [0, 1]


def test_a_file_that_is_continued_is_continued_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for first in (0, 5, 10):
        with JsonlSink(path, max_bytes=100) as sink:
            for step in range(first, first + 5):
                sink({"step": step})
    assert [record["step"] for record in read_rotated(path)] == list(range(15))


def test_a_record_larger_than_the_limit_has_a_file_for_itself(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonlSink(path, max_bytes=10) as sink:
        for step in range(3):
            sink({"step": step, "text": "x" * 50})
    assert [record["step"] for record in read_rotated(path)] == [0, 1, 2]
    assert len(list(tmp_path.iterdir())) == 3


def test_other_files_of_the_folder_are_no_parts(tmp_path: Path) -> None:
    path = tmp_path / "layers.jsonl"
    for name in ("xlayers.1.jsonl", "layers.x.jsonl", "layers.1.json", "layersx1.jsonl", "layers.1.2.jsonl"):
        (tmp_path / name).write_text("no JSON\n")
    with JsonlSink(path, max_bytes=60) as sink:
        sink({"step": 0})
        sink({"step": 1})
        sink({"step": 2})
    assert [record["step"] for record in read_rotated(path)] == [0, 1, 2]


def test_reading_in_the_middle_of_a_rotation_or_of_a_line_gives_what_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonlSink(path, max_bytes=60) as sink:
        for step in range(3):
            sink({"step": step})
    last = path.read_bytes()
    path.unlink()
    whole = [record["step"] for record in read_rotated(path)]
    assert whole == list(range(len(whole))) and len(whole) < 3
    for torn in (b"", last[:10], last[:-1]):
        path.write_bytes(torn)
        assert [record["step"] for record in read_rotated(path)] == whole


def test_what_is_no_run_is_refused_by_the_reader(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(read_rotated(tmp_path / "metrics.jsonl"))
    (tmp_path / "metrics.jsonl").write_text('{"kind": "meta", "schema": 1}\n{"step": 0}\n')
    with pytest.raises(JsonlError, match="schema 2; got"):
        list(read_rotated(tmp_path / "metrics.jsonl"))


def test_after_a_rotation_that_failed_half_way_the_next_file_still_names_the_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, max_bytes=60)
    sink({"step": 0})
    sink({"step": 1})

    def full(fd: int, data: bytes) -> int:
        raise OSError("disk full")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="disk full"):
        sink({"step": 2})
    monkeypatch.undo()
    sink({"step": 3})
    sink.close()
    assert read_records(path)[0] == {"kind": "meta", "schema": 2}
    assert [record["step"] for record in read_rotated(path)] == [0, 1, 3]
