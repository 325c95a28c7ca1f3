"""The experts function that transformers calls: T·K rows, nothing dropped, no shape that depends on a value.

Two ways through it. Where the module's activation is one of ours, the whole block is one op, which keeps x and the
pre-activation for the backward and nothing else. Otherwise, and where adapters add to a weight, two grouped products,
with the module's own activation (and its norm after the experts) between and behind them under autograd.

Dimensions: T tokens, K top_k, E experts, H hidden, I intermediate, R = T·K rows. Where there is no gate, read I
for 2I.
"""

from __future__ import annotations

import dataclasses
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from staticmoe import functional
from staticmoe.errors import ModelError
from staticmoe.functional import RoutingPlan
from staticmoe.integrations.huggingface.activation import activation_of
from staticmoe.integrations.huggingface.adapters import LowRank, adapters_of, has_running_adapters
from staticmoe.integrations.huggingface.participants import as_they_lie, masked, step_of
from staticmoe.moe.step import capacity_of, main_grads, plan_step
from staticmoe.runner.participants import StepBinding
from staticmoe.shapes import StaticShape

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# How often each experts module came here. Beside the modules and not on them: they are the user's.
entries: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Weights:
    """The parameters of one experts module, seen in the layout [E,out,in].

    Attributes:
        up: [E,2I,H]; columns of gate and up interleaved where the module says so.
        down: [E,H,I].
        up_bias, down_bias: [E,2I] and [E,H], or None.
    """

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return each token's weighted sum of its experts' outputs; differentiable in tokens, weights and parameters.

    An id outside 0..E-1 is an assignment without expert: it adds nothing, and its weight gets a zero gradient. Under a
    runner so is every assignment of a token that its mask says is none, and rows are as many as its capacity gives.

    Shapes:
        hidden_states [T,H]; top_k_index [T,K] int64 or int32; top_k_weights [T,K] float. Returns [T,H] in the dtype
        of hidden_states.
    Raises:
        ModelError: parameters that are sharded, quantised, without memory, or of shapes that do not fit the module.
    Graph-safe: yes; the first call of a module looks at constants on the CPU to learn which activation it has.
    """
    entries[self] = entries.get(self, 0) + 1
    weights = _weights(self, hidden_states)
    if not hidden_states.shape[0]:
        return hidden_states.clone()
    whole = not has_running_adapters(self) and not getattr(self, "has_post_expert_norm", False)
    activation = activation_of(self) if whole else None
    x, weights = _cast(hidden_states, weights, whole=activation is not None)
    binding = step_of(self)
    top_k_index, top_k_weights = masked(binding, top_k_index, top_k_weights)
    shape = _static_shape(self, binding, top_k_index, weights)
    plan, top_k_weights = plan_step(binding, top_k_index, top_k_weights, shape)
    if activation is None:
        y = _by_parts(self, x, top_k_index, top_k_weights, plan, weights)
    else:
        gate_up, bias = weights.up, weights.up_bias
        if self.has_gate and not self.is_concatenated:
            gate_up, bias = _halves(gate_up), None if bias is None else _halves(bias)
        y = functional.experts(
            x,
            top_k_weights,
            plan,
            gate_up,
            weights.down,
            gate_up_bias=bias,
            down_bias=weights.down_bias,
            activation=activation,
            main_grads=main_grads(binding, self.gate_up_proj, self.down_proj) if as_they_lie(self) else None,
        )
    return y.to(hidden_states.dtype)


def _static_shape(module: Any, binding: StepBinding | None, ids: Tensor, weights: Weights) -> StaticShape:
    """The sizes of this call at the capacity in force."""
    capacity = capacity_of(binding)
    num_experts, hidden, intermediate = weights.down.shape
    return StaticShape(
        tokens=ids.shape[0],
        top_k=ids.shape[1],
        num_experts=num_experts,
        hidden=hidden,
        intermediate=intermediate,
        capacity_factor=capacity.factor,
        capacity_scope=capacity.scope,
        gated=bool(module.has_gate),
    )


def _weights(module: Any, hidden_states: Tensor) -> Weights:
    """The module's parameters as [E,out,in], looked at for what the ops cannot take."""
    up_name = "gate_up_proj" if module.has_gate else "up_proj"
    names = (up_name, "down_proj", *((f"{up_name}_bias", "down_proj_bias") if module.has_bias else ()))
    found = [_need_plain(module, name) for name in names]
    up, down = found[:2]
    if up.dim() != 3 or down.dim() != 3:
        raise ModelError(
            f"{type(module).__name__}: expected {up_name} and down_proj with 3 dimensions, one weight per expert; got "
            f"{tuple(up.shape)} and {tuple(down.shape)}: quantised and flattened experts run with "
            'experts_implementation="eager"'
        )
    if module.is_transposed:
        # Views: gradients arrive at the parameter as it lies. On a GPU the kernels read rows along the summed
        # dimension, so that each product copies its weight once, in the forward and in the backward.
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    num_experts, width, hidden = up.shape
    per_gate = 2 if module.has_gate else 1
    expected = (num_experts, hidden, width // per_gate)
    if tuple(down.shape) != expected or width % per_gate or hidden_states.shape[-1] != hidden:
        raise ModelError(
            f"{type(module).__name__}: expected down_proj of {expected} as [experts, out, in] for {up_name} "
            f"{tuple(up.shape)} and tokens of width {hidden}; got {tuple(down.shape)} and width "
            f'{hidden_states.shape[-1]}: use experts_implementation="eager"'
        )
    return Weights(up, down, *(found[2:] if module.has_bias else (None, None)))


def _need_plain(module: Any, name: str) -> Tensor:
    """The named parameter, if it is a plain tensor of a float dtype with memory behind it."""
    tensor = getattr(module, name, None)
    where = f"{type(module).__name__}.{name}"
    if not isinstance(tensor, Tensor):
        raise ModelError(f'{where}: expected a tensor; got {tensor!r}: use experts_implementation="eager"')
    if hasattr(tensor, "placements"):
        raise ModelError(
            f"{where}: expected a whole tensor; got a DTensor placed as {tensor.placements}: run one replica on each "
            "GPU (data parallel), or FSDP2, which makes the weights whole before the layer runs"
        )
    if tensor.is_meta:
        raise ModelError(
            f"{where}: expected a tensor with memory; got one on the meta device: load the checkpoint without offload, "
            'or model.to_empty(device="cuda") and initialise it'
        )
    if is_traceable_wrapper_subclass(tensor) or tensor.dtype not in _DTYPES:
        raise ModelError(
            f"{where}: expected a plain float32, bfloat16, float16 or float64 tensor; got {type(tensor).__name__} of "
            f"{tensor.dtype}, which looks quantised: load the model in bfloat16, or use the experts implementation "
            "of the quantiser"
        )
    return tensor


def _cast(hidden_states: Tensor, weights: Weights, *, whole: bool) -> tuple[Tensor, Weights]:
    """Bring tokens and parameters to one dtype: that of autocast where it is on, else that of the parameters.

    `whole`: the block is one op, which takes weights in fp32 as they are.
    """
    device = hidden_states.device.type
    dtype = weights.up.dtype
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)

    # Casts of our own, not autocast's cached ones: a cached copy outlives the update of its parameter.
    def cast(parameter: Tensor | None) -> Tensor | None:
        return None if parameter is None else parameter.to(dtype)

    biases = (cast(weights.up_bias), cast(weights.down_bias))
    if whole and weights.up.dtype == torch.float32:
        # The block makes casts of its own, so that the gradients are not rounded.
        return hidden_states.to(dtype), Weights(weights.up, weights.down, *biases)
    return hidden_states.to(dtype), Weights(weights.up.to(dtype), weights.down.to(dtype), *biases)


