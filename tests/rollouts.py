"""Set keys of a `RolloutConfig` by their last parts, each of which only one group has."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import is_dataclass
from typing import Any

from fusion.inference.config import RolloutConfig


def rollout_config(**values: Any) -> RolloutConfig:
    """Return a config with ``values``."""
    return changed(RolloutConfig(), **values)


def changed(config: RolloutConfig, **values: Any) -> RolloutConfig:
    """Return a copy with ``values``.

    Raises:
        TypeError: a name that is the last part of no key.
    """
    config = deepcopy(config)
    groups = [config, *(value for value in vars(config).values() if is_dataclass(value))]
    for name, value in values.items():
        owner = next((one for one in groups if name in vars(one) and not is_dataclass(getattr(one, name))), None)
        if owner is None:
            raise TypeError(f"{name}: expected the last part of a key of rollout")
        setattr(owner, name, value)
    return config
