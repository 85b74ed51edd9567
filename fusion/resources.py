"""Answer command lines, and find what is no Python package: `recipes/` and `scripts/`, in the checkout or in the wheel.

Imports nothing that takes time, so that every command answers `--help` at once."""

import argparse
import io
import os
import re
import stat
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

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
    """Return the parser of a script's arguments, whose help is the script's documentation. What the script prints
    after its reader has ended is discarded (`outlive_readers`)."""
    outlive_readers()
    layout = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=as_called(documentation), formatter_class=layout)


def plan_command(usage: str, doc: str, module: str) -> int:
    """Answer the arguments of a command that plans a job, by ``answer`` of a module, which is imported unless only help
    is asked for. Return the exit status."""
    outlive_readers()
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


class _OutlivingFile(io.FileIO):
    """A file whose reader may end: what is written afterwards is lost."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(data)


def outlive_readers() -> None:
    """Let what is printed to a pipe or a socket without a reader be lost, instead of raising BrokenPipeError (rich: an
    exit without a word)."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is not io.TextIOWrapper:  # closed, or replaced
            continue
        mode = os.fstat(stream.fileno()).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            stream.flush()
            raw = _OutlivingFile(stream.fileno(), "w", closefd=False)
            lines = stream.line_buffering
            setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, None, lines))
