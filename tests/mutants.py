"""Try faults of one line each, spread over the rooms, in a copy of the checkout, with the tests that find them:

    python -m tests.mutants [PART OF A FILE'S NAME]

`mutants.txt` lists them; `test_mutants.py` checks that every line is still there. Each fault is printed as found or as
surviving; if one survives, the exit status is 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

LIST = ROOT / "tests" / "mutants.txt"
"""A fault a line: file | line | fault | tests"""


class Mutant(NamedTuple):
    """A fault: ``line`` of a file, once there, becomes ``fault``; ``tests`` find it."""

    path: str
    line: str
    fault: str
    tests: list[str]


def mutants() -> list[Mutant]:
    """Return the recorded faults."""
    rows = [[part.strip() for part in row.split(" | ")] for row in LIST.read_text().splitlines()]
    return [Mutant(path, line, fault, tests.split()) for path, line, fault, tests in rows]


def survives(mutant: Mutant, checkout: Path) -> bool:
    """Return whether no test finds a fault, which is in the checkout meanwhile."""
    path = checkout / mutant.path
    text = path.read_text()
    path.write_text(text.replace(mutant.line, mutant.fault))
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.tests]
        environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
        assert done.returncode in (0, 1), done.stdout + done.stderr  # else no test ran
        return done.returncode == 0
    finally:
        path.write_text(text)


def main(part: str = "") -> int:
    """Try the faults of files whose names contain ``part``; return the number of those that no test finds."""
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "checkout"
        shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__"))
        survived = 0
        for mutant in mutants():
            if part in mutant.path:
                lives = survives(mutant, checkout)
                survived += lives
                print(f"{'SURVIVES' if lives else 'found   '} {mutant.path}: {mutant.fault}", flush=True)
    return survived


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) > 0)
