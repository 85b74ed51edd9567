"""The command `rlfusion` runs the scripts, and answers at once."""

import subprocess
import sys

import pytest

from fusion.resources import RECIPES, SCRIPTS
from stalesync.console import describe, scripts_by_command, unknown
from tests.machine import patience
from tests.scripts.test_command_lines import answer_of, is_quick

CONSOLE = "from stalesync.console import main; import sys; sys.exit(main())"


def rlfusion(*arguments):
    """Runs the command as its installed script does."""
    words = [sys.executable, "-c", CONSOLE, *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=patience(60))


def test_every_script_is_a_command():
    commands = scripts_by_command(SCRIPTS)
    expected = "check control convert doctor evaluate make-base plan report sft simulate smoke train"
    assert list(commands) == expected.split()
    listed = rlfusion("--help")
    assert listed.returncode == 0 and describe(commands) in listed.stdout
    assert "make-base  Train a small base model to start from\n" in listed.stdout


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("trian", "did you mean 'train'?"),
        ("make_base", "did you mean 'make-base'?"),
        ("xyz", "expected one of check, control"),
    ],
)
def test_an_unknown_command_names_the_nearest(name, meant):
    assert meant in unknown(name, list(scripts_by_command(SCRIPTS)))
    refused = rlfusion(name)
    assert refused.returncode == 2 and refused.stderr.startswith("usage: rlfusion ") and meant in refused.stderr


def test_no_command_prints_the_usage_and_exits_with_2():
    refused = rlfusion()
    assert refused.returncode == 2 and refused.stdout.startswith("usage: rlfusion ")


@pytest.mark.parametrize("name", ["train", "plan", "report", "make-base"])
def test_a_command_names_itself_in_its_help(name):
    shown = rlfusion(name, "--help")
    assert shown.returncode == 0 and f"rlfusion {name}" in shown.stdout, shown.stderr
    assert "python scripts/" not in shown.stdout


def test_arguments_and_the_exit_status_are_those_of_the_script():
    assert "unknown key 'run.nmae'; did you mean 'run.name'?" in rlfusion("train", "run.nmae=x").stderr
    assert rlfusion("train", "run.nmae=x").returncode == 2
    assert rlfusion("plan").returncode == 2


def test_help_takes_a_tenth_of_a_second_of_cpu(tmp_path):
    """Ten times less than the commands' own help: only the names and first lines of the scripts are read."""
    bare = answer_of("-c pass", tmp_path)
    (tmp_path / "call.py").write_text(f"import sys; sys.argv = ['rlfusion', '--help']\n{CONSOLE}\n")
    answer = answer_of(str(tmp_path / "call.py"), tmp_path)
    assert answer.code == 0 and is_quick(answer)
    assert not {"hydra", "omegaconf", "yaml", "asyncio"} & answer.imported - bare.imported


def test_recipes_of_the_checkout_are_found():
    assert (RECIPES / "conf" / "config.yaml").is_file() and (RECIPES / "shapes" / "pangu_718b.yaml").is_file()
