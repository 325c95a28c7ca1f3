"""State dicts of experts in a ModuleList to those of banks, and back: keys are mapped, values copied bit for bit.

Dimensions: E experts, H hidden, I intermediate.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from staticmoe.errors import ConfigError
from staticmoe.integrations.modulelist.names import Names, names_among

_BANK = re.compile(r"^(gate_up_proj|down_proj)(_bias)?$")
_EXPERT = re.compile(r"^(\d+)\.([^.]+)\.(weight|bias)$")


@dataclasses.dataclass(frozen=True)
class Place:
    """One tensor of a bank, and the tensors of experts that it holds.

    Attributes:
        key: of the bank's tensor.
        parts: [E][layers] keys of the experts' tensors: gate and up, or up, or down.
    """

    key: str
    parts: tuple[tuple[str, ...], ...]


def joined(rows: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
    """Tensors [E][layers] of all experts as (gate_up [E,2I,...], down [E,H,...]), in new memory."""
    detached = [[tensor.detach() for tensor in row] for row in rows]
    return torch.stack([torch.cat(row[:-1]) for row in detached]), torch.stack([row[-1] for row in detached])


def parted(gate_up: Tensor, down: Tensor, *, gated: bool) -> list[Tensor]:
    """Views of one expert's tensors, in the order of `joined`."""
    return [*(gate_up.chunk(2) if gated else (gate_up,)), down]


def to_banks(
    state: Mapping[str, Tensor], paths: Iterable[str], *, names: Names | None = None, gated: bool = True
) -> dict[str, Tensor]:
    """Return `state` with the experts at `paths` as banks; everything else as it was, in its place.

    Values keep dtype and device, meta included; those of banks lie in new memory.

    Args:
        paths: of the ModuleLists, which are those of the banks: see `bank_paths`.
        names: None finds (w1, w3, w2) or (gate_proj, up_proj, down_proj), in each of them.
        gated: as the experts are, where `names` is None.
    Raises:
        ConfigError: no expert there, one missing, another key among them, or tensors that do not fit each other.
    """
    places = expert_places(state, paths, names, gated)
    first = {parts[0][0]: Place(key, parts) for key, parts in ((place.key, place.parts) for place in places)}
    inside = {key for place in places for row in place.parts for key in row}
    converted: dict[str, Tensor] = {}
    for key, value in state.items():
        if key in first:
            converted[first[key].key] = join(first[key], state)
        elif key not in inside:
            converted[key] = value
    return converted


def to_experts(
    state: Mapping[str, Tensor], paths: Iterable[str], *, names: Names, gated: bool = True
) -> dict[str, Tensor]:
    """Return `state` with the banks at `paths` as experts of a ModuleList; the reverse of `to_banks`.

    Raises:
        ConfigError: no bank there, or another key in it.
    """
    places = {place.key: place for place in bank_places(state, paths, names, gated)}
    converted: dict[str, Tensor] = {}
    for key, value in state.items():
        if key in places:
            converted.update(part(places[key], value))
        else:
            converted[key] = value
    return converted


def join(place: Place, values: Mapping[str, Tensor]) -> Tensor:
    """The bank's tensor of its parts.

    Raises:
        ConfigError: they differ in shape, dtype or device.
    """
    rows = [[values[key].detach() for key in row] for row in place.parts]
    kinds = {(tensor.shape, tensor.dtype, tensor.device) for row in rows for tensor in row}
    if len(kinds) > 1:
        listed = ", ".join(sorted(f"{tuple(shape)} {dtype} {device}" for shape, dtype, device in kinds)[:4])
        raise ConfigError(f"{place.key}: expected parts of one shape, dtype and device; got {listed}")
    return torch.stack([torch.cat(row) for row in rows])


def part(place: Place, value: Tensor) -> dict[str, Tensor]:
    """The experts' tensors of a bank's tensor, in memory of their own.

    Raises:
        ConfigError: it has another number of experts, or rows that cannot be halved.
    """
    layers = len(place.parts[0])
    if value.dim() < 2 or value.shape[0] != len(place.parts) or value.shape[1] % layers:
        wanted = f"[{len(place.parts)}, a multiple of {layers}, ...]"
        raise ConfigError(f"{place.key}: expected {wanted}; got {tuple(value.shape)}")
    values = value.detach()
    return {
        key: tensor.clone()
        for number, row in enumerate(place.parts)
        for key, tensor in zip(row, values[number].chunk(layers), strict=True)
    }


