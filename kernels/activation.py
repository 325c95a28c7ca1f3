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


if triton.knobs.runtime.interpret:

    @triton.jit
    def _sigmoid(x):
        return 1.0 / (1.0 + tl.exp(-x))

    @triton.jit
    def rounded(value, DTYPE: tl.constexpr):
        """Return fp32 values rounded to DTYPE, in DTYPE and widened again."""
        narrow = value.to(DTYPE)
        return narrow, narrow.to(tl.float32)

else:
    # By hand, because the compiler's division and conversion take five times the instructions, and an epilogue that
    # works on a whole tile once is bound by fetching them.
    @triton.jit
    def _sigmoid(x):
        # Within 2 units in the last place of fp32; 0 and 1 far out, NaN stays NaN.
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; "
            "rcp.approx.ftz.f32 $0, t; }",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )

    @triton.jit
    def rounded(value, DTYPE: tl.constexpr):
        """Return fp32 values rounded to DTYPE, in DTYPE and widened again."""
        if DTYPE == tl.bfloat16:  # noqa: SIM300
            narrow, wide = tl.inline_asm_elementwise(
                "cvt.rn.bf16x2.f32 $0, $4, $3; shl.b32 $1, $0, 16; and.b32 $2, $0, 0xffff0000;",
                "=&r,=r,=r,r,r",
                [value],
                dtype=(tl.bfloat16, tl.float32),
                is_pure=True,
                pack=2,
            )
        elif DTYPE == tl.float16:  # noqa: SIM300
            narrow, wide = tl.inline_asm_elementwise(
                "{ .reg .b16 low, high; cvt.rn.f16x2.f32 $0, $4, $3; mov.b32 {low, high}, $0; cvt.f32.f16 $1, low; "
                "cvt.f32.f16 $2, high; }",
                "=&r,=r,=r,r,r",
                [value],
                dtype=(tl.float16, tl.float32),
                is_pure=True,
                pack=2,
            )
        else:
            narrow = value.to(DTYPE)
            wide = narrow.to(tl.float32)
        return narrow, wide


@triton.jit
def activate(gate, up, ACT: tl.constexpr):
    """Return the gated activation of fp32 tiles; see `staticmoe.reference.activate`. NaN stays NaN."""
    tl.static_assert(ACT == "swiglu" or ACT == "geglu" or ACT == "gpt_oss", "a gated activation")
    if ACT == "swiglu":
        out = gate * _sigmoid(gate) * up
    elif ACT == "geglu":
        out = gate * _normal_cdf(gate) * up
    else:
        gate, up = _clamp_gpt_oss(gate, up)
        out = (up + 1.0) * gate * _sigmoid(gate * GPT_OSS_ALPHA)
    return out


@triton.jit
def activate_backward(gate, up, grad, ACT: tl.constexpr):
    """Return the gradients (d_gate, d_up) of fp32 tiles; see `staticmoe.reference.activation_backward`."""
    tl.static_assert(ACT == "swiglu" or ACT == "geglu" or ACT == "gpt_oss", "a gated activation")
    if ACT == "swiglu":
        sigmoid = _sigmoid(gate)
        silu = gate * sigmoid
        d_gate = grad * up * (sigmoid + silu * (1.0 - sigmoid))
        d_up = grad * silu
    elif ACT == "geglu":
        cdf = _normal_cdf(gate)
        density = tl.exp(-0.5 * gate * gate) * _ROOT_TWO_PI_INVERSE
        d_gate = grad * up * (cdf + gate * density)
        d_up = grad * gate * cdf
    else:
        low, middle = _clamp_gpt_oss(gate, up)
        sigmoid = _sigmoid(low * GPT_OSS_ALPHA)
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
