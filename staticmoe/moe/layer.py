"""StaticMoE: a mixture-of-experts layer whose every shape is constant.

Alone it is an ordinary, dropless module. Wrapped by a runner it takes part in the step: it counts, flags overflows,
hands over its losses, and updates its balancing bias at commit.

Dimensions: T tokens, K top_k, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from staticmoe.config import CapacityPolicy
from staticmoe.errors import ConfigError, ModelError
from staticmoe.moe.experts import Experts, SharedExpert
from staticmoe.moe.losses import load_balancing_loss, router_z_loss
from staticmoe.moe.router import Router, RouterOutput
from staticmoe.moe.step import active, capacity_of, main_grads, plan_step, step_fields
from staticmoe.reference import RoutingPlan, is_gated
from staticmoe.shapes import StaticShape

if TYPE_CHECKING:
    from staticmoe.runner.participants import StepBinding


class StaticMoE(nn.Module):
    """Mixture of experts with constant shapes: router, expert block, optional shared expert.

    Args:
        hidden_size: H.
        intermediate_size: I, of one expert.
        num_experts: E.
        top_k: K, experts of a token.
        score_function: "softmax" or "sigmoid".
        norm_topk_prob: divide the chosen scores by their sum.
        routed_scaling_factor: factor on all routing weights.
        n_group, topk_group: choose only among experts of the best `topk_group` of `n_group` groups.
        balancing_bias_rate: step of the balancing bias at each commit; 0 leaves the bias out.
        router_aux_loss_coef, router_z_loss_coef: coefficients under which the runner adds the router's losses.
        shared_intermediate_size: width of a dense expert beside the routed ones; 0 for none.
        activation: "swiglu", "geglu", "gpt_oss" or the ungated "relu2".
        bias: whether the experts have biases.
        device, dtype: of the experts; the router is fp32.

    Raises:
        ConfigError: a size or option that cannot work.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        score_function: str = "softmax",
        norm_topk_prob: bool = True,
        routed_scaling_factor: float = 1.0,
        n_group: int = 1,
        topk_group: int = 1,
        balancing_bias_rate: float = 0.0,
        router_aux_loss_coef: float = 0.0,
        router_z_loss_coef: float = 0.0,
        shared_intermediate_size: int = 0,
        activation: str = "swiglu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(hidden_size, intermediate_size, num_experts, shared_intermediate_size)
        _check_rates(balancing_bias_rate, router_aux_loss_coef, router_z_loss_coef)
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_experts = num_experts
        self.top_k = top_k
        self.router_aux_loss_coef = router_aux_loss_coef
        self.router_z_loss_coef = router_z_loss_coef
        self.router = Router(
            hidden_size,
            num_experts,
            top_k,
            score_function=score_function,
            norm_topk_prob=norm_topk_prob,
            routed_scaling_factor=routed_scaling_factor,
            n_group=n_group,
            topk_group=topk_group,
            balancing_bias_rate=balancing_bias_rate,
            device=device,
        )
        self.experts = Experts(
            hidden_size, intermediate_size, num_experts, activation=activation, bias=bias, device=device, dtype=dtype
        )
        self.shared_expert = (
            SharedExpert(hidden_size, shared_intermediate_size, device=device, dtype=dtype)
            if shared_intermediate_size
            else None
        )
        self._binding: StepBinding | None = None
        self._last_losses: dict[str, Tensor] | None = None
        if top_k == 1 and norm_topk_prob:
            warnings.warn(
                "StaticMoE: with top_k=1 and norm_topk_prob=True every routing weight is 1, so the output gives the "
                "router no gradient; pass norm_topk_prob=False",
                stacklevel=2,
            )

    def reset_parameters(self) -> None:
        """Draw all parameters anew, as construction does under the same seed, and zero the balancing bias."""
        self.router.reset_parameters()
        self.experts.reset_parameters()
        if self.shared_expert is not None:
            self.shared_expert.reset_parameters()

    def forward(
        self, x: Tensor, token_mask: Tensor | None = None, routing: tuple[Tensor, Tensor | None] | None = None
    ) -> Tensor:
        """Return the layer's output for each token; zeros for masked tokens and for dropped assignments' share.

        Shapes:
            x [..., H]; token_mask of the leading shape of x, or flat [T], bool or integer, non-zero for real tokens
            (default: the runner's); routing = (topk_ids [T,K] int, topk_weights [T,K]) instead of the router's,
            with the leading shape of x or flat; with None for the weights, the router weighs the given experts, as
            `functional.weigh` does. Returns the shape of x; under autocast in its dtype.
        Raises:
            ConfigError: shapes or dtypes that do not fit.
            ModelError: the router's losses would be lost to reentrant checkpointing.
        Graph-safe: yes: no host sync, every shape follows from shapes and from the capacity in force.
        """
        if x.dim() < 1 or x.shape[-1] != self.hidden_size:
            raise ConfigError(f"x: expected last dimension hidden_size = {self.hidden_size}; got {tuple(x.shape)}")
        tokens = x.reshape(-1, self.hidden_size).contiguous()
        binding = active(self._binding)
        if token_mask is None and binding is not None:
            token_mask = binding.token_mask
        mask = None if token_mask is None else _flat_mask(token_mask, x)
        if mask is not None:
            # Masked tokens may hold anything, and a weight gradient would multiply it by zero.
            tokens = torch.where(mask[:, None], tokens, 0.0)
        routed = None
        if routing is None or routing[1] is None:
            given = () if routing is None else (self._given("topk_ids", routing[0], tokens.shape[0]),)
            routed = self.router(tokens, mask, *given)
            ids, weights = routed.topk_ids, routed.topk_weights
        else:
            ids, weights = self._given_routing(routing[0], routing[1], mask, tokens.shape[0])
        shape = self._shape(tokens.shape[0], capacity_of(binding))
        plan, weights = plan_step(binding, ids, weights, shape)
        gate_up, down = self.accumulated_parameters()
        y = self.experts(tokens, weights, plan, main_grads(binding, gate_up, down))
        if self.shared_expert is not None:
            y = y + self.shared_expert(tokens)
        self._report_losses(binding, routed, plan, mask)
        return y.reshape(x.shape)

    def static_shape(self, tokens: int) -> StaticShape:
        """Return the sizes of a forward with `tokens` tokens at the capacity in force; dropless without a runner."""
        return self._shape(tokens, capacity_of(self._binding))

    def _shape(self, tokens: int, capacity: CapacityPolicy) -> StaticShape:
        return StaticShape(
            tokens=tokens,
            top_k=self.top_k,
            num_experts=self.num_experts,
            hidden=self.hidden_size,
            intermediate=self.intermediate_size,
            capacity_factor=capacity.factor,
            capacity_scope=capacity.scope,
            gated=is_gated(self.experts.activation),
        )

    def router_losses(self) -> dict[str, Tensor]:
        """Return {"aux_loss", "z_loss"} of the last forward, before their coefficients, for a loop without runner.

        They are differentiable where their coefficient is above 0.

        Raises:
            ModelError: there was no forward with gradients and an own router, or a runner takes the losses.
        """
        if self._last_losses is None:
            raise ModelError(
                "router_losses: expected the last forward to have had gradients enabled, the layer's own router and no "
                "runner; got none such. Under a runner read result.metrics"
            )
        return dict(self._last_losses)

    def step_fields(self) -> Mapping[str, tuple[int, ...]]:
        """Return the record fields: assignments before capacity and rows kept, per expert."""
        return step_fields(self.num_experts)

    def bind_step(self, binding: StepBinding | None) -> None:
        """Take a runner's binding, or give it up (None).

        Raises:
            ModelError: another binding is held.
        """
        if binding is not None and self._binding is not None:
            raise ModelError("StaticMoE: expected an unbound layer; got one that a runner holds: close that runner")
        self._binding = binding
        self._last_losses = None

    def accumulated_parameters(self) -> tuple[nn.Parameter, nn.Parameter]:
        """Return the parameters whose gradients the backward can add into the buffers that a binding lends."""
        return self.experts.gate_up_proj, self.experts.down_proj

    def commit_step(self, veto: Tensor) -> None:
        """Update the balancing bias from the counts of this step; `veto` is fp32, non-zero to change nothing.

        Raises:
            ModelError: the layer is not bound.
        Graph-safe: yes; writes the buffer in place.
        """
        if self._binding is None:
            raise ModelError("commit_step: expected a bound layer; got one without runner: call bind_step first")
        if self.router.balancing_bias_rate > 0:
            self.router.update_balancing_bias(self._binding.fields["routed"], veto)

    def extra_repr(self) -> str:
        """Return the sizes and the capacity in force for the module's repr."""
        factor = None if self._binding is None else self._binding.capacity.factor
        return (
            f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}, "
            f"num_experts={self.num_experts}, top_k={self.top_k}, activation={self.experts.activation}, "
            f"capacity_factor={factor}"
        )

    def __getstate__(self) -> dict[str, Any]:
        # A copy is not wrapped by the runner that wraps this one, and a loss carries a graph that cannot be copied.
        return {**self.__dict__, "_binding": None, "_last_losses": None}

    def _given(self, name: str, tensor: Tensor, tokens: int) -> Tensor:
        if tensor.dim() < 1 or tensor.shape[-1] != self.top_k or tensor.numel() != tokens * self.top_k:
            raise ConfigError(f"routing: expected {name} of shape {(tokens, self.top_k)}; got {tuple(tensor.shape)}")
        return tensor.reshape(tokens, self.top_k)

    def _given_routing(self, ids: Tensor, weights: Tensor, mask: Tensor | None, tokens: int) -> tuple[Tensor, Tensor]:
        ids, weights = self._given("topk_ids", ids, tokens), self._given("topk_weights", weights, tokens)
        if weights.dtype != torch.float64:
            weights = weights.to(torch.float32)
        if mask is not None:
            ids = torch.where(mask[:, None], ids, -1)
            weights = torch.where(mask[:, None], weights, 0.0)
        return ids, weights

    def _report_losses(
        self, binding: StepBinding | None, routed: RouterOutput | None, plan: RoutingPlan, mask: Tensor | None
    ) -> None:
        # Activation checkpointing runs the forward again inside the backward. That run must compute what the first
        # one did, but the losses of the first are those in use.
        recompute = torch._C._current_graph_task_id() != -1
        if not recompute:
            self._last_losses = None
        grad = torch.is_grad_enabled()
        if routed is None or not (grad if binding is None else binding.training):
            return
        if not (grad or recompute):
            self._refuse_hidden_losses()
        score_function, counts = self.router.score_function, plan.routed_per_expert
        with torch.set_grad_enabled(grad and self.router_aux_loss_coef > 0):
            aux = load_balancing_loss(routed.logits, counts, score_function=score_function, token_mask=mask)
        with torch.set_grad_enabled(grad and self.router_z_loss_coef > 0):
            z = router_z_loss(routed.logits, token_mask=mask)
        if binding is not None:
            binding.add_loss("aux_loss", aux, self.router_aux_loss_coef)
            binding.add_loss("z_loss", z, self.router_z_loss_coef)
        elif not recompute and self._binding is None:
            self._last_losses = {"aux_loss": aux, "z_loss": z}

    def _refuse_hidden_losses(self) -> None:
        has_loss = self.router_aux_loss_coef > 0 or self.router_z_loss_coef > 0
        if has_loss and self.router.weight.requires_grad:
            raise ModelError(
                "StaticMoE: expected gradients to be enabled in a training forward of a layer with router losses; got "
                "a forward under no_grad, as reentrant activation checkpointing runs it, where the losses would be "
                "lost: checkpoint with use_reentrant=False"
            )


def _flat_mask(token_mask: Tensor, x: Tensor) -> Tensor:
    tokens = x.numel() // x.shape[-1]
    if token_mask.numel() != tokens or (token_mask.dim() != 1 and token_mask.shape != x.shape[:-1]):
        raise ConfigError(
            f"token_mask: expected shape {tuple(x.shape[:-1])} or ({tokens},), one per token; "
            f"got {tuple(token_mask.shape)}"
        )
    return token_mask.reshape(-1).to(torch.bool)


def _check_sizes(hidden: int, intermediate: int, num_experts: int, shared: int) -> None:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_experts": num_experts}
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{name}: expected at least 1; got {value}")
    if shared < 0:
        raise ConfigError(f"shared_intermediate_size: expected 0 (none) or a positive width; got {shared}")


def _check_rates(bias_rate: float, aux: float, z: float) -> None:
    rates = {"balancing_bias_rate": bias_rate, "router_aux_loss_coef": aux, "router_z_loss_coef": z}
    for name, value in rates.items():
        # Written so that NaN is refused as well.
        if not value >= 0:
            raise ConfigError(f"{name}: expected 0 (off) or a positive number; got {value}")
