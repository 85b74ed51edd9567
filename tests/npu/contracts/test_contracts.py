"""Every call of `ascend.py` fits torch_npu's schemas, Meta kernels and documented limits, with real models' shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusion.npu.emulator.operators import VERSIONS, recorded_schemas
from tests.machine import patience
from tests.npu.contracts.wheel import unpacked

pytestmark = pytest.mark.contracts


@pytest.mark.parametrize("version", VERSIONS)
def test_calls_fit_the_wheel(version, capsys):
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-m", "tests.npu.contracts.check", version, str(unpacked(version))]
    root = Path(__file__).parents[3]
    ran = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=patience(300))
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    with capsys.disabled():
        print(f"\ntorch_npu {version}: {found['checked']} calls checked, {len(found['failed'])} failed")
    assert not found["failed"]
    assert not found["composed"], "beyond a limit with the shapes of a family"
    assert found["checked"] > 1000
    assert sorted(found["operators"]) == sorted(recorded_schemas(version)), "every recorded operator is called"
