"""Follows the files of all ranks of a run, and hands their records on as those of one run.

Records of one step are put together and reduced once every rank has it. A rank that stays behind, or has no files here,
is waited for over `BACKLOG` records and then left out until it comes; "ranks" in a record tells of how many it speaks.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from staticmoe.observe.follow import Receiver, RunFollower
from staticmoe.observe.ranks import rank_folder, reduce_records, reduce_windows

BACKLOG = 50

# Life, step, number of the evaluation after it, 0 for the step. A resume begins another life: a rank may have written
# steps before that another had not, and those come again. So does a step that comes again without a word.
_Key = tuple[int, int, int]


class Merger:
    """Puts the records of several ranks together by their step, in order.

    Args:
        ranks: their numbers.
        take: called with the records of a step, of the lowest rank first.
    """

    def __init__(self, ranks: Sequence[int], take: Callable[[list[dict[str, Any]]], None]) -> None:
        self.take = take
        self._queues: dict[int, collections.deque[tuple[_Key, dict[str, Any]]]] = {}
        # Of the last record of each rank, and of the last that was handed on.
        self._seen: dict[int, _Key] = {}
        self._lives: dict[int, int] = {}
        self._last: _Key = (-1, 0, 0)
        self.follow(ranks)

    def follow(self, ranks: Sequence[int]) -> None:
        """Wait for these ranks from here on."""
        self._queues = {rank: self._queues.get(rank, collections.deque()) for rank in sorted(ranks)}

    def add(self, rank: int, record: dict[str, Any]) -> None:
        """Take the next record of a rank; void attempts, which say nothing of the run, are left out."""
        step, train = record.get("step"), record.get("kind") == "train"
        if record.get("void") or not isinstance(step, int):
            return
        life, last, evaluations = max(self._seen.get(rank, (0, -1, 0)), (self._lives.get(rank, 0), -1, 0))
        if train:
            key = life + (step <= last), step, 0
        else:
            key = life, step, evaluations + 1 if step == last else 1
        self._seen[rank] = key
        queue = self._queues[rank]
        queue.append((key, record))
        # Only what was waited for can complete a step.
        if len(queue) == 1:
            self._hand_on()

    def resume(self, rank: int) -> None:
        """A rank was taken up again."""
        self._lives[rank] = 1 + max(self._lives.get(rank, 0), self._seen.get(rank, (0, -1, 0))[0])

    def settle(self, *, final: bool = False) -> None:
        """Go on without ranks that are far behind; `final`: without those too that have not come at all."""
        while any(self._queues.values()):
            longest = max(map(len, self._queues.values()))
            absent = {rank for rank in self.behind if longest > BACKLOG or (final and rank not in self._seen)}
            if absent != set(self.behind):
                return
            self._pop()
            self._hand_on()

    @property
    def behind(self) -> dict[int, int]:
        """Rank that is waited for -> records that are there of the furthest other rank."""
        longest = max(map(len, self._queues.values()), default=0)
        return {rank: longest for rank, queue in self._queues.items() if longest and not queue}

    @property
    def absent(self) -> list[int]:
        """Ranks of which nothing has come."""
        return [rank for rank in self._queues if rank not in self._seen]

    def _hand_on(self) -> None:
        while all(self._queues.values()):
            self._pop()

    def _pop(self) -> None:
        """Hand on the earliest of what is there; nothing where others went on without it."""
        earliest = min(queue[0][0] for queue in self._queues.values() if queue)
        at_hand = [queue for queue in self._queues.values() if queue and queue[0][0] == earliest]
        records = [queue.popleft()[1] for queue in at_hand]
        if earliest > self._last:
            self._last = earliest
            self.take(records)


class _OfRank:
    """What a rank's files are handed to."""

    def __init__(self, rank: int, owner: RanksFollower) -> None:
        self._rank, self._owner = rank, owner

    def take_meta(self, meta: dict[str, Any]) -> None:
        """Meta.json."""
        if self._rank == 0:
            self._owner.take_meta(meta)

    def take(self, stream: str, record: dict[str, Any]) -> None:
        """A record."""
        self._owner.take(self._rank, stream, record)

    def restart(self, stream: str) -> None:
        """A file was replaced."""
        self._owner.restart(stream)

    def resume(self, stream: str) -> None:
        """The rank was taken up again."""
        self._owner.resume(self._rank, stream)


