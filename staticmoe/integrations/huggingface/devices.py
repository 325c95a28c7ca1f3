"""Modules of transformers that make a constant on the host in each forward and copy it to the device.

A GPU refuses such a copy in a capture. With a default device of the input's, their factories make it where it is used.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

# PhiMoE computes the frequencies of its rotary embedding anew (modeling_phimoe.py, `self.rope_init_fn(self.config)`);
# MiniMax's linear attention starts from `torch.zeros(...).to(value_states)`, until transformers 5.24.
_MAKE_ON_HOST = {"PhimoeRotaryEmbedding", "MiniMaxLightningAttention"}


def make_on_device(model: nn.Module) -> None:
    """Let such modules of `model` make their constants on the device of what they get; a second call changes nothing.

    A device may round a power in another way than the host does: PhiMoE's frequencies may differ in the last bit.
    """
    for module in model.modules():
        wrapped = getattr(module.forward, "func", None) is _on_device_of_input
        if type(module).__name__ in _MAKE_ON_HOST and not wrapped:
            # On the instance: the class is also that of models that are not ours.
            module.forward = functools.partial(_on_device_of_input, module.forward)


def _on_device_of_input(forward: Any, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        # It cannot enter a default device; Inductor moves factories to where they are used itself.
        return forward(*args, **kwargs)
    given = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    with torch.device(given.device):
        return forward(*args, **kwargs)
