"""Declare what holds of a config key besides its type and its text: accepted values, where it has effect, its readers.

    tree: int = key(1, at_least=1, only={"source": ("siblings", "history", "both")})
    token_budget: int = key(16384, at_least=1, read_by="plan")
    offload: str = key("switch", one_of=("none", "switch", "stream"))
    run: RunConfig = key(factory=RunConfig, timeless=True)                 a group: holds of its keys

Stated once, it is used by `Group.validate`, which refuses values that are not accepted, by `Checks.used`, which refuses
a key that is changed where it has no effect, by `rlfusion check`, which lists those that are not refused, by plan and
simulation, which refuse what they do not read, and by the page of keys. Pure."""

import operator
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import reduce
from typing import Any, Literal

SET: Literal["set"] = "set"
"""Condition: any value but null"""
POSITIVE: Literal["above 0"] = "above 0"
"""Condition: a number above 0"""
MAX_TIMEOUT_S = 1e6
"""Upper bound of timeouts in seconds, twelve days: poll(2) counts 2^31 milliseconds"""


@dataclass(frozen=True)
class Unsupported:
    """Why a backend computes with none of ``values``; None: with none but the default."""

    reason: str
    values: Collection[Any] | None = None


@dataclass(frozen=True)
class KeyUse:
    """What holds of a key.
    ``bounds``: of a number (`validation.Checks.number`); None: it is not a number, or checked elsewhere.
    ``one_of``: the accepted values; (): any; with bounds: the words that are accepted besides whole numbers.
    ``only``: by other key, the values with which it has an effect, or SET or POSITIVE; a key of its own group is named
    without it.
    ``refused``: whether it is refused where it has none; else it is only listed.
    ``why``: ends the message of a refusal.
    ``read_by``: commands whose answer it changes.
    ``timeless``: changes neither time nor memory of a step, so that no command needs it; None: as its group.
    ``unsupported_by``: what a backend cannot do, by its name."""

    bounds: Mapping[str, float] | None = None
    one_of: Collection[Any] = ()
    only: Mapping[str, Any] = field(default_factory=dict)
    refused: bool = True
    why: str = ""
    read_by: Collection[str] = ()
    timeless: bool | None = None
    unsupported_by: Mapping[str, Unsupported] = field(default_factory=dict)

    def conditions(self, group: str) -> str:
        """Describe with which values of other keys a key of ``group`` has an effect; "" if with all."""
        return " and ".join(_condition(_path(name, group), accepted) for name, accepted in self.only.items())


BOUNDS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}


def key(default: Any = MISSING, *, factory: Any = MISSING, number: bool = False, read_by: str = "", **use: Any) -> Any:
    """Return the field of a config dataclass with its `KeyUse`.
    ``number``: expect a number of the field's type, whatever its bounds; any of BOUNDS implies it.
    ``read_by``: commands, separated by spaces."""
    bounds = {name: use.pop(name) for name in BOUNDS if name in use}
    numeric = bounds if bounds or number else None
    metadata = {"use": KeyUse(bounds=numeric, read_by=frozenset(read_by.split()), **use)}
    if factory is MISSING:
        return field(default=default, metadata=metadata)
    return field(default_factory=factory, metadata=metadata)


def use_of(item: Any) -> KeyUse:
    return item.metadata.get("use", KeyUse())


@dataclass(frozen=True)
class Unused:
    """A key that has been changed and has no effect. ``where``: the value of another key with which it has none."""

    name: str
    value: Any
    default: Any
    where: str
    use: KeyUse


def unused(values: Any, group: str, root: Any = None) -> Iterator[Unused]:
    """Yield the keys of a group, a dataclass, that have been changed and have no effect.
    ``root``: the whole config; None: conditions on other groups are not looked at."""
    for item in fields(values):
        use, value, default = use_of(item), getattr(values, item.name), item.default
        if default is MISSING and item.default_factory is not MISSING:
            default = item.default_factory()
        for name, accepted in use.only.items() if value != default else ():
            if "." in name and root is None:
                continue
            other = reduce(getattr, name.split("."), root if "." in name else values)
            if not _accepts(accepted, other):
                yield Unused(item.name, value, default, f"{_path(name, group)}={as_yaml(other)}", use)
                break


def as_yaml(value: Any) -> str:
    """Return a value as a user writes it in YAML or on the command line."""
    literals = {None: "null", True: "true", False: "false"}
    return literals[value] if value is None or isinstance(value, bool) else repr(value) if value == "" else str(value)


def _path(name: str, group: str) -> str:
    return name if "." in name else f"{group}.{name}"


def _accepts(accepted: Any, value: Any) -> bool:
    if accepted is SET:
        return value is not None
    return value is not None and value > 0 if accepted is POSITIVE else value in accepted


def _condition(path: str, accepted: Any) -> str:
    if accepted is SET or accepted is POSITIVE:
        return f"{path} {accepted}"
    *first, last = map(as_yaml, accepted)
    return f"{path}={', '.join(first)}{' or ' if first else ''}{last}"
