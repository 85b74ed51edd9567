"""The floors of `stalesync`: each imports only those above it in the docstring of the package; decisions stay pure."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import stalesync

ROOT = Path(stalesync.__file__).parent
FLOORS = re.findall(r"^(\w+)/ ", stalesync.__doc__ or "", flags=re.MULTILINE)
IMPURE = {"ray", "torch", "time", "asyncio", "threading", "random", "datetime"}


def imports_of(path: Path) -> list[str]:
    """Return the modules that a file imports, also where it imports late or for types only."""
    modules = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules += [f"{node.module}.{name.name}" for name in node.names]
        elif isinstance(node, ast.Import):
            modules += [name.name for name in node.names]
    return modules


def floor_of(module: str) -> str:
    first, second, *_ = [*module.split("."), ""]
    return second if first == "stalesync" and second in FLOORS else ""


def test_the_package_names_its_floors_and_has_few_other_files():
    assert {*FLOORS} == {path.name for path in ROOT.iterdir() if (path / "__init__.py").is_file()}
    assert len([*ROOT.glob("*.py")]) <= 8


def test_a_floor_imports_only_floors_above_it():
    for path in sorted(ROOT.glob("*/**/*.py")):
        own = path.relative_to(ROOT).parts[0]
        for module in imports_of(path):
            if module.startswith("stalesync.") and ".config." not in module:  # configs are leaves
                floor = floor_of(module)
                assert floor, f"{path} imports {module}, which launches runs"
                assert FLOORS.index(floor) <= FLOORS.index(own), f"{path} imports {module}"


def test_configs_are_leaves():
    for path in ROOT.glob("*/config.py"):
        own = path.parent.name
        for module in imports_of(path):
            assert own == "job" or floor_of(module) in ("", own, "prompts"), f"{path} imports {module}"


def test_policies_import_neither_ray_nor_torch_nor_a_clock():
    for path in sorted((ROOT / "policy").glob("*.py")):
        assert not IMPURE & {module.partition(".")[0] for module in imports_of(path)}, path


def test_policies_load_neither_ray_nor_torch():
    names = " ".join(f"stalesync.policy.{path.stem}" for path in sorted((ROOT / "policy").glob("[a-z]*.py")))
    code = f"import importlib, sys; [importlib.import_module(name) for name in {names!r}.split()]"
    code += "; print(sorted({'ray', 'torch', 'numpy'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
