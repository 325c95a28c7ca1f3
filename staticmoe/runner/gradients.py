"""The gradients of a step: differentiated by micro-batch, summed, and checked to be all there.

Letters: P trained parameters, N micro-batches.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from staticmoe.capture.provenance import storage_key
from staticmoe.errors import CaptureError, ModelError
from staticmoe.optim.adapter import OptimizerAdapter
from staticmoe.runner.participants import GradientAccumulator, StepBinding, StepParticipant

_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


class GradientSum:
    """Sums P gradients over N micro-batches; those of 16-bit parameters in fp32, where there is more than one.

    A participant that can (`GradientAccumulator`) gets buffers to add its weights' gradients into, if it is entered
    once in each micro-batch and all its weights are trained: its backward then stores or adds where it computes them,
    and no second copy of them exists.

    Args:
        adapter: knows the P parameters; which they are may change from one iteration to the next.
        names: names those of a list of parameters.
        participants, bindings: name -> participant, and what the runner lends it.
        micro_batches: N.
    """

    def __init__(
        self,
        adapter: OptimizerAdapter,
        names: Callable[[Sequence[nn.Parameter]], list[str]],
        participants: Mapping[str, StepParticipant],
        bindings: Mapping[str, StepBinding],
        micro_batches: int,
    ) -> None:
        self._adapter = adapter
        self._names = names
        self._participants = participants
        self._bindings = bindings
        self._parameters: list[nn.Parameter] = []
        self._accumulators: dict[str, list[nn.Parameter]] = {}
        # How often a forward reached a participant, in the micro-batches that were looked at.
        self._entered: dict[str, set[int]] = collections.defaultdict(set)
        self._before: dict[str, int] = {}
        self._lent: dict[nn.Parameter, Tensor] = {}
        self._seen: list[Tensor] = []
        self._many = micro_batches > 1
        self._total: list[Tensor] | None = None

    def begin(self) -> None:
        """Start a step; lends what the micro-batches seen so far allow."""
        self._total = None
        self._lent, self._seen = {}, []
        self._parameters = self._adapter.parameters
        self._accumulators = _accumulators(self._participants, self._parameters) if self._many else {}
        for name, weights in self._accumulators.items():
            binding = self._bindings[name]
            if self._entered[name] == {1}:
                buffers = {w: torch.empty_like(w, dtype=_WIDE.get(w.dtype, w.dtype)) for w in weights}
                binding.main_grads, binding.seen = buffers, weights[0].new_zeros(())
                self._seen.append(binding.seen)
                self._lent.update(buffers)

    def enter(self) -> None:
        """Start a micro-batch."""
        for name in self._accumulators:
            binding = self._bindings[name]
            self._before[name], binding.adding = binding.entered, self._total is not None

    def add(self, objective: Tensor) -> None:
        """Differentiate the objective of the micro-batch and add its gradients.

        Raises:
            ModelError: a parameter without a gradient, or a layer that the forward entered more often than before.
            CaptureError: reentrant checkpointing.
        """
        self._count()
        versions = {parameter: buffer._version for parameter, buffer in self._lent.items()}
        found = self._differentiate(objective)
        seen = {storage_key(tensor) for tensor in self._seen}
        others: list[Tensor] = []
        for parameter, gradient in zip(self._parameters, found, strict=True):
            if parameter in self._lent:
                buffer = self._lent[parameter]
                written = buffer._version != versions[parameter]
                if storage_key(gradient) not in seen:
                    # The loss depends on the weight in another way, beside the layer or alone.
                    buffer.add_(gradient) if written or self._total is not None else buffer.copy_(gradient)
            else:
                others.append(_laid_out_like(parameter, gradient))
        if self._total is not None:
            self._total = list(torch._foreach_add(self._total, others)) if others else []
        else:
            self._total = [g.to(_WIDE.get(g.dtype, g.dtype)) for g in others] if self._many else others

    def end(self) -> list[Tensor]:
        """Return the P sums and forget them; in fp32 where they are sums of 16-bit gradients."""
        others = iter(self._total or [])
        total = [self._lent[p] if p in self._lent else next(others) for p in self._parameters]
        self._lent, self._seen, self._total = {}, [], None
        return total

    def _count(self) -> None:
        """Learn how often this micro-batch entered each accumulator."""
        for name in self._accumulators:
            times = self._bindings[name].entered - self._before[name]
            if self._bindings[name].main_grads and times != 1:
                raise ModelError(
                    f"{name or '(the model)'}: expected every micro-batch to enter the layer once, as when the runner "
                    f"was built; got {times} times: its number of uses must not change from one iteration to another"
                )
            self._entered[name].add(times)

    def _differentiate(self, objective: Tensor) -> list[Tensor]:
        """Gradients by torch.autograd.grad: no accumulation node, so none can remember a stale stream."""
        if not objective.requires_grad:
            raise ModelError("loss_fn: expected a loss that depends on a trained parameter, got one without a gradient")
        try:
            gradients: Any = torch.autograd.grad(objective, self._parameters, allow_unused=True)
        except RuntimeError as error:
            if "use_reentrant=True" in str(error):
                raise CaptureError(
                    "activation checkpointing: expected use_reentrant=False, got use_reentrant=True"
                ) from error
            raise
        unused = [p for p, g in zip(self._parameters, gradients, strict=True) if g is None]
        if unused:
            missing = self._names(unused)
            raise ModelError(
                f"{len(missing)} trainable parameters in the optimizer get no gradient from the loss: "
                f"{', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}; call requires_grad_(False) on them, "
                "or let the loss use them"
            )
        return list(gradients)


def _accumulators(
    participants: Mapping[str, StepParticipant], parameters: Sequence[nn.Parameter]
) -> dict[str, list[nn.Parameter]]:
    """Name -> weights of each participant that can add gradients itself, all of them trained and of one dtype."""
    trained = set(parameters)
    found: dict[str, list[nn.Parameter]] = {}
    for name, participant in participants.items():
        if isinstance(participant, GradientAccumulator):
            weights = list(participant.accumulated_parameters())
            if trained.issuperset(weights) and len({w.dtype for w in weights}) == 1:
                found[name] = weights
    # A weight of two layers would be stored by both.
    users = collections.Counter(w for weights in found.values() for w in weights)
    return {name: weights for name, weights in found.items() if all(users[w] == 1 for w in weights)}


def _laid_out_like(parameter: Tensor, gradient: Tensor) -> Tensor:
    """`gradient` with the strides of `parameter`: fused optimizers walk both by one index, expanded ones too."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)
