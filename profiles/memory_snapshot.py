"""What a runner holds on the GPU, by part, beside its forecast: pools, fragments, workspaces, and who allocated.

    python profiles/memory_snapshot.py --sizes train medium large --output profiles/results/h200/memory_snapshot.json
    python profiles/memory_snapshot.py --sizes train --pickle snapshot.pickle      # for pytorch.org/memory_viz

The allocator's history is recorded from before the model is made. The highest point is where torch held most from the
device: what was allocated then, with the lines of code that did, and what lay idle between allocations; what is held
beyond the forecast is in one of them. The pools are as they are after some steps: the graphs' private ones and the
rest, each with what is in use, what rounding added to it, and what is free inside. The workspaces of cuBLAS are what
clearing them gives back.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gc
import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import step_overhead  # first: cuBLAS reads its setting at the first product
import torch

from staticmoe.bench.result import provenance, source_commit, write_result
from staticmoe.runner.memory import in_words

STEPS, ENTRIES = 5, 2_000_000
SHOWN = 12
GROWS, SHRINKS = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")


class Levels:
    """Bytes held and allocated, as the events of the allocator change them."""

    def __init__(self, held: int = 0, allocated: int = 0) -> None:
        self.held, self.allocated = held, allocated
        self.live: dict[int, Mapping[str, Any]] = {}

    def take(self, event: Mapping[str, Any]) -> tuple[int, int]:
        """Both after `event`."""
        action, size, address = event["action"], event["size"], event["addr"]
        if action in GROWS:
            self.held += size
        elif action in SHRINKS:
            self.held -= size
        elif action == "alloc":
            self.allocated += size
            self.live[address] = event
        elif action == "free_completed":
            self.allocated -= size
            self.live.pop(address, None)
        return self.held, self.allocated


def highest(trace: Sequence[Mapping[str, Any]], held: int = 0, allocated: int = 0) -> dict[str, Any]:
    """The moment at which most was held; of several the one with most allocated. With the largest allocators then.

    Args:
        trace: events of the allocator on one device, in order.
        held, allocated: bytes before the first of them.
    """
    levels = Levels(held, allocated)
    heights = [levels.take(event) for event in trace]
    if not heights:
        return {"held": held, "allocated": allocated, "idle": held - allocated, "by": []}
    place = max(range(len(heights)), key=heights.__getitem__)
    again = Levels(held, allocated)
    for event in trace[: place + 1]:
        again.take(event)
    most = heights[place]
    return {"held": most[0], "allocated": most[1], "idle": most[0] - most[1], "by": by_code(again.live.values())}


def by_code(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Bytes of live allocations by the innermost line of Python that is not torch's, the most first."""
    sizes: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    for event in events:
        where = _where(event.get("frames") or ())
        sizes[where] += event["size"]
        counts[where] += 1
    return [{"where": where, "bytes": size, "count": counts[where]} for where, size in sizes.most_common(SHOWN)]


def _where(frames: Iterable[Mapping[str, Any]]) -> str:
    python = [frame for frame in frames if str(frame.get("filename", "")).endswith(".py")]
    own = [frame for frame in python if "/torch/" not in frame["filename"]] or python
    if not own:
        return "no Python line (C++, workspaces)"
    return f"{'/'.join(Path(own[0]['filename']).parts[-2:])}:{own[0]['line']} {own[0]['name']}"


def pools(segments: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Private pools and the rest: bytes held, in use, added by rounding, pending, free inside, and segments."""
    found: dict[str, collections.Counter[str]] = {"private pools": collections.Counter(), "rest": collections.Counter()}
    for segment in segments:
        private = tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
        part = found["private pools" if private else "rest"]
        part.update(held=segment["total_size"], segments=1)
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                rounding = block["size"] - block.get("requested_size", block["size"])
                part.update({"in use": block["size"], "of it rounding": rounding})
            else:
                part.update({"free inside" if block["state"] == "inactive" else "pending": block["size"]})
    return {name: dict(part) for name, part in found.items()}


def measure(size: step_overhead.Size, device: torch.device, dump: Path | None) -> dict[str, Any]:
    """One size: built, run for some steps, looked at."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=ENTRIES, clear_history=True)
    mode = step_overhead.Runner(size, device, "cuda")
    for batch in step_overhead.batches(size, STEPS, device):
        mode.step(batch)
    mode.finish()
    torch.cuda.synchronize(device)
    snapshot = torch.cuda.memory._snapshot(device)
    memory = mode.runner.memory()
    torch.cuda.memory._record_memory_history(enabled=None)
    trace = snapshot["device_traces"][device.index or 0]
    if len(trace) >= ENTRIES:
        raise SystemExit(f"{size.name}: the history has over {ENTRIES} events, and its beginning is lost")
    if dump is not None:
        dump.write_bytes(pickle.dumps(snapshot))
    found: dict[str, Any] = {
        "model": dataclasses.asdict(size.config),
        "tokens": size.batch * size.sequence,
        "forecast": None if memory.forecast is None else dataclasses.asdict(memory.forecast),
        "forecast total": None if memory.forecast is None else memory.forecast.total,
        "reserved, most": torch.cuda.max_memory_reserved(device),
        "allocated, most": torch.cuda.max_memory_allocated(device),
        "reserved, now": torch.cuda.memory_reserved(device),
        "allocated, now": torch.cuda.memory_allocated(device),
        "highest": highest(trace, *before),
        "pools": pools([one for one in snapshot["segments"] if one["device"] == (device.index or 0)]),
    }
    if memory.forecast is not None:
        print("\n".join(memory.forecast.lines(found["reserved, most"])))
    mode.close()
    del mode
    gc.collect()
    with_workspaces = torch.cuda.memory_allocated(device)
    # The graphs that used them are gone.
    torch._C._cuda_clearCublasWorkspaces()
    found["workspaces of cuBLAS"] = with_workspaces - torch.cuda.memory_allocated(device)
    return found


def shown(found: Mapping[str, Any]) -> list[str]:
    """The parts as lines."""
    high = found["highest"]
    rows = [(f"{name}", found[name]) for name in found if isinstance(found[name], int) and name != "tokens"]
    rows += [(f"at the highest point: {name}", high[name]) for name in ("held", "allocated", "idle")]
    for pool, parts in found["pools"].items():
        rows += [(f"{pool}: {name}", size) for name, size in parts.items() if name != "segments"]
    lines = [f"{name:<52}{in_words(size):>14}" for name, size in rows]
    return [*lines, *(f"{in_words(one['bytes']):>14} in {one['count']:>6}  {one['where']}" for one in high["by"])]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=["train", "medium"], help="of step_overhead.py")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--pickle", type=Path, help="file for the snapshot of the last size")
    parser.add_argument("--commit", default=None, help="of the code; default: git's")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("memory_snapshot: expected a GPU, whose allocator it looks at; there is none")
    device = torch.device("cuda", torch.cuda.current_device())
    result: dict[str, Any] = {"provenance": provenance(device, arguments.commit or source_commit(), ()), "sizes": {}}
    for size in (one for one in step_overhead.sizes() if one.name in arguments.sizes):
        found = result["sizes"][size.name] = measure(size, device, arguments.pickle)
        print(f"\n{size.name}", *shown(found), sep="\n", flush=True)
        if arguments.output:
            write_result(result, arguments.output)


if __name__ == "__main__":
    main()
