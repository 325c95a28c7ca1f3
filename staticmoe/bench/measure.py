"""Memory and times of every block in every case. Needs a GPU.

TFLOP/s count 6·T·K·H·I for the forward and 18·T·K·H·I for both passes. The ceiling is an 8192^3 bf16 product of cuBLAS,
measured before and after the cases of a shape, and once on the idle device, whose clock it cannot keep; shares are of
the former.

Dimensions: T tokens, K top_k, H hidden, I intermediate.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from staticmoe.bench.blocks import OURS, Block, Candidate
from staticmoe.bench.check import forward_backward
from staticmoe.bench.peers.layout import Converted
from staticmoe.bench.problems import Problem, Shape, make_problem
from staticmoe.bench.timing import capture, ceiling, clean, milliseconds, spread


def memory(block: Block, p: Problem, device: torch.device) -> dict[str, float]:
    """GiB saved for the backward beside the inputs, and the peak above inputs and weights, gradients included."""
    converted = [block.gate_up] if isinstance(block, Converted) else []
    mine = {t.untyped_storage().data_ptr() for t in (*p.inputs(), p.ids, *converted)}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in mine:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = block(p)
    del y
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    results = forward_backward(block, p)
    peak = torch.cuda.max_memory_allocated(device) - before
    del results
    return {"saved_gib": sum(saved.values()) / 2**30, "peak_gib": peak / 2**30}


def measure(block: Block, p: Problem, device: torch.device, captured: bool = True) -> dict[str, Any]:
    """Times of both passes, captured or launched by the host each time, and memory."""
    flops = 6 * p.ids.numel() * p.x.shape[1] * p.down.shape[2]
    found: dict[str, Any] = memory(block, p, device)
    passes = {"forward": (lambda: block(p), flops), "both": (lambda: forward_backward(block, p), 3 * flops)}
    for name, (call, work) in passes.items():
        if captured:
            recorded = capture(call)
            found[name] = spread(milliseconds(recorded.replay))
            del recorded
        else:
            found[name] = spread(milliseconds(call))
        found[name]["tflops"] = work / found[name]["ms"] / 1e9
    return found


def why_not_captured(block: Block, p: Problem) -> str | None:
    """What keeps both passes out of a CUDA graph: the message at the first wait for the device; None without one.

    torch's grouped product reads its offsets on the host wherever it has no kernel for GPU and dtype.
    """
    forward_backward(block, p)
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward_backward(block, p)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def first_cause(error: BaseException) -> str:
    """Type and first line of the error that others were made of: a compiler says last where, and first what."""
    cause = error.__cause__ or error.__context__
    while cause is not None:
        error, cause = cause, cause.__cause__ or cause.__context__
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """The cases of one shape: every number of tokens with every routing, and in each the same candidates."""

    name: str
    shape: Shape
    tokens: Sequence[int]
    routings: Sequence[str]
    dtype: torch.dtype
    candidates: Sequence[Candidate]


def measure_case(
    sweep: Sweep, p: Problem, tokens: int, routing: str, device: torch.device, say: Callable[[str], None]
) -> dict[str, Any]:
    """One row of the result; a peer that cannot be captured, and a package that fails, are left out by name."""
    row: dict[str, Any] = {"shape": sweep.name, "tokens": tokens, "routing": routing, "blocks": {}}
    for candidate in sweep.candidates:
        say(f"{tokens} tokens, {routing}: {candidate.name}")
        try:
            found, reason = measure_candidate(candidate, p, device)
        except Exception as error:  # what another package raises is a finding, not the end
            if not candidate.package:
                raise
            found, reason = None, f"fails: {first_cause(error)}"
        if found is None:
            clean(device)
            say(f"{candidate.name} is left out: {reason}")
            row.setdefault("left_out", {})[candidate.name] = reason
        else:
            row["blocks"][candidate.name] = found
    return row


def measure_candidate(candidate: Candidate, p: Problem, device: torch.device) -> tuple[dict[str, Any] | None, str]:
    """Times and memory; or None, and what keeps a peer out of a CUDA graph."""
    block = candidate.make(p)
    # Ours must be captured: where it cannot be, the capture says so.
    probed = candidate.captured and not candidate.name.startswith(OURS)
    reason = why_not_captured(block, p) if probed else None
    clean(device)
    if reason is not None:
        return None, f"not capturable: {reason}"
    return measure(block, p, device, candidate.captured), ""


def measure_sweep(
    sweep: Sweep,
    device: torch.device,
    *,
    say: Callable[[str], None] = lambda text: None,
    after: Callable[[Problem, dict[str, Any]], None] = lambda p, row: None,
) -> list[dict[str, Any]]:
    """Rows of all cases, with the ceilings before and after them and every rate as a share of their mean.

    `say` hears what is being done; `after` gets each problem with its row before the next one is made.
    """
    rows = []
    say("ceiling: 8192^3 bf16 product")
    from_idle, before = ceiling(device, settle_s=0.0), ceiling(device)
    for tokens in sweep.tokens:
        for routing in sweep.routings:
            p = make_problem(sweep.shape, tokens, routing, sweep.dtype, device)
            row = measure_case(sweep, p, tokens, routing, device, say)
            after(p, row)
            del p
            clean(device)
            rows.append(row)
    say("ceiling: again")
    for row in rows:
        row["ceiling_from_idle_tflops"] = from_idle
    return with_shares(rows, [before, ceiling(device)])


def with_shares(rows: list[dict[str, Any]], ceilings: list[float]) -> list[dict[str, Any]]:
    """The rows, with the ceilings in TFLOP/s and each rate over their mean as `share`."""
    for row in rows:
        row["ceiling_tflops"] = ceilings
        for entry in (found[which] for found in row["blocks"].values() for which in ("forward", "both")):
            entry["share"] = entry["tflops"] / statistics.mean(ceilings)
    return rows
