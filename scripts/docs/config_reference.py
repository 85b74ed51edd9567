"""Prints the reference of all config keys as Markdown: type, default, accepted values, meaning, from the dataclasses.

    python scripts/docs/config_reference.py > config.md

The site (mkdocs.yml) shows the same page; `python scripts/train.py --help` lists the same keys.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the site is built where rlfusion is not installed

from stalesync.job.config import Config  # noqa: E402
from stalesync.job.overrides import as_yaml, documented_keys  # noqa: E402

INTRODUCTION = """# Config keys

This page is generated from the dataclasses of the config. A job sets a key as `group.key=value`, and takes a file of
`recipes/conf` as `group=choice`:

```
python scripts/train.py model.path=FOLDER algorithm=dapo algorithm.group_size=16
```

Unknown keys and values that are not accepted are refused before anything starts. `python scripts/train.py --cfg job …`
prints the composed config.
"""


@dataclass(frozen=True)
class Key:
    """One key. ``accepted``: the values that its validation accepts, as its error states them; "": any of its type."""

    path: str
    type: str
    default: str
    text: str
    accepted: str


class Refused:
    """A value that no check accepts."""

    def __repr__(self) -> str:
        return "?"


def keys(node: Any, texts: dict[str, str], prefix: str = "") -> Iterator[Key]:
    """Yields the keys below ``node``, an object of a config dataclass, in the order of its fields."""
    hints, annotations = get_type_hints(type(node)), {item.name: item.type for item in dataclasses.fields(node)}
    for name, annotation in annotations.items():
        path, value = f"{prefix}{name}", getattr(node, name)
        if dataclasses.is_dataclass(hints[name]):
            yield from keys(value, texts, f"{path}.")
        else:
            kind, values = shown_type(str(annotation)), accepted(node, name)
            states_more = values not in (kind, f"a {kind}", "a list")
            yield Key(path, kind, as_yaml(value), texts[path], values if states_more else "")


def accepted(node: Any, name: str) -> str:
    """Returns which values a field accepts: what the error of `validate` expects instead of a wrong one; "" if it says
    nothing, or only what must hold of other keys."""
    probe = copy.copy(node)
    object.__setattr__(probe, name, Refused())
    try:
        getattr(probe, "validate", lambda: None)()
    except ValueError as error:
        match = re.search(rf"\.{name}=\?: expected (.*)", str(error))
        return "" if match is None or re.search(r"[a-z]+\.[a-z_]+=", match[1]) else match[1]
    except (TypeError, AttributeError):  # a value of another type than any that Hydra lets through
        pass
    return ""


def shown_type(annotation: str) -> str:
    words = {"int": "whole number", "float": "number", "str": "text", "bool": "true or false", "None": "null"}
    plain = re.sub(r"list\[(\w+)\]", lambda match: f"list of {words.get(match[1], 'value')}s", annotation)
    return " or ".join(words.get(part.strip(), part.strip()) for part in plain.split("|"))


def page(config: Config | None = None) -> str:
    """Returns the page: a section for each group, and in it one for each key."""
    config, texts, lines = config or Config(), documented_keys(), [INTRODUCTION]
    for group in dataclasses.fields(Config):
        node = getattr(config, group.name)
        lines.append(f"## {group.name}\n\n{' '.join((type(node).__doc__ or '').split())}\n")
        choices = sorted(path.stem for path in (ROOT / "recipes" / "conf" / group.name).glob("*.yaml"))
        if choices:
            lines.append(f"Files: {', '.join(f'`{group.name}={choice}`' for choice in choices)}\n")
        for key in keys(node, texts, f"{group.name}."):
            lines.append(f"### `{key.path}` {{ #{key.path} }}\n\n{key.text}\n")
            facts = [f"- type: {key.type}", f"- default: `{key.default}`"]
            facts += [f"- accepted: {key.accepted}"] if key.accepted else []
            lines.append("\n".join(facts) + "\n")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print(page())


if __name__ == "__main__":
    main()
