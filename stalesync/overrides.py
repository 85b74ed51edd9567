"""Provide the config to Hydra and to the command line: its schema, its keys with their documentation, and loading of
a saved config."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from stalesync.config import Config


def register() -> None:
    """Registers the dataclasses as the schema of `recipes/conf/config.yaml`."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=Config)


def load(path: Path) -> Config:
    """Loads the config that a run saved as its config.yaml.

    Raises:
        ValueError: a key that this version does not know, or a value of another type.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(path)))
    except OmegaConfBaseException as error:
        raise ValueError(f"{path}: {error}") from None
    assert isinstance(config, Config)
    return config


def composed(conf: Path, overrides: Sequence[str], saved: Config | None = None) -> Config:
    """Composes a config from overrides, as `scripts/train.py` does.

    Args:
        conf: folder of the config groups.
        overrides: `KEY=VALUE` and `GROUP=CHOICE`, which `check_overrides` accepts.
        saved: the config that they change; None: that of `config.yaml` in ``conf``.

    Raises:
        ValueError: an override that is no value of its key, or a choice that the group does not have.
    """
    from hydra import compose, initialize_config_dir
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        if saved is None:
            register()
            with initialize_config_dir(str(conf), version_base="1.3"):
                config: Any = compose("config", overrides=list(overrides))
        else:
            config = OmegaConf.structured(saved)
            for one in OverridesParser.create().parse_overrides(list(overrides)):
                key, value = one.key_or_group, one.value()
                if (conf / key).is_dir():
                    choice = conf / key / f"{value}.yaml"
                    if not choice.is_file():
                        has = ", ".join(sorted(path.stem for path in (conf / key).glob("*.yaml")))
                        raise ValueError(f"{key}={value}: expected one of {has}")
                    OmegaConf.update(config, key, OmegaConf.load(choice))
                else:
                    OmegaConf.update(config, key, value, merge=False)
        composed_config = OmegaConf.to_object(config)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(str(error)) from None
    assert isinstance(composed_config, Config)
    return composed_config


def known_keys(node: type = Config, prefix: str = "") -> list[str]:
    """Lists every key with its full path."""
    return list(documented_keys(node, prefix))


def documented_keys(node: type = Config, prefix: str = "") -> dict[str, str]:
    """Maps every key, by its full path, to the text below its field."""
    documented: dict[str, str] = {}
    hints, texts = get_type_hints(node), _field_texts(node)
    for item in dataclasses.fields(node):
        path, child = prefix + item.name, hints[item.name]
        if dataclasses.is_dataclass(child):
            documented |= documented_keys(child, path + ".")  # type: ignore[arg-type]
        else:
            documented[path] = texts.get(item.name, "")
    return documented


@cache
def _field_texts(node: type) -> dict[str, str]:
    """Maps the fields of a dataclass to the string literals that follow them in its source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(node))).body[0].body  # type: ignore[attr-defined]
    return {
        statement.target.id: " ".join(following.value.value.split())
        for statement, following in zip(body, body[1:], strict=False)
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and isinstance(following, ast.Expr)
        and isinstance(following.value, ast.Constant)
        and isinstance(following.value.value, str)
    }


def help_text(choices: Mapping[str, Sequence[str]], width: int = 120) -> str:
    """Lists the config groups with their ``choices`` and every key with its default and its documentation."""
    lines = ["Groups (GROUP=CHOICE takes a file of recipes/conf):"]
    lines += [f"  {group}: {', '.join(names)}" for group, names in sorted(choices.items())]
    lines += ["", "Keys (KEY=VALUE) with their defaults:"]
    for key, text in documented_keys().items():
        default: Any = Config()
        for name in key.split("."):
            default = getattr(default, name)
        lines.append(f"  {key}={as_yaml(default)}")
        lines += textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False)
    return "\n".join(lines)


def as_yaml(value: Any) -> str:
    """Returns a default as a user writes it in YAML or on the command line."""
    literals = {None: "null", True: "true", False: "false"}
    return literals[value] if value is None or isinstance(value, bool) else repr(value) if value == "" else str(value)


def check_overrides(arguments: Sequence[str], groups: Iterable[str] = ()) -> None:
    """Checks Hydra overrides before the config is composed: rejects arguments that are not overrides, and unknown keys.

    Args:
        groups: names that choose a config file instead of a value (`algorithm=grpo`).

    Raises:
        ValueError: the first rejected argument; for an unknown key, with the most similar known one.
    """
    keys, choices = known_keys(), set(groups)
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if argument.startswith(("-", "~")):
            continue
        if "=" not in argument:
            if not before.startswith("-"):  # the value of one of Hydra's options, as in --cfg job
                raise ValueError(f"{argument!r}: expected KEY=VALUE or GROUP=CHOICE")
            continue
        key = argument.split("=", 1)[0].lstrip("+~").split("@")[0]
        if key in choices or key in keys or key.startswith("hydra"):
            continue
        similar = difflib.get_close_matches(key, [*keys, *choices], n=1, cutoff=0.4)
        hint = f"; did you mean {similar[0]!r}?" if similar else ""
        raise ValueError(f"unknown key {key!r}{hint}")
