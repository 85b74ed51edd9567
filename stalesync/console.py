"""Run the command `rlfusion NAME …`: it executes `scripts/NAME.py`, which is the only implementation.

rlfusion train model.path=FOLDER …        as python scripts/train.py model.path=FOLDER …
rlfusion --help                           lists the commands with their first lines
"""

import ast
import sys
from difflib import get_close_matches
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from fusion.resources import COMMAND, SCRIPTS, outlive_readers

USAGE = f"usage: {COMMAND} [--help] COMMAND [ARGUMENT ...]"


def main() -> int:
    """Run the command that the arguments name; return the exit status 2 if there is none of that name."""
    outlive_readers()
    commands, arguments = scripts_by_command(SCRIPTS), sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, describe(commands), f"{COMMAND} COMMAND --help explains a command.", sep="\n\n")
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in commands:
        print(USAGE, f"error: {unknown(name, list(commands))}", sep="\n", file=sys.stderr)
        return 2
    sys.argv = [f"{COMMAND} {name}", *rest]
    execute(commands[name])
    return 0


def execute(path: Path) -> None:
    """Execute a script as `__main__` of this process. `runpy.run_path` would put the path into ``sys.argv[0]``, by
    which the script knows the command (`as_called`)."""
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__file__ = str(path)
    SourceFileLoader("__main__", str(path)).exec_module(module)


def scripts_by_command(folder: Path) -> dict[str, Path]:
    """Return the scripts of a folder by the names of their commands: `make_base.py` is `make-base`."""
    return {path.stem.replace("_", "-"): path for path in sorted(folder.glob("*.py"))}


def describe(commands: dict[str, Path]) -> str:
    """Return one line for each command: the first sentence of its script."""
    lines = []
    for name, path in commands.items():
        documentation = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        first = documentation.split("\n\n")[0].replace("\n", " ")
        lines.append(f"  {name:<10} {first.partition(': `')[0].partition('. ')[0].rstrip('.')}")
    return "Commands:\n" + "\n".join(lines)


def unknown(name: str, commands: list[str]) -> str:
    """Return the message about a command that does not exist, with the nearest name."""
    nearest = get_close_matches(name, commands, n=1, cutoff=0.5)
    meant = f"did you mean {nearest[0]!r}?" if nearest else f"expected one of {', '.join(commands)}"
    return f"unknown command {name!r}; {meant}"
