"""Provide the config to Hydra and to the command line: its schema, its keys with their documentation, and loading of
a saved config."""

import difflib
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fusion.telemetry.keys import as_yaml
from stalesync.job.config import Config
from stalesync.job.keys import keys_of
from stalesync.job.other_names import MOVED, NOW, OTHER_NAMES, check_moved, migrate_groups
from stalesync.job.values import typed_words

HYDRA_OPTIONS = frozenset(
    "-h --help --hydra-help --version -c --cfg --resolve -p --package -r --run -m --multirun -sc --shell-completion "
    "-cp --config-path -cn --config-name -cd --config-dir --experimental-rerun -i --info".split()
)


@cache
def register() -> None:
    """Register, once, the dataclasses as the schema of `recipes/conf/config.yaml`."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=Config)


def load(path: Path) -> Config:
    """Load the config that a run saved as its config.yaml, also one of an earlier version. Raise ValueError for a key
    that this version does not know, or a value of another type."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        saved: Any = OmegaConf.to_container(OmegaConf.load(path))
        saved = migrate_groups(saved) if isinstance(saved, dict) else saved
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), saved))
    except OmegaConfBaseException as error:
        raise ValueError(f"{path}: {_in_a_line(error)}") from None
    assert isinstance(config, Config)
    return config


def composed(conf: Path, overrides: Sequence[str], saved: Config | None = None) -> Config:
    """Compose a config from overrides, as `scripts/train.py` does. ``conf``: folder of the config groups;
    ``overrides``: `KEY=VALUE` and `GROUP=CHOICE`, which `accepted` has returned; ``saved``: the config that they
    change; None: that of `config.yaml` in ``conf``. Raise ValueError for an override that is no value of its key, or a
    choice that the group does not have."""
    if options := [word for word in overrides if word.startswith("-")]:
        raise ValueError(f"{options[0]!r}: expected KEY=VALUE or GROUP=CHOICE")
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
                    if key not in config:
                        raise ValueError(f"{key}={value}: expected KEY=VALUE, as a saved config is changed")
                    choice = conf / key / f"{value}.yaml"
                    if not choice.is_file():
                        has = ", ".join(sorted(path.stem for path in (conf / key).glob("*.yaml")))
                        raise ValueError(f"{key}={value}: expected one of {has}")
                    OmegaConf.update(config, key, OmegaConf.load(choice))
                else:
                    OmegaConf.update(config, key, value, merge=False)
        composed_config = OmegaConf.to_object(config)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_in_a_line(error)) from None
    assert isinstance(composed_config, Config)
    return composed_config


def choices_in(conf: Path) -> dict[str, list[str]]:
    """List the choices of every config group in the folder ``conf``."""
    return {path.name: sorted(file.stem for file in path.glob("*.yaml")) for path in conf.iterdir() if path.is_dir()}


def _in_a_line(error: Exception) -> str:
    for key in (getattr(one, "full_key", None) for one in (error, error.__context__)):
        if key in NOW:
            return f"{key} is {NOW[key]}"
    return "; ".join(line.strip() for line in f"{error}\n{error.__cause__ or ''}".splitlines()[:2] if line)


def known_keys() -> list[str]:
    """List every key with its full path."""
    return list(keys_of(Config))


def typed_keys() -> dict[str, Any]:
    """Map every key, by its full path, to its type."""
    return {path: key.type for path, key in keys_of(Config).items()}


def help_text(choices: Mapping[str, Sequence[str]], width: int = 120) -> str:
    """List the config groups with their ``choices`` and every key with its default and its documentation."""
    lines = ["Groups (GROUP=CHOICE takes a file of recipes/conf):"]
    lines += [f"  {group}: {', '.join(names)}" for group, names in sorted(choices.items())]
    lines += ["", "Keys (KEY=VALUE) with their defaults:"]
    for key in keys_of(Config).values():
        lines.append(f"  {key.path}={as_yaml(key.default)}")
        lines += textwrap.wrap(
            key.text, width, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False
        )
    return "\n".join(lines)


def accepted(arguments: Sequence[str], conf: Path) -> list[str]:
    """Return the words of a command line as Hydra reads them; raise ValueError for the first that is not accepted, with
    what is. ``conf``: folder of the config groups."""
    choices = choices_in(conf)
    check_overrides(arguments, choices)
    for argument in arguments:
        group, equals, choice = argument.partition("=")
        if equals and group in choices and choice not in choices[group] and re.fullmatch(r"[\w./:-]*", choice):
            raise ValueError(f"{argument}: expected one of {', '.join(choices[group])}")
    return typed_words([*arguments], typed_keys())


def check_overrides(arguments: Sequence[str], groups: Iterable[str] = ()) -> None:
    """Raise ValueError for the first argument that is no override of Hydra, or whose key is unknown, with the most
    similar known one. ``groups``: names that choose a config file instead of a value (`algorithm=grpo`)."""
    keys, choices = known_keys(), set(groups)
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if argument.startswith("-") and (option := argument.partition("=")[0]) not in HYDRA_OPTIONS:
            key, following = option.lstrip("-").replace("-", "_"), arguments[arguments.index(argument) + 1 :]
            value = argument.partition("=")[2] or next(iter(following), "VALUE")
            names = [key] if key in keys else names_here(key, keys)
            raise ValueError(
                f"{argument!r}: expected KEY=VALUE; write {names[0] if len(names) == 1 else 'KEY'}={value}"
            )
        if argument.startswith(("-", "~")):
            continue
        if "=" not in argument:
            if not before.startswith("-"):  # the value of one of Hydra's options, as in --cfg job
                raise ValueError(f"{argument!r}: expected KEY=VALUE or GROUP=CHOICE")
            continue
        key = argument.split("=", 1)[0].lstrip("+~").split("@")[0]
        if key in choices or key in keys or key.startswith("hydra"):
            continue
        check_moved([key])
        if names := names_here(key, keys):
            raise ValueError(f"unknown key {key!r}; it is {' or '.join(names)} here")
        if key in OTHER_NAMES:
            raise ValueError(f"unknown key {key!r}; there is none like it here (docs/coming_from.md)")
        head, _, last = key.rpartition(".")
        begun = [known for known in keys if known.startswith(head) and known.rpartition(".")[2].startswith(last)]
        similar = difflib.get_close_matches(key, begun or [*keys, *choices], n=1, cutoff=0.4)
        hint = f"; did you mean {similar[0]!r}?" if similar else ""
        raise ValueError(f"unknown key {key!r}{hint}")


def names_here(key: str, keys: Sequence[str]) -> list[str]:
    """Return what a key of verl, TRL or an earlier version, or the last part of a key, is called here; nothing if that
    is not known."""
    last = key.rpartition(".")[2]
    for wanted in (key, last):
        named = [here for name, here in OTHER_NAMES.items() if name == wanted or name.endswith(f".{wanted}")]
        if named := [*dict.fromkeys(filter(None, named))]:
            return named
    same = [one for one in (*keys, *MOVED) if one.rpartition(".")[2] == last]
    return [*dict.fromkeys(MOVED.get(one, one) for one in ([key] if key in MOVED else same))]
