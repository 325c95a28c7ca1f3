"""The scope of a replay, and which scope a recomputed forward belongs to.

Dimensions: B sequences, S tokens of a sequence, L layers, K top_k, T = B·S.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from staticmoe.errors import ConfigError, ModelError
from staticmoe.integrations.router_replay.ids import admit, fitting, own_slice, same_shape
from staticmoe.integrations.router_replay.layers import Layer, Place, layers_of
from staticmoe.runner.participants import StepBinding

METRIC = "replay_refused"
# Ranges of nodes of scopes that nothing holds any more: kept, in case some backward asks for what it needs of them.
_REMEMBERED = 64
_KEY = "staticmoe.router_replay"


class Replay:
    """One forward under replay.

    Attributes:
        refused: int64 0-dim tensor, how many (token, layer) pairs could not be replayed and have no expert.
        ids: [B,S,L,K] int32, what is replayed: -1 in all slots of a token without expert.
    """

    def __init__(self, found: Sequence[Layer], ids: Tensor, weights: Tensor | None, token_mask: Tensor | None) -> None:
        self.ids, kept, refused = admit(ids, found, token_mask)
        self.refused = refused.sum()
        self._weights = None if weights is None else torch.where(kept[..., None], weights, 0.0)
        self._number = {id(layer.place): number for number, layer in enumerate(found)}
        self._experts = [layer.num_experts for layer in found]
        self._names = [layer.name for layer in found]
        self._entered: set[int] = set()
        self.recomputing = StepBinding.in_recompute()

    def enter(self, place: Place, tokens: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """Return the layer's own ids [T,K] int32, and weights [T,K] fp32 if there are; `tokens` as they come in.

        Raises:
            ModelError: the layer was entered before.
            ConfigError: other tokens than those of the ids.
        """
        number = self._number[id(place)]
        self._check_tokens(number, tokens)
        if not StepBinding.in_recompute() or self.recomputing:
            if number in self._entered:
                raise ModelError(
                    f"replaying: expected one forward; got a second one through {self._names[number]}: open a scope "
                    "with its own ids for each forward"
                )
            self._entered.add(number)
        weights = None if self._weights is None else own_slice(self._weights, number, torch.float32)
        return own_slice(self.ids, number, torch.int32), weights

    def experts_of(self, place: Place) -> int:
        """E of the layer."""
        return self._experts[self._number[id(place)]]

    @property
    def weighs(self) -> bool:
        """Whether weights were handed over."""
        return self._weights is not None

    def close(self) -> None:
        """End the scope.

        Raises:
            ModelError: there are layers that the forward did not enter, whose ids would be left out without a word.
        """
        missing = [name for number, name in enumerate(self._names) if number not in self._entered]
        if missing:
            raise ModelError(
                f"replaying: expected a forward through {len(self._names)} layers; got none through "
                f"{', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}: run the forward within the scope"
            )

    def _check_tokens(self, number: int, tokens: tuple[int, ...]) -> None:
        batch, sequence = self.ids.shape[:2]
        if tokens not in ((batch, sequence), (batch * sequence,)):
            raise ConfigError(
                f"ids: expected {' x '.join(map(str, tokens))} tokens, as come to {self._names[number]}; got "
                f"{batch} x {sequence}, [sequences, tokens]: pad the ids with -1 as the batch is padded, and give the "
                "last token of a rollout, which no engine routes, -1 too"
            )


@dataclasses.dataclass
class Pass:
    """Which nodes of the graph were made under a scope: those numbered from `start` to before `end`.

    The scope itself lives as long as such a node does.
    """

    replay: weakref.ref[Replay]
    start: int
    end: float = float("inf")


@contextlib.contextmanager
def replaying(
    model: nn.Module,
    ids: Tensor,
    weights: Tensor | None = None,
    *,
    token_mask: Tensor | None = None,
    layers: Sequence[int] | None = None,
) -> Iterator[Replay]:
    """Within: the one forward of `model` takes its experts from `ids`. See the package for what it computes.

    Args:
        token_mask: which tokens are real; what the ids of others hold is not looked at. Default: the runner's.
        layers: for ids that count other layers too, as engines that count dense ones: the index of each of the model's
            `routing_layers` in dimension 2.

    Shapes:
        ids [B,S,L,K] of any integer dtype and any strides; weights alike, float; token_mask [B,S].
    Raises:
        ConfigError: ids that differ from the model in B, S, L or K, or weights or mask from the ids.
        ModelError: a scope within a scope, a second forward, or one that did not reach all layers.
    Graph-safe: yes: each layer reads a copy of its own, made by the step from `ids`.
    """
    found = layers_of(model)
    ids = fitting("ids", ids, found, layers)
    if weights is not None:
        weights = fitting("weights", weights, found, layers)
        same_shape(weights, ids)
    places = [layer.place for layer in found]
    # One that a recomputed forward opens may meet the one around its backward.
    within = StepBinding.in_recompute()
    if any(place.replay is not None and not (within and not place.replay.recomputing) for place in places):
        raise ModelError(
            "replaying: expected no open scope on this model; got one within another: close that one first"
        )
    binding = found[0].binding
    if token_mask is None and binding is not None:
        token_mask = binding.token_mask
    replay = Replay(found, ids, weights, token_mask)
    if binding is not None:
        # Without coefficient: shown, and no part of the loss.
        binding.add_loss(METRIC, replay.refused.to(torch.float32), 0.0)
    with _open(replay, places):
        yield replay
    replay.close()


@contextlib.contextmanager
def _open(replay: Replay, places: Sequence[Place]) -> Iterator[None]:
    this = Pass(weakref.ref(replay), _next_node())
    before = [place.replay for place in places]
    for place in places:
        place.replay = replay
        if not replay.recomputing:
            _forget(place.past)
            place.past.append(this)
    try:
        yield
    finally:
        this.end = _next_node()
        for place, earlier in zip(places, before, strict=True):
            place.replay = earlier


def applying(place: Place) -> Replay | None:
    """The scope that the forward which runs now belongs to.

    A recomputed forward runs in a backward, when the scope of the first one has mostly ended and others may have
    followed. It runs for the sake of a node that the first one made, whose number tells under which scope that was.

    Raises:
        ModelError: the scope is no more.
    """
    if not StepBinding.in_recompute() or (place.replay is not None and place.replay.recomputing):
        return place.replay
    if not place.past:
        return None
    number = torch._C._current_autograd_node()._sequence_nr()
    for one in reversed(place.past):
        if one.start <= number < one.end:
            replay = one.replay()
            if replay is None:
                raise ModelError(
                    "replaying: expected the graph of the first forward to hold the ids for a recomputed one; got a "
                    "checkpoint that makes no graph: checkpoint with use_reentrant=False"
                )
            return replay
    return None


def hold(replay: Replay, output: Any) -> None:
    """Let the graph that made `output` hold the scope, for a forward that it may run again."""
    if isinstance(output, Tensor) and output.grad_fn is not None:
        # A dict, of which torch's types say that it is a method.
        metadata: Any = output.grad_fn.metadata
        metadata[_KEY] = replay


def _next_node() -> int:
    """The number that this thread's next node will have."""
    return torch._C._autograd._get_sequence_nr()


def _forget(past: list[Pass]) -> None:
    """Keep what a graph still holds, and the latest of the rest."""
    dead = [one for one in past if one.replay() is None]
    if len(dead) > _REMEMBERED:
        old = {id(one) for one in dead[:-_REMEMBERED]}
        past[:] = [one for one in past if id(one) not in old]
