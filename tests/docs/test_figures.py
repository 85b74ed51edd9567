"""The page of figures: every row says how it was measured, by which command, and at which commit; commands parse."""

import argparse
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from fusion.resources import RECIPES
from stalesync import planning
from stalesync.job.job_arguments import parse
from stalesync.job.overrides import check_overrides, choices_in
from stalesync.simulator import command_line

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "figures.md"
HEADER = ["what", "figure", "target", "peer", "command", "commit"]
KINDS = ("*measured*", "*paced*", "*simulated*", "*input*")


def rows(page):
    """The rows of all tables of figures, as dicts; an empty command is that of the row above, and one that begins with
    … adds arguments to the nearest whole one above."""
    command = whole = ""
    for section in page.split("\n## ")[1:]:
        header, _, *lines = [line for line in section.splitlines() if line.startswith("|")]
        assert cells(header) == HEADER, section.splitlines()[0]
        for line in lines:
            row = dict(zip(HEADER, cells(line), strict=True))
            row["command"] = command = row["command"] or command
            if command.startswith("`…"):
                row["command"] = command = f"`{whole} {command.strip('`… ')}`"
            elif command:
                whole = command.split("`")[1]
            yield row


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


ROWS = list(rows(PAGE.read_text()))


def test_every_row_states_what_it_is_its_figure_and_the_commit_it_was_measured_at():
    assert len(ROWS) > 100
    for row in ROWS:
        assert row["what"].startswith(KINDS) and row["figure"], row
        assert re.fullmatch(r"[0-9a-f]{7,12}", row["commit"]), row


def test_every_section_has_one_table_whose_first_row_has_a_command():
    for section in PAGE.read_text().split("\n## ")[1:]:
        table = [line for line in section.splitlines() if line.startswith("|")]
        assert sum(line.startswith("|---") for line in table) == 1 and cells(table[2])[4], section.splitlines()[0]


def refusal(command):
    """Why a row's command would not run; "": its arguments are those of the script that it names."""
    words = shlex.split(re.fullmatch(r"(?:/usr/bin/time -v |time )?(.+)", command)[1])
    try:
        match words:
            case ["python", "-m", "pytest", *arguments]:
                return refused_by_pytest(arguments)
            case ["python", script, *arguments]:
                return refused_by_script(Path(script), arguments)
            case ["bash", "scripts/test.sh", *arguments]:
                known = {"quick", *re.findall(r'^    "(\w+):', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)}
                return " ".join({*arguments} - known)
            case ["bash", recipe, *arguments]:
                check_overrides(arguments, choices_in(RECIPES / "conf"))
                return "" if (ROOT / recipe).is_file() else recipe
    except (ValueError, OSError, ImportError, SystemExit) as error:
        return str(error) or "refused"
    return "an unknown command"


def refused_by_script(script, arguments):
    parts = {"scripts/simulate.py": command_line.OPTIONS, "scripts/plan.py": planning.OPTIONS}
    if str(script) in parts:
        parsed = parse(arguments, options=parts[str(script)], flags=["--json"], conf=RECIPES / "conf")
        if script.name == "simulate.py":
            command_line.cases_of(parsed.options, command_line.scenario_of(parsed, RECIPES).config)
    elif str(script) == "scripts/train.py" and arguments != ["--help"]:
        check_overrides(arguments, choices_in(RECIPES / "conf"))
    elif script.parts[0] == "benchmarks" and arguments != ["--help"]:
        import_module(f"benchmarks.{script.stem}").BENCHMARK.parse(arguments)
    elif arguments != ["--help"]:
        return "only its --help is known here"
    return "" if (ROOT / script).is_file() else str(script)


def refused_by_pytest(arguments):
    parser = argparse.ArgumentParser()
    for option in ("-m", "-k"):
        parser.add_argument(option)
    parser.add_argument("-s", action="store_true")
    parser.add_argument("paths", nargs="+")
    asked = parser.parse_args(arguments)
    files = [ROOT / path for path in asked.paths]
    if missing := [str(file) for file in files if not file.exists()]:
        return ", ".join(missing)
    text = "".join(one.read_text() for file in files for one in ([file] if file.is_file() else file.glob("test_*.py")))
    return "" if asked.k is None or asked.k in text else f"-k {asked.k} chooses nothing"


@pytest.mark.parametrize("command", sorted({row["command"].split("`")[1] for row in ROWS}))
def test_the_command_of_a_row_still_parses(command, tmp_path):
    texts = tmp_path / "texts.jsonl"  # in place of the file that its reader has
    texts.write_text('{"prompt": "p", "response": "r"}\n' * 2)
    assert refusal(re.sub(r" texts=\S+", f" texts={texts}", command)) == ""


@pytest.mark.parametrize(
    "command",
    [
        "python benchmarks/growth.py --only contoller",
        "python benchmarks/switch.py --pears x",
        "python benchmarks/absent.py",
        "/usr/bin/time -v python scripts/plan.py model=pangu_718b clutser=cloudmatrix384",
        "python scripts/simulate.py model=pangu_718b cluster=cloudmatrix384 supernodes=one",
        "bash recipes/quickstart.sh rollout.top_pp=0.95",
        "python scripts/train.py device=emulated rollout.top_pp=0.95",
        "bash recipes/absent.sh",
        "bash scripts/test.sh quik",
        "python -m pytest tests/absent.py",
        "python -m pytest -m slow tests/hosts/test_runs.py -k absent",
        "rlfusion train",
    ],
)
def test_a_command_that_does_not_parse_would_be_noticed(command, capsys):
    assert refusal(command)
