"""The parameters of the routed experts and of the shared expert.

Dimensions: T tokens, K top_k, E experts, H hidden, I intermediate, S intermediate of the shared expert.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from staticmoe import functional
from staticmoe.errors import ConfigError
from staticmoe.reference import ACTIVATIONS, RoutingPlan, is_gated


class Experts(nn.Module):
    """E feed-forward networks of one shape, their weights stacked.

    Attributes:
        gate_up_proj: [E,2I,H], the I gate rows first; [E,I,H] for the ungated "relu2".
        down_proj: [E,H,I].
        gate_up_proj_bias: [E,2I] (or [E,I]), or None.
        down_proj_bias: [E,H], or None.
    """

    gate_up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ConfigError(f"activation: expected one of {', '.join(ACTIVATIONS)}; got {activation!r}")
        self.activation = activation
        width = 2 * intermediate_size if is_gated(activation) else intermediate_size

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.gate_up_proj = parameter(num_experts, width, hidden_size)
        self.down_proj = parameter(num_experts, hidden_size, intermediate_size)
        self.register_parameter("gate_up_proj_bias", parameter(num_experts, width) if bias else None)
        self.register_parameter("down_proj_bias", parameter(num_experts, hidden_size) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew, uniform within 1/sqrt(fan-in) of one expert, and set the biases to zero."""
        for weight in (self.gate_up_proj, self.down_proj):
            bound = 1 / math.sqrt(weight.shape[2])
            nn.init.uniform_(weight, -bound, bound)
        for bias in (self.gate_up_proj_bias, self.down_proj_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(
        self, x: Tensor, topk_weights: Tensor, plan: RoutingPlan, main_grads: functional.MainGrads | None = None
    ) -> Tensor:
        """Run the block; under autocast in its dtype, else in that of x, which the parameters must share.

        `main_grads` takes the weights' gradients; see `staticmoe.functional.experts`.

        Shapes:
            x [T,H]; topk_weights [T,K]. Returns [T,H].
        Raises:
            ConfigError: x and the parameters differ in dtype outside of autocast.
        Graph-safe: yes.
        """
        device = x.device.type
        dtype = x.dtype
        if torch.is_autocast_enabled(device) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
        elif self.gate_up_proj.dtype != dtype:
            raise ConfigError(
                f"x: expected {self.gate_up_proj.dtype} as the experts; got {dtype}: cast one of them, "
                "or use torch.autocast"
            )

        # Casts of our own, not autocast's cached ones: a cached copy outlives the update of its parameter.
        def cast(parameter: Tensor | None) -> Tensor | None:
            return None if parameter is None else parameter.to(dtype)

        weights: tuple[Tensor, Tensor] = (self.gate_up_proj, self.down_proj)
        if weights[0].dtype != torch.float32:
            # Of fp32 the block makes its own, so that their gradients are not rounded.
            weights = (weights[0].to(dtype), weights[1].to(dtype))
        return functional.experts(
            x.to(dtype),
            topk_weights,
            plan,
            *weights,
            gate_up_bias=cast(self.gate_up_proj_bias),
            down_bias=cast(self.down_proj_bias),
            activation=self.activation,
            main_grads=main_grads,
        )


class SharedExpert(nn.Module):
    """A dense SwiGLU network that every token passes.

    Attributes:
        gate_proj, up_proj: H to S, without bias.
        down_proj: S to H, without bias.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False, device=device, dtype=dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False, device=device, dtype=dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        for linear in (self.gate_proj, self.up_proj, self.down_proj):
            linear.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Return down(silu(gate(x)) · up(x)).

        Shapes:
            x [T,H]. Returns [T,H].
        Graph-safe: yes.
        """
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
