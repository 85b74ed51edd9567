"""Nothing that was acknowledged is lost or comes twice, whoever is killed. The long version: `-m slow`."""

from pathlib import Path

import pytest

from tests.distqueue import faults
from tests.machine import patience


@pytest.mark.extended
def test_kills_at_any_moment_lose_nothing(tmp_path: Path) -> None:
    journal, folder = tmp_path / "journal", tmp_path / "told"
    killed = faults.fire(journal, folder, seconds=patience(8), pause_s=(0.2, 0.8), seed=1)
    assert killed >= 5
    assert faults.check(folder, faults.drain(journal, folder, seed=2)) > 20


@pytest.mark.slow
def test_hundreds_of_kills_lose_nothing(tmp_path: Path) -> None:
    journal, folder = tmp_path / "journal", tmp_path / "told"
    killed = 0
    for seed in range(20):  # most of the time goes into starting anew what was killed
        if killed < 300:
            killed += faults.fire(journal, folder, seconds=40, pause_s=(0.0, 0.4), seed=seed)
    passed = faults.check(folder, faults.drain(journal, folder, seed=99))
    print(f"{killed} killed, {passed} samples passed")
    assert killed >= 300
