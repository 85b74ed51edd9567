"""Every package exports exactly the names that its `__init__.pyi` lists, whatever has been imported before, and imports
only the packages that CONTRIBUTING.md allows; no two classes have one name."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests import machine

ROOT = Path(__file__).resolve().parents[1]
STUBS = {
    ".".join(path.parent.relative_to(ROOT).parts): path
    for room in ("distqueue", "fusion", "stalesync")
    for path in sorted((ROOT / room).rglob("__init__.pyi"))
}

MAY_IMPORT = {
    "distqueue": set(),
    "fusion.telemetry": set(),
    "fusion.resources": set(),
    "fusion.npu": {"telemetry"},
    "fusion.rewards": {"telemetry"},
    "fusion.environments": {"telemetry", "rewards"},
    "fusion.model": {"telemetry", "npu"},
    "fusion.offload": {"telemetry", "npu"},
    "fusion.ep_switch": {"telemetry", "npu", "model"},
    "fusion.training": {"telemetry", "npu", "model"},
    "fusion.inference": {"telemetry", "npu", "model"},
    "fusion.costmodel": {"telemetry", "npu", "model", "ep_switch"},
    "fusion.rollout": {"telemetry", "npu", "inference", "distqueue"},
    "fusion.colocate": {
        "telemetry", "npu", "model", "offload", "ep_switch", "training", "inference", "rewards", "rollout", "distqueue",
        "costmodel",
    },
    "stalesync": {
        "telemetry", "npu", "model", "offload", "ep_switch", "training", "inference", "rewards", "rollout", "distqueue",
        "costmodel", "colocate", "resources", "environments",
    },
}  # fmt: skip
"""Package → packages of this project that it may import, as the table of CONTRIBUTING.md states."""
PACED = {"fusion/colocate/paced.py", "fusion/colocate/spec.py"}
"""Modules of colocate that may import the cost model."""

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


def package_of(module: str) -> str:
    first, _, rest = module.partition(".")
    return f"fusion.{rest.partition('.')[0]}" if first == "fusion" and rest else first


def imports_of(path: Path) -> set[str]:
    """Packages of this project that a file imports, also where it imports late or for types only."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: a relative import"
            modules |= {f"fusion.{one.name}" for one in node.names} if node.module == "fusion" else {node.module}
        elif isinstance(node, ast.Import):
            modules |= {one.name for one in node.names}
    own = {"distqueue", "fusion", "stalesync", "scripts", "benchmarks", "tests", "recipes"}
    return {package_of(module) for module in modules if module.partition(".")[0] in own}


def test_packages_import_only_what_contributing_allows():
    seen = set()
    for room in ("distqueue", "fusion", "stalesync"):
        for path in sorted((ROOT / room).rglob("*.py")):
            relative = path.relative_to(ROOT)
            package = package_of(".".join(relative.with_suffix("").parts).removesuffix(".__init__"))
            seen.add(package)
            allowed = {*MAY_IMPORT.get(package, set()), package.removeprefix("fusion.")}
            foreign = {one.removeprefix("fusion.") for one in imports_of(path)} - allowed
            assert not foreign, f"{relative} imports {sorted(foreign)}: see CONTRIBUTING.md"
            if package == "fusion.colocate" and str(relative) not in PACED:
                assert "fusion.costmodel" not in imports_of(path), relative
    assert seen - {"fusion"} == set(MAY_IMPORT)


def test_a_name_of_a_class_is_taken_once():
    texts = (path.read_text() for room in ("distqueue", "fusion", "stalesync") for path in (ROOT / room).rglob("*.py"))
    names = Counter(name for text in texts for name in re.findall(r"^class (\w+)", text, re.MULTILINE))
    assert len(names) > 500 and [name for name, times in names.items() if times > 1] == []


def test_contributing_has_a_row_for_every_package():
    rows = [line for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if line.startswith("| `")]
    for package, allowed in MAY_IMPORT.items():
        name = "fusion/resources.py" if package == "fusion.resources" else package
        (row,) = (line for line in rows if f"`{name}`" in line.split("|")[1])
        listed = row.split("|")[2]
        named = {one for one in allowed - {"telemetry"} if one in listed}
        assert named == allowed - {"telemetry"} or "all of fusion" in listed or "fusion, distqueue" in listed, row