def _by_parts(
    module: Any, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, plan: RoutingPlan, weights: Weights
) -> Tensor:
    """Two grouped products with the module's own activation between them, and its norm behind them.

    Rows without an assignment hold finite values throughout: zeros, what the biases make of them, and what the
    activation makes of that. The last step does not read them, so that their gradients are zeros.
    """
    of_row = None if weights.up_bias is None else _expert_of_row(top_k_index, plan, x.dtype)
    added = adapters_of(module, x.dtype)
    pre = _product(x, weights.up, added.get("gate_up_proj" if module.has_gate else "up_proj"), plan, gather=True)
    if of_row is not None and weights.up_bias is not None:
        pre = pre + of_row @ weights.up_bias
    hidden = module._apply_gate(pre) if module.has_gate else module.act_fn(pre)
    rows = _product(hidden.to(x.dtype), weights.down, added.get("down_proj"), plan, gather=False)
    if of_row is not None and weights.down_bias is not None:
        rows = rows + of_row @ weights.down_bias
    if getattr(module, "has_post_expert_norm", False):
        rows = module.post_expert_norm(rows)
    return functional.combine(rows, top_k_weights, plan)


def _product(
    rows_or_tokens: Tensor, weight: Tensor, added: LowRank | None, plan: RoutingPlan, *, gather: bool
) -> Tensor:
    """Each row times the weight of its expert, and times what is added to that."""
    product = functional.grouped_linear(rows_or_tokens, weight, plan, gather=gather)
    if added is None:
        return product
    narrow = functional.grouped_linear(rows_or_tokens, added.inner, plan, gather=gather)
    return product + functional.grouped_linear(narrow, added.outer, plan, gather=False)


def _expert_of_row(top_k_index: Tensor, plan: RoutingPlan, dtype: torch.dtype) -> Tensor:
    """[R,E]: 1 at the expert of each row, all 0 for a row without an assignment.

    A product with it adds the biases, and its backward sums their gradients in a fixed order, which the scatter of
    an indexed bias does slowly where an expert has many rows.
    """
    assignment = plan.row_assignment
    expert = top_k_index.reshape(-1)[assignment.clamp(min=0).long()]
    every = torch.arange(plan.num_experts, device=expert.device)
    return ((expert[:, None] == every) & (assignment >= 0)[:, None]).to(dtype)


def _halves(tensor: Tensor) -> Tensor:
    """The view [E,2,I,...] of [E,2I,...] in which gate and up alternate."""
    return tensor.unflatten(1, (-1, 2)).transpose(1, 2)
