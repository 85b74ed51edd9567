"""Print the reference of all config keys as Markdown: meaning, type, default, values, effect, from the dataclasses.

    python scripts/docs/config_reference.py > config.md

The site (mkdocs.yml) shows the same page; `python scripts/train.py --help` lists the same keys.
"""

import copy
import dataclasses
import re
import sys
from pathlib import Path
from typing import Any, get_args

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the site is built where rlfusion is not installed

from fusion.resources import parser_of  # noqa: E402
from fusion.telemetry.keys import as_yaml  # noqa: E402
from stalesync.job.config import Config  # noqa: E402
from stalesync.job.keys import Key, keys_of, value_of  # noqa: E402

INTRODUCTION = """# Config keys

This page is generated from the dataclasses of the config. A job sets a key as `group.key=value`, and takes a file of
`recipes/conf` as `group=choice`:

```
python scripts/train.py model.path=FOLDER algorithm=dapo algorithm.group_size=16
```

Unknown keys and values that are not accepted are refused before anything starts. `python scripts/train.py --cfg job …`
prints the composed config.
"""


class Refused:
    """A value that no check accepts."""

    def __repr__(self) -> str:
        return "?"


def facts(key: Key, config: Any) -> list[str]:
    """Return what holds of a key: its type, default, accepted values, where it has an effect, and which commands of
    those that answer for a job without running it read it."""
    group, _, name = key.path.rpartition(".")
    kind, values, only = shown_type(key.type), accepted(value_of(config, group), name), key.use.conditions(group)
    lines = [f"- type: {kind}", f"- default: `{as_yaml(key.default)}`"]
    lines += [f"- accepted: {values}"] if values not in ("", kind, f"a {kind}", "a list") else []
    lines += [f"- has an effect with: {only}"] if only else []
    lines += [f"- not with `{backend}`: {limit.reason}" for backend, limit in key.use.unsupported_by.items()]
    return lines + ([f"- read by: {', '.join(sorted(key.use.read_by))}"] if key.use.read_by else [])


def accepted(node: Any, name: str) -> str:
    """Return which values a field accepts: what the error of `validate` expects instead of a wrong one; "" if it says
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


def shown_type(hint: Any) -> str:
    words = {"int": "whole number", "float": "number", "str": "text", "bool": "true or false", "None": "null"}
    written = str(hint if get_args(hint) else getattr(hint, "__name__", hint)).replace("typing.", "")
    plain = re.sub(r"list\[(\w+)\]", lambda match: f"list of {words.get(match[1], 'value')}s", written)
    return " or ".join(words.get(part.strip(), part.strip()) for part in plain.split("|"))


def page(config: Config | None = None) -> str:
    """Return the page: a section for each group, and in it one for each key."""
    config, lines = config or Config(), [INTRODUCTION]
    for group in dataclasses.fields(Config):
        text = " ".join((type(getattr(config, group.name)).__doc__ or "").split())
        lines.append(f"## {group.name}\n\n{text}\n")
        choices = sorted(path.stem for path in (ROOT / "recipes" / "conf" / group.name).glob("*.yaml"))
        if choices:
            lines.append(f"Files: {', '.join(f'`{group.name}={choice}`' for choice in choices)}\n")
        for key in keys_of(Config).values():
            if key.path.startswith(f"{group.name}."):
                lines.append(f"### `{key.path}` {{ #{key.path} }}\n\n{key.text}\n")
                lines.append("\n".join(facts(key, config)) + "\n")
    return "\n".join(lines)


def main() -> None:
    parser_of(__doc__).parse_args()
    print(page())


if __name__ == "__main__":
    main()
