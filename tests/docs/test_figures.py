"""The page of figures: every row says how it was measured, by which command, and at which commit."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "figures.md"
HEADER = ["what", "figure", "target", "peer", "command", "commit"]
KINDS = ("*measured*", "*paced*", "*simulated*", "*input*")


def rows(page):
    """The rows of all tables of figures, as dicts; an empty command is that of the row above."""
    command = ""
    for section in page.split("\n## ")[1:]:
        header, _, *lines = [line for line in section.splitlines() if line.startswith("|")]
        assert cells(header) == HEADER, section.splitlines()[0]
        for line in lines:
            row = dict(zip(HEADER, cells(line), strict=True))
            row["command"] = command = row["command"] or command
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
