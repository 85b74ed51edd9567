"""The command blocks of the tutorial and of the how-tos are valid, and run in their order."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stalesync.job.overrides import check_overrides
from tests import machine
from tests.docs.commands import Block, blocks

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = ROOT / "docs" / "tutorial.md"
HOWTOS = sorted((ROOT / "docs" / "howto").glob("*.md"))
RUNNABLE = [page for page in HOWTOS if any(not block.reason for block in blocks(page.read_text()))]
SHORT = [page for page in RUNNABLE if page.stem == "several_hosts"]
"""Those that take a second, and need no file of the tutorial"""

GROUPS = [path.name for path in (ROOT / "recipes" / "conf").iterdir() if path.is_dir()]
SECONDS = 300
"""Of the reference machine, for one page"""

each_page = pytest.mark.parametrize("page", [TUTORIAL, *HOWTOS], ids=lambda page: page.stem)


def script_of(page: Path) -> str:
    """Returns the commands of a page that run in tests, as one script. Recipes are started where they lie."""
    commands = [block.command for block in blocks(page.read_text()) if not block.reason]
    return "\n".join(["set -e", *commands]).replace("bash recipes/", f"bash {ROOT}/recipes/")


def overrides(command: str) -> list[str]:
    """Returns the arguments of each `scripts/train.py` or `scripts/evaluate.py` in a block, behind its folders."""
    flat = re.sub(r"<<'(\w+)'\n.*?\n\1(?=\n|$)", "", command.replace("\\\n", " "), flags=re.DOTALL)
    found = []
    for line in flat.splitlines():
        words = shlex.split(line.rstrip(")"))
        for index, word in enumerate(words):
            if word in ("scripts/train.py", "scripts/evaluate.py"):
                found += [one for one in words[index + 1 :] if "=" in one]
    return found


def run(script: str, folder: Path) -> None:
    """Runs a script in a folder that holds the scripts of the checkout."""
    paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "VIRTUAL_ENV": sys.prefix, "extra": "test"}
    done = machine.run(["bash", "-c", script], SECONDS, cwd=folder, env=os.environ | paths)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def after_tutorial(tmp_path_factory):
    """A folder in which the commands of the tutorial have run."""
    folder = tmp_path_factory.mktemp("tutorial")
    (folder / "scripts").symlink_to(ROOT / "scripts")
    run(script_of(TUTORIAL), folder)
    return folder


def test_blocks_are_read_with_their_comments():
    page = "a\n<!-- small: run.steps=2 -->\n```bash\nx \\\n  y\n```\n\n```\nout\n```\n"
    page += "<!-- not run: no card -->\n```bash\nz\n```\n"
    assert blocks(page) == [Block("x \\\n  y", small="run.steps=2"), Block("z", reason="no card")]
    assert blocks(page)[0].command == "x \\\n  y run.steps=2"
    for wrong in ("<!-- not run: -->\n```bash\nx\n```\n", "<!-- later -->\n```bash\nx\n```\n", "```sh\nx\n```\n"):
        with pytest.raises(ValueError, match="expected"):
            blocks(wrong)
    assert overrides("cat > f <<'E'\na = 1\nE\npython scripts/train.py \\\n  a=1 'b=[c]'\nls x=1") == ["a=1", "b=[c]"]


@each_page
def test_commands_are_valid(page):
    for block in blocks(page.read_text()):
        checked = subprocess.run(["bash", "-n"], input=block.command, text=True, capture_output=True)
        assert checked.returncode == 0, checked.stderr
        check_overrides(overrides(block.command), GROUPS)
        for script in re.findall(r"(?:scripts|recipes)/\w+\.(?:py|sh)", block.text):
            assert (ROOT / script).is_file(), script


def test_tutorial_and_howtos_have_commands():
    assert len(blocks(TUTORIAL.read_text())) > 6 and len(RUNNABLE) > 6 and SHORT


@pytest.mark.extended
def test_the_tutorial_ends_with_a_model_that_transformers_load(after_tutorial):
    runs = after_tutorial / "runs"
    assert (runs / "my" / "exported" / "model.safetensors").is_file()
    assert (runs / "tutorial" / "report.html").is_file() and (runs / "evaluate-tutorial" / "evaluation.json").is_file()


@pytest.mark.extended  # its recipe: tests/costmodel/test_plan_script.py
@pytest.mark.parametrize("page", SHORT, ids=lambda page: page.stem)
def test_short_howto_runs(page, tmp_path):
    run(script_of(page), tmp_path)


@pytest.mark.extended
@pytest.mark.parametrize("page", [page for page in RUNNABLE if page not in SHORT], ids=lambda page: page.stem)
def test_howto_runs(page, after_tutorial, tmp_path):
    folder = tmp_path / "checkout"
    shutil.copytree(after_tutorial, folder, symlinks=True)
    run(script_of(page), folder)
