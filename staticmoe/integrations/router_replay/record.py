"""A recording: which experts a forward took, and with which weights.

Dimensions: B sequences, S tokens of a sequence, L layers, K top_k.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from staticmoe.errors import ConfigError, ModelError
from staticmoe.integrations.router_replay.layers import Layer, Place, layers_of


@dataclasses.dataclass
class Recording:
    """What a forward chose, before capacity: what `replaying` takes.

    Attributes:
        ids: [B,S,L,K] int32, -1 for masked tokens; B = 1 for a model whose layers are given flat tokens.
        weights: [B,S,L,K] fp32, 0 for masked tokens; without gradient.
    """

    ids: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    weights: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))


class Recorder:
    """Takes what each layer chose."""

    def __init__(self, found: Sequence[Layer]) -> None:
        self._number = {id(layer.place): number for number, layer in enumerate(found)}
        self._names = [layer.name for layer in found]
        self._taken: dict[int, tuple[Tensor, Tensor]] = {}

    def take(self, place: Place, tokens: tuple[int, ...], ids: Tensor, weights: Tensor) -> None:
        """Take ids and weights [T,K] of one layer, whose tokens came in this shape.

        Raises:
            ModelError: it was entered before.
        """
        number = self._number[id(place)]
        if number in self._taken:
            raise ModelError(
                f"recording: expected one forward; got a second one through {self._names[number]}: open a scope each"
            )
        shape = (*(tokens if len(tokens) == 2 else (1, ids.shape[0])), ids.shape[1])
        self._taken[number] = (
            ids.detach().to(torch.int32).reshape(shape),
            weights.detach().to(torch.float32).reshape(shape),
        )

    def write(self, record: Recording, into: bool) -> None:
        """Write what was taken into `record`: in place, or as tensors of its own.

        Raises:
            ModelError: a layer was not entered, or has other tokens or another top_k than the first one.
            ConfigError: the tensors to write into have another shape.
        """
        missing = [name for number, name in enumerate(self._names) if number not in self._taken]
        if missing:
            raise ModelError(
                f"recording: expected a forward through {len(self._names)} layers; got none through {missing[0]}: run "
                "the model's forward within the scope"
            )
        every = [self._taken[number] for number in range(len(self._names))]
        shapes = {tuple(ids.shape) for ids, _ in every}
        if len(shapes) > 1:
            raise ModelError(f"recording: expected layers with the same tokens and top_k; got {sorted(shapes)}")
        for name, pieces in (("ids", [ids for ids, _ in every]), ("weights", [weights for _, weights in every])):
            value = torch.stack(pieces, 2)
            if not into:
                setattr(record, name, value)
                continue
            target: Tensor = getattr(record, name)
            if target.shape != value.shape or target.dtype != value.dtype:
                raise ConfigError(
                    f"into.{name}: expected {value.dtype} of {tuple(value.shape)}; got {target.dtype} of "
                    f"{tuple(target.shape)}: use what a recording of such a forward returned"
                )
            target.copy_(value)


@contextlib.contextmanager
def recording(model: nn.Module, into: Recording | None = None) -> Iterator[Recording]:
    """Within: the one forward of `model` leaves ids and weights of all layers, to be read when the scope has ended.

    In a captured step, what it returns is memory of that step. To read the routing of steps, make a recording of one
    plain forward, and hand that over as `into`: each replay then writes it anew, and after `runner.synchronize()` it
    holds what the last committed step chose, of its last micro-batch.

    Raises:
        ModelError: a recording within a recording, a second forward, or one that did not reach all layers.
        ConfigError: `into` is of another shape.
    Graph-safe: yes.
    """
    found = layers_of(model)
    places = [layer.place for layer in found]
    if any(place.recorder is not None for place in places):
        raise ModelError("recording: expected no open recording on this model; got one within another")
    record, recorder = Recording() if into is None else into, Recorder(found)
    for place in places:
        place.recorder = recorder
    try:
        yield record
    finally:
        for place in places:
            place.recorder = None
    recorder.write(record, into is not None)
