"""Find the class that a config value names: a built-in one of a table, or a user's own as `module:Class`.

ORDERS = {"fifo": "fusion.rollout.orders.fifo:FifoOrder", …}      where the config group is defined; imports nothing
find_class(name, ORDERS, key=f"rollout.schedule.order={name}")    where the class is needed
"""

import re
from collections.abc import Mapping
from importlib import import_module
from typing import Any

OWN_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""`module:Class`, a class of one's own"""


def find(name: str, built_in: Mapping[str, str], *, key: str) -> Any:
    """Import what ``name`` names, a name of ``built_in`` or `module:name`; None: the module does not have it.
    Raise ValueError: the module cannot be imported; ``key`` begins the message."""
    module, _, attribute = built_in.get(name, name).partition(":")
    try:
        return getattr(import_module(module), attribute, None)
    except Exception as error:  # whatever a module raises while it is imported, it cannot be used
        raise ValueError(f"{key}: cannot be imported: {type(error).__name__}: {error}") from error


def find_class(name: str, built_in: Mapping[str, str], *, key: str, base: type = object) -> Any:
    """Import a class as `find` does.
    Raise ValueError: the module cannot be imported, or has no such subclass of ``base`` with all its methods; ``key``
    begins the message."""
    named = find(name, built_in, key=key)
    if not (isinstance(named, type) and issubclass(named, base)):
        module, _, attribute = built_in.get(name, name).partition(":")
        kind = f"class {attribute}" if base is object else f"subclass of {base.__module__}.{base.__qualname__}"
        raise ValueError(f"{key}: expected a {kind} in the module {module}")
    if lacking := getattr(named, "__abstractmethods__", ()):
        raise ValueError(f"{key}: the class lacks the methods {', '.join(sorted(lacking))} of {base.__qualname__}")
    return named
