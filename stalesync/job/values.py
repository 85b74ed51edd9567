"""Check the words of a command line by the types of their keys, and write them as Hydra reads them. Pure.

    run.steps=1e3             run.steps=1000
    device.capacity_bytes=2G  device.capacity_bytes=2147483648     K, M, G, T: powers of 1024
    run.loggers=wandb         run.loggers=[wandb]
    run.name=1e3              run.name='1e3'

A text in quotes and an interpolation are Hydra's own to read, and stay as they are; where no text is expected, also
brackets."""

import re
import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin

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
    found, expected = text, ""
    if kind is int:
        sized = key.endswith("_bytes")
        found, expected = _integer(text, sized), f"a whole number{' or one with K, M, G or T' if sized else ''}"
    elif kind is float:
        found, expected = (text if _number(text) is not None else ""), "a number"
    elif kind is str:
        found = quoted(text)
    elif kind is bool:
        found, expected = (text if text.lower() in TRUTHS else ""), "true or false"
    if not found:
        raise ValueError(f"{key}={text}: expected {expected}{', or null' if optional else ''}")
    return found


def quoted(text: str) -> str:
    """Return a text as Hydra reads it in quotes, where backslashes count only before a quote."""
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), text) + "'"


def typed_words(words: list[str], hints: Mapping[str, Any]) -> list[str]:
    """Return the words of a command line with the values of known keys as Hydra reads them; raise ValueError for one
    that is none of its key's type. ``hints``: types by key."""
    found = []
    for word in words:
        key, equals, text = word.partition("=")
        bare = key.lstrip("+")
        found.append(f"{key}={typed(bare, text, hints[bare])}" if equals and bare in hints else word)
    return found


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
