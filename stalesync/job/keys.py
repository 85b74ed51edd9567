"""List the keys of a config with all that is declared of them: type, text, where they have an effect, who reads them.

    dataclasses ─► keys_of ─┬─► overrides, values      types and texts: the command line
                            ├─► check_used             a key without an effect is refused
                            ├─► without_effect         or only listed
                            ├─► check_supported        what a backend cannot do is refused
                            └─► job_arguments          which keys plan and simulation read, and which they may ignore

Pure."""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, reduce
from typing import Any, get_type_hints

from fusion.telemetry.keys import KeyUse, as_yaml, unused, use_of
from fusion.telemetry.validation import Checks


@dataclass(frozen=True)
class Key:
    """A key of a config. ``group``: the class of its group; ``type``: as annotated; ``default``: without a file."""

    path: str
    group: type
    type: Any
    default: Any
    use: KeyUse

    @property
    def text(self) -> str:
        """Its documentation: read from the source, which takes a while."""
        return _texts(self.group).get(self.path.rpartition(".")[2], "")


@cache
def keys_of(node: type) -> Mapping[str, Key]:
    """Map every key of a config class, by its full path, in the order of the fields."""
    return {key.path: key for key in _keys(node, node(), "", KeyUse())}


def _keys(node: type, default: Any, prefix: str, outer: KeyUse) -> Iterator[Key]:
    hints = get_type_hints(node)
    for item in fields(node):
        kind, use = hints[item.name], use_of(item)
        timeless = outer.timeless if use.timeless is None else use.timeless
        use = replace(use, timeless=timeless, read_by={*use.read_by, *outer.read_by})
        path, value = prefix + item.name, getattr(default, item.name)
        if is_dataclass(kind):
            yield from _keys(kind, value, f"{path}.", use)  # type: ignore[arg-type]
        else:
            yield Key(path, node, kind, value, use)


@cache
def _texts(node: type) -> dict[str, str]:
    """Map the fields of a dataclass to the string literals that follow them in its source, those of its bases too."""
    texts: dict[str, str] = {}
    for one in filter(is_dataclass, reversed(node.__mro__)):
        body = ast.parse(textwrap.dedent(inspect.getsource(one))).body[0].body  # type: ignore[attr-defined]
        for statement, following in zip(body, body[1:], strict=False):
            match statement, following:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[name] = " ".join(text.split())
    return texts


def value_of(config: Any, key: str) -> Any:
    """Return the value of a key by its full path."""
    return reduce(getattr, key.split("."), config)


def groups_of(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every group of a config by its path, and the groups within it."""
    for item in fields(node):
        if is_dataclass(value := getattr(node, item.name)):
            yield prefix + item.name, value
            yield from groups_of(value, f"{prefix}{item.name}.")


def check_used(config: Any) -> None:
    """Raise ValueError for the first key that is changed where it has no effect, with where it has one."""
    for path, group in groups_of(config):
        Checks(path, group).used(config)


def without_effect(config: Any) -> list[str]:
    """Describe the keys that are changed, have no effect and are not refused."""
    return [
        f"{path}.{key.name}={as_yaml(key.value)} has no effect with {key.where}, only with {key.use.conditions(path)}"
        for path, group in groups_of(config)
        for key in unused(group, path, config)
    ]


def check_supported(config: object, key: str) -> None:
    """Raise ValueError for the first key whose value a backend does not support, and why. ``key``: of the backend, such
    as `rollout.backend`; `embedded` can do everything."""
    backend = value_of(config, key)
    for one in keys_of(type(config)).values():  # type: ignore[arg-type]
        limit, value = one.use.unsupported_by.get(backend), value_of(config, one.path)
        if limit is not None and (value != one.default if limit.values is None else value in limit.values):
            raise ValueError(f"{one.path}={as_yaml(value)}: {limit.reason}; change it, or {key}=embedded")
