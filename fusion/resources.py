"""Find what is no Python package: `recipes/` and `scripts/`, in the checkout or as the wheel carries them (`setup.py`).

Imports nothing that takes time, so that every command answers `--help` at once.
"""

import argparse
import re
import sys
from importlib import import_module
from pathlib import Path

_PACKAGED = Path(__file__).resolve().parent / "packaged"

ROOT = _PACKAGED if _PACKAGED.is_dir() else _PACKAGED.parent.parent
"""Folder that contains `recipes` and `scripts`."""
RECIPES = ROOT / "recipes"
"""Folder of `conf/` (the groups of the config) and `shapes/` (shapes of models)."""
SHAPES = RECIPES / "shapes"

SCRIPTS = ROOT / "scripts"
"""Folder of the commands: `train.py` is `rlfusion train`."""
COMMAND = "rlfusion"


def as_called(text: str) -> str:
    """Return ``text`` with its `python scripts/NAME.py` written as `rlfusion NAME`, if this process was started by
    that command."""
    if not sys.argv[0].startswith(f"{COMMAND} "):
        return text
    return re.sub(r"python scripts/(\w+)\.py", lambda match: f"{COMMAND} {match[1].replace('_', '-')}", text)


def parser_of(documentation: str) -> argparse.ArgumentParser:
    """Return the parser of a script's arguments, whose help is the script's documentation."""
    layout = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=as_called(documentation), formatter_class=layout)


def plan_command(usage: str, doc: str, module: str) -> int:
    """Answer the arguments of a command that plans a job, by ``answer`` of a module, which is imported unless only help
    is asked for. Return the exit status."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(as_called(usage), as_called(doc), sep="\n\n", end="")
        return 0
    try:
        if not sys.argv[1:]:
            raise ValueError("model= and cluster= are required")
        return import_module(module).answer(sys.argv[1:], RECIPES) or 0
    except (ValueError, OSError) as error:
        print(as_called(usage), f"error: {error}", sep="\n", file=sys.stderr)
        return 2
