"""What the hosts of several ranks find out together before their devices do: that they are about to do the same.

A rank that stands alone in a collective waits for ever. So ranks meet beforehand, with what they are about to do or
with the error that keeps them from it, and what one of them cannot do none of them begins.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from staticmoe.errors import ReplicaError

# Longer than one rank may compile for (`compile_limit_s`, and what it is in by then) while another, whose cache has it
# all, waits; and shorter than anybody would sit and watch.
PATIENCE = datetime.timedelta(minutes=15)
# One place for all runners of a group, for as long as there is the group: a meeting place has threads and sockets.
_places: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


class Agreement:
    """Where the hosts of a group's ranks meet. Every call is one of all ranks.

    Args:
        group: the ranks. They meet beside it, on the CPU, so that a meeting that one misses is an error and no hang.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._size = dist.get_world_size(group)
        if group not in _places:
            ranks = dist.get_process_group_ranks(group)
            part = len(ranks) < dist.get_world_size()
            with _in_words("StaticMoERunner"):
                _places[group] = dist.new_group(
                    ranks,
                    timeout=PATIENCE,
                    backend="gloo",
                    use_local_synchronization=part,
                    group_desc="staticmoe hosts",
                )
        self._place = _places[group]

    def compare(self, purpose: str, facts: Mapping[str, str]) -> None:
        """Exchange `facts`, and go on where they and the purpose are the same on every rank.

        Raises:
            ReplicaError: on every rank, where two ranks differ in a fact, or one of them came with an error; on the
                ranks that came, where one did not.
        """
        found = self.exchange(purpose, ("", {"call": purpose, **facts}))
        failed = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(found) if error]
        if failed:
            raise ReplicaError(f"{purpose}: expected every rank to come this far, got an error on {'; '.join(failed)}")
        gathered = [theirs for _, theirs in found]
        for name in dict.fromkeys(name for theirs in gathered for name in theirs):
            values = [theirs.get(name, "none") for theirs in gathered]
            other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
            if other is not None:
                raise ReplicaError(
                    f"{purpose}: expected the same {name} on every rank, got {values[0]} on rank 0 and {values[other]} "
                    f"on rank {other}; give every rank of the process group the same"
                )

    @contextlib.contextmanager
    def sharing_failures(self, purpose: str) -> Iterator[None]:
        """Within, one `compare` is to come: a rank that fails before it lets the others know."""
        try:
            yield
        except ReplicaError:
            raise
        except Exception as error:
            # Its own error counts, whatever the others make of it.
            with contextlib.suppress(ReplicaError):
                self.exchange(purpose, (f"{type(error).__name__}: {error}", {}))
            raise

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on some rank."""
        word = torch.tensor([int(flag)])
        with _in_words("a decision of all ranks"):
            dist.all_reduce(word, dist.ReduceOp.MAX, group=self._place)
        return bool(word.item())

    def exchange(self, purpose: str, mine: Any) -> list[Any]:
        """Return what every rank gave, in rank order; `purpose` is for messages.

        Raises:
            ReplicaError: a rank did not come.
        """
        everyone: list[Any] = [None] * self._size
        with _in_words(purpose):
            # It names who is missing.
            dist.monitored_barrier(self._place, timeout=PATIENCE, wait_all_ranks=True)
            dist.all_gather_object(everyone, mine, group=self._place)
        return everyone


@contextlib.contextmanager
def _in_words(purpose: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ReplicaError(
            f"{purpose}: expected every rank of the process group within {PATIENCE.total_seconds():g} s, got: {error}; "
            "every rank must make the same calls, and see the same changes, in the same order"
        ) from error
