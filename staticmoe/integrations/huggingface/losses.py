"""The loss of a transformers model as a runner takes it, with the router's own loss where the family has one.

Masks are needed twice and in two forms: attention wants one that nobody has to look at on the host (`ready_masks`), and
the family's load-balancing loss wants the 2-D one, to leave padding out. So the model gets the 2-D one, and the ready
ones take its place where the model hands it on to the layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from staticmoe.errors import ModelError
from staticmoe.integrations.huggingface.masks import ready_masks


def causal_lm_loss(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the model's own loss, and its "aux_loss" apart: a `loss_fn` of `StaticMoERunner`.

    With `output_router_logits` in the model's config (or in the batch) Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, GPT-OSS,
    Granite-MoE (since transformers 5.18) and others add `router_aux_loss_coef` times their load-balancing loss.
    "aux_loss" is that loss before its coefficient, one number over all layers, which is top_k when loads are even.
    Families without one (DeepSeek, GLM4-MoE, dots1) ignore the setting, and no "aux_loss" is reported: see
    `prepare(balancing_bias_rate=...)`.

    Args:
        model: a transformers model with a head that has a loss, wrapped by PEFT or not.
        batch: what its forward takes, "labels" among it. "attention_mask" is [B,S]; anything else is handed on as it
            is. Padded tokens are in neither loss: their labels are -100, and the mask takes them out of the router's.
    Raises:
        ModelError: no transformers model; no loss in its output.
    Graph-safe: yes.
    """
    inner = _transformers_model(model)
    hook = inner.base_model.register_forward_pre_hook(_make_masks_ready, with_kwargs=True)
    try:
        out = model(**{"use_cache": False, **batch})
    finally:
        hook.remove()
    loss = getattr(out, "loss", None)
    if not isinstance(loss, Tensor):
        raise ModelError(
            f"{type(inner).__name__}: expected a loss in the output, got {loss!r}: put labels into the batch, and take "
            "a model with a head (AutoModelForCausalLM)"
        )
    auxiliary = getattr(out, "aux_loss", None)
    return loss, {"aux_loss": auxiliary} if isinstance(auxiliary, Tensor) else {}


def _transformers_model(model: nn.Module) -> Any:
    """The outermost model of transformers in `model`."""
    from transformers import PreTrainedModel

    found = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if found is None:
        raise ModelError(f"{type(model).__name__}: expected a model of transformers: write a loss_fn of your own")
    return found


def _make_masks_ready(
    base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    return args, {**kwargs, "attention_mask": ready_masks(base, mask)}
