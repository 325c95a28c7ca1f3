"""The reference language model: a small byte-level transformer whose every MLP is a mixture of experts.

One dial, `depth`, decides width, heads and experts. Written to be captured: constant shapes, no
question to the host, tables as buffers; and to be read before wrapping a model of one's own.

Dimensions: B sequences, S tokens of a sequence, H hidden size, A heads, D = H / A head size, E experts,
I intermediate size, V = 256 byte values.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from staticmoe.errors import ConfigError
from staticmoe.moe import StaticMoE

HEAD_SIZE = 32
ROPE_BASE = 10000.0


class LMOutput(NamedTuple):
    """What a forward returns: `loss` (fp32 scalar, nats a byte, None without labels) and `logits` [B, S, V]."""

    loss: Tensor | None
    logits: Tensor


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The sizes of a `DemoLM`; `from_depth` derives all of them from one number.

    Attributes:
        depth: layers.
        hidden_size: H.
        num_heads: A; H / A must be even.
        num_experts: E of every layer.
        top_k: experts of a token.
        intermediate_size: I of every expert.
        max_seq_len: the longest S, which sizes the rotary tables.
        vocab_size: V.
        dropout: probability on the embedding and on both residual branches.
        score_function: of the router.
        balancing_bias_rate: step of the router's balancing bias.
        router_aux_loss_coef: weight of the load-balancing loss.
    """

    depth: int
    hidden_size: int
    num_heads: int
    num_experts: int
    top_k: int
    intermediate_size: int
    max_seq_len: int
    vocab_size: int = 256
    dropout: float = 0.0
    score_function: str = "sigmoid"
    balancing_bias_rate: float = 1e-3
    router_aux_loss_coef: float = 0.01

    def __post_init__(self) -> None:
        for name in ("depth", "hidden_size", "num_heads", "num_experts", "top_k", "intermediate_size", "max_seq_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1; got {getattr(self, name)}")
        if self.hidden_size % (2 * self.num_heads):
            raise ConfigError(
                f"hidden_size: expected a multiple of {2 * self.num_heads}, twice num_heads, for rotary pairs; "
                f"got {self.hidden_size}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout: expected at least 0 and below 1; got {self.dropout}")

    @classmethod
    def from_depth(cls, depth: int, max_seq_len: int, dropout: float = 0.0) -> ModelConfig:
        """Return the sizes for `depth` layers: 32 channels, one head and four experts a layer, top 2.

        An expert is as wide as the stream, so the two that a token meets weigh as much as one dense SwiGLU
        of twice the width.
        """
        hidden_size = HEAD_SIZE * depth
        return cls(
            depth=depth,
            hidden_size=hidden_size,
            num_heads=depth,
            num_experts=4 * depth,
            top_k=2,
            intermediate_size=hidden_size,
            max_seq_len=max_seq_len,
            dropout=dropout,
        )


class RotaryTable(nn.Module):
    """Rotates queries and keys by their position. The tables are buffers, so that they move with the model
    and a capture knows where they come from; non-persistent, as they follow from the sizes."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_size: int, max_seq_len: int) -> None:
        super().__init__()
        frequency = ROPE_BASE ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
        angle = torch.arange(max_seq_len, dtype=torch.float64)[:, None] * frequency
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` rotated.

        Shapes:
            x: [B, A, S, D], S at most max_seq_len; returned alike.
        Graph-safe: yes, constant tables and shapes.
        """
        seq_len = x.shape[-2]
        cos, sin = self.cos[:seq_len].to(x.dtype), self.sin[:seq_len].to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and normalised queries and keys."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.head_size = config.hidden_size // config.num_heads
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: RotaryTable) -> Tensor:
        """Return what every token gathers from those before it and itself.

        Shapes:
            x: [B, S, H]; returned alike.
        Graph-safe: yes, constant shapes.
        """
        batch, seq_len, hidden = x.shape
        qkv = self.qkv_proj(x).view(batch, seq_len, 3, self.num_heads, self.head_size)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        query, key = (F.rms_norm(rotary(part), (self.head_size,)) for part in (query, key))
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out_proj(y.transpose(1, 2).reshape(batch, seq_len, hidden))


class Block(nn.Module):
    """Attention, then experts, each on the normalised stream and added to it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size)
        self.attention = Attention(config)
        self.moe_norm = nn.RMSNorm(config.hidden_size)
        self.moe = StaticMoE(
            config.hidden_size,
            config.intermediate_size,
            config.num_experts,
            config.top_k,
            score_function=config.score_function,
            balancing_bias_rate=config.balancing_bias_rate,
            router_aux_loss_coef=config.router_aux_loss_coef,
        )
        self.dropout = config.dropout

    def forward(self, x: Tensor, rotary: RotaryTable) -> Tensor:
        """Return the stream after this layer.

        Shapes:
            x: [B, S, H]; returned alike.
        Graph-safe: yes.
        """
        x = x + F.dropout(self.attention(self.attention_norm(x), rotary), self.dropout, self.training)
        return x + F.dropout(self.moe(self.moe_norm(x)), self.dropout, self.training)


class DemoLM(nn.Module):
    """Byte-level language model; the loss is the mean over labels that are not -100, in fp32."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary = RotaryTable(config.hidden_size // config.num_heads, config.max_seq_len)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.RMSNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.reset_parameters(seed)

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Draw all weights from a generator of their own: the same for the same seed, whatever ran before."""
        generator = torch.Generator().manual_seed(seed)
        # Each layer adds two branches to the stream; this keeps its variance from growing with depth.
        branch_scale = 1.0 / math.sqrt(2 * self.config.depth)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
                continue
            # The last dimension is what a weight sums over, for linear, router and expert weights alike.
            std = 1.0 / math.sqrt(parameter.shape[-1])
            if name.startswith("embedding"):
                std = 1.0
            elif name.endswith(("out_proj.weight", "down_proj")):
                std *= branch_scale
            elif name.startswith("head") or "router" in name:
                # Near-uniform predictions and routes to begin with.
                std *= 0.1
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> LMOutput:
        """Return the logits and, given labels, the loss in nats a byte.

        Shapes:
            tokens, labels: [B, S] int64, S at most max_seq_len; a label of -100 does not count.
            loss: fp32 scalar; logits: [B, S, V].
        Raises:
            ValueError: S exceeds max_seq_len.
        Graph-safe: yes, constant shapes and no host sync.
        """
        if tokens.shape[-1] > self.config.max_seq_len:
            raise ValueError(
                f"tokens: expected at most max_seq_len = {self.config.max_seq_len} a sequence; got {tokens.shape[-1]}. "
                "Build the model with a larger max_seq_len"
            )
        x = F.dropout(self.embedding(tokens), self.config.dropout, self.training)
        for block in self.blocks:
            x = block(x, self.rotary)
        logits = self.head(self.norm(x))
        if labels is None:
            return LMOutput(None, logits)
        # In fp32 whatever the stream's dtype: a bfloat16 logarithm of a sum would lose the differences that matter.
        return LMOutput(F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()), logits)
