"""Stand in for the package where a benchmark is started by its file: Python then looks for modules in this folder, in
which some have the names of packages."""

import sys
from pathlib import Path

__path__ = [str(Path(__file__).resolve().parent)]
sys.path[0] = str(Path(__file__).resolve().parents[1])
