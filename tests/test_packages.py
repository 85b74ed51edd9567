"""Every package exports exactly the names that its `__init__.pyi` lists, whatever has been imported before."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest

from tests import machine

ROOT = Path(__file__).resolve().parents[1]
STUBS = {
    ".".join(path.parent.relative_to(ROOT).parts): path
    for room in ("distqueue", "fusion", "stalesync")
    for path in sorted((ROOT / room).rglob("__init__.pyi"))
}

CHECK = """
import importlib, json, sys
wrong = []
listed = json.loads(sys.argv[1])
for package, module_by_name in listed.items():
    for module in module_by_name.values():
        importlib.import_module(f"{package}.{module}")
for package, module_by_name in listed.items():
    exported = importlib.import_module(package)
    if sorted(exported.__all__) != sorted(module_by_name):
        wrong.append(f"{package} exports {sorted(exported.__all__)}")
    for name, module in module_by_name.items():
        defined = getattr(importlib.import_module(f"{package}.{module}"), name, None)
        if defined is None or getattr(exported, name, None) is not defined:
            wrong.append(f"{package}.{name} is not {package}.{module}.{name}")
print(json.dumps(wrong))
"""


def listed_by(stub: Path) -> dict[str, str]:
    """Exported name → submodule that defines it. A type checker takes a name for exported only if it is `x as x`."""
    names = [(line.module, one) for line in ast.parse(stub.read_text()).body for one in line.names]
    assert all(one.asname == one.name for _, one in names), stub
    return {one.name: module for module, one in names}


def test_names_of_the_stubs_are_what_the_packages_export():
    """In an interpreter that has loaded every submodule first: one of the same name must not hide what is exported."""
    listed = json.dumps({package: listed_by(stub) for package, stub in STUBS.items()})
    done = machine.run([sys.executable, "-c", CHECK, listed], timeout_s=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize("room", ["distqueue", "fusion", "stalesync"])
def test_a_package_that_loads_lazily_has_a_stub(room):
    lazy = [path for path in (ROOT / room).rglob("__init__.py") if "lazy_loader" in path.read_text()]
    assert {path.with_suffix(".pyi") for path in lazy} == {*(ROOT / room).rglob("__init__.pyi")}
