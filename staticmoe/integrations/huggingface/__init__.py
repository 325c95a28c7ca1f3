"""The experts of transformers models on staticmoe's ops: `experts_implementation="staticmoe"`.

    from staticmoe.integrations import huggingface

    huggingface.register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="staticmoe")
    model.set_experts_implementation("eager")            # and back: parameters stay where they are
    huggingface.check(model, batch)                      # every layer was entered and agrees with its own loop
    huggingface.prepare(model)                           # the layers take part in the steps of a StaticMoERunner
    StaticMoERunner(model, optimizer, example_batch=batch, loss_fn=huggingface.causal_lm_loss, ...)

transformers looks the function up on each call, so modules, parameters and state dicts stay as they are.
"""

from __future__ import annotations

from staticmoe.integrations.huggingface.attention import attend_causally
from staticmoe.integrations.huggingface.census import LayerCheck, calls, check, prepare
from staticmoe.integrations.huggingface.experts import experts_forward
from staticmoe.integrations.huggingface.flex import attend_by_blocks
from staticmoe.integrations.huggingface.losses import causal_lm_loss
from staticmoe.integrations.huggingface.masks import block_mask, causal_mask, ready_masks
from staticmoe.integrations.huggingface.registry import NAME, register
from staticmoe.integrations.huggingface.sequences import pad_packed
from staticmoe.integrations.huggingface.varlen import attend_within_sequences

__all__ = [
    "NAME", "LayerCheck", "attend_by_blocks", "attend_causally", "attend_within_sequences", "block_mask", "calls",
    "causal_lm_loss", "causal_mask", "check", "experts_forward", "pad_packed", "prepare", "ready_masks", "register",
]  # fmt: skip
