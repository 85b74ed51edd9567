"""Count what a drafter has done."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class DraftTotals:
    """Totals since construction. ``asked``: sequences for which a draft was looked up; ``found``: for which there was
    one; ``verified``: drafts that were; ``drafted``, ``accepted``: their tokens, and those kept, by source;
    ``seconds``: of keeping text, looking up, and recording what was kept; ``read``: tokens of other engines that were
    added to a text, ``unread``: that were not, as nothing here could use them; ``dropped``, ``expired``: prompts whose
    text found no room, or was not used for too long."""

    asked: int = 0
    found: int = 0
    verified: int = 0
    seconds: float = 0.0
    read: int = 0
    unread: int = 0
    dropped: int = 0
    expired: int = 0
    drafted: list[int] = field(default_factory=lambda: [0, 0])
    accepted: list[int] = field(default_factory=lambda: [0, 0])
