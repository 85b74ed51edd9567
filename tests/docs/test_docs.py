"""What README, CONTRIBUTING and docs/ name exists: files, links, commands, config keys, functions."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from stalesync.job.overrides import known_keys

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SUFFIXES = "py|sh|md|yaml|svg|cpp|h"


def each_page(test):
    return pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())(test)


@cache
def definitions(path):
    """`function`, `Class` and `Class.method` names that a file defines."""
    names = set()

    def visit(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(prefix + child.name)
                visit(child, f"{prefix}{child.name}.")

    visit(ast.parse(path.read_text()), "")
    return names


def references(text):
    """(file, name) of every `path/file.py:name` in backticks; the name may be `Class.method`."""
    return re.findall(r"`([\w/]+\.py):([\w.]+)`", text)


def anchors(text):
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_a_missing_function_would_be_noticed():
    assert references("`a/b.py:C.d` and `e.py:f`") == [("a/b.py", "C.d"), ("e.py", "f")]
    names = definitions(Path(__file__))
    assert "definitions" in names and "no_such_function" not in names


@each_page
def test_functions_exist(page):
    for file, name in references(page.read_text()):
        if "/" in file:  # a bare name, as in `reward.path=file.py:function`, is a user's
            assert (ROOT / file).is_file(), f"{page.name}: {file} does not exist"
            assert name in definitions(ROOT / file), f"{page.name}: {file} defines no {name}"


@each_page
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if not target.startswith("http"):
            path, _, anchor = target.partition("#")
            linked = page.parent / path if path else page
            assert linked.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors(linked.read_text()), f"{page.name} links to {target}"


@each_page
def test_paths_exist(page):
    for path in re.findall(rf"(?<![\w/.-])((?:[\w-]+/)+[\w-]+\.(?:{SUFFIXES}))(?![\w/])", page.read_text()):
        if not path.startswith("runs/"):
            assert (ROOT / path).exists() or (page.parent / path).exists(), f"{page.name} names {path}"


@each_page
def test_config_keys_exist(page):
    if page.name == "distqueue.md":  # there `queue` is the user's object, not the config group
        return
    text = page.read_text()
    if page.name == "coming_from.md":  # the first column has the keys of other frameworks
        text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
    keys = set(known_keys())
    groups = {key.split(".")[0] for key in keys}
    for key in re.findall(r"`([a-z]+\.[a-z_]+)(?:=[^`]*)?`", text):
        group, field = key.split(".")
        if group in groups and not (ROOT / group / field).exists() and field not in {"py", "sh", "yaml", "log"}:
            assert key in keys or any(one.startswith(f"{key}.") for one in keys), f"{page.name} names the key {key}"


def test_every_room_has_a_page():
    rooms = [path.name for path in (ROOT / "fusion").iterdir() if (path / "__init__.py").is_file()]
    for room in [*rooms, "stalesync", "distqueue"]:
        assert (ROOT / "docs" / f"{room}.md").is_file(), f"docs/{room}.md"


def test_every_kind_of_silent_fault_names_a_test():
    _, *sections = (ROOT / "docs" / "silent.md").read_text().split("\n## ")
    without = [text.split("\n")[0] for text in sections if not any("tests/" in file for file, _ in references(text))]
    assert len(sections) == 32 and without == []
