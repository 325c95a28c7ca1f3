"""The experts of transformers models on staticmoe's ops: `experts_implementation="staticmoe"`.

    from staticmoe.integrations import huggingface

    huggingface.register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="staticmoe")
    model.set_experts_implementation("eager")            # and back: parameters stay where they are
    huggingface.check(model, batch)                      # every layer was entered and agrees with its own loop

transformers looks the function up on each call, so modules, parameters and state dicts stay as they are.
"""

from __future__ import annotations

from staticmoe.integrations.huggingface.census import LayerCheck, calls, check
from staticmoe.integrations.huggingface.experts import experts_forward
from staticmoe.integrations.huggingface.registry import NAME, register

__all__ = ["NAME", "LayerCheck", "calls", "check", "experts_forward", "register"]
