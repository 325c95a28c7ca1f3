"""The activation functions and their derivatives, as device functions of the up projection and of its backward.

Both take the rounded pre-activation, widened to fp32. No product is followed by a sum in the forward functions, so
no compiler can contract them differently in two kernels: the backward computes bitwise the activation of the forward.
"""

from __future__ import annotations

import triton
import triton.language as tl

GPT_OSS_LIMIT = tl.constexpr(7.0)
GPT_OSS_ALPHA = tl.constexpr(1.702)
_ROOT_HALF = tl.constexpr(0.7071067811865476)
_ROOT_TWO_PI_INVERSE = tl.constexpr(0.3989422804014327)


@triton.jit
def activate(gate, up, ACT: tl.constexpr):
    """Return the gated activation of fp32 tiles; see `staticmoe.reference.activate`. NaN stays NaN."""
    tl.static_assert(ACT == "swiglu" or ACT == "geglu" or ACT == "gpt_oss", "a gated activation")
    if ACT == "swiglu":
        out = gate * tl.sigmoid(gate) * up
    elif ACT == "geglu":
        out = gate * _normal_cdf(gate) * up
    else:
        gate, up = _clamp_gpt_oss(gate, up)
        out = (up + 1.0) * gate * tl.sigmoid(gate * GPT_OSS_ALPHA)
    return out


@triton.jit
def activate_backward(gate, up, grad, ACT: tl.constexpr):
    """Return the gradients (d_gate, d_up) of fp32 tiles; see `staticmoe.reference.activation_backward`."""
    tl.static_assert(ACT == "swiglu" or ACT == "geglu" or ACT == "gpt_oss", "a gated activation")
    if ACT == "swiglu":
        sigmoid = tl.sigmoid(gate)
        d_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        d_up = grad * gate * sigmoid
    elif ACT == "geglu":
        cdf = _normal_cdf(gate)
        density = tl.exp(-0.5 * gate * gate) * _ROOT_TWO_PI_INVERSE
        d_gate = grad * up * (cdf + gate * density)
        d_up = grad * gate * cdf
    else:
        low, middle = _clamp_gpt_oss(gate, up)
        sigmoid = tl.sigmoid(low * GPT_OSS_ALPHA)
        d_gate = grad * (middle + 1.0) * sigmoid * (1.0 + low * GPT_OSS_ALPHA * (1.0 - sigmoid))
        d_up = grad * low * sigmoid
        # A value exactly on a limit still passes its gradient, as torch.clamp has it.
        d_gate = tl.where(gate <= GPT_OSS_LIMIT, d_gate, 0.0)
        d_up = tl.where(tl.abs(up) <= GPT_OSS_LIMIT, d_up, 0.0)
    return d_gate, d_up


@triton.jit
def activate_ungated(value, ACT: tl.constexpr):
    """Return the ungated activation of an fp32 tile. NaN stays NaN."""
    tl.static_assert(ACT == "relu2", "an ungated activation")
    kept = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return kept * kept


@triton.jit
def activate_ungated_backward(value, grad, ACT: tl.constexpr):
    """Return the gradient of the pre-activation of an fp32 tile."""
    tl.static_assert(ACT == "relu2", "an ungated activation")
    return 2.0 * tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL) * grad


@triton.jit
def _normal_cdf(x):
    return 0.5 * (1.0 + tl.erf(x * _ROOT_HALF))


@triton.jit
def _clamp_gpt_oss(gate, up):
    gate = tl.minimum(gate, GPT_OSS_LIMIT, propagate_nan=tl.PropagateNan.ALL)
    up = tl.minimum(up, GPT_OSS_LIMIT, propagate_nan=tl.PropagateNan.ALL)
    up = tl.maximum(up, -GPT_OSS_LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return gate, up
