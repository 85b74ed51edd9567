"""Read the command blocks of the tutorial and of the how-tos.

A block is a fence with the language `bash`. What a comment in the line before it says holds for the block:

    <!-- small: KEY=VALUE … -->    in tests these overrides follow the ones that the last command of the block has
    <!-- not run: REASON -->       it cannot run in tests

Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

FENCE = re.compile(
    r"(?:<!-- (?P<directive>[^\n]*) -->\n)?```(?P<language>\w*)[^\n]*\n(?P<text>.*?)\n```(?:\n|$)", re.DOTALL
)
LANGUAGES = ("bash", "python", "")


@dataclass(frozen=True)
class Block:
    """A block of commands. ``small``: overrides in tests; ``reason``: why it cannot run in tests, "" if it can."""

    text: str
    small: str = ""
    reason: str = ""

    @property
    def command(self) -> str:
        """The commands as tests run them."""
        return f"{self.text} {self.small}".rstrip()


def blocks(page: str) -> list[Block]:
    """Returns the command blocks of a page.

    Raises:
        ValueError: a comment before a fence that is neither `small:` nor `not run:`, a reason that is missing, or a
            fence of another language.
    """
    found = []
    for fence in FENCE.finditer(page):
        if fence["language"] not in LANGUAGES:
            raise ValueError(f"{fence['language']!r}: expected one of {LANGUAGES}")
        kind, _, value = (fence["directive"] or "").partition(":")
        if kind not in ("", "small", "not run") or bool(kind) != bool(value.strip()):
            raise ValueError(f"<!-- {fence['directive']} -->: expected small: KEY=VALUE … or not run: REASON")
        if fence["language"] == "bash":
            small, reason = (value.strip() if kind == one else "" for one in ("small", "not run"))
            found.append(Block(fence["text"], small, reason))
        elif kind:
            raise ValueError(f"<!-- {fence['directive']} -->: expected only before a block of the language bash")
    return found
