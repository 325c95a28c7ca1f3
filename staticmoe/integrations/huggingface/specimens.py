"""Small random models of the families that are served: what tests and the report card look at."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from staticmoe.errors import ModelError

# Every name that some family has for a size; a family reads those that it knows.
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "num_experts": 6,
    "num_local_experts": 6, "n_routed_experts": 6, "moe_num_experts": 6, "num_experts_per_tok": 2, "moe_k": 2,
    "moe_topk": 2, "top_k": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "attention_dropout": 0.0,
}  # fmt: skip
_HEADS = {"head_dim": 8}
_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip
# Name -> (model type, what differs from SIZES, the activation that is recognised).
FAMILIES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "mixtral": ("mixtral", _HEADS, "swiglu"),
    "qwen2_moe": ("qwen2_moe", _HEADS, "swiglu"),
    "qwen3_moe": ("qwen3_moe", _HEADS, "swiglu"),
    "olmoe": ("olmoe", _HEADS, "swiglu"),
    "deepseek_v2": ("deepseek_v2", {**_LATENT, "topk_method": "group_limited_greedy"}, "swiglu"),
    "deepseek_v3": ("deepseek_v3", _LATENT, "swiglu"),
    "gpt_oss": ("gpt_oss", _HEADS, "gpt_oss"),
    "glm4_moe": ("glm4_moe", _HEADS, "swiglu"),
    "granitemoe": ("granitemoe", _HEADS, "swiglu"),
    "minimax": ("minimax", _HEADS, "swiglu"),
    "minimax_m2": ("minimax_m2", _HEADS, "swiglu"),
    "phimoe": ("phimoe", _HEADS, "swiglu"),
    "ernie4_5_moe": ("ernie4_5_moe", _HEADS, "swiglu"),
    "dots1": ("dots1", _HEADS, "swiglu"),
    "flex_olmo": ("flex_olmo", _HEADS, "swiglu"),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", _HEADS, "swiglu"),
    "afmoe": ("afmoe", _HEADS, "swiglu"),
    "lfm2_moe": ("lfm2_moe", {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}, "swiglu"),
    "aria_text: transposed": ("aria_text", _HEADS, "swiglu"),
    "openai_privacy_filter: transposed, biases": ("openai_privacy_filter", _HEADS, "gpt_oss"),
    "nemotron_h: no gate": ("nemotron_h", {"layers_block_type": ["moe", "moe"], "head_dim": 8}, "relu2"),
    "muse_spark_text: norm after the experts": ("muse_spark_text", {**_HEADS, "moe_hidden_size": 32}, "swiglu"),
    "mixtral with gelu": ("mixtral", {**_HEADS, "hidden_act": "gelu"}, "geglu"),
    "mixtral with tanh gelu": ("mixtral", {**_HEADS, "hidden_act": "gelu_pytorch_tanh"}, None),
    "gpt_oss with another limit": ("gpt_oss", {**_HEADS, "swiglu_limit": 0.5}, None),
    "nemotron_h with silu": (
        "nemotron_h",
        {"layers_block_type": ["moe", "moe"], "head_dim": 8, "mlp_hidden_act": "silu"},
        None,
    ),
}


def specimen(family: str, implementation: str = "eager", *, attention: str | None = "eager", **over: Any) -> Any:
    """Return a random model in eval mode; `over` replaces sizes, and attention None is what transformers takes itself.

    Raises:
        ValueError: of transformers, for an attention that the family lacks.
        ModelError: this version of transformers lacks the family, or its experts do not ask for an implementation.
    """
    transformers = importlib.import_module("transformers")
    kind, differs, _ = FAMILIES[family]
    sizes = {**SIZES, **differs, **over}
    if kind not in transformers.CONFIG_MAPPING:
        raise ModelError(f"transformers {transformers.__version__}: expected {kind}, got none")
    config = transformers.AutoConfig.for_model(kind, **sizes)
    causal = transformers.AutoModelForCausalLM
    auto = causal if type(config) in causal._model_mapping else transformers.AutoModel
    options = {"experts_implementation": implementation, "attn_implementation": attention}
    model = drawn(auto.from_config(config, **options))
    served = [module for module in model.modules() if hasattr(module, "is_transposed")]
    if not served:
        raise ModelError(f"transformers {transformers.__version__}: expected {kind} to ask for its experts function")
    for module in served:
        # An older version has the limit in its code and not in its config.
        if "swiglu_limit" in sizes:
            module.limit = sizes["swiglu_limit"]
    return model


def drawn(model: Any) -> Any:
    """`model` with values that tell its parameters apart: the shipped ones are often all 0, or not set at all."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(noise + (1 if parameter.dim() == 1 else 0))
    return model.eval()
