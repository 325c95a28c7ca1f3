"""The activation functions between the up and the down projection, and their derivatives.

Forward and backward take the same, already rounded pre-activation: a gradient then belongs to the activation that
was really used.

Dimensions: R rows, I intermediate. A gated pre-activation is [R,2I], the gate in the first I columns.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from staticmoe.reference.routing import compute_dtype

# Name -> whether the up projection has a gate half.
ACTIVATIONS = {"swiglu": True, "geglu": True, "gpt_oss": True, "relu2": False}

GPT_OSS_LIMIT = 7.0
GPT_OSS_ALPHA = 1.702


def is_gated(activation: str) -> bool:
    """Return whether `activation` takes a gate half, so that the up projection has 2I columns and not I."""
    return ACTIVATIONS[activation]


def activate(pre: Tensor, activation: str) -> Tensor:
    """Return the activation, computed in fp32 (fp64 stays fp64) and rounded to the dtype of `pre`.

    swiglu: silu(gate)·up. geglu: gelu(gate)·up with the exact (erf) gelu. relu2: relu(pre)^2, ungated.
    gpt_oss: gate clamped above at 7, up to [-7,7], then (up + 1)·gate·sigmoid(1.702·gate).

    Shapes:
        pre [R,2I], or [R,I] if ungated. Returns [R,I].
    Source: gpt_oss as in the model code published with gpt-oss, with the halves side by side, not interleaved.
    Graph-safe: yes.
    """
    values = pre.to(compute_dtype(pre.dtype))
    if activation == "relu2":
        return torch.relu(values).square().to(pre.dtype)
    gate, up = values.chunk(2, dim=-1)
    if activation == "swiglu":
        out = gate * torch.sigmoid(gate) * up
    elif activation == "geglu":
        out = gate * _normal_cdf(gate) * up
    else:
        gate, up = gate.clamp(max=GPT_OSS_LIMIT), up.clamp(-GPT_OSS_LIMIT, GPT_OSS_LIMIT)
        out = (up + 1) * gate * torch.sigmoid(GPT_OSS_ALPHA * gate)
    return out.to(pre.dtype)


def activation_backward(pre: Tensor, grad: Tensor, activation: str) -> Tensor:
    """Return the gradient of the pre-activation, in its dtype.

    Shapes:
        pre [R,2I] (or [R,I]); grad [R,I], fp32 or fp64. Returns the shape of `pre`.
    Graph-safe: yes.
    """
    values = pre.to(compute_dtype(pre.dtype))
    grad = grad.to(values.dtype)
    if activation == "relu2":
        return (2 * torch.relu(values) * grad).to(pre.dtype)
    gate, up = values.chunk(2, dim=-1)
    if activation == "swiglu":
        sigmoid = torch.sigmoid(gate)
        d_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
        d_up = grad * gate * sigmoid
    elif activation == "geglu":
        cdf = _normal_cdf(gate)
        density = torch.exp(-0.5 * gate.square()) * (1 / math.sqrt(2 * math.pi))
        d_gate = grad * up * (cdf + gate * density)
        d_up = grad * gate * cdf
    else:
        d_gate, d_up = _gpt_oss_backward(gate, up, grad)
    return torch.cat([d_gate, d_up], dim=-1).to(pre.dtype)


def _gpt_oss_backward(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    # A value exactly on a limit still passes its gradient, as torch.clamp has it.
    gate_passes = gate <= GPT_OSS_LIMIT
    up_passes = up.abs() <= GPT_OSS_LIMIT
    gate, up = gate.clamp(max=GPT_OSS_LIMIT), up.clamp(-GPT_OSS_LIMIT, GPT_OSS_LIMIT)
    sigmoid = torch.sigmoid(GPT_OSS_ALPHA * gate)
    d_gate = grad * (up + 1) * sigmoid * (1 + GPT_OSS_ALPHA * gate * (1 - sigmoid))
    d_up = grad * gate * sigmoid
    return torch.where(gate_passes, d_gate, 0.0), torch.where(up_passes, d_up, 0.0)


def _normal_cdf(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
