"""Which packages are compared, which of them can be imported here, and why the others cannot."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from staticmoe.errors import ConfigError

Load = Callable[[], "Adapter"]


@dataclasses.dataclass(frozen=True)
class Adapter:
    """A package that was imported: `make` gives its block for a problem, `note` is said beside its times."""

    make: Callable[[Any], Callable[[Any], Any]]
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Peer:
    """A package that computes the block.

    Args:
        name: as it is shown.
        package: what is imported.
        adapter: our module about it.
        captured: whether its calls can be captured; they are timed uncaptured in any case.
        converts: whether it holds gate and up a second time, in its own order.
        devices: where it runs.
    """

    name: str
    package: str
    adapter: str
    captured: bool = True
    converts: bool = False
    devices: tuple[str, ...] = ("cuda",)

    def load(self) -> Adapter:
        """Import it; raises whatever that raises."""
        loaded: Load = importlib.import_module(self.adapter).load
        return loaded()


PEERS = {
    "sonicmoe": Peer("SonicMoE", "sonicmoe", "staticmoe.bench.peers.sonicmoe", converts=True),
    "scattermoe": Peer("ScatterMoE", "scattermoe", "staticmoe.bench.peers.scattermoe"),
    "fbgemm": Peer("FBGEMM-GenAI", "fbgemm_gpu", "staticmoe.bench.peers.fbgemm"),
    "liger": Peer("Liger", "liger_kernel", "staticmoe.bench.peers.liger", captured=False),
}
NOBODY = "none"


@dataclasses.dataclass(frozen=True)
class Found:
    """Peers that were imported, by key, and the names of the others with the reason."""

    adapters: Mapping[str, Adapter]
    absent: Mapping[str, str]

    @property
    def notes(self) -> dict[str, str]:
        """Name -> what is said beside its times, where there is something to say."""
        return {PEERS[key].name: adapter.note for key, adapter in self.adapters.items() if adapter.note}

    @property
    def converts(self) -> bool:
        """Whether one of them holds weights a second time."""
        return any(PEERS[key].converts for key in self.adapters)


def asked_for(text: str | None) -> tuple[str, ...] | None:
    """The keys in "sonicmoe,liger"; () for "none"; None, which stands for those that import, for None.

    Raises:
        ConfigError: an unknown one.
    """
    if text is None:
        return None
    keys = tuple(dict.fromkeys(key.strip() for key in text.split(",")))
    if keys == (NOBODY,):
        return ()
    for key in keys:
        if key not in PEERS:
            raise ConfigError(f"--peers: expected some of {', '.join(PEERS)}, or {NOBODY}; got {key!r}")
    return keys


def find(asked: Sequence[str] | None = None) -> Found:
    """Import the peers asked for, all of them by default."""
    adapters: dict[str, Adapter] = {}
    absent: dict[str, str] = {}
    for key, peer in PEERS.items():
        if asked is not None and key not in asked:
            absent[peer.name] = "not asked for: --peers"
        elif importlib.util.find_spec(peer.package) is None:
            absent[peer.name] = "not installed"
        else:
            try:
                adapters[key] = peer.load()
            except Exception as error:  # another package's import may fail in any way: it is absent, and says how
                absent[peer.name] = reason(error)
    return Found(adapters, absent)


def reason(error: Exception) -> str:
    """The first line of a failed import: its text alone, or after the type of an error of another kind."""
    text = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
    return (text.splitlines() or [""])[0][:200]
