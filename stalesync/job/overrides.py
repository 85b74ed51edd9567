"""Provide the config to Hydra and to the command line: its schema, its keys with their documentation, and loading of
a saved config. The words of a command line are checked by the types of their keys, and written as Hydra reads them:

    run.steps=1e3             run.steps=1000
    device.capacity_bytes=2G  device.capacity_bytes=2147483648     K, M, G, T: powers of 1024
    run.loggers=wandb         run.loggers=[wandb]
    run.name=1e3              run.name='1e3'

A text in quotes and an interpolation are Hydra's own to read, and stay as they are; where no text is expected, also
brackets."""

import difflib
import re
import textwrap
import types
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from fusion.telemetry.keys import as_yaml
from stalesync.job.config import Config
from stalesync.job.keys import keys_of
from stalesync.job.other_names import MOVED, NOTES, NOW, OTHER_NAMES, check_moved, migrate_groups

HYDRAS_OWN = re.compile(r"^\Z|^['\"\[{]|\$\{|^\w+\(")
HYDRAS_TEXT = re.compile(r"""^\Z|\$\{|^(['"])(?:(?!\1)[^\\]|\\.)*\1\Z""", re.DOTALL)
"""What is Hydra's own where a text is expected, which may have brackets"""
BYTES = re.compile(r"(\d+(?:\.\d+)?)([KMGT])i?B?", re.IGNORECASE)
TRUTHS = ("true", "false")


def typed(key: str, text: str, hint: Any) -> str:
    """Return the value ``text`` of ``key`` as Hydra reads it; raise ValueError, with key, value and what is expected,
    if it is none of the type ``hint``."""
    kinds = [*get_args(hint)] if get_origin(hint) in (Union, types.UnionType) else [hint]
    optional = type(None) in kinds
    kinds = [kind for kind in kinds if kind is not type(None)]
    if {*kinds} == {int, str}:
        return _integer(text, sized=False) or text
    own = HYDRAS_TEXT if kinds == [str] else HYDRAS_OWN
    if own.search(text) or len(kinds) != 1 or (optional and text.lower() in ("null", "none")):
        return text
    (kind,) = kinds
    if get_origin(kind) is list or kind is list:
        is_text = "," not in text and not {int, float} & {*get_args(kind)}
        return text if text.lower() == "null" else f"[{quoted(text) if is_text else text}]"
    value, expected = text, ""
    if kind is int:
        sized = key.endswith("_bytes")
        value, expected = _integer(text, sized), f"a whole number{' or one with K, M, G or T' if sized else ''}"
    elif kind is float:
        value, expected = (text if _number(text) is not None else ""), "a number"
    elif kind is str:
        value = quoted(text)
    elif kind is bool:
        value, expected = (text if text.lower() in TRUTHS else ""), "true or false"
    if not value:
        raise ValueError(f"{key}={text}: expected {expected}{', or null' if optional else ''}")
    return value


def quoted(text: str) -> str:
    """Return a text as Hydra reads it in quotes, where backslashes count only before a quote."""
    return "'" + re.sub(r"(\\*)('|\Z)", lambda match: 2 * match[1] + ("\\'" if match[2] else ""), text) + "'"


def typed_words(words: list[str], hints: Mapping[str, Any]) -> list[str]:
    """Return the words of a command line with the values of known keys as Hydra reads them; raise ValueError for one
    that is none of its key's type. ``hints``: types by key."""
    arguments = []
    for word in words:
        key, equals, text = word.partition("=")
        bare = key.lstrip("+")
        arguments.append(f"{key}={typed(bare, text, hints[bare])}" if equals and bare in hints else word)
    return arguments


def _integer(text: str, sized: bool) -> str:
    if re.fullmatch(r"[+-]?\d+(_\d+)*", text):
        return text
    if sized and (match := BYTES.fullmatch(text)):
        size = float(match[1]) * 1024 ** (1 + "KMGT".index(match[2].upper()))
        return str(int(size)) if size.is_integer() else ""
    number = _number(text)
    return str(int(number)) if number is not None and number.is_integer() else ""


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


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
    """Raise ValueError for the first argument that is no override of Hydra, else for all keys that are unknown, a line
    each. ``groups``: names that choose a config file instead of a value (`algorithm=grpo`)."""
    keys, choices, unknown = known_keys(), set(groups), []
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
        unknown.append(f"unknown key {key!r}{_hint(key, keys, choices)}")
    if unknown:
        raise ValueError("\n".join(dict.fromkeys(unknown)))


def _hint(key: str, keys: Sequence[str], choices: Iterable[str]) -> str:
    if names := names_here(key, keys):
        notes = [f" ({NOTES[name]})" for name in names if name in NOTES]
        return f"; it is {' or '.join(names)} here{''.join(notes)}"
    if key in OTHER_NAMES:
        return "; there is none like it here (docs/coming_from.md)"
    if _is_foreign(key, keys):
        return "; docs/coming_from.md has what keys of verl and TRL are here"
    head, _, last = key.rpartition(".")
    begun = [known for known in keys if known.startswith(head) and known.rpartition(".")[2].startswith(last)]
    similar = difflib.get_close_matches(key, begun or [*keys, *choices], n=1, cutoff=0.4)
    return f"; did you mean {similar[0]!r}?" if similar else ""


def _is_foreign(key: str, keys: Sequence[str]) -> bool:
    """Return whether a key is in a group of another framework, where its last part says little."""
    group, dot, _ = key.partition(".")
    return bool(dot) and not difflib.get_close_matches(group, {one.partition(".")[0] for one in keys}, n=1, cutoff=0.75)


def names_here(key: str, keys: Sequence[str]) -> list[str]:
    """Return what a key of verl, TRL or an earlier version, or the last part of a key, is called here; nothing if that
    is not known."""
    last = key.rpartition(".")[2]
    foreign = _is_foreign(key, keys)
    for wanted in (key,) if foreign else (key, last):
        named = [here for name, here in OTHER_NAMES.items() if name == wanted or name.endswith(f".{wanted}")]
        if named := [*dict.fromkeys(filter(None, named))]:
            return named
    if foreign:
        return []
    same = [one for one in (*keys, *MOVED) if one.rpartition(".")[2] == last]
    return [*dict.fromkeys(MOVED.get(one, one) for one in ([key] if key in MOVED else same))]
