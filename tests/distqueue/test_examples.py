"""The examples in the docstrings of the public interface run and print what they say; `--help` answers at once, and
the queue's own processes import what they need."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["distqueue", "distqueue.hierarchy.reader", "distqueue.stream"])
def test_the_examples_of_the_public_interface_hold(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted and not result.failed


def test_help_loads_neither_torch_nor_ray() -> None:
    program = (
        "import sys; from distqueue.inspection import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'ray', 'numpy'} & set(sys.modules)))"
    )
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert "name of a live queue" in printed and printed.endswith("[]\n")


@pytest.mark.parametrize("module", ["distqueue.actor", "distqueue.payload.shard", "distqueue.core.queue"])
def test_the_actor_and_the_shards_do_without_torch(module: str) -> None:
    program = f"import {module}, sys; print(sorted({{'torch', 'lightning', 'transformers'}} & set(sys.modules)))"
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert printed == "[]\n"
