"""The router: fp32 logits, the choice of experts, the balancing bias.

Dimensions: T tokens, K top_k, E experts, H hidden.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from staticmoe import functional
from staticmoe.moe.step import balance
from staticmoe.phases import DevicePhase, device_range


@dataclasses.dataclass(frozen=True)
class RouterOutput:
    """What the router decided.

    Attributes:
        logits: [T,E] fp32 or fp64.
        topk_ids: [T,K] int32, -1 for masked tokens.
        topk_weights: [T,K] fp32 or fp64, 0 for masked tokens.
    """

    logits: Tensor
    topk_ids: Tensor
    topk_weights: Tensor


class Router(nn.Module):
    """Scores tokens against experts and chooses; always in fp32, whatever the module or autocast was cast to.

    Attributes:
        weight: [E,H] fp32 parameter.
        balancing_bias: [E] fp32 buffer; added to the scores for the choice alone, and only if
            `balancing_bias_rate` is above 0. Registered always, so that state dicts do not depend on the rate.
    """

    weight: nn.Parameter
    balancing_bias: Tensor

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        score_function: str = "softmax",
        norm_topk_prob: bool = True,
        routed_scaling_factor: float = 1.0,
        n_group: int = 1,
        topk_group: int = 1,
        balancing_bias_rate: float = 0.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        functional.check_routing_options(
            num_experts=num_experts,
            top_k=top_k,
            score_function=score_function,
            n_group=n_group,
            topk_group=topk_group,
        )
        self.top_k = top_k
        self.score_function = score_function
        self.norm_topk_prob = norm_topk_prob
        self.routed_scaling_factor = routed_scaling_factor
        self.n_group = n_group
        self.topk_group = topk_group
        self.balancing_bias_rate = balancing_bias_rate
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=torch.float32))
        self.register_buffer("balancing_bias", torch.zeros(num_experts, device=device, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight anew, uniform within 1/sqrt(H), and set the balancing bias to zero."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.zeros_(self.balancing_bias)

    def forward(self, x: Tensor, token_mask: Tensor | None = None, topk_ids: Tensor | None = None) -> RouterOutput:
        """Route tokens; where `topk_ids` chooses the experts, weigh those, and neither bias nor groups matter.

        Shapes:
            x [T,H] any float; token_mask [T] bool; topk_ids [T,K] integer. Masked tokens must hold finite numbers
            here: the weight's gradient multiplies them by zero.
        Raises:
            ConfigError: shapes that do not fit.
        Graph-safe: yes.
        """
        with torch.autocast(device_type=x.device.type, enabled=False), device_range(DevicePhase.ROUTER):
            dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
            logits = F.linear(x.to(dtype), self.weight.to(dtype))
            options: dict[str, Any] = {
                "score_function": self.score_function,
                "token_mask": token_mask,
                "norm_topk_prob": self.norm_topk_prob,
                "routed_scaling_factor": self.routed_scaling_factor,
                "n_group": self.n_group,
            }
            if topk_ids is not None:
                ids, weights = functional.weigh(logits, topk_ids, **options)
            else:
                ids, weights = functional.route(
                    logits,
                    top_k=self.top_k,
                    selection_bias=self.balancing_bias if self.balancing_bias_rate > 0 else None,
                    topk_group=self.topk_group,
                    **options,
                )
        return RouterOutput(logits, ids, weights)

    @torch.no_grad()
    def update_balancing_bias(self, routed: Tensor, veto: Tensor) -> None:
        """Raise the bias of experts below the mean load by the rate and lower that of experts above it.

        Shapes:
            routed [E] int64, assignments before capacity; veto fp32 scalar, anything but 0 changes nothing.
        Source: auxiliary-loss-free balancing (arXiv 2408.15664).
        Graph-safe: yes; the buffer is written in place.
        """
        balance(self.balancing_bias, routed, self.balancing_bias_rate, veto)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # A cast of the module moves the bias and leaves its dtype: in bf16 steps of the rate would round away.
        before = self.balancing_bias
        super()._apply(fn, recurse)
        after = self.balancing_bias
        if after.dtype != torch.float32:
            self.balancing_bias = before.to(device=after.device)
        return self
