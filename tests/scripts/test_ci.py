"""`.ci/run` runs failed tests again, alone, and tells what is flaky from what fails."""

import os
import shutil
from pathlib import Path

from tests.machine import run

ROOT = Path(__file__).resolve().parents[2]

TESTS = """
from pathlib import Path

def test_passes_alone():
    first = not Path("ran").exists()
    Path("ran").touch()
    assert not first

def test_passes():
    pass
"""
FAILS = """
def test_fails():
    raise AssertionError
"""


def run_ci(folder: Path, tests: str, status: str = "$?"):
    """Run `.ci/run` over ``tests``; the other scripts do nothing. ``status``: exit status of `scripts/test.sh`."""
    for name, text in {
        "scripts/lint.sh": "",
        "scripts/docs.sh": "",
        "scripts/test.sh": f"""
            args=()
            for one in "$@"; do
              case $one in extended|megatron|triton|vllm|contracts) exit 0;; -n|0);; *) args+=("$one");; esac
            done
            python -m pytest -q "${{args[@]}}"; exit {status}""",
        "pytest.ini": "[pytest]",
        "test_some.py": tests,
    }.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    shutil.copytree(ROOT / ".ci", folder / ".ci")
    return run(["bash", ".ci/run"], 60, cwd=folder, env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})


def test_names_a_test_that_passes_alone(tmp_path):
    ended = run_ci(tmp_path, TESTS)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1] == "flaky: test_some.py::test_passes_alone"


def test_fails_if_a_test_fails_again(tmp_path):
    ended = run_ci(tmp_path, TESTS + FAILS)
    assert ended.returncode == 1
    assert "again, alone:" in ended.stdout and "flaky:" not in ended.stdout


def test_fails_if_the_tests_did_not_run_to_their_end(tmp_path):
    ended = run_ci(tmp_path, TESTS, status="3")
    assert ended.returncode == 3
    assert "again, alone:" not in ended.stdout
