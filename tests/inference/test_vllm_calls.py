"""`vllm_calls` lists every import of vLLM and every private name of it; `contract` finds what sources lack."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from fusion.inference.backends import vllm_calls
from stalesync.job.contract import misfits

FOLDER = Path(vllm_calls.__file__).parent
LISTED = [
    (path, row)
    for group in vars(vllm_calls).values()
    if isinstance(group, dict)
    for path, rows in group.items()
    if path.endswith(".py")
    for row in rows
]
SOURCES = {
    "vllm/a.py": """
from vllm.b import Base
class Runner(Base):
    limit: int
    def __init__(self, config, *, size=1):
        self.block = size
    def step(self, plan, *, fast=False): ...
    def allocate(self, config): ...
""",
    "vllm/b/__init__.py": "from .c import Base, helper as helped\n",
    "vllm/b/c.py": """
try:
    def helper(a, b=2, *rest): ...
except ImportError:
    pass
class Base:
    count: int
    def inherited(self): self.late = 1
class Fields:
    a: int
    b: int = 0
""",
}


def names_of(row: str) -> list[str]:
    return [node.attr for node in ast.walk(ast.parse(row.removeprefix("def "))) if isinstance(node, ast.Attribute)]


def modules():
    return [(path.name, ast.parse(path.read_text())) for path in sorted(FOLDER.glob("vllm_*.py"))]


def test_every_import_of_vllm_has_a_row():
    roots = {(path, row.removeprefix("def ").partition("(")[0].partition(".")[0]) for path, row in LISTED}
    listed_modules = {path for path, _ in LISTED}
    found = 0
    for name, module in modules():
        for node in ast.walk(module):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("vllm", "vllm_ascend"):
                stem = node.module.replace(".", "/")
                for alias in node.names:
                    candidates = {f"{stem}/__init__.py", f"{stem}.py"}
                    is_module = f"{stem}/{alias.name}.py" in listed_modules
                    exported = stem == "vllm" and any(root == alias.name for _, root in roots)
                    assert is_module or exported or any((path, alias.name) in roots for path in candidates), (
                        f"{name}: no row of {node.module}.{alias.name}"
                    )
                    found += 1
            elif isinstance(node, ast.Import) and node.names[0].name.startswith("vllm"):
                assert f"{node.names[0].name.replace('.', '/')}.py" in listed_modules, f"{name}: {node.names[0].name}"
    assert found > 20


def test_every_private_name_of_vllm_has_a_row():
    listed = {name for _, row in LISTED for name in names_of(row)} | {row for _, row in LISTED}
    for name, module in modules():
        for node in ast.walk(module):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                owner = ast.unparse(node.value)
                if owner not in ("self", "torch.ops"):
                    assert node.attr in listed, f"{name}: no row of {owner}.{node.attr}"


@pytest.mark.parametrize(
    "path, row, problem",
    [
        ("vllm/a.py", "Runner(_, size=_)", None),
        ("vllm/a.py", "Runner(_, width=_)", "Runner has no parameter width"),
        ("vllm/a.py", "Runner()", "Runner also needs config"),
        ("vllm/a.py", "Runner.block", None),
        ("vllm/a.py", "Runner.late", None),
        ("vllm/a.py", "Runner.count", None),
        ("vllm/a.py", "Runner.gone", "no Runner.gone"),
        ("vllm/a.py", "Runner.inherited()", None),
        ("vllm/a.py", "Runner.inherited(_)", "Runner.inherited takes 0 positional arguments, 1 are given"),
        ("vllm/a.py", "Runner.step(_, fast=_)", None),
        ("vllm/a.py", "Runner.block()", "Runner.block is no function"),
        ("vllm/a.py", "def Runner.allocate(self, config)", None),
        ("vllm/a.py", "def Runner.allocate(self, plan)", "the parameters self, config, expected self, plan"),
        ("vllm/a.py", "def Runner.step(self, plan)", "the parameters self, plan, fast, expected self, plan"),
        ("vllm/a.py", "def Runner.step(self, plan, *_)", None),
        ("vllm/b/__init__.py", "helped(_, _, _, _)", None),
        ("vllm/b/__init__.py", "helped(_, c=_)", "helped has no parameter c"),
        ("vllm/b/c.py", "Fields(a=_)", None),
        ("vllm/b/c.py", "Fields(b=_)", "Fields also needs a"),
        ("vllm/b/c.py", "Fields(a=_, c=_)", "Fields has no field c"),
        ("vllm/gone.py", "anything", "no anything"),
    ],
)
def test_what_sources_lack_is_found(path, row, problem):
    found = misfits({path: (row,)}, SOURCES.get)
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]
