import os
import signal
from contextlib import suppress

import pytest

from fusion.npu import open_device
from stalesync.job.base_model import make_base_model
from tests.stalesync.runs import begin, descendants, wait_until

LUCK = """
import zlib

def score(prompt, response, answer, **fields):
    return zlib.crc32((prompt + response).encode()) % 3 / 2
"""


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A model that adds up one digit right now and then."""
    folder = tmp_path_factory.mktemp("base")
    make_base_model("addition", folder, open_device("emulated"), target=0.05)
    return folder


@pytest.fixture
def luck(tmp_path):
    """A reward that any model receives now and then, so that every step has a gradient."""
    (tmp_path / "luck.py").write_text(LUCK)
    return f"reward.path={tmp_path / 'luck.py'}:score"


@pytest.fixture
def start(base, tmp_path):
    """Starts a run, and returns it when it has two steps behind it. Nothing of it is left after the test."""
    runs = []

    def started(*overrides):
        metrics = tmp_path / "run" / "metrics.jsonl"
        run = begin(base, tmp_path, *overrides)
        runs.append(run)
        wait_until(run, 120, lambda: metrics.exists() and metrics.read_text().count("\n") >= 2)
        return run

    yield started
    for run in runs:
        if run.poll() is None:
            for pid in (*descendants(run.pid), run.pid):
                with suppress(ProcessLookupError):  # it has ended by itself
                    os.kill(pid, signal.SIGKILL)
            run.communicate()
