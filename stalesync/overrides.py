"""The config as Hydra sees it: its schema, the keys that there are, and the config of an earlier run."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_type_hints

from stalesync.config import Config


def register() -> None:
    """Makes the dataclasses the schema of `recipes/conf/config.yaml`."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=Config)


def load(path: Path) -> Config:
    """The config of a run, from the config.yaml it left.

    Raises:
        ValueError: a key that this version does not know, or a value of another type.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        found = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(path)))
    except OmegaConfBaseException as error:
        raise ValueError(f"{path}: {error}") from None
    assert isinstance(found, Config)
    return found


def known_keys(node: type = Config, prefix: str = "") -> list[str]:
    """Every key with its full path."""
    keys: list[str] = []
    hints = get_type_hints(node)
    for item in dataclasses.fields(node):
        path = prefix + item.name
        child: Any = hints[item.name]
        keys += known_keys(child, path + ".") if dataclasses.is_dataclass(child) else [path]  # type: ignore[arg-type]
    return keys


def check_overrides(arguments: Iterable[str], groups: Iterable[str] = ()) -> None:
    """Refuses Hydra overrides of keys that do not exist, with the nearest right name, before anything is composed.

    Args:
        groups: names that choose a config file instead of a value (`algorithm=grpo`).

    Raises:
        ValueError: the first unknown key.
    """
    keys, choices = known_keys(), set(groups)
    for argument in arguments:
        if argument.startswith("-") or "=" not in argument:
            continue
        key = argument.split("=", 1)[0].lstrip("+~").split("@")[0]
        if key in choices or key in keys or key.startswith("hydra"):
            continue
        near = difflib.get_close_matches(key, [*keys, *choices], n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown key {key!r}{hint}")
