"""What happens at a layer: hooks that lead its routing in and out. They do nothing where no scope applies.

Dimensions: T tokens, K top_k, E experts, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from staticmoe.errors import ConfigError, ModelError
from staticmoe.integrations.huggingface.participants import masked, step_of
from staticmoe.integrations.router_replay.layers import Place, place_of
from staticmoe.integrations.router_replay.replay import Replay, applying, hold
from staticmoe.moe import RouterOutput, StaticMoE
from staticmoe.runner.participants import StepBinding, uncompiled

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
# As transformers calls every experts function, after the module.
_EXPERTS_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")


def before_layer(module: StaticMoE, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """Hand a `StaticMoE` its replayed routing."""
    place = place_of(module)
    replay = applying(place)
    place.tokens = tuple((args[0] if args else kwargs["x"]).shape[:-1])
    routing = args[2] if len(args) > 2 else kwargs.get("routing")
    if replay is not None:
        if routing is not None:
            raise ModelError(
                "replaying: expected layers that route for themselves; got one that is called with routing=...: leave "
                "that out, or the scope"
            )
        routing = replay.enter(place, place.tokens)
    if routing is not None and routing[1] is not None:
        # No router will tell.
        _record(place, *routing)
    return (args[:2], {**kwargs, "routing": routing}) if replay is not None else None


def after_router(router: nn.Module, args: tuple[Any, ...], output: RouterOutput) -> None:
    """Record what the router of a `StaticMoE` chose, or weighed."""
    _record(place_of(router), output.topk_ids, output.topk_weights)


def after_layer(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Let the graph hold the scope."""
    replay = place_of(module).replay
    if replay is not None and not StepBinding.in_recompute():
        hold(replay, output)


def before_block(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let the router of a transformers model choose what is replayed, and weigh it in its own way."""
    place = place_of(block)
    tokens = args[0] if args else kwargs.get("hidden_states")
    place.tokens = tuple(tokens.shape[:-1]) if isinstance(tokens, Tensor) else None
    replay = applying(place)
    if replay is not None and not replay.weighs and place.tokens is not None:
        ids, _ = replay.enter(place, place.tokens)
        place.choice = Choice(ids, replay.experts_of(place))
        place.choosing.enter_context(uncompiled())
        place.choosing.enter_context(place.choice)


def after_block(block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """End what `before_block` began, also where the block failed."""
    place = place_of(block)
    place.choosing.close()
    place.choice = None


def before_experts(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """Hand the experts of a transformers model what is replayed, and record what they get."""
    place = place_of(module)
    given = dict(zip(_EXPERTS_ARGUMENTS, args, strict=False)) | kwargs
    hidden, ids, weights = (given[name] for name in _EXPERTS_ARGUMENTS)
    replay = applying(place)
    if replay is not None:
        ids, weights = _replayed(place, replay, hidden, ids, weights)
    _record(place, *masked(step_of(module), ids, weights))
    return ((hidden, ids, weights), {}) if replay is not None else None


def _replayed(place: Place, replay: Replay, hidden: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    if replay.ids.shape[3] != ids.shape[1]:
        raise ConfigError(_other_top_k(ids.shape[1], replay.ids.shape[3]))
    if replay.weighs:
        replayed, given = replay.enter(place, place.tokens or tuple(hidden.shape[:-1]))
        assert given is not None, "there are weights"
        return replayed, given
    choice = place.choice
    if choice is None or choice.found != 1:
        raise ModelError(
            "replaying: expected a router that chooses by one torch.topk over all experts, which is where the ids come "
            f"in; got {0 if choice is None else choice.found}: hand over weights as well as ids"
        )
    return choice.ids, torch.where(choice.ids >= 0, weights, 0.0)


class Choice(TorchFunctionMode):
    """Answers the router's `topk` over all experts with what is replayed, whatever it scores and however it goes on.

    Attributes:
        ids: [T,K] int32, -1 for tokens without expert, which are answered with expert 0: they get no weight later.
        found: how many calls were answered.
    """

    def __init__(self, ids: Tensor, num_experts: int) -> None:
        super().__init__()
        self.ids, self.found = ids, 0
        self._shape = (ids.shape[0], num_experts)

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.topk, Tensor.topk) and tuple(args[0].shape) == self._shape:
            k = args[1] if len(args) > 1 else kwargs["k"]
            if k != self.ids.shape[1]:
                raise ConfigError(_other_top_k(k, self.ids.shape[1]))
            self.found += 1
            order = self.ids.clamp(min=0).long()
            return torch.return_types.topk((args[0].gather(1, order), order))
        return func(*args, **kwargs)


def _other_top_k(expected: int, got: int) -> str:
    return (
        f"ids: expected {expected} slots in dimension 3, the top_k of the model; got {got}: record with the same "
        "top_k, without slots of shared experts"
    )


def _record(place: Place, ids: Tensor, weights: Tensor) -> None:
    if place.recorder is not None and not StepBinding.in_recompute():
        place.recorder.take(place, place.tokens or (), ids, weights)
