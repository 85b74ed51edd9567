"""Every call of `ascend.py` fits torch_npu's schemas, Meta kernels and documented limits, with real models' shapes."""

from __future__ import annotations

import ast

import pytest

from fusion.model.families import FAMILIES
from fusion.npu.emulator.operators import VERSIONS, recorded_schemas
from tests.npu.contracts.wheel import GRAPHS, check, unpacked

pytestmark = pytest.mark.contracts


@pytest.mark.parametrize("version", VERSIONS)
def test_calls_fit_the_wheel(version, capsys):
    found = check(version)
    with capsys.disabled():
        print(f"\ntorch_npu {version}: {found['checked']} calls checked, {len(found['failed'])} failed")
    assert not found["failed"]
    assert not found["composed"], "beyond a limit with the shapes of a family"
    assert found["checked"] > 1000 and found["families"] == sorted(FAMILIES)
    assert sorted(found["operators"]) == sorted(recorded_schemas(version)), "every recorded operator is called"


@pytest.mark.parametrize("version", VERSIONS)
def test_graphs_have_the_methods_that_are_called(version):
    """As `AcceleratorDevice.capture` and `DecodeGraphs` call them; `frontend` has their other parameters."""
    tree = ast.parse((unpacked(version) / GRAPHS).read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    methods = {
        node.name: [argument.arg for argument in node.args.args]
        for node in classes["NPUGraph"].body
        if isinstance(node, ast.FunctionDef)
    }
    assert {"replay", "reset", "pool"} <= methods.keys() and methods["update"] == ["self", "cpu_update_input"]
    (entered,) = (node for node in classes["graph"].body if getattr(node, "name", "") == "__init__")
    taken = [argument.arg for argument in entered.args.args]
    assert taken[:2] == ["self", "npu_graph"] and {"pool", "auto_dispatch_capture", "capture_error_mode"} <= set(taken)
