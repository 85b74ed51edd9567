"""No package decodes what another process sends, or a file, in a way that executes code; exceptions have reasons."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("fusion", "stalesync", "distqueue", "scripts", "benchmarks", "recipes")

MODULES = {
    "pickle", "_pickle", "cloudpickle", "ray.cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle",
    "multiprocessing.connection", "multiprocessing.managers", "multiprocessing.reduction", "torch.multiprocessing",
    "torch.distributed.rpc", "torch.distributed.checkpoint", "torch.package",
    "xmlrpc", "xmlrpc.client", "xmlrpc.server",
}  # fmt: skip
"""Modules that unpickle, or whose sockets do. `torch.distributed.checkpoint` pickles its metadata file."""

CALLS = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list", "unsafe_load", "full_load", "eval", "exec", "system", "popen",
}  # fmt: skip
"""Functions and methods by name: collectives of torch that unpickle, loaders that construct objects, code from text"""

ALLOWED = {
    "fusion/rewards/wire.py pickle": "samples for the pool's own child, over a socket pair; replies are JSON",
    "fusion/rewards/child.py pickle": "the samples that its parent sends over that socket pair",
    "fusion/environments/wire.py pickle": "orders for the pool's own child, as those of rewards; replies are JSON",
    "fusion/environments/child.py pickle": "the orders that its parent sends over that socket pair",
    "fusion/npu/owners.py torch.multiprocessing": "a weak reference to a storage; nothing is sent",
    "fusion/training/chunk_reader.py torch.distributed.checkpoint": "a reader of its own for safetensors and JSON",
}
"""By file and what it uses"""


def uses(tree: ast.AST) -> Iterator[str]:
    """What a file uses of the above: module names, function names, and keywords that switch safety off."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _forbidden(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            yield from (name for name in names[:1] if _forbidden(name))
            yield from (name for name in names[1:] if name in MODULES)
        elif isinstance(node, ast.Call):
            yield from _called(node)


def _forbidden(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in MODULES)


def _called(node: ast.Call) -> Iterator[str]:
    name, owner = "", ""
    if isinstance(node.func, ast.Name):
        name = node.func.id
    elif isinstance(node.func, ast.Attribute):
        name, owner = node.func.attr, ast.unparse(node.func.value)
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}

    def is_true(keyword: str) -> bool:
        value = keywords.get(keyword)
        return isinstance(value, ast.Constant) and value.value is True

    if name in CALLS and not (name in ("eval", "exec") and owner):
        yield name
    if (owner, name) == ("torch", "load") and not is_true("weights_only"):
        yield "torch.load without weights_only=True"
    if (owner, name) == ("yaml", "load"):
        yield "yaml.load"
    if owner in ("np", "numpy") and name == "load" and "allow_pickle" in keywords:
        yield "numpy.load with allow_pickle"
    for keyword in ("trust_remote_code", "shell"):
        if keyword in keywords and not (isinstance(keywords[keyword], ast.Constant) and not keywords[keyword].value):
            yield keyword


def _module_of(name: str) -> str:
    """The forbidden module that a name is, or lies in."""
    return next((module for module in MODULES if name == module or name.startswith(f"{module}.")), name)


def test_no_package_executes_what_it_receives():
    found = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            file = str(path.relative_to(ROOT))
            for use in uses(ast.parse(path.read_text())):
                found[f"{file} {_module_of(use)}"] = use
    assert not (unknown := found.keys() - ALLOWED.keys()), (
        f"{sorted(unknown)}: send plain structs or JSON, or say why not"
    )


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import multiprocessing.connection as c",
        "from multiprocessing import connection",
        "from multiprocessing.connection import Listener",
        "from torch import multiprocessing",
        "import torch.multiprocessing as mp",
        "from torch.multiprocessing.reductions import rebuild_tensor",
        "from ray import cloudpickle",
        "dist.all_gather_object(values, value)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=safe)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text, Loader=yaml.Loader)",
        "eval(text)",
        "os.system(command)",
        "subprocess.run(command, shell=True)",
        "AutoTokenizer.from_pretrained(folder, trust_remote_code=True)",
    ],
)
def test_what_it_looks_for_is_found(code):
    assert list(uses(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "import multiprocessing",
        "from multiprocessing import get_context",
        "import torch.distributed",
        "torch.load(path, weights_only=True)",
        "np.load(path)",
        "model.eval()",
        "yaml.safe_load(text)",
        "subprocess.run(command, shell=False)",
    ],
)
def test_what_is_safe_is_not(code):
    assert not list(uses(ast.parse(code)))