def expert_places(keys: Iterable[str], paths: Iterable[str], names: Names | None, gated: bool) -> list[Place]:
    """What of `keys` are experts' tensors at `paths`.

    Raises:
        ConfigError: none there, one missing, or another key among them.
    """
    keys, places = list(keys), []
    for path in _checked(paths):
        found = {key: _EXPERT.match(key[len(path) :]) for key in keys if key.startswith(path)}
        foreign = [key for key, match in found.items() if match is None]
        matches = {key: match for key, match in found.items() if match is not None}
        if not matches or (path and foreign):
            raise ConfigError(f"{path or 'state'}: expected keys 0.<layer>.weight ...; got {_listed(foreign)}")
        used = names
        if used is None:
            used = names_among((match[2] for match in matches.values()), gated=gated, where=path or "state")
        strange = sorted({match[2] for match in matches.values()} - set(used.linears))
        if strange:
            raise ConfigError(f"{path}: expected layers ({used}); got {', '.join(strange)} as well")
        count = 1 + max(int(match[1]) for match in matches.values())
        for part_name in dict.fromkeys(match[3] for match in matches.values()):
            made = _places(path, count, used, part_name)
            missing = [key for place in made for row in place.parts for key in row if key not in matches]
            if missing:
                raise ConfigError(f"{path}: expected {count} experts with all of ({used}); got no {_listed(missing)}")
            places += made
    return places


def bank_places(values: Mapping[str, Tensor], paths: Iterable[str], names: Names, gated: bool) -> list[Place]:
    """What of `values` are banks at `paths`.

    Raises:
        ConfigError: none there, another key in one, or names that do not fit `gated`.
    """
    if (names.gate is not None) != gated:
        raise ConfigError(f"names: expected {'a' if gated else 'no'} gate; got {names!r}")
    places = []
    for path in _checked(paths):
        found = {key: _BANK.match(key[len(path) :]) for key in values if key.startswith(path)}
        foreign = [key for key, match in found.items() if match is None]
        matches = [match for match in found.values() if match is not None]
        if not matches or (path and foreign):
            raise ConfigError(f"{path or 'state'}: expected gate_up_proj and down_proj; got {_listed(foreign)}")
        count = next(value.shape[0] for key, value in values.items() if found.get(key) is not None)
        kinds = dict.fromkeys("bias" if match[2] else "weight" for match in matches)
        made = [place for kind in kinds for place in _places(path, count, names, kind)]
        missing = [place.key for place in made if place.key not in found]
        if missing:
            raise ConfigError(f"{path}: expected gate_up_proj and down_proj; got no {_listed(missing)}")
        places += made
    return places


def _places(path: str, count: int, names: Names, kind: str) -> list[Place]:
    """The two tensors of a bank of `count` experts, weights or biases."""
    suffix = "" if kind == "weight" else "_bias"
    inner, down = names.linears[:-1], names.linears[-1:]
    return [
        Place(
            f"{path}{name}{suffix}",
            tuple(tuple(f"{path}{number}.{layer}.{kind}" for layer in layers) for number in range(count)),
        )
        for name, layers in (("gate_up_proj", inner), ("down_proj", down))
    ]


def _checked(paths: Iterable[str]) -> list[str]:
    """Paths as prefixes of keys."""
    if isinstance(paths, str):
        raise ConfigError(f"paths: expected a list of dotted paths; got the string {paths!r}: pass [{paths!r}]")
    prefixes = [f"{path}." if path else "" for path in paths]
    if not prefixes:
        raise ConfigError("paths: expected at least one dotted path of experts; got none: see bank_paths(model)")
    return prefixes


def _listed(keys: Iterable[str]) -> str:
    keys = list(keys)
    return ", ".join(keys[:4]) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "") or "nothing"
