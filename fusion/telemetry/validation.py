"""Check the values of a config group, in the same way for all groups.

    class EngineConfig(Group, path="rollout.engine"):
        block_size: int = key(16, at_least=16)
        max_kv_tokens: int | None = key(None, at_least=1)

        def check(self, check: Checks) -> None:
            check.that("block_size", self.block_size % 16 == 0, "a multiple of 16")

Every error is a `ValueError` that reads `group.key=value: expected …`. nan and inf are not numbers here, and neither is
a bool. Pure. It is in this package because every package may import it (`distqueue` imports none, and has checks of its
own)."""

import difflib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, get_args, get_type_hints

from fusion.telemetry.keys import BOUNDS, as_yaml, unused, use_of

RUN_NAME = "one folder name, without / and not starting with a dot"


@dataclass(frozen=True)
class Checks:
    """Check the attributes of ``values``, which are the keys of the config group ``group``.
    ``group``: prefix of the keys in an error message: a group (`rollout`), a node (`parallel.train`) or a request."""

    group: str
    values: Any

    def that(self, key: str, holds: bool, expected: str) -> None:
        """Check a condition on a key. Raise ValueError: ``holds`` is false; says what is ``expected`` of the key."""
        if not holds:
            raise ValueError(f"{self.group}.{key}={_shown(getattr(self.values, key))}: expected {expected}")

    def integer(self, *keys: str, null: bool = False, words: Collection[str] = (), **bounds: float) -> None:
        """Expect whole numbers within the bounds (`BOUNDS`), one of ``words``, or None where ``null``.
        Raise ValueError: names the first key that holds something else."""
        keys = tuple(key for key in keys if getattr(self.values, key) not in words)
        kind = ", ".join([*words, "a whole number"])
        self._bounded(keys, kind, is_whole, null=null, bounds=bounds)

    def number(self, *keys: str, null: bool = False, **bounds: float) -> None:
        """Expect finite numbers within the bounds (`BOUNDS`), or None where ``null``.
        Raise ValueError: names the first key that holds something else."""
        self._bounded(keys, "a number", is_finite, null=null, bounds=bounds)

    def _bounded(
        self, keys: Sequence[str], kind: str, is_kind: Callable[[Any], bool], *, null: bool, bounds: Mapping[str, float]
    ) -> None:
        for key in keys:
            value = getattr(self.values, key)
            within = is_kind(value) and all(BOUNDS[name](value, limit) for name, limit in bounds.items())
            self.that(key, (value is None and null) or within, _described(kind, **bounds) + ", or null" * null)

    def boolean(self, *keys: str) -> None:
        """Expect true or false. Raise ValueError: names the first key that holds something else."""
        for key in keys:
            self.that(key, isinstance(getattr(self.values, key), bool), "true or false")

    def one_of(self, key: str, choices: Collection[str], null: bool = False) -> None:
        """Expect one of ``choices``, or None where ``null``. Raise ValueError: names the key and the choices."""
        value = getattr(self.values, key)
        holds = (value is None and null) or value in choices
        self.that(key, holds, f"one of {', '.join([*choices, *(['null'] if null else [])])}")

    def declared(self) -> None:
        """Expect of each key what its field states: the choices, the bounds of a number, true or false.
        Raise ValueError: names the first key that holds something else."""
        hints = get_type_hints(type(self.values))
        for item in fields(self.values):
            use, hint = use_of(item), hints[item.name]
            kinds = {*get_args(hint)} or {hint}
            null = type(None) in kinds
            if use.bounds is not None and float in kinds:
                self.number(item.name, null=null, **use.bounds)
            elif use.bounds is not None:
                self.integer(item.name, null=null, words=use.one_of, **use.bounds)
            elif use.one_of:
                self.one_of(item.name, use.one_of, null=null)
            elif bool in kinds:
                self.boolean(item.name)

    def used(self, root: Any = None) -> None:
        """Expect the defaults of keys that have no effect beside the others (`keys.KeyUse.only`).
        ``root``: the whole config, for keys whose effect depends on other groups.
        Raise ValueError: names the first key that has been changed, and where it has an effect."""
        for one in unused(self.values, self.group, root):
            if one.use.refused:
                why = f", {one.use.why}" if one.use.why else ""
                used = f"; it is used with {one.use.conditions(self.group)}"
                self.that(one.name, False, f"{json.dumps(one.default)} (the default) with {one.where}{why}{used}")


class Group:
    """A group of the config, a dataclass whose keys state what they accept (`fusion.telemetry.keys.key`)."""

    _path: ClassVar[str]

    def __init_subclass__(cls, path: str | None = None) -> None:
        """Set the ``path`` of the group's keys; None: that of a base class."""
        cls._path = cls._path if path is None else path

    def validate(self) -> None:
        """Check every value of the group and of those within it.
        Raise ValueError: a value that is not accepted, by key."""
        check = Checks(self._path, self)
        check.declared()
        for item in fields(self):  # type: ignore[arg-type]
            if isinstance(group := getattr(self, item.name), Group):
                group.validate()
        self.check(check)
        check.used()

    def check(self, check: Checks) -> None:
        """Check what the fields cannot state."""


def fields_of(entry: Any, known: Sequence[str], key: str) -> Mapping[str, Any]:
    """Return the fields of an entry of a list: a mapping, or a text, which is the first of ``known``; a mapping needs
    only that one.
    Raise ValueError: it is neither, or has an unknown field; names ``key``, such as `eval.files[0]`."""
    first = known[0]
    stated = {first: entry} if isinstance(entry, str) else entry
    if not isinstance(stated, Mapping) or not isinstance(stated.get(first), str):
        raise ValueError(
            f"{key}={_shown(entry)}: expected a {first}, or {first} and other fields of {', '.join(known[1:])}"
        )
    for name in stated:
        if name not in known:
            similar = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {similar[0]!r}?" if similar else ""
            raise ValueError(f"{key}: unknown field {name!r}, expected some of {', '.join(known)}{hint}")
    return stated


def is_finite(value: Any) -> bool:
    """Return whether ``value`` is an int or a float other than nan and inf."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number beyond the range of a float
        return False


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_run_name(name: str) -> bool:
    """Return whether a run may be called so: whether it is a `RUN_NAME`."""
    return bool(name) and name == Path(name).name and not name.startswith(".") and "\0" not in name


def _shown(value: Any) -> str:
    try:
        return as_yaml(value) if value is None or isinstance(value, bool) else f"{value!r:.200}"
    except ValueError:  # a whole number of more digits than Python writes
        return "a whole number of thousands of digits"


def _described(
    kind: str,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> str:
    """Return in words what is expected; None: no limit."""
    low, high = above if at_least is None else at_least, below if at_most is None else at_most
    shown_low, shown_high = (f"{limit:g}" if isinstance(limit, float) else str(limit) for limit in (low, high))
    if low is not None and high is not None:
        opening, closing = "[" if above is None else "(", "]" if below is None else ")"
        return f"{kind} in {opening}{shown_low}, {shown_high}{closing}"
    if low is not None:
        return f"{kind} above {shown_low}" if at_least is None else f"{kind} of at least {shown_low}"
    if high is not None:
        return f"{kind} below {shown_high}" if at_most is None else f"{kind} of at most {shown_high}"
    return kind