class RanksFollower:
    """The files of a run of one rank or more, handed to a receiver as they grow; as `RunFollower` is for one rank.

    How many ranks there are stands in rank 0's meta.json. Metrics and layers are reduced; alerts of other ranks than
    rank 0 have the rank in the name of their rule. Of a run of one rank everything is handed on as it is.

    Args:
        run_dir: directory of the run; its files may come later.
        receiver: takes meta.json and the records in.
    """

    def __init__(self, run_dir: str | os.PathLike[str], receiver: Receiver) -> None:
        self.run_dir = Path(run_dir)
        self._receiver = receiver
        self._followers = {0: RunFollower(run_dir, _OfRank(0, self))}
        reduced = {"metrics": reduce_records, "layers": reduce_windows}
        self._mergers = {stream: Merger([0], self._reducing(stream, how)) for stream, how in reduced.items()}
        self._restarted: set[str] = set()

    def _reducing(
        self, stream: str, how: Callable[[list[dict[str, Any]]], dict[str, Any]]
    ) -> Callable[[list[dict[str, Any]]], None]:
        return lambda records: self._receiver.take(stream, how(records))

    @property
    def ranks(self) -> int:
        """How many ranks are followed."""
        return len(self._followers)

    def take_meta(self, meta: dict[str, Any]) -> None:
        """Take rank 0's meta.json: it tells how many there are."""
        count = meta.get("ranks", 1)
        count = count if isinstance(count, int) and count > 0 else 1
        for rank in range(self.ranks, count):
            self._followers[rank] = RunFollower(rank_folder(self.run_dir, rank), _OfRank(rank, self))
        for rank in range(count, self.ranks):
            self._followers.pop(rank).close()
        for merger in self._mergers.values():
            merger.follow(range(count))
        self._receiver.take_meta(meta if count == 1 else {name: one for name, one in meta.items() if name != "rank"})

    def take(self, rank: int, stream: str, record: dict[str, Any]) -> None:
        """Take a record of a rank."""
        if stream in self._restarted:
            # It comes again.
            return
        if stream in self._mergers and self.ranks > 1:
            self._mergers[stream].add(rank, record)
        elif rank:
            self._receiver.take(stream, {**record, "rule": f"{record.get('rule', '')} (rank {rank})"})
        else:
            self._receiver.take(stream, record)

    def restart(self, stream: str) -> None:
        """Forget a stream of all ranks, as soon as this round of reading is over."""
        self._restarted.add(stream)

    def resume(self, rank: int, stream: str) -> None:
        """A rank was taken up again: all of them were, and what one had written before need not be what another had."""
        if stream in self._mergers and stream not in self._restarted:
            self._mergers[stream].resume(rank)

    def poll(self, limit: int | None = None) -> bool:
        """Hand on what is there, about `limit` bytes a stream and rank at most; return whether more is there already.

        Raises:
            RunFilesError: a file is of another schema, broken, or may not be read.
        """
        # Rank 0 first: its meta.json brings the others.
        more = self._followers[0].poll(limit)
        more = any([follower.poll(limit) for rank, follower in self._followers.items() if rank]) or more
        for stream in self._restarted:
            self._receiver.restart(stream)
            for follower in self._followers.values():
                follower.again(stream)
            if stream in self._mergers:
                self._mergers[stream] = Merger(range(self.ranks), self._mergers[stream].take)
        if self._restarted:
            self._restarted.clear()
            return True
        if not more:
            self.settle()
        return more

    def settle(self, *, final: bool = False) -> None:
        """Go on without ranks that are far behind; `final`: nothing more is read, so without absent ones too."""
        for merger in self._mergers.values():
            merger.settle(final=final)

    @property
    def behind(self) -> dict[int, int]:
        """Rank that metrics are waited for -> how many are there of the furthest other rank."""
        return self._mergers["metrics"].behind

    @property
    def absent(self) -> list[int]:
        """Ranks of which there are no metrics, where others have some."""
        absent = self._mergers["metrics"].absent
        return absent if len(absent) < self.ranks else []

    @property
    def share_read(self) -> float:
        """Share of the bytes there that were read, 0 to 1."""
        sizes = [follower.sizes for follower in self._followers.values()]
        total = sum(there for _, there in sizes)
        return sum(read for read, _ in sizes) / total if total else 1.0

    @property
    def unreadable(self) -> int:
        """Whole lines that hold no JSON object, and were left out."""
        return sum(follower.unreadable for follower in self._followers.values())

    def close(self) -> None:
        """Close the files."""
        for follower in self._followers.values():
            follower.close()
