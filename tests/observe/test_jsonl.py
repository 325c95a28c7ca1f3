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
from staticmoe.observe.sinks.jsonl import encode_record, read_records


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
        {"kind": "meta", "schema": 1, "run": "a"},
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
    assert read_records(path) == [{"kind": "meta", "schema": 1, "run": "a"}, {"step": 0}, {"step": 1}]


def test_a_torn_first_line_starts_the_file_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "me')
    JsonlSink(path).close()
    assert read_records(path) == [{"kind": "meta", "schema": 1}]


@pytest.mark.parametrize("first", [b"hello\n", b'{"kind": "meta", "schema": 2}\n', b'{"step": 0}\n', b"[1]\n"])
def test_another_file_is_refused_and_left_alone(tmp_path: Path, first: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(first)
    with pytest.raises(JsonlError, match="schema 1; got"):
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


@settings(max_examples=50, deadline=None)
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
    assert read_records(path) == [{"kind": "meta", "schema": 1}, {"step": 1}]


def test_a_short_write_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
    sink({"step": 0, "text": "é" * 20})
    monkeypatch.undo()
    sink.close()
    assert read_records(path)[1] == {"step": 0, "text": "é" * 20}
