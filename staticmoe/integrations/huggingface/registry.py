"""The registry of experts functions in transformers, looked at before anything is put into it."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

from staticmoe.errors import ConfigError
from staticmoe.integrations.huggingface.experts import experts_forward

NAME = "staticmoe"
OLDEST = (5, 17)
_FIX = "pip install 'transformers>=5.17'"
_PARAMETERS = ["self", "hidden_states", "top_k_index", "top_k_weights"]


def register() -> None:
    """Make `experts_implementation="staticmoe"` known to transformers; a second call changes nothing.

    Raises:
        ConfigError: transformers is missing or older than 5.17, its registry of experts functions is not the one
            that this function was written for, or the name is taken by another function.
    """
    registry = _registry()
    known = registry.get(NAME)
    if known is experts_forward:
        return
    if known is not None:
        raise ConfigError(
            f'experts_implementation: expected "{NAME}" to be free; got {known!r} from {known.__module__}: '
            "do not register another function under this name"
        )
    registry.register(NAME, experts_forward)
    if registry.get(NAME) is not experts_forward:
        raise ConfigError(
            f'transformers: expected ALL_EXPERTS_FUNCTIONS to hold "{NAME}" after register(); got '
            f"{registry.get(NAME)!r}: {_FIX}"
        )


def _registry() -> Any:
    """The registry, once version and interface are as expected."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(f"transformers: expected an installed package; got {error}: {_FIX}") from error
    version = str(transformers.__version__)
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < OLDEST:
        raise ConfigError(f"transformers: expected 5.17 or newer; got {version}: {_FIX}")
    try:
        moe = importlib.import_module("transformers.integrations.moe")
        registry, shipped = moe.ALL_EXPERTS_FUNCTIONS, moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"]
        has = callable(registry.register) and callable(registry.get)
    except (ImportError, AttributeError, KeyError, TypeError) as error:
        raise ConfigError(
            "transformers: expected a registry transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS with "
            f'"grouped_mm" in it; got {type(error).__name__}: {error} in version {version}: use a version from 5.17 '
            "to 5.24"
        ) from error
    # What the modeling files call is what the shipped function takes: a changed call would bind wrongly or not at all.
    takes = list(inspect.signature(shipped).parameters)
    if not has or takes[: len(_PARAMETERS)] != _PARAMETERS:
        raise ConfigError(
            f"transformers: expected experts functions of ({', '.join(_PARAMETERS)}); got ({', '.join(takes)}) in "
            f"version {version}: use a version from 5.17 to 5.24"
        )
    return registry
