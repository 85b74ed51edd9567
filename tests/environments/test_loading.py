"""Files of environments that cannot be loaded are refused by the constructor of the pool, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusion.environments import EnvironmentConfig, EnvPool
from tests.machine import patience


def started(file: Path) -> EnvPool:
    return EnvPool(EnvironmentConfig(name="custom", path=f"{file}:Echo"), lambda: None)


def test_a_file_that_cannot_be_imported_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("import no_such_module")
    with pytest.raises(ValueError, match="environment.path=.*importing it raised ModuleNotFoundError"):
        started(file)


def test_a_file_that_loads_for_too_long_is_refused_with_the_place_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow.py").write_text("import time\ndef wait():\n    time.sleep(1000)\nwait()\n")
    monkeypatch.setattr("fusion.rewards.process.START_LIMIT_S", patience(2.0))
    with pytest.raises(ValueError, match=r"(?s)environment\.path=.*slow\.py:Echo': not ready after \d+ s.* in wait"):
        started(tmp_path / "slow.py")
