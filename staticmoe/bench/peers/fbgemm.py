"""FBGEMM-GenAI: CUTLASS grouped products with counts on the device, in place of torch's in the block around them.

The library is loaded alone: importing the package wants more libraries than the products do. Written for 1.6.0, whose
kernel of the weight gradient skips experts without tokens, so it gets a zeroed output.

Dimensions: E experts, R rows, N, K widths of a product.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from staticmoe.bench.blocks import lay_out, swiglu_rows
from staticmoe.bench.peers.registry import Adapter
from staticmoe.bench.problems import Problem

LIBRARY = "experimental/gen_ai/fbgemm_gpu_experimental_gen_ai.so"
NOTE = "bf16bf16bf16_grouped_stacked, _grad and _wgrad in the block of grouped_mm; weight gradients zeroed first"


class _Product(torch.autograd.Function):
    """Rows [R,K] of experts times their weights [E,N,K]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, counts)
        out: Tensor = torch.ops.fbgemm.bf16bf16bf16_grouped_stacked(rows, weight, counts)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, counts = ctx.saved_tensors
        grad = grads[0].contiguous()
        d_rows = torch.ops.fbgemm.bf16bf16bf16_grouped_grad(grad, weight.permute(0, 2, 1), counts)
        d_weight = torch.ops.fbgemm.bf16bf16bf16_grouped_wgrad(grad, rows, counts, output=torch.zeros_like(weight))
        return d_rows, d_weight, None


def load() -> Adapter:
    """Load the library of the package.

    Raises:
        ImportError: the package has none.
    """
    spec = importlib.util.find_spec("fbgemm_gpu")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    libraries = [path for path in (Path(folder) / LIBRARY for folder in folders) if path.exists()]
    if not libraries:
        raise ImportError(f"expected {LIBRARY} in fbgemm_gpu; got none in {folders}: pip install fbgemm-gpu-genai")
    torch.ops.load_library(str(libraries[0]))
    return Adapter(lambda _: block, NOTE)


def block(p: Problem) -> Tensor:
    """The block around its products."""
    layout = lay_out(p.ids, p.weights, p.down.shape[0], p.x.dtype)
    counts = torch.diff(layout.ends, prepend=layout.ends.new_zeros(1)).long()

    def product(rows: Tensor, weight: Tensor) -> Tensor:
        made: Tensor = _Product.apply(rows, weight, counts)
        return made

    return swiglu_rows(p.x, layout, p.gate_up, p.down, product)
