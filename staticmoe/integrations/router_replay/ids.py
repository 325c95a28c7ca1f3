"""Ids of a replay: which tokens of them can be replayed, and each layer's own copy.

Dimensions: B sequences, S tokens of a sequence, L layers, K top_k, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from staticmoe.errors import ConfigError
from staticmoe.integrations.router_replay.layers import Layer, layers_of
from staticmoe.moe import StaticMoE
from staticmoe.reference import repeats


def check(
    model: nn.Module,
    ids: Tensor,
    weights: Tensor | None = None,
    *,
    token_mask: Tensor | None = None,
    layers: Sequence[int] | None = None,
) -> None:
    """Refuse ids that `replaying` could not replay whole. On the host, before training: it waits for the device.

    Shapes: as `replaying`.
    Raises:
        ConfigError: shapes or dtypes that do not fit the model, or tokens whose ids are not K different experts; names
            how many, and the first.
    Graph-safe: no.
    """
    found = layers_of(model)
    ids = fitting("ids", ids, found, layers)
    if weights is not None:
        same_shape(fitting("weights", weights, found, layers), ids)
    _, _, refused = admit(ids, found, token_mask)
    count = int(refused.sum())
    if count:
        b, s, at = (int(i) for i in refused.nonzero()[0])
        raise ConfigError(
            f"ids: expected {ids.shape[3]} different experts of 0..{found[at].num_experts - 1} for each token, or -1 "
            f"in all slots; got {count} of {refused.numel()} (token, layer) pairs that are not, the first "
            f"{ids[b, s, at].tolist()} at sequence {b}, token {s}, layer {at} ({found[at].name}): correct the ids, or "
            "take padding out with token_mask"
        )


def fitting(name: str, tensor: Tensor, found: Sequence[Layer], layers: Sequence[int] | None) -> Tensor:
    """`tensor` [B,S,L,K] with the layers of the model alone, looked at for what shapes and dtype can tell.

    Raises:
        ConfigError: they do not fit; names expected, got and the fix.
    """
    if tensor.dim() != 4:
        raise ConfigError(
            f"{name}: expected 4 dimensions [sequences, tokens, layers, slots]; got shape {tuple(tensor.shape)}"
        )
    count = len(found)
    if layers is not None:
        if len(layers) != count or not all(0 <= at < tensor.shape[2] for at in layers):
            raise ConfigError(
                f"layers: expected {count} indices below {tensor.shape[2]}, one for each layer that routes "
                f"({_names(found)}); got {list(layers)}"
            )
        tensor = torch.stack([tensor[:, :, at] for at in layers], 2)
    if tensor.shape[2] != count:
        raise ConfigError(
            f"{name}: expected {count} layers in dimension 2, those of the model that route ({_names(found)}); got "
            f"{tensor.shape[2]}: for ids that count dense layers too, pass layers=[...], {count} indices"
        )
    for layer in found:
        if isinstance(layer.module, StaticMoE) and layer.module.top_k != tensor.shape[3]:
            raise ConfigError(
                f"{name}: expected {layer.module.top_k} slots in dimension 3, the top_k of {layer.name}; got "
                f"{tensor.shape[3]}: record with the same top_k, without slots of shared experts"
            )
    integers = not tensor.is_floating_point() and tensor.dtype != torch.bool
    if integers != (name == "ids"):
        raise ConfigError(f"{name}: expected {'integers' if name == 'ids' else 'floats'}; got {tensor.dtype}")
    device = found[0].parameter.device
    if tensor.device != device:
        raise ConfigError(f"{name}: expected a tensor on {device} as the model; got {tensor.device}: move it there")
    return tensor


def same_shape(weights: Tensor, ids: Tensor) -> None:
    """Refuse weights of another shape than the ids."""
    if weights.shape != ids.shape:
        raise ConfigError(f"weights: expected shape {tuple(ids.shape)} as ids; got {tuple(weights.shape)}")


def admit(ids: Tensor, found: Sequence[Layer], token_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids [B,S,L,K] int32, -1 in all slots of what has no expert; whether it has some, and what was refused.

    Shapes:
        ids [B,S,L,K] integer, any strides; token_mask of B·S elements. Both others [B,S,L] bool.
    Raises:
        ConfigError: a mask of other tokens.
    Graph-safe: yes.
    """
    if ids.dtype not in (torch.int32, torch.int64):
        # Not compared as they are: -1 would wrap in an unsigned dtype.
        ids = ids.to(torch.int32)
    kept = ((ids >= 0) & _below(ids, [layer.num_experts for layer in found])).all(-1) & ~repeats(ids)
    refused = ~kept & ~(ids == -1).all(-1)
    if token_mask is not None:
        if token_mask.numel() != ids.shape[0] * ids.shape[1]:
            raise ConfigError(
                f"token_mask: expected shape {tuple(ids.shape[:2])}, one value for each token of ids; got "
                f"{tuple(token_mask.shape)}"
            )
        real = (token_mask != 0).reshape(ids.shape[0], ids.shape[1], 1)
        kept, refused = kept & real, refused & real
    return torch.where(kept[..., None], ids, -1).to(torch.int32), kept, refused


def own_slice(tensor: Tensor, layer: int, dtype: torch.dtype) -> Tensor:
    """Return [T,K], the values of one layer of [B,S,L,K], in memory of their own.

    Never a view. A layer's view starts at any multiple of K elements, and compilers copy an input that is not aligned
    to 16 bytes; torch 2.13 then hands out aliases of it that start at the first layer. Memory of its own is aligned.

    Graph-safe: yes.
    """
    values = tensor[:, :, layer]
    own = torch.empty(values.shape, dtype=dtype, device=tensor.device)
    return own.copy_(values).view(-1, tensor.shape[3])


def _below(ids: Tensor, counts: Sequence[int]) -> Tensor:
    """Whether each id is below the number of experts of its layer."""
    if len(set(counts)) == 1:
        return ids < counts[0]
    return torch.stack([ids[:, :, at] < count for at, count in enumerate(counts)], 2)


def _names(found: Sequence[Layer], most: int = 3) -> str:
    names = [layer.name for layer in found]
    return ", ".join(names if len(names) <= most else [names[0], "...", names[-1]])
