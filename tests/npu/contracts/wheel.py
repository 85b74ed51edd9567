"""Download wheels of torch_npu, without installing them, unpack what states the operators' calls, and check ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from fusion.npu.emulator.operators import VERSIONS
from tests.machine import patience

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rlfusion-tests"
SCHEMAS = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"
META_KERNELS = "torch_npu/op_plugin/meta/_meta_registrations.py"
GRAPHS = "torch_npu/npu/graphs.py"
FILES = SCHEMAS, META_KERNELS, GRAPHS
PLATFORM = "--only-binary :all: --python-version 3.11 --platform manylinux_2_28_x86_64".split()


def unpacked(version: str) -> Path:
    """Return the folder of the unpacked files of a version, downloaded (40 MB) if it is not there yet."""
    folder = CACHE / f"torch_npu-{version}"
    if not all((folder / name).is_file() for name in FILES):
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *PLATFORM, "-d", scratch]
            subprocess.run([*command, f"torch_npu=={version}"], check=True)
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(scratch, FILES)
            for name in FILES:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (Path(scratch) / name).replace(folder / name)  # whole, also if two processes download
    return folder


def check(version: str) -> dict[str, Any]:
    """Return what `check.py` finds in a version."""
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-m", "tests.npu.contracts.check", version, str(unpacked(version))]
    root = Path(__file__).parents[3]
    ran = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=patience(300))
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def figures(args: Any) -> dict[str, Any]:
    """Count the calls that were checked, of all versions, and those that failed or are beyond a limit."""
    found = [check(version) for version in VERSIONS]
    return {
        "checked": sum(one["checked"] for one in found),
        "failed": sum(len(one["failed"]) + len(one["composed"]) for one in found),
    }
