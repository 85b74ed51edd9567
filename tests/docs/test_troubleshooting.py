"""Every message that the troubleshooting page quotes is one that the code can print."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
ANYTHING = "…"
MESSAGES = re.findall(r"^### `(.+)`$", PAGE.read_text(), re.MULTILINE)


def template(node: ast.expr) -> str | None:
    """Returns the text of a literal, with `…` for each value in it; None: it is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else ANYTHING for part in node.values)
    return None


@cache
def templates() -> list[str]:
    """All texts in the packages that messages may be made of, docstrings excluded."""
    found = []
    for path in [path for package in ("fusion", "stalesync", "distqueue") for path in (ROOT / package).rglob("*.py")]:
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        left_out = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
        left_out |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        literals = (node for node in nodes if isinstance(node, ast.Constant | ast.JoinedStr))
        found += [text for node in literals if id(node) not in left_out and (text := template(node)) and " " in text]
    return found


def occurs(message: str, texts: list[str]) -> bool:
    """Whether the pieces of a message between `…` are in one text, in their order."""
    pieces = [re.escape(piece) for piece in message.split(ANYTHING) if piece]
    return any(re.search(".*".join(pieces), text, re.DOTALL) for text in texts)


def test_a_message_that_is_not_in_the_code_would_be_noticed():
    texts = ["data.source=…: no such file: …", "x", "a minibatch has … samples"]
    assert occurs("data.source=…: no such file: …", texts) and occurs("a minibatch has … samples", texts)
    assert not occurs("data.source=…: such no file: …", texts) and not occurs("a minibatch had … samples", texts)
    assert template(ast.parse("f'a {b!r} c' 'd'", mode="eval").body) == "a … cd"


def test_there_are_messages_of_every_part():
    assert len(MESSAGES) == len(set(MESSAGES)) > 30
    assert all(len(re.findall(r"\w{2,}", message)) >= 2 or message == "…=…: expected …" for message in MESSAGES)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_is_in_the_code(message):
    assert occurs(message, templates()), f"no text in the code is {message!r}"
