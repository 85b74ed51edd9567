"""The build on first use: once for processes that come together, and a clear line where it cannot be done."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

import fusion.npu.emulator.build as builder
from tests.helpers import in_fork
from tests.machine import communicate, within

OPEN = """
import warnings, torch
from fusion.npu import open_device
device = open_device("emulated", capacity_bytes=1 << 20)
x = torch.ones(8, device=device.torch_device)
print(device.kind, x.sum().item(), device.memory().allocated)
"""


def _open(**environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", OPEN],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_two_processes_build_once_in_a_fresh_cache(tmp_path):
    processes = [_open(XDG_CACHE_HOME=str(tmp_path)) for _ in range(2)]
    for process in processes:
        output, errors = communicate(process, 300)
        assert output == "emulated 8.0 512\n", errors
    (folder,) = (tmp_path / "rlfusion").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["lock", "rlfusion_npu.so"]
    start = time.monotonic()
    output, errors = communicate(_open(XDG_CACHE_HOME=str(tmp_path)), 60)
    assert output == "emulated 8.0 512\n", errors
    assert within(time.monotonic() - start, 15), "no second build"


def opened() -> None:
    exec(OPEN, {})


def test_a_missing_compiler_is_one_warning_and_a_ledger(tmp_path):
    output, errors = in_fork(opened, XDG_CACHE_HOME=str(tmp_path), PATH=str(tmp_path))
    assert output == "ledger 8.0 32\n"
    assert errors.count("Warning") == 1
    assert "The emulated NPU is not available: no C++ compiler found (install g++)" in errors


def test_a_compiler_that_fails_says_why(tmp_path):
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 'unit.cpp:1: fatal error: Python.h: No such file' >&2\nexit 1\n")
    compiler.chmod(0o755)
    output, errors = in_fork(opened, XDG_CACHE_HOME=str(tmp_path / "cache"), PATH=f"{tmp_path}:/bin")
    assert output == "ledger 8.0 32\n"
    assert "the C++ compiler failed: unit.cpp:1: fatal error: Python.h: No such file" in errors


def test_the_library_is_tied_to_the_sources_and_to_torch(monkeypatch):
    here = builder.emulator_library().path
    monkeypatch.setattr(builder.torch, "__version__", "0.0")
    assert builder.emulator_library().path != here
