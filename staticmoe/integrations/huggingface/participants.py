"""Experts modules of transformers models as participants of a runner's step: counts, capacity, token mask.

The modules are the user's and stay as they are: a participant stands beside each one.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from staticmoe.errors import ModelError
from staticmoe.integrations.huggingface.activation import activation_of
from staticmoe.integrations.huggingface.adapters import is_adapted, is_wrapper
from staticmoe.moe.step import active, balance, step_fields
from staticmoe.runner.participants import StepBinding, participant_of, stand_beside

# As DeepSeek-V3 and those after it name what is added to scores for the choice of experts alone.
_BIAS = "e_score_correction_bias"


class ExpertsStep:
    """Takes part in the step for one experts module.

    Attributes:
        binding: what a runner lends, or None.
    """

    def __init__(self, module: nn.Module) -> None:
        # Weakly, because this object lives as long as its module.
        self._module = weakref.ref(module)
        self._balanced: tuple[weakref.ref[nn.Module], float] | None = None
        self.binding: StepBinding | None = None

    def balance(self, block: nn.Module, rate: float) -> None:
        """Update the selection bias of `block`, which holds router and experts, by `rate` at each commit; 0: leave it.

        Raises:
            ModelError: the block has no such bias, or one that is not fp32.
        """
        if rate:
            bias = _selection_bias(block, self._need_module().down_proj.shape[0])
            if bias.dtype != torch.float32:
                raise ModelError(
                    f"{type(block).__name__}.{_BIAS}: expected fp32, in which a step of {rate} counts; got "
                    f"{bias.dtype}: cast it back after the model was cast"
                )
        self._balanced = (weakref.ref(block), rate) if rate else None

    def step_fields(self) -> Mapping[str, tuple[int, ...]]:
        """Return the record fields: assignments before capacity and rows kept, per expert."""
        return step_fields(self._need_module().down_proj.shape[0])

    def bind_step(self, binding: StepBinding | None) -> None:
        """Take a runner's binding, or give it up (None).

        Raises:
            ModelError: another binding is held.
        """
        if binding is not None and self.binding is not None:
            raise ModelError(
                f"{type(self._need_module()).__name__}: expected experts without a runner; got some that a runner "
                "holds: close that runner"
            )
        self.binding = binding

    def commit_step(self, veto: Tensor) -> None:
        """Update the selection bias, if that was asked for; `veto` is fp32, non-zero to change nothing."""
        if self._balanced is None or self.binding is None:
            return
        block, rate = self._balanced[0](), self._balanced[1]
        assert block is not None, "a block holds its experts"
        routed = self.binding.fields["routed"]
        with torch.no_grad():
            balance(_selection_bias(block, routed.shape[0]), routed, rate, veto)

    def accumulated_parameters(self) -> Sequence[nn.Parameter]:
        """Return the weights, where the whole block is one op that takes them as they lie; else none."""
        module = self._need_module()
        return (module.gate_up_proj, module.down_proj) if as_they_lie(module) else ()

    def _need_module(self) -> Any:
        module = self._module()
        assert module is not None, "the participant of a module is found through the module"
        return module


def _selection_bias(block: nn.Module, num_experts: int) -> Tensor:
    """The bias that the router of `block` adds to scores when it chooses. Looked up anew: a move replaces buffers."""
    named = [*block.named_buffers(), *block.named_parameters()]
    found = {id(t): t for name, t in named if name.endswith(_BIAS) and t.numel() == num_experts}
    if len(found) != 1:
        raise ModelError(
            f"{type(block).__name__}: expected one {_BIAS} of {num_experts} experts to update; got {len(found)}: pass "
            "balancing_bias_rate=0 for this family"
        )
    return next(iter(found.values()))


def as_they_lie(module: Any) -> bool:
    """Whether `functional.experts` takes the module's weights themselves, gate rows first, not views of them."""
    plain = module.has_gate and module.is_concatenated and not module.is_transposed and not is_adapted(module)
    return plain and not getattr(module, "has_post_expert_norm", False) and activation_of(module) is not None


def step_of(module: nn.Module) -> StepBinding | None:
    """What a runner lends the module at the moment; None outside of its iterations."""
    participant = participant_of(module)
    return active(participant.binding) if isinstance(participant, ExpertsStep) else None


def attach(model: nn.Module, modules: Mapping[str, nn.Module], balancing_bias_rate: float) -> None:
    """Put a participant beside each module that has none, and tell each how its block is balanced."""
    for name, module in modules.items():
        participant = participant_of(module)
        if not isinstance(participant, ExpertsStep):
            participant = ExpertsStep(module)
            stand_beside(module, participant)
        participant.balance(_block_of(model, name), balancing_bias_rate)


def _block_of(model: nn.Module, name: str) -> nn.Module:
    """What holds the experts module of that name and its router, past the wrappers of adapters."""
    block = model.get_submodule(name := name.rpartition(".")[0])
    while is_wrapper(block):
        block = model.get_submodule(name := name.rpartition(".")[0])
    return block


def masked(binding: StepBinding | None, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Take the expert, and the weight, from every token that the runner's mask says is none.

    Shapes:
        ids [T,K] int; weights [T,K] float.
    Raises:
        ModelError: the mask has another number of tokens.
    Graph-safe: yes.
    """
    if binding is None or binding.token_mask is None:
        return ids, weights
    mask = binding.token_mask.reshape(-1)
    if mask.shape[0] != ids.shape[0]:
        raise ModelError(
            f"token_mask: expected one value for each of the {ids.shape[0]} tokens that reach the experts; got "
            f"{tuple(binding.token_mask.shape)}"
        )
    real = mask[:, None]
    return torch.where(real, ids, -1), torch.where(real, weights, 0.0)
