"""Made-up packages with the signatures of the real ones, in plain PyTorch: they run on a CPU."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from staticmoe.bench.peers import fbgemm, liger, registry


def segments(ends: Tensor) -> list[tuple[int, int]]:
    """Start and end of the rows of each expert; `ends` inclusive."""
    listed = [0, *ends.tolist()]
    return list(zip(listed, listed[1:], strict=False))


def linear(
    x: Tensor, w: Tensor, k: int, ids: Tensor, order: Tensor, ends: Tensor,
    biases: None = None, gates: Tensor | None = None, grouped_in: bool = False, grouped_out: bool = False,
) -> Tensor:  # fmt: skip
    """`scattermoe.parallel_experts.parallel_linear`: weights [E,K,N]."""
    assert ends.tolist() == ids.bincount(minlength=w.shape[0]).cumsum(0).tolist()
    rows = torch.bmm((x if grouped_in else x[order // k])[:, None], w[ids]).squeeze(1)
    if grouped_out:
        return rows
    assert gates is not None and gates.dtype == x.dtype
    scattered = torch.zeros_like(rows).index_copy(0, order, rows)
    return (gates[:, None] @ scattered.view(*gates.shape, -1)).squeeze(1)


def fused(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """`LigerFusedMoEFunction.apply`."""
    y = torch.zeros_like(x)
    for expert in range(down.shape[0]):
        token, slot = torch.where(ids == expert)
        gate, up = (x[token] @ gate_up[expert].T).chunk(2, dim=-1)
        y = y.index_add(0, token, (F.silu(gate) * up) @ down[expert].T * weights[token, slot, None].to(x.dtype))
    return y


def metadata(ids: Tensor, experts: int, counts: Tensor, offsets: Tensor, *maps: Tensor) -> None:
    """`sonicmoe.functional.TC_topk_router_metadata_triton`: fills counts, offsets, token, assignment and row maps."""
    order = ids.flatten().argsort(stable=True)
    counts.copy_(ids.flatten().bincount(minlength=experts))
    offsets.copy_(F.pad(counts.cumsum(0), (1, 0)))
    for target, values in zip(maps, (order // ids.shape[1], order, order.argsort()), strict=True):
        target.copy_(values)


def sonic_up(x: Tensor, w: Tensor, bias: None, offsets: Tensor, rows: int, k: int, token: Tensor, *rest: Any) -> Any:
    """`_UpProjection.apply`: w [2I,H,E], gate and up interleaved."""
    assert w.permute(2, 0, 1).is_contiguous() and rest[2:] == (None, False, "swiglu", False, False)
    spans = segments(offsets[1:])
    pre = torch.cat([x[token[a:b].long()] @ w[..., e].T for e, (a, b) in enumerate(spans)])
    assert pre.shape == (rows, w.shape[0])
    return (F.silu(pre[:, ::2]) * pre[:, 1::2]).detach(), pre


def sonic_down(
    act: Tensor, pre: Tensor, w: Tensor, bias: None, scores: Tensor, offsets: Tensor, t: int, k: int,
    token: Tensor, assignment: Tensor, row: Tensor, *rest: Any,
) -> Tensor:  # fmt: skip
    """`_DownProjection.apply`: w [H,I,E]; its gradient goes to `pre` alone."""
    assert not act.requires_grad and w.permute(2, 0, 1).is_contiguous() and rest == (None, False, "swiglu")
    act = F.silu(pre[:, ::2]) * pre[:, 1::2]
    y = torch.cat([act[a:b] @ w[..., e].T for e, (a, b) in enumerate(segments(offsets[1:]))])
    return (y[row.long()].view(t, k, -1).float() * scores[..., None]).sum(1).to(pre.dtype)


def stacked(rows: Tensor, w: Tensor, counts: Tensor, *rest: object) -> Tensor:
    """`fbgemm::bf16bf16bf16_grouped_stacked`: w [E,N,K]; and, with w [E,K,N] as a view, the gradient of the rows."""
    assert counts.dtype == torch.int64 and rows.is_contiguous()
    return torch.cat([rows[a:b] @ w[e].T for e, (a, b) in enumerate(segments(counts.cumsum(0)))])


def weight_gradient(
    grad: Tensor, rows: Tensor, counts: Tensor, output: Tensor, output_accum: bool = False, num_sms: int | None = None
) -> Tensor:
    """`fbgemm::bf16bf16bf16_grouped_wgrad`: an expert without tokens is skipped."""
    for expert, (a, b) in enumerate(segments(counts.cumsum(0))):
        if b > a:
            output[expert] = grad[a:b].T @ rows[a:b]
    return output.clone()


def module(monkeypatch: pytest.MonkeyPatch, name: str, **members: object) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    made.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, made)
    return made


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """All four packages, on a CPU."""
    for key, peer in registry.PEERS.items():
        monkeypatch.setitem(registry.PEERS, key, dataclasses.replace(peer, devices=("cpu", "cuda")))
    tuners = {name: SimpleNamespace(configs=list(range(24))) for name in ("gemm_tuned", "gemm_gated_tuned")}
    tuners["gemm_dgated_tuned"] = SimpleNamespace(configs=list(range(24)))
    # Setting it first makes the fixture put it back to what it was.
    monkeypatch.setenv(liger.TUNING, "1")
    monkeypatch.delenv(liger.TUNING)
    made: dict[str, Any] = {
        name: module(monkeypatch, name, **members)
        for name, members in {
            "sonicmoe": {},
            "sonicmoe.enums": {"ActivationType": SimpleNamespace(SWIGLU="swiglu")},
            "sonicmoe.functional": {
                "TC_topk_router_metadata_triton": metadata,
                "_UpProjection": SimpleNamespace(apply=sonic_up),
                "_DownProjection": SimpleNamespace(apply=sonic_down),
            },
            "quack": {},
            "quack.gemm_interface": tuners,
            "quack.gemm_config": {"GemmConfig": dict},
            "quack.autotuner": {"AutotuneConfig": dict},
            "scattermoe": {},
            "scattermoe.parallel_experts": {"parallel_linear": linear},
            "liger_kernel": {},
            "liger_kernel.ops": {},
            "liger_kernel.ops.fused_moe": {"LigerFusedMoEFunction": SimpleNamespace(apply=fused)},
            "liger_kernel.ops.fused_moe_kernels": {"_AUTOTUNE_DISABLED": True},
        }.items()
    }
    library = tmp_path / "fbgemm_gpu" / fbgemm.LIBRARY
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: made.update({"library": path}))
    operators = torch.library.Library("fbgemm", "FRAGMENT")
    tail = "Tensor? out=None, int? num_sms=None) -> Tensor"
    for name, call in {"stacked": stacked, "grad": stacked}.items():
        operators.define(f"bf16bf16bf16_grouped_{name}(Tensor X, Tensor W, Tensor M_sizes, {tail}")
        operators.impl(f"bf16bf16bf16_grouped_{name}", call, "CPU")
    operators.define(
        "bf16bf16bf16_grouped_wgrad(Tensor X, Tensor W, Tensor M_sizes, Tensor(a!)? output=None, "
        "bool output_accum=False, int? num_sms=None) -> Tensor"
    )
    operators.impl("bf16bf16bf16_grouped_wgrad", weight_gradient, "CPU")
    yield made
    operators._destroy()


@pytest.fixture
def spoiled(installed: dict[str, Any]) -> dict[str, Any]:
    """The same, ScatterMoE wrong by a tenth and Liger raising."""

    def raises(*arguments: object) -> Tensor:
        raise RuntimeError("no kernel image\nfor this GPU")

    def wrong(*arguments: Any, **options: Any) -> Tensor:
        return linear(*arguments, **options) * (1.1 if options.get("gates") is not None else 1.0)

    installed["scattermoe.parallel_experts"].parallel_linear = wrong
    installed["liger_kernel.ops.fused_moe"].LigerFusedMoEFunction.apply = raises
    return installed
