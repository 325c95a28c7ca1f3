"""The state of an optimizer over experts in a ModuleList, as that over banks, and back.

What an optimizer keeps for each element of a parameter (moments, momentum) is laid out as the parameter is. What it
keeps once for a parameter (the step count) must be the same for all that become one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from staticmoe.errors import ConfigError
from staticmoe.integrations.modulelist.names import Names
from staticmoe.integrations.modulelist.states import Place, bank_places, expert_places, join, part

_Named = dict[str, dict[str, Any]]


def optimizer_to_banks(
    state: Mapping[str, Any],
    parameters: Mapping[str, Tensor],
    new_parameters: Mapping[str, Tensor],
    paths: Iterable[str],
    *,
    names: Names | None = None,
    gated: bool = True,
    differing_steps: str = "error",
) -> dict[str, Any]:
    """Return an optimizer's `state_dict()` over a model with experts as one over the same model with banks.

    The optimizers must have been, and be, given the parameters in the order of these mappings: one group, or groups
    that part them in order. A group keeps its options; parts of one bank must lie in one group. All tensors are copies.

    Args:
        state: of the old optimizer.
        parameters, new_parameters: name -> parameter in the old and in the new optimizer, in its order:
            `dict(model.named_parameters())`, without those that it was not given.
        paths, names, gated: as of `to_banks`.
        differing_steps: what to do where experts of one bank have taken different numbers of steps, as they do in a
            loop that skips an expert without tokens: "error", or "largest", which takes the largest (bias corrections
            of the others come out as if they had taken part; after many steps none of them matter).
    Raises:
        ConfigError: parameters that are not those of the optimizer, parts in several groups or with state for some
            only, or state that is neither of the parameter's shape nor the same for all parts.
    """
    if differing_steps not in ("error", "largest"):
        raise ConfigError(f'differing_steps: expected "error" or "largest"; got {differing_steps!r}')
    held, groups = _by_name(state, parameters)
    for place in expert_places(parameters, paths, names, gated):
        keys = [key for row in place.parts for key in row]
        _replace(groups, keys, [place.key])
        states = {key: held.pop(key) for key in keys if key in held}
        if states:
            if len(states) < len(keys):
                missing = next(key for key in keys if key not in states)
                raise ConfigError(
                    f"{place.key}: expected a state for each of its parts or for none; got none of {missing}"
                )
            held[place.key] = _joined(place, states, parameters, differing_steps)
    return _by_number(held, groups, new_parameters, state)


def optimizer_to_experts(
    state: Mapping[str, Any],
    parameters: Mapping[str, Tensor],
    new_parameters: Mapping[str, Tensor],
    paths: Iterable[str],
    *,
    names: Names,
    gated: bool = True,
) -> dict[str, Any]:
    """The reverse of `optimizer_to_banks`: `parameters` are those with banks.

    Raises:
        ConfigError: as `optimizer_to_banks`.
    """
    held, groups = _by_name(state, parameters)
    for place in bank_places(parameters, paths, names, gated):
        keys = [key for row in place.parts for key in row]
        _replace(groups, [place.key], keys)
        if place.key in held:
            held.update(_parted(place, held.pop(place.key), parameters[place.key]))
    return _by_number(held, groups, new_parameters, state)


def _by_name(state: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> tuple[_Named, list[dict[str, Any]]]:
    """State by parameter name, and groups with names for numbers."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    if len(numbers) != len(parameters):
        raise ConfigError(
            f"parameters: expected the {len(numbers)} of the optimizer, in its order; got {len(parameters)}"
        )
    names = dict(zip(numbers, parameters, strict=True))
    # Copies: load_state_dict takes tensors as they are, and two optimizers would then write the same moments.
    held = {
        names[number]: {key: _copied(value) for key, value in values.items()}
        for number, values in state["state"].items()
    }
    for name, values in held.items():
        for key, value in values.items():
            if isinstance(value, Tensor) and value.dim() and value.shape != parameters[name].shape:
                raise ConfigError(
                    f"{name}: expected optimizer state of the parameter's shape {tuple(parameters[name].shape)} or one "
                    f"number; got '{key}' of {tuple(value.shape)}: the order of parameters differs, or it is factored"
                )
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]]
    return held, groups


def _by_number(
    held: _Named, groups: list[dict[str, Any]], parameters: Mapping[str, Tensor], state: Mapping[str, Any]
) -> dict[str, Any]:
    """The state dict of an optimizer that was given `parameters` in their order."""
    named = [name for group in groups for name in group["params"]]
    if sorted(named) != sorted(parameters):
        differing = sorted(set(named) ^ set(parameters))
        raise ConfigError(f"new_parameters: expected those of the converted model; got a difference in {differing[:4]}")
    order = {name: place for place, name in enumerate(parameters)}
    ordered = [{**group, "params": sorted(group["params"], key=order.__getitem__)} for group in groups]
    numbers = {name: n for n, name in enumerate(name for group in ordered for name in group["params"])}
    renamed = [
        {
            **group,
            "params": [numbers[name] for name in group["params"]],
            **({"param_names": list(group["params"])} if "param_names" in group else {}),
        }
        for group in ordered
    ]
    return {**state, "state": {numbers[name]: values for name, values in held.items()}, "param_groups": renamed}


def _replace(groups: list[dict[str, Any]], old: Sequence[str], new: Sequence[str]) -> None:
    """In the group of all of `old`, put `new` in the place of the first."""
    holding = [group for group in groups if set(old) & set(group["params"])]
    if len(holding) != 1:
        raise ConfigError(f"{old[0]}: expected all parts of one bank in one group of the optimizer; got {len(holding)}")
    names: list[str] = holding[0]["params"]
    place = names.index(old[0])
    gone = set(old)
    holding[0]["params"] = [*names[:place], *new, *(name for name in names[place:] if name not in gone)]


def _joined(place: Place, states: _Named, parameters: Mapping[str, Tensor], differing_steps: str) -> dict[str, Any]:
    """The state of one bank."""
    every = list(states.values())
    if any(values.keys() != every[0].keys() for values in every):
        raise ConfigError(f"{place.key}: expected the same kinds of state for all of its parts; got several")
    made: dict[str, Any] = {}
    for key, value in every[0].items():
        of_elements = isinstance(value, Tensor) and value.shape == parameters[next(iter(states))].shape
        if of_elements and value.dim():
            made[key] = join(place, {name: values[key] for name, values in states.items()})
            continue
        given = [values[key] for values in every]
        if all(_same(one, value) for one in given):
            made[key] = value
        elif key == "step" and differing_steps == "largest":
            made[key] = max(given, key=float)
        else:
            raise ConfigError(
                f"{place.key}: expected one '{key}' for all of its parts; got {given[0]} and others: "
                'pass differing_steps="largest" if it is the step count'
            )
    return made


def _parted(place: Place, values: dict[str, Any], parameter: Tensor) -> _Named:
    """The states of the experts of one bank."""
    keys = [key for row in place.parts for key in row]
    made: _Named = {key: {} for key in keys}
    for kind, value in values.items():
        if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape:
            for key, tensor in part(place, value).items():
                made[key][kind] = tensor
        else:
            for key in keys:
                made[key][kind] = _copied(value)
    return made


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and one == other
