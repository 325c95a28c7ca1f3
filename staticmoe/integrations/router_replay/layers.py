"""Which layers of a model route tokens, and the place beside each where a replay or a recording lies in wait."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from staticmoe.errors import ModelError
from staticmoe.integrations import huggingface
from staticmoe.integrations.huggingface.participants import step_of
from staticmoe.moe import StaticMoE
from staticmoe.moe.step import active
from staticmoe.runner.participants import StepBinding

if TYPE_CHECKING:
    from staticmoe.integrations.router_replay.hooks import Choice
    from staticmoe.integrations.router_replay.record import Recorder
    from staticmoe.integrations.router_replay.replay import Pass, Replay


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer that routes tokens.

    Attributes:
        name: its path in the model.
        module: the `StaticMoE`, or the experts of a transformers model.
        num_experts: E.
        block: of a transformers model, the module that holds router and experts; else None.
    """

    name: str
    module: nn.Module
    num_experts: int
    block: nn.Module | None

    @property
    def place(self) -> Place:
        """Its place."""
        return _places[self.module]

    @property
    def parameter(self) -> Tensor:
        """A parameter of the layer, for its device."""
        return next(self.module.parameters())

    @property
    def binding(self) -> StepBinding | None:
        """What a runner lends the layer at the moment."""
        return active(self.module._binding) if isinstance(self.module, StaticMoE) else step_of(self.module)


@dataclasses.dataclass
class Place:
    """What is going on at one layer. Beside the module and not on it: modules are the user's.

    Attributes:
        replay: the scope that is open.
        recorder: the recording that is open.
        past: scopes that were opened here, oldest first.
        tokens: leading shape of the tokens that the block around the layer was given last.
        choice: what answers the router of the block that runs now.
        choosing: what is to be undone when that block has run.
    """

    replay: Replay | None = None
    recorder: Recorder | None = None
    past: list[Pass] = dataclasses.field(default_factory=list)
    tokens: tuple[int, ...] | None = None
    choice: Choice | None = None
    choosing: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)


# By the layer's module; those of router and block lead to the same place.
_places: WeakKeyDictionary[nn.Module, Place] = WeakKeyDictionary()


def place_of(module: nn.Module) -> Place:
    """The place of a layer, by the module that a hook is called with; an empty one for a copy that has had no scope."""
    return _places.get(module) or Place()


def layers_of(model: nn.Module) -> list[Layer]:
    """The layers of `model` that route tokens, in module order; each has its hooks afterwards.

    Raises:
        ModelError: there is none, or one whose experts are not staticmoe's.
    """
    theirs = huggingface.calls(model)
    found = []
    for name, module in model.named_modules():
        if isinstance(module, StaticMoE):
            found.append(Layer(name, module, module.num_experts, None))
        elif name in theirs:
            found.append(Layer(name, module, _experts_of(name, module), model.get_submodule(name.rpartition(".")[0])))
    if not found:
        raise ModelError(
            f"{type(model).__name__}: expected layers that route tokens; got none: build it of StaticMoE, or load it "
            'with experts_implementation="staticmoe"'
        )
    for layer in found:
        if layer.module not in _places:
            _install(layer)
    return found


def routing_layers(model: nn.Module) -> list[str]:
    """Return the names of the layers that `ids[:, :, l]` are for, l = 0, 1, ...: module order, dense layers left out.

    Raises:
        ModelError: there is none, or one whose experts are not staticmoe's.
    """
    return [layer.name for layer in layers_of(model)]


def _experts_of(name: str, module: Any) -> int:
    """E of an experts module of transformers."""
    if module.config._experts_implementation != huggingface.NAME:
        raise ModelError(
            f'{name}: expected experts_implementation="{huggingface.NAME}"; got '
            f'{module.config._experts_implementation!r}: model.set_experts_implementation("{huggingface.NAME}")'
        )
    return module.down_proj.shape[0]


def _install(layer: Layer) -> None:
    # They stay, and do nothing unless a scope applies: a recomputed forward comes when its scope has ended. A copy of a
    # model has them already.
    from staticmoe.integrations.router_replay import hooks

    place = _places[layer.module] = Place()
    module, block = layer.module, layer.block
    if isinstance(module, StaticMoE):
        _places[module.router] = place
        if hooks.before_layer not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(hooks.before_layer, with_kwargs=True)
            module.register_forward_hook(hooks.after_layer)
            module.router.register_forward_hook(hooks.after_router)
        return
    assert block is not None, "experts of transformers lie in a block"
    _places[block] = place
    if hooks.before_experts not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(hooks.before_experts, with_kwargs=True)
        module.register_forward_hook(hooks.after_layer)
        block.register_forward_pre_hook(hooks.before_block, with_kwargs=True)
        block.register_forward_hook(hooks.after_block, always_call=True)
