"""What was acknowledged survives the loss of power, see `power_loss.py`. The long version: `-m slow`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs Linux and a C compiler: what is synced is watched by a library that is preloaded")
    built = tmp_path_factory.mktemp("shim") / "power.so"
    source = str(HERE / "power.c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(built), source, "-ldl", "-lpthread"], check=True)
    return built


def lose_power_often(shim: Path, folder: Path, rounds: int, seed: int) -> None:
    command = [sys.executable, "-m", "tests.distqueue.power_loss", str(folder), str(rounds), str(seed)]
    ran = subprocess.run(command, env=os.environ | {"LD_PRELOAD": str(shim)}, cwd=HERE.parents[1], text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    print(ran.stdout)
    assert ran.returncode == 0, ran.stdout


def test_a_loss_of_power_at_any_moment_takes_nothing_that_was_acknowledged(shim: Path, tmp_path: Path) -> None:
    lose_power_often(shim, tmp_path, 10, seed=1)


@pytest.mark.slow
def test_hundreds_of_losses_of_power_take_nothing(shim: Path, tmp_path: Path) -> None:
    for seed in range(2):
        (tmp_path / str(seed)).mkdir()
        lose_power_often(shim, tmp_path / str(seed), 100, seed + 10)
